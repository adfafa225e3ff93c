"""What the ways of ``gpu.py`` are called in results; those of ours begin alike."""

from peers import NOTHING, ON_CPU, TRL

__all__ = ["CHECKPOINT", "ENGINE", "FOUR", "INPUTS", "NOTHING", "ON_CPU", "OURS", "RECOMPUTE", "TRL", "TUNE"]

CHECKPOINT, TUNE, ENGINE = "checkpoint per block", "torchtune OffloadActivations", "TransformerEngine cpu offload"
OURS, INPUTS = "disthooks OnCpu", "disthooks OnCpu around checkpoints"
RECOMPUTE, FOUR = "disthooks Recompute, OnCpu", "disthooks Quantize(4), OnCpu"
