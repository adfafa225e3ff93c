"""Codecs: a tensor to smaller tensors and back. Each is in a file of its own and registers itself."""

from disthooks.saved.codecs.base import Codec

__all__ = ["Codec"]
