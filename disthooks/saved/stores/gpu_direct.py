"""Between a GPU's memory and a disk, past the host's: GPUDirect Storage, through kvikio.

kvikio's reads and writes happen on the host's schedule, in threads of its own, whatever the streams are at. So who
writes waits on the host until the tensor is filled, who reads until the memory is nobody's any more, and both hold it
until the future is done. That is done in the threads of a mover.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from disthooks.saved.stores.arena import Arena
from disthooks.saved.stores.buffers import PAGE

_LEAST = 1 << 20  # bytes: kvikio moves smaller ones through host memory by itself
_KINDS = ("cuda",)  # of devices
_INSTALL = "install kvikio-cu12 (or -cu13, as your CUDA is) and NVIDIA's nvidia-fs driver, or leave gpu_direct=False"


class GpuDirect:
    """The files of ``arenas``, opened once more for GPUs.

    Raises:
        OSError, RuntimeError, ValueError: what kvikio raises for a file that it cannot move directly.
    """

    def __init__(self, kvikio: Any, arenas: Sequence[Arena]) -> None:
        # "OFF": an error where it would otherwise go through host memory, silently.
        with kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF):
            # By their descriptors: they have no names.
            self._files = {arena: kvikio.CuFile(f"/proc/self/fd/{arena.fileno()}", "r+") for arena in arenas}

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, contiguous, goes this way: whole pages, and enough of them to be worth it."""
        return tensor.device.type in _KINDS and tensor.nbytes >= _LEAST and tensor.nbytes % PAGE == 0

    def write(self, arena: Arena, tensor: torch.Tensor, offset: int) -> None:
        """Write ``tensor``, which is filled, at ``offset``, and wait for it.

        Raises:
            StoreError: when it is not all written.
        """
        self._move(arena, "pwrite", "written", tensor, offset)

    def read(self, arena: Arena, tensor: torch.Tensor, offset: int) -> None:
        """Fill ``tensor``, which the device is done with, from ``offset``, and wait for it.

        Raises:
            StoreError: when not all of it is there.
        """
        self._move(arena, "pread", "read", tensor, offset)

    def _move(self, arena: Arena, call: str, done: str, tensor: torch.Tensor, offset: int) -> None:
        data = tensor.detach().view(-1).view(torch.uint8)  # bits: it does not know every dtype of torch
        what = f"{tensor.nbytes} bytes could not be {done} by GPUDirect Storage"
        try:
            moved = getattr(self._files[arena], call)(data, tensor.nbytes, offset).get()
        except OSError as error:
            raise arena.error(what, error, tensor.nbytes) from error
        except (RuntimeError, ValueError) as error:
            raise arena.error(f"{what} ({error})", None, tensor.nbytes) from error
        if moved != tensor.nbytes:
            raise arena.error(f"{what}: only {moved} were", None, tensor.nbytes)


def opened(arenas: Sequence[Arena], checksum: bool) -> tuple[GpuDirect | None, str]:
    """The way past the host for all of ``arenas``, or why there is none."""
    if checksum:
        return None, "checksum=True reads every byte on the host"
    buffered = next((arena for arena in arenas if not arena.direct), None)
    if buffered is not None:
        return None, f"{buffered.directory} is written through the page cache: {buffered.why_buffered}"
    kvikio, why = _kvikio()
    if kvikio is None:
        return None, why
    try:
        found = GpuDirect(kvikio, arenas)
        _probe(found, arenas)
    except Exception as error:  # whatever a driver raises on a machine that it does not fit
        return None, f"kvikio cannot move files of {', '.join(arena.directory for arena in arenas)}: {error}"
    return found, ""


def _kvikio() -> tuple[Any, str]:
    """kvikio, or why it cannot be used."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None, "there is no NVIDIA GPU"
    try:
        kvikio: Any = importlib.import_module("kvikio")
        driver: Any = importlib.import_module("kvikio.cufile_driver")
        importlib.import_module("kvikio.defaults")  # kvikio itself does not: it would not be there
    except Exception as error:  # also a library that does not load
        return None, f"kvikio cannot be imported ({error}): {_INSTALL}"
    try:
        there = driver.get("is_gds_available") if hasattr(driver, "get") else driver.properties.is_gds_available
    except Exception as error:
        return None, f"the cuFile driver does not start ({error}): {_INSTALL}"
    return (kvikio, "") if there else (None, f"kvikio says that GPUDirect Storage is not available: {_INSTALL}")


def _probe(direct: GpuDirect, arenas: Sequence[Arena]) -> None:
    """Write and read a little of each file, to see that what comes back is what was written."""
    device = torch.accelerator.current_accelerator()
    there = torch.arange(_LEAST // 8, device=device)
    for arena in arenas:
        back = torch.zeros_like(there)
        torch.accelerator.synchronize()
        extent = arena.allocate(there.nbytes)
        try:
            direct.write(arena, there, extent.offset)
            direct.read(arena, back, extent.offset)
        finally:
            arena.free(extent)
        if not torch.equal(there, back):
            raise RuntimeError("what was written did not come back")
