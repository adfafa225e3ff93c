"""Codecs turn a tensor into smaller tensors, and back. Each codec has a file of its own and registers itself."""

from disthooks.saved.codecs.base import Codec

__all__ = ["Codec"]
