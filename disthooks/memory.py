"""The resident memory of this process, and a setting of the allocator that returns freed memory to the system."""

from __future__ import annotations

import ctypes
import pathlib
import re

from disthooks._tensors import parse_bytes

__all__ = ["peak_resident", "release_promptly", "reset_peak_resident", "resident", "unreturned"]

_M_MMAP_THRESHOLD = -3  # the number of this parameter of `mallopt`, from glibc's malloc.h


def release_promptly(threshold: int | str = "1 MiB") -> bool:
    """Make glibc return each freed block of at least ``threshold`` bytes to the system at once.

    Without this setting glibc raises its own threshold to the size of the blocks that the program frees, and keeps such
    blocks. Then, on a machine with only a CPU, the memory of tensors that were moved to disk stays resident, and the
    move saves nothing. With the setting the system maps and zeroes every large block anew: on a machine with two cores
    a training step took about 1.5 times as long, with or without disthooks. Call this function once, before the first
    step. It does not change how the memory of a GPU is used.

    Args:
        threshold: bytes, or text such as ``"1 MiB"``.

    Returns:
        True if the setting was made; False if the C library has no ``mallopt`` (macOS, musl).

    Raises:
        UsageError: if ``threshold`` is not a size.

    >>> release_promptly("1 MiB") in (True, False)
    True
    """
    size = parse_bytes(threshold, "threshold")
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, size))
    except (AttributeError, OSError):
        return False


def reset_peak_resident() -> bool:
    """Start the peak of resident memory anew, from the memory that is resident now.

    Returns:
        True if the peak was reset; False if the system does not allow it, or is not Linux.
    """
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident() -> int:
    """The largest resident memory of this process since its start or the last reset, in bytes.

    It is 0 if the system does not report it.

    >>> now = resident()
    >>> peak_resident() >= now > 2**20
    True
    """
    return _status("VmHWM")


def resident() -> int:
    """The resident memory of this process now, in bytes; 0 if the system does not report it."""
    return _status("VmRSS")


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(f"_{i}", ctypes.c_size_t) for i in range(8)] + [("fordblks", ctypes.c_size_t), ("_9", ctypes.c_size_t)]


def unreturned() -> int:
    """Bytes that this process has freed and that glibc has not returned to the system; 0 without glibc 2.33 or later.

    >>> unreturned() >= 0
    True
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return 0
    mallinfo2.restype = _MallInfo
    return int(mallinfo2().fordblks)


def _status(name: str) -> int:
    """The bytes of one line of Linux's ``/proc/self/status``; 0 if there is no such file or line."""
    try:
        found = re.search(rf"{name}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
