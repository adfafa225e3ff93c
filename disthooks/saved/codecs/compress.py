"""``Compress``: general compression of bytes, by Zstandard or LZ4."""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from disthooks._registry import register
from disthooks.errors import StoreError, UsageError
from disthooks.saved.codecs.base import Codec, flat
from disthooks.saved.stores.host import memory_of


class _Spec(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@register("codec")
@dataclass(frozen=True)
class Compress(Codec):
    """Compress the bytes of a tensor, of any dtype, with Zstandard or LZ4. Lossless.

    The libraries (``pip install 'disthooks[compress]'``) release Python's global lock, so threads compress side by
    side. The bytes of a tensor on a GPU are copied to the CPU, and the compressed bytes stay there. A tensor that does
    not get smaller is stored as it is.

    Such a library finds no pattern in most activations, but it does in masks, in indices and in the output of a ReLU
    (``benchmarks/codecs.py``). It can stand behind another codec: ``Quantize(8), Compress("zstd")``.

    Args:
        library: ``"zstd"`` (smaller) or ``"lz4"`` (faster).
        level: higher is smaller and slower. For zstd -100 to 22, by default 1; for lz4 -100 to 12, by default 0.

    Raises:
        UsageError: if the library is another one or is not installed, or if it does not have the level.
        StoreError: in backward, if the bytes from the store are not the bytes that were compressed.

    >>> codec = Compress("zstd")
    >>> tensors, spec = codec.encode(torch.zeros(1000))
    >>> sum(t.nbytes for t in tensors) < 100, torch.equal(codec.decode(tensors, spec), torch.zeros(1000))
    (True, True)
    """

    library: Literal["zstd", "lz4"] = "zstd"
    level: int | None = None

    def __post_init__(self) -> None:
        if self.library not in ("zstd", "lz4"):
            raise UsageError(f"Compress: library must be 'zstd' or 'lz4', got {self.library!r}")
        most = 22 if self.library == "zstd" else 12
        if self.level is not None and (type(self.level) is not int or not -100 <= self.level <= most):
            raise UsageError(f"Compress: level of {self.library} must be from -100 to {most}, got {self.level!r}")
        _imported(self.library)

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], _Spec | None]:
        """The compressed bytes (1-D, uint8, on the CPU) and the shape, dtype and device; or the tensor and None."""
        if not tensor.numel():
            return (tensor,), None
        content = flat(tensor).cpu().view(torch.uint8)
        if self.library == "zstd":
            # A compressor has megabytes of state and serves one thread at a time, so each thread has its own.
            compressors: dict[int, Any] = _local.__dict__.setdefault("compressors", {})
            level = 1 if self.level is None else self.level
            if level not in compressors:
                compressors[level] = _imported("zstd").ZstdCompressor(level=level)
            compressed: bytes = compressors[level].compress(memory_of(content))
        else:
            lz4 = _imported("lz4")
            size = lz4.BLOCKSIZE_MAX4MB
            compressed = lz4.compress(memory_of(content), compression_level=self.level or 0, block_size=size)
        if len(compressed) >= content.numel():
            return (tensor,), None
        encoded = torch.empty(len(compressed), dtype=torch.uint8, device="cpu")
        memory_of(encoded)[:] = compressed
        return (encoded,), _Spec(tensor.shape, tensor.dtype, tensor.device)

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: _Spec | None) -> torch.Tensor:
        if spec is None:
            return tensors[0]
        content = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        compressed = tensors[0].cpu().contiguous()
        try:
            decompress = _decompress_zstd if self.library == "zstd" else _decompress_lz4
            count = decompress(memory_of(compressed), memory_of(content))
        except Exception as error:  # each library has error classes of its own
            raise StoreError(f"{self!r}: {compressed.numel()} bytes cannot be decompressed: {error}") from error
        if count != content.nbytes:
            raise StoreError(f"{self!r}: decompressed {count} bytes of {content.nbytes}")
        return content.to(spec.device)


#: The compressors of each thread.
_local = threading.local()


def _imported(library: str) -> Any:
    try:
        return importlib.import_module("zstandard" if library == "zstd" else "lz4.frame")
    except ImportError as error:
        raise UsageError(f"Compress({library!r}) needs a library: pip install 'disthooks[compress]'") from error


def _decompress_zstd(compressed: memoryview, into: memoryview) -> int:
    """Fill ``into``; returns the number of bytes that came out, ``len(into) + 1`` if there are more."""
    count = 0
    with _imported("zstd").ZstdDecompressor().stream_reader(compressed) as reader:
        while count < len(into) and (read := reader.readinto(into[count:])):
            count += read
        return count + len(reader.read(1))


def _decompress_lz4(compressed: memoryview, into: memoryview) -> int:
    """Fill ``into`` if the sizes agree; returns the number of bytes that came out."""
    content = _imported("lz4").decompress(compressed, return_bytearray=True)
    if len(content) == len(into):
        into[:] = content
    return len(content)
