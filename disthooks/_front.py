"""The public names, all imported: what ``import disthooks`` gives when the first of them is asked for."""

from __future__ import annotations

from disthooks import errors, memory
from disthooks._handles import Attachment
from disthooks._version import __version__
from disthooks.config import Plan, Prepared, from_config, prepare
from disthooks.grads import sinks, stats
from disthooks.grads.attach import gradients
from disthooks.grads.attachment import Gradients
from disthooks.grads.on_gradient import on_gradient
from disthooks.grads.rules import (
    ClipAdaptive,
    ClipNorm,
    ClipPercentile,
    ClipValue,
    ClipZScore,
    Freeze,
    Noise,
    Sanitize,
    Scale,
    SkipNonFinite,
    only,
)
from disthooks.saved.attach import Saving, save_activations, saving
from disthooks.saved.codecs import Cast, Compact, Compress, Quantize
from disthooks.saved.pipeline import AtLeast, pipeline
from disthooks.saved.recompute.verify import Recompute
from disthooks.saved.report import SavedReport
from disthooks.saved.stores.base import Functions, StoreReport
from disthooks.saved.stores.cpu import OnCpu
from disthooks.saved.stores.disk import OnDisk
from disthooks.saved.stores.tiers import OnDevice, Tiered
from disthooks.saved.wrap import SaveToCpu, SaveToDisk, SaveWith, unwrap
from disthooks.watch.blame import blame
from disthooks.watch.features import features
from disthooks.watch.replicas import ReplicaReport, check_replicas
from disthooks.watch.trace import trace

__all__ = [
    "AtLeast",
    "Attachment",
    "Cast",
    "ClipAdaptive",
    "ClipNorm",
    "ClipPercentile",
    "ClipValue",
    "ClipZScore",
    "Compact",
    "Compress",
    "Freeze",
    "Functions",
    "Gradients",
    "Noise",
    "OnCpu",
    "OnDevice",
    "OnDisk",
    "Plan",
    "Prepared",
    "Quantize",
    "Recompute",
    "ReplicaReport",
    "Sanitize",
    "SaveToCpu",
    "SaveToDisk",
    "SaveWith",
    "SavedReport",
    "Saving",
    "Scale",
    "SkipNonFinite",
    "StoreReport",
    "Tiered",
    "__version__",
    "blame",
    "check_replicas",
    "errors",
    "features",
    "from_config",
    "gradients",
    "memory",
    "on_gradient",
    "only",
    "pipeline",
    "prepare",
    "save_activations",
    "saving",
    "sinks",
    "stats",
    "trace",
    "unwrap",
]
