"""Resident memory of this process, and the allocator setting without which it does not fall."""

from __future__ import annotations

import ctypes
import pathlib
import re

from disthooks._tensors import parse_bytes

__all__ = ["peak_resident", "release_promptly", "reset_peak_resident", "resident", "unreturned"]

_M_MMAP_THRESHOLD = -3  # the number that glibc's malloc.h gives to this mallopt parameter


def release_promptly(threshold: int | str = "1 MiB") -> bool:
    """Have glibc give freed blocks of at least ``threshold`` bytes back to the system at once.

    Without it, glibc raises its own threshold to the size of the blocks it sees freed and keeps them: on a
    CPU-only machine the tensors that were moved to disk stay resident, and moving them saves nothing. The
    price is that every large block is mapped and zeroed anew: measured on a two-core machine, a training
    step took about 1.5 times as long, with or without disthooks. Call it once, before the first step. On a
    GPU it makes no difference to device memory.

    Returns:
        True when the setting was made, False where the C library has no ``mallopt`` (macOS, musl).

    Raises:
        UsageError: when ``threshold`` is not a size.

    >>> release_promptly("1 MiB") in (True, False)
    True
    """
    size = parse_bytes(threshold, "threshold")
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, size))
    except (AttributeError, OSError):
        return False


def reset_peak_resident() -> bool:
    """Start the peak of resident memory anew from what is resident now; False where Linux will not."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident() -> int:
    """The largest resident memory of this process, in bytes, since its start or the last reset.

    >>> now = resident()
    >>> peak_resident() >= now > 2**20
    True
    """
    return _status("VmHWM")


def resident() -> int:
    """The resident memory of this process now, in bytes; 0 where the system does not tell."""
    return _status("VmRSS")


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(f"_{i}", ctypes.c_size_t) for i in range(8)] + [("fordblks", ctypes.c_size_t), ("_9", ctypes.c_size_t)]


def unreturned() -> int:
    """Bytes that this process has freed and glibc has not given back to the system; 0 where it does not tell.

    >>> unreturned() >= 0
    True
    """
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    ask.restype = _MallInfo
    return int(ask().fordblks)


def _status(name: str) -> int:
    try:
        found = re.search(rf"{name}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
