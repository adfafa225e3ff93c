"""Saved tensors on disk: one anonymous file for each process and directory, moved beside the computation."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from disthooks._fork_safe import Order, shared
from disthooks._ranks import local_rank
from disthooks._registry import register
from disthooks._streams import on_accelerator
from disthooks._tensors import format_bytes, parse_bytes
from disthooks._torch import uncompiled
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.base import ByteBudget, Store, StoreReport
from disthooks.saved.stores.carrier import Ticket, Transfer
from disthooks.saved.stores.mover import Mover
from disthooks.saved.stores.pools import PAGE
from disthooks.saved.stores.scratch_file import GpuDirect, ScratchFile, opened

_SMALL = 256 << 10  # bytes: smaller ones are joined in other memory
_Directory = str | os.PathLike[str]
_files: weakref.WeakValueDictionary[Any, ScratchFile] = weakref.WeakValueDictionary()
_movers: weakref.WeakValueDictionary[Any, Mover] = weakref.WeakValueDictionary()
_lock = shared(Order.OPENING)


def _file(directory: str, direct: bool | Literal["auto"]) -> ScratchFile:
    key = os.path.realpath(directory), os.getpid(), direct
    found = _files.get(key)
    if found is None:
        found = _files[key] = ScratchFile(directory, direct)
    return found


def _mover(store: OnDisk) -> Mover:
    """The mover of this process for what ``store`` asks for; a fork gets one of its own."""
    directories = [_here(directory) for directory in store.directories]
    process, asked = os.getpid(), (store.direct, store.in_flight, store.checksum, store.gpu_direct)
    key = (*map(os.path.realpath, directories), process, *asked)
    with _lock:
        found = _movers.get(key)
        if found is None:
            files = [_file(directory, store.direct) for directory in directories]
            way = _Way(files, store)
            budget = parse_bytes(store.in_flight, "in_flight")
            found = _movers[key] = Mover(files, budget, Transfer(store.checksum, way))
        return found


class _Way:
    """The way past the host that ``store`` asks for, looked for when it is first needed; and why there is none.

    Raises:
        StoreError: at once, when it has to be there and is not.
    """

    def __init__(self, files: Sequence[ScratchFile], store: OnDisk) -> None:
        self._files, self._checksum, self._lock = files, store.checksum, shared(Order.WAY)
        self._looked = store.gpu_direct is False
        self._found: GpuDirect | None = None
        self.why_staged = ""  # also when nobody asked for it
        if store.gpu_direct is True and self() is None:
            what = f"OnDisk({files[0].directory!r}): gpu_direct=True, but {self.why_staged}"
            raise StoreError(what, path=files[0].directory)

    def __call__(self) -> GpuDirect | None:
        if not self._looked:
            with self._lock:
                if not self._looked:
                    self._found, self.why_staged = opened(self._files, self._checksum)
                    self._looked = True
        return self._found


def _here(directory: str) -> str:
    """``directory`` of this process: "{local_rank}" is its number on its node."""
    return directory.replace("{local_rank}", local_rank())


@register("store")
@dataclass(frozen=True)
class OnDisk(Store):
    """Keep saved tensors in one anonymous file of this process in ``directory``.

    Threads write them while the forward goes on, and read them back before the backward comes to them, in the order
    of the last backward. What is wanted or dropped before it was written never is. The copy that was
    made of a tensor when it was saved is held in memory until it is written.

    The file has no name from birth: whatever ends the process, SIGKILL too, the system takes it back. It goes
    when the last store and the last saved tensor in it go.

    Args:
        directory: a directory that exists and can be written; best a local disk. ``"{local_rank}"`` in it is the
            number of the process on its node (``LOCAL_RANK``, 0 without): one disk for each. A list of directories:
            tensors go to each in turn.
        limit: most bytes at any time in this process, in flight too: an int or text such as ``"1 TiB"``, or
            ``"4 TiB per node"``, of which each process of the node (``LOCAL_WORLD_SIZE``) gets its part; None for
            no limit. Whole pages of 4 KiB count. What is compared is what the file takes on the disk: where the file
            system can make holes (ext4, XFS, Btrfs, tmpfs), pages of dropped tensors go back to it when their place is
            needed. A tensor that is let go of while one of the two threads writes it counts no more, and its place in
            the file is free when that write ends.
        direct: write past the page cache of the system, which otherwise grows by all that is written: True, False,
            or ``"auto"`` for wherever the file system can; ``report()`` says what it was.
        checksum: keep a CRC-32 of each tensor in memory and compare it when it is read; a thread takes a quarter of a
            second for each GB, each way.
        in_flight: most bytes that are held until they are written, and as many that are read ahead.
        gpu_direct: have an NVIDIA GPU write and read large tensors past the host's memory (GPUDirect Storage, through
            kvikio): True, False, or ``"auto"`` for wherever it works; ``report()`` says why it does not. What is
            written so stays on the GPU until it is, up to ``in_flight`` bytes.

    Raises:
        UsageError: when an argument is not what it should be.
        StoreError: at once when no file can be made in ``directory``, or ``direct=True`` or ``gpu_direct=True`` does
            not work there; in forward at the limit; when a tensor could not be written, once, as soon as the next one
            is saved or wanted: it is still in memory, so the backward can be run all the same; in backward when one
            cannot be read. It has ``path``, ``wanted`` and ``free``.

    >>> import tempfile
    >>> store = OnDisk(tempfile.gettempdir())
    >>> ticket = store.put(torch.arange(4))
    >>> store.wait()
    >>> store.get(ticket)
    tensor([0, 1, 2, 3])
    >>> store.drop(ticket)
    """

    min_bytes: ClassVar[int] = 64 << 10  # measured: a tensor costs 80 µs, and as much again for each 100 KiB or so
    directory: _Directory | Sequence[_Directory]
    limit: int | str | None = None
    direct: bool | Literal["auto"] = field(default="auto", kw_only=True)
    checksum: bool = field(default=False, kw_only=True)
    in_flight: int | str = field(default="64 MiB", kw_only=True)
    gpu_direct: bool | Literal["auto"] = field(default=False, kw_only=True)
    budget: ByteBudget = field(init=False, repr=False, compare=False)
    directories: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _mover: Mover = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.direct, bool) and self.direct != "auto":  # 1 is True, and is taken for neither below
            raise UsageError(f"OnDisk: direct must be True, False or 'auto', got {self.direct!r}")
        if not isinstance(self.gpu_direct, bool) and self.gpu_direct != "auto":
            raise UsageError(f"OnDisk: gpu_direct must be True, False or 'auto', got {self.gpu_direct!r}")
        parse_bytes(self.in_flight, "OnDisk in_flight")
        several = not isinstance(self.directory, (str, os.PathLike))
        given: Any = self.directory if several else (self.directory,)
        directories = tuple(map(os.fspath, given))
        if not directories:
            raise UsageError("OnDisk: give at least one directory")
        object.__setattr__(self, "directory", directories if several else directories[0])
        object.__setattr__(self, "directories", directories)
        object.__setattr__(self, "budget", ByteBudget(self.limit, f"OnDisk({self.directory!r})", PAGE))
        object.__setattr__(self, "_mover", _mover(self))
        self._share_limit()

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.directory, self.limit, self.direct, self.checksum, self.in_flight, self.gpu_direct)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor``: of a large one in whole pages, which are written as they are and used again."""
        if not tensor.is_cpu or tensor.nbytes <= _SMALL:
            return super().own(tensor)
        try:
            return self._own_mover().transfer.copied(tensor)
        except OSError as error:
            what = f"OnDisk({self.directory!r}): no host memory to copy {format_bytes(tensor.nbytes)} to"
            raise StoreError(what, path=str(self.directory), wanted=tensor.nbytes) from error

    def put(self, tensor: torch.Tensor) -> _Stored:
        """Have ``tensor`` written; wait when too many bytes are in flight."""
        content = (tensor.detach() if on_accelerator(tensor) else tensor.detach().cpu()).contiguous()
        return self._put(content, tensor.device, None)

    def put_from_host(self, tensor: torch.Tensor, stream: torch.Stream) -> _Stored:
        """Have ``tensor`` written, which is in memory and belongs on the device of ``stream``."""
        return self._put(tensor.detach().cpu().contiguous(), stream.device, stream)

    def _put(self, content: torch.Tensor, device: torch.device, home: torch.Stream | None) -> _Stored:
        mover = self._own_mover()
        stored = _Stored(mover, mover.ticket(content, device), self.budget)
        stored.ticket.at = home
        try:
            self.budget.reserve(content.nbytes)
            stored.ticket.owed = self.budget.size(content.nbytes)
            mover.put(stored.ticket)
        except BaseException as error:
            stored.drop()
            if isinstance(error, OSError):
                what = f"OnDisk({self.directory!r}): no host memory to copy {format_bytes(content.nbytes)} to"
                raise StoreError(what, path=str(self.directory), wanted=content.nbytes) from error
            raise
        return stored

    def get(self, ticket: _Stored) -> torch.Tensor:
        """The tensor on the device it came from: itself while it is in memory, afterwards from disk."""
        return ticket.mover.get(ticket.ticket)

    def peek(self, ticket: _Stored) -> torch.Tensor | None:
        """The tensor, as long as it is not written."""
        held = ticket.ticket.tensor
        return None if held is None else ticket.mover.transfer.give(ticket.ticket, held)

    def pop_transfer_seconds(self, ticket: _Stored) -> float:
        """Seconds in which it was written and read."""
        seconds, ticket.ticket.seconds = ticket.ticket.seconds, 0.0
        return seconds

    def prefetch(self, ticket: _Stored) -> None:
        """Read it before it is wanted."""
        ticket.mover.prefetch(ticket.ticket)

    def device_bytes(self) -> int:
        """Bytes that are copied from devices in this moment, or were read and are there before they are wanted."""
        return self._own_mover().transfer.device_bytes

    def set_device_limit(self, nbytes: int) -> None:
        """Hold less of them there."""
        self._own_mover().transfer.set_device_limit(nbytes)

    def drop(self, ticket: _Stored) -> None:
        """Let its place be used again."""
        ticket.drop()

    def wait(self) -> None:
        """Wait until all is written; StoreError when something could not be."""
        self._own_mover().wait()

    def report(self) -> tuple[StoreReport, ...]:
        """Bytes and speed of all that goes to these directories in this process."""
        return (_report(f"OnDisk({self.directory!r})", self._own_mover(), self.budget),)

    def release_idle(self) -> None:
        """End idle threads, free idle memory and unused space in the file."""
        self._own_mover().release_idle()

    def _own_mover(self) -> Mover:
        if self._mover.process != os.getpid():  # this process is a fork
            object.__setattr__(self, "_mover", _mover(self))
            self._share_limit()
        return self._mover

    def _share_limit(self) -> None:
        for file in self._mover.files:
            file.budgets.add(self.budget)
            file.parts = len(self._mover.files)


