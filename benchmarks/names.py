"""What the ways of ``gpu.py`` are called in results; those of ours begin alike."""

from peers import NOTHING, ON_CPU, TRL

__all__ = ["CHECKPOINT", "ENGINE", "FOUR", "FOUR_HERE", "INPUTS", "NOTHING", "ON_CPU", "OURS", "PRODUCTS"]
__all__ += ["RECOMPUTE", "RECOMPUTE_HERE", "TRL", "TUNE"]

CHECKPOINT, TUNE, ENGINE = "checkpoint per block", "torchtune OffloadActivations", "TransformerEngine cpu offload"
OURS, INPUTS = "disthooks OnCpu", "disthooks OnCpu around checkpoints"
RECOMPUTE, FOUR = "disthooks Recompute, OnCpu", "disthooks Quantize(4), OnCpu"
# Without the link.
RECOMPUTE_HERE, FOUR_HERE = "disthooks Recompute, OnDevice", "disthooks Recompute, Quantize(4), OnDevice"
PRODUCTS = "disthooks Recompute(products=1), OnDevice"
