"""GPUDirect Storage: a GPU's tensors go to a scratch file and back without host memory, through kvikio."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal

import torch

from disthooks._fork_safe import Order, shared_lock
from disthooks.errors import StoreError
from disthooks.saved.stores.backend import InFile
from disthooks.saved.stores.pools import PAGE
from disthooks.saved.stores.scratch_file import ScratchFile

_LEAST = 1 << 20  # bytes: kvikio itself moves smaller tensors through host memory
_KINDS = ("cuda",)  # the types of devices that can use it

_INSTALL = "install kvikio-cu12 (or -cu13, as your CUDA is) and NVIDIA's nvidia-fs driver, or leave gpu_direct=False"


class GpuDirect:
    """Scratch files that are opened a second time for GPUs: NVIDIA's GPUDirect Storage, through kvikio.

    kvikio reads and writes in threads of its own, and does not wait for streams. So the host waits before a write until
    the tensor is filled, and before a read until nobody uses the memory any more. Writer and reader hold the memory
    until kvikio is done.

    Raises:
        OSError, RuntimeError, ValueError: what kvikio raises for a file that it cannot move directly.
    """

    def __init__(self, kvikio: Any, files: Sequence[ScratchFile]) -> None:
        # With "OFF", kvikio raises an error where it would otherwise go through host memory without a word.
        with kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF):
            # The files have no names, so they are opened by their descriptors.
            self._files = {file: kvikio.CuFile(f"/proc/self/fd/{file.fileno()}", "r+") for file in files}

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, which is contiguous, can go this way: it has whole pages, and is large enough."""
        return tensor.device.type in _KINDS and tensor.nbytes >= _LEAST and tensor.nbytes % PAGE == 0

    def write(self, file: ScratchFile, tensor: torch.Tensor, offset: int) -> None:
        """Write ``tensor``, which is filled, at ``offset``, and wait for that.

        Raises:
            StoreError: if not all of it is written.
        """
        self._move(file, "pwrite", "written", tensor, offset)

    def read(self, file: ScratchFile, tensor: torch.Tensor, offset: int) -> None:
        """Fill ``tensor``, whose memory the device does not use, from ``offset``, and wait for that.

        Raises:
            StoreError: if not all of it is there.
        """
        self._move(file, "pread", "read", tensor, offset)

    def _move(self, file: ScratchFile, call: str, done: str, tensor: torch.Tensor, offset: int) -> None:
        data = tensor.detach().view(-1).view(torch.uint8)  # bytes, because kvikio does not know every dtype of torch
        what = f"{tensor.nbytes} bytes could not be {done} by GPUDirect Storage"
        try:
            moved = getattr(self._files[file], call)(data, tensor.nbytes, offset).get()
        except OSError as error:
            raise file.error(what, error, tensor.nbytes) from error
        except (RuntimeError, ValueError) as error:
            raise file.error(f"{what} ({error})", None, tensor.nbytes) from error
        if moved != tensor.nbytes:
            raise file.error(f"{what}: only {moved} bytes were {done}", None, tensor.nbytes)


def opened(files: Sequence[ScratchFile], checksum: bool) -> tuple[GpuDirect | None, str]:
    """GPUDirect Storage for all of ``files``, or why it cannot be used."""
    if checksum:
        return None, "checksum=True reads every byte on the host"
    buffered = next((file for file in files if not file.direct), None)
    if buffered is not None:
        return None, f"{buffered.directory} is written through the page cache: {buffered.why_buffered}"
    kvikio, why = _kvikio()
    if kvikio is None:
        return None, why
    try:
        found = GpuDirect(kvikio, files)
        _probe(found, files)
    except Exception as error:  # on a machine that it does not fit, a driver may raise anything
        return None, f"kvikio cannot move files of {', '.join(file.directory for file in files)}: {error}"
    return found, ""


def _kvikio() -> tuple[Any, str]:
    """kvikio, or why it cannot be used."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None, "there is no NVIDIA GPU"
    try:
        kvikio: Any = importlib.import_module("kvikio")
        driver: Any = importlib.import_module("kvikio.cufile_driver")
        importlib.import_module("kvikio.defaults")  # kvikio itself does not import it
    except Exception as error:  # a shared library that does not load raises other errors than ImportError
        return None, f"kvikio cannot be imported ({error}): {_INSTALL}"
    try:
        there = driver.get("is_gds_available") if hasattr(driver, "get") else driver.properties.is_gds_available
    except Exception as error:
        return None, f"the cuFile driver does not start ({error}): {_INSTALL}"
    return (kvikio, "") if there else (None, f"kvikio says that GPUDirect Storage is not available: {_INSTALL}")


def _probe(direct: GpuDirect, files: Sequence[ScratchFile]) -> None:
    """Write a little to each file and read it back; RuntimeError if other bytes come back."""
    device = torch.accelerator.current_accelerator()
    there = torch.arange(_LEAST // 8, device=device)
    for file in files:
        back = torch.zeros_like(there)
        torch.accelerator.synchronize()
        extent = file.allocate(there.nbytes)
        try:
            direct.write(file, there, extent.offset)
            direct.read(file, back, extent.offset)
        finally:
            file.release(extent)
        if not torch.equal(there, back):
            raise RuntimeError(f"the bytes read from {file.directory} are not those that were written")


class GpuDirectWay:
    """GPUDirect Storage for ``files``, opened when it is first needed.

    Args:
        files: the files; it is used only if it works for all of them.
        checksum: whether the host has to read every byte, for a checksum.
        wanted: True: it has to work. False: it is not used. ``"auto"``: it is used if it works.

    Attributes:
        why_staged: why it cannot be used; empty if it can, or if ``wanted`` is False.

    Raises:
        StoreError: at once, if it has to work and does not.
    """

    def __init__(self, files: Sequence[ScratchFile], checksum: bool, wanted: bool | Literal["auto"]) -> None:
        self._files, self._checksum, self._lock = files, checksum, shared_lock(Order.WAY)
        self._looked = wanted is False
        self._found: GpuDirect | None = None
        self.why_staged = ""
        if wanted is True and self() is None:
            what = f"OnDisk({files[0].directory!r}): gpu_direct=True, but {self.why_staged}"
            raise StoreError(what, path=files[0].directory)

    def __call__(self) -> GpuDirect | None:
        """GPUDirect Storage for these files, or None if it cannot be used."""
        if not self._looked:
            with self._lock:
                if not self._looked:
                    self._found, self.why_staged = opened(self._files, self._checksum)
                    self._looked = True
        return self._found


class GpuDirectBackend(InFile[torch.Tensor]):
    """A scratch file that moves the memory of a GPU: its memory is a contiguous tensor on that GPU.

    Its user waits for the streams that use the memory, before a write and before a read. See :class:`GpuDirect`.

    Args:
        direct: GPUDirect Storage for ``file``.
        file: the file.
        capacity: most bytes in use in the file; None for no limit.
    """

    def __init__(self, direct: GpuDirect, file: ScratchFile, capacity: int | None = None) -> None:
        super().__init__(file, capacity)
        self._direct = direct

    def _write_at(self, offset: int, memory: torch.Tensor) -> None:
        self._direct.write(self.file, memory, offset)

    def _read_at(self, offset: int, memory: torch.Tensor) -> None:
        self._direct.read(self.file, memory, offset)
