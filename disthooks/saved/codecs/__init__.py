"""Tensor to smaller tensors and back."""

from __future__ import annotations

from disthooks.saved.codecs.base import Codec
from disthooks.saved.codecs.cast import Cast
from disthooks.saved.codecs.compact import Compact
from disthooks.saved.codecs.compress import Compress
from disthooks.saved.codecs.quantize import Quantize

__all__ = ["Cast", "Codec", "Compact", "Compress", "Quantize"]
