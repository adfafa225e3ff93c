"""Where saved tensors live between forward and backward, and what happens to gradients before the step."""

# ruff: noqa: F403, F405  (the names come by __getattr__; the star is for type checkers)

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from disthooks._version import __version__

if TYPE_CHECKING:
    from disthooks._front import *

#: Modules of the package that ``disthooks.NAME`` imports when it is asked for.
_MODULES = ("config", "errors", "integrations", "memory")

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


def __getattr__(name: str) -> Any:
    """Import the public names when the first is asked for: ``disthooks --help`` is not to wait for torch."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from disthooks import _front

    globals().update({public: getattr(_front, public) for public in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