class _Stored(NamedTuple):
    """A ticket, and who counts and moves it. It is dropped when nobody has it: Ctrl-C may take it from anybody."""

    mover: Mover
    ticket: Ticket
    budget: ByteBudget

    def drop(self) -> None:
        """Drop it, if that is not done yet."""
        owed, self.ticket.owed = self.ticket.owed, 0
        self.budget.release(owed)
        self.mover.drop(self.ticket)

    @uncompiled()
    def __del__(self) -> None:
        self.drop()


def _report(name: str, mover: Mover, budget: ByteBudget) -> StoreReport:
    stats, measured = mover.stats, [file.measured for file in mover.files if file.measured is not None]
    return StoreReport(
        name,
        held=budget.held,
        limit=budget.limit,
        in_flight=mover.in_flight,
        written=stats.written,
        never_written=stats.never_written,
        from_memory=stats.from_memory,
        ahead=stats.ahead,
        in_vain=stats.in_vain,
        read=stats.read,
        write_seconds=stats.writing.seconds,
        read_seconds=stats.reading.seconds,
        measured_write=sum(each.write for each in measured) or None,
        measured_read=sum(each.read for each in measured) or None,
        why_buffered="; ".join(sorted({file.why_buffered for file in mover.files} - {""})),
        why_staged=getattr(mover.transfer.directly, "why_staged", ""),
    )


def _made(
    directory: Any, limit: int | str | None, direct: Any, checksum: bool, in_flight: int | str, gpu_direct: Any = False
) -> OnDisk:
    return OnDisk(directory, limit, direct=direct, checksum=checksum, in_flight=in_flight, gpu_direct=gpu_direct)
