"""Where saved tensors live between forward and backward, and what happens to gradients before the step."""

from __future__ import annotations

from disthooks._handles import Attachment
from disthooks._version import __version__
from disthooks.saved.codecs import Cast
from disthooks.saved.inplace import save_activations
from disthooks.saved.pipeline import AtLeast, pipeline
from disthooks.saved.saving import saving
from disthooks.saved.stores.base import Functions
from disthooks.saved.stores.cpu import OnCpu
from disthooks.saved.stores.disk import OnDisk
from disthooks.saved.wrap import SaveToCpu, SaveToDisk, SaveWith

__all__ = [
    "AtLeast",
    "Attachment",
    "Cast",
    "Functions",
    "OnCpu",
    "OnDisk",
    "SaveToCpu",
    "SaveToDisk",
    "SaveWith",
    "__version__",
    "pipeline",
    "save_activations",
    "saving",
]
