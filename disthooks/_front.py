"""The public names, all imported: what ``import disthooks`` gives when the first of them is asked for."""

from __future__ import annotations

from disthooks import errors, memory
from disthooks._handles import Attachment
from disthooks._version import __version__
from disthooks.config import Plan, Prepared, from_config, prepare
from disthooks.grads import sinks, stats
from disthooks.grads.attach import gradients
from disthooks.grads.attached import Gradients
from disthooks.grads.replicas import ReplicaReport, check_replicas
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
from disthooks.grads.single import on_gradient
from disthooks.saved.codecs import Cast, Compact, Compress, Quantize
from disthooks.saved.inplace import Saving, save_activations
from disthooks.saved.pipeline import AtLeast, pipeline
from disthooks.saved.recompute.stage import Recompute
from disthooks.saved.report import SavedReport
from disthooks.saved.saving import saving
from disthooks.saved.stores.base import Functions
from disthooks.saved.stores.cpu import OnCpu
from disthooks.saved.stores.device import OnDevice
from disthooks.saved.stores.disk import OnDisk
from disthooks.saved.stores.tiers import Tiered
from disthooks.saved.stores.traffic import StoreReport
from disthooks.saved.wrap import SaveToCpu, SaveToDisk, SaveWith, unwrap
from disthooks.watch.blame import blame
from disthooks.watch.features import features
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
