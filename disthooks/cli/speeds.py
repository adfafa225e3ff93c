"""How fast bytes move here: to a disk and back, to a GPU and back. Each takes a second or two and leaves nothing."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import Any

#: Bounds of one measurement.
MOST, SECONDS = 256 << 20, 1.0
_ROOM = 8  # at most an eighth of what is free
_LEAST = 32 << 20


def directory_facts(path: str, roles: list[str]) -> dict[str, Any]:
    """What ``path`` is and gives, measured by the file that ``OnDisk`` would have there."""
    from disthooks.cli.machine import file_system

    kind = file_system(path)
    facts: dict[str, Any] = {
        "path": path,
        "roles": roles,
        "file_system": kind,
        "in_memory": kind in ("tmpfs", "ramfs", "devtmpfs"),
        "free_bytes": None,
        "direct": None,
        "write_bytes_per_s": None,
        "read_bytes_per_s": None,
        "error": None,
    }
    try:
        facts["free_bytes"] = shutil.disk_usage(path).free
        return facts | _measured(path, min(MOST, facts["free_bytes"] // _ROOM))
    except OSError as error:
        return facts | {"error": f"{path}: {error.strerror}"}
    except RuntimeError as error:  # a StoreError is one, and the memory to measure with may be missing
        return facts | {"error": " ".join(str(error).split())}


def _measured(path: str, most: int) -> dict[str, Any]:
    """The speed of one thread that moves 8 MiB at a time; ``OnDisk`` has several."""
    from disthooks.saved.stores.arena import CHUNK, Arena
    from disthooks.saved.stores.buffers import Buffers

    arena = Arena(path, "auto")
    if most < _LEAST:
        return {"direct": arena.direct}
    lease = Buffers().lease(CHUNK)
    block = memoryview(lease).cast("B")[:CHUNK]
    block[:] = os.urandom(CHUNK)  # a file system may compress
    extent = arena.allocate(most)
    try:
        written, write = _timed(lambda offset: arena.write(block, extent.offset + offset), most // CHUNK * CHUNK, CHUNK)
        _, read = _timed(lambda offset: arena.read(block, extent.offset + offset, CHUNK), written, CHUNK)
    finally:
        arena.free(extent)
        arena.shrink(keep_peak=False)
    return {"direct": arena.direct, "write_bytes_per_s": write, "read_bytes_per_s": read}


def _timed(move: Callable[[int], object], most: int, step: int) -> tuple[int, float]:
    """Bytes moved until ``most`` or the time is reached, and bytes a second."""
    begin, done, took = time.perf_counter(), 0, 0.0
    while done < most and took < SECONDS:
        move(done)
        done += step
        took = time.perf_counter() - begin
    return done, done / took


def link() -> dict[str, Any] | None:
    """Bytes a second between the CPU's memory and the first GPU, from pinned and from pageable memory."""
    import torch

    if not torch.cuda.is_available():
        return None
    found: dict[str, Any] = {"error": None}
    for name, pinned in (("pinned", True), ("pageable", False)):
        try:
            found |= _copies(name, pinned)
        except RuntimeError as error:  # no room on the device, or no memory that may be pinned
            found |= {f"{name}_to_device": None, f"{name}_to_host": None, "error": f"{name}: {error}".splitlines()[0]}
    return found


def _copies(name: str, pinned: bool) -> dict[str, float]:
    import torch

    host = torch.ones(64 << 20, dtype=torch.uint8, pin_memory=pinned)
    device = torch.empty(host.shape, dtype=host.dtype, device="cuda")
    ways = {"to_device": (device, host), "to_host": (host, device)}
    return {f"{name}_{way}": _copied(target, source) for way, (target, source) in ways.items()}


def _copied(target: Any, source: Any, times: int = 8) -> float:
    import torch

    target.copy_(source, non_blocking=True)  # the first is slow
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return float(source.nbytes * times / (time.perf_counter() - begin))
