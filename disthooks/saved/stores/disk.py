"""Keep saved tensors on disk: a process has an anonymous file in each directory, and a thread that moves tensors."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from disthooks._ranks import local_rank
from disthooks._registry import register
from disthooks._streams import stream_of
from disthooks._tensors import format_bytes, parse_bytes
from disthooks._torch import uncompiled
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.base import ByteBudget, MovingTicket, StoreReport, StoreSpec, Tier, opening
from disthooks.saved.stores.copies import Outgoing
from disthooks.saved.stores.file_worker import FileWorker
from disthooks.saved.stores.host import PAGE
from disthooks.saved.stores.scratch_file import file_in
from disthooks.saved.stores.tape import Entry

_runtimes: weakref.WeakValueDictionary[Any, FileWorker] = weakref.WeakValueDictionary()


def _runtime(store: OnDisk) -> FileWorker:
    """The runtime of this process for the directory and options of ``store``; a forked process gets its own."""
    directory = os.fspath(store.directory).replace("{local_rank}", local_rank())
    # The blocks of a file can be bounded only if all stores that use it have a limit, so these have files of their own.
    process, is_limited = os.getpid(), store.limit is not None
    key = (os.path.realpath(directory), process, store.direct, store.in_flight, is_limited)
    with opening:
        found = _runtimes.get(key)
        if found is None:
            file = file_in(directory, store.direct, is_limited)
            found = _runtimes[key] = FileWorker(file, parse_bytes(store.in_flight, "in_flight"))
        return found


class Ticket(MovingTicket):
    """An entry of a tape with its budget. Its destructor drops it: after Ctrl-C its owner may never have got it.

    Attributes:
        runtime: lives as long as the ticket, and the files with it.
    """

    __slots__ = ("budget", "entry", "runtime")

    def __init__(self, entry: Entry, budget: ByteBudget, runtime: FileWorker) -> None:
        self.entry, self.budget, self.runtime = entry, budget, runtime

    def drop(self) -> None:
        """Release the entry, unless that was done already. This takes no lock; see [Note: destructors]."""
        entry = self.entry
        if entry.dropped:
            return
        reserved, entry.reserved = entry.reserved, 0
        if reserved:
            self.budget.release(reserved)
        group, outgoing = entry.group, entry.outgoing
        entry.outgoing = entry.tensor = None
        if outgoing is not None and outgoing.is_done():
            outgoing.source = None  # otherwise the link releases it when it is next used
        entry.dropped = True
        if group is not None:
            self.runtime.drop(entry)
            group.ahead.pop(entry, None)

    def pop_transfer_seconds(self) -> float:
        """Seconds for which the tensor was written and read, since the last call."""
        seconds, self.entry.seconds = self.entry.seconds, 0.0
        return seconds

    @uncompiled()
    def __del__(self) -> None:
        self.drop()


class OpenOnDisk(Tier):
    """An :class:`OnDisk` at work: the runtime of its directory, and the bytes under its limit."""

    reads_ahead: ClassVar[bool] = True

    def __init__(self, worker: FileWorker, budget: ByteBudget, directory: str) -> None:
        self.worker, self.budget, self.file = worker, budget, worker.file
        self._path, self._name = directory, f"OnDisk({directory!r})"
        self.file.budgets.add(budget)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` in memory of whole pages, which is written without another copy and used again."""
        if not tensor.is_cpu:
            return super().own(tensor)
        try:
            return self.worker.own(tensor)
        except OSError as error:
            raise self._no_memory(tensor.nbytes) from error

    def put(self, tensor: torch.Tensor) -> Ticket:
        """Queue ``tensor`` to be written; wait if too many bytes are in flight."""
        content = tensor.detach()
        at = stream_of(content)
        if at is None and not content.is_cpu:
            content = content.cpu()  # a device without streams: nothing is ordered there
        return self._put(content, tensor.device, at)

    def put_from_host(self, tensor: torch.Tensor, stream: torch.Stream) -> Ticket:
        """Queue ``tensor``, which is in host memory and belongs on the device of ``stream``, to be written."""
        return self._put(tensor.detach().cpu(), stream.device, stream)

    def take_over(self, copy: Outgoing, stream: torch.Stream) -> Ticket:
        """Queue what another store copies from the device of ``stream``; it is written from the memory it lies in."""
        if not self.worker.take_over(copy, stream.device):
            return self.put_from_host(copy.wait(), stream)
        ticket = self._put(copy.host, stream.device, stream, copy)
        copy.is_taken = True
        return ticket

    def _put(
        self, content: torch.Tensor, device: torch.device, at: torch.Stream | None, outgoing: Outgoing | None = None
    ) -> Ticket:
        plain = content.contiguous()
        entry = Entry(plain, device, at, is_copy=plain is not content)
        entry.outgoing = outgoing
        ticket = Ticket(entry, self.budget, self.worker)
        try:
            self.budget.reserve(entry.nbytes, entry)
            self.worker.put(entry)
        except BaseException as error:
            ticket.drop()  # now, because the traceback holds this frame
            if isinstance(error, OSError):
                raise self._no_memory(entry.nbytes) from error
            raise
        return ticket

    def _no_memory(self, nbytes: int) -> StoreError:
        what = f"{self._name}: the system has no {format_bytes(nbytes)} of host memory left"
        return StoreError(what, path=self._path, wanted=nbytes)

    def get(self, ticket: Ticket) -> torch.Tensor:
        """The tensor, on the device that it was saved on: the one that was put if it is in memory, else read."""
        return ticket.runtime.get(ticket.entry)

    def peek(self, ticket: Ticket) -> torch.Tensor | None:
        return ticket.runtime.peek(ticket.entry)

    def prefetch(self, ticket: Ticket) -> None:
        ticket.runtime.prefetch(ticket.entry)

    def device_bytes(self, device: torch.device | None = None) -> int:
        """Bytes on ``device``, or on all devices: of tensors that are copied from there, or that were read early."""
        return self.worker.staging.device_bytes(device)

    def set_device_limit(self, nbytes: int, device: torch.device) -> int:
        return self.worker.staging.set_device_limit(nbytes, device)

    def drop(self, ticket: Ticket) -> None:
        """Let other tensors use its place in the file."""
        ticket.drop()

    def wait(self) -> None:
        self.worker.wait()

    def report(self) -> tuple[StoreReport, ...]:
        """One entry: the bytes and the speed of all tensors that go to this file in this process."""
        stats = self.worker.stats
        return (
            StoreReport(
                self._name,
                held=self.budget.held,
                limit=self.budget.limit,
                in_flight=self.worker.in_flight,
                written=stats.written,
                never_written=self.worker.never_written,
                from_memory=stats.from_memory,
                ahead=stats.ahead,
                in_vain=stats.in_vain,
                read=stats.read,
                write_seconds=stats.writing.seconds,
                read_seconds=stats.reading.seconds,
                why_buffered=self.file.why_buffered,
                peak_held=self.budget.peak,
            ),
        )

    def release_idle(self) -> None:
        """End idle threads, and free idle memory and unused space in the file."""
        self.worker.release_idle()


@register("store")
@dataclass(frozen=True)
class OnDisk(StoreSpec["OpenOnDisk"]):
    """Keep saved tensors in one anonymous file of this process in ``directory``.

    A thread writes the tensors during forward. It reads them back before backward needs them, in the order in which
    the last backward read them. A tensor that is read or dropped before it was written is never written. The copy
    that was made of a tensor when it was saved is held in memory until it is written.

    The file has no name, so the system frees it however the process ends, also after SIGKILL. Otherwise it is closed
    when the last store and the last saved tensor that use it are gone.

    Args:
        directory: a directory that exists and can be written, best on a local disk. ``"{local_rank}"`` in it stands
            for the number of the process on its node (``LOCAL_RANK``, or 0), so that each process can have a disk of
            its own. For several disks at once give a directory on a RAID of them.
        limit: most bytes in this process at any time, those in flight included: an int, text such as ``"1 TiB"``, or
            ``"4 TiB per node"``, of which each process of the node (``LOCAL_WORLD_SIZE``) gets an equal part; None
            for no limit. Stores without a limit have another file. Each tensor counts as whole pages of 4 KiB. The
            limit is compared with the space that the file takes on the disk. If the file system can make holes (ext4,
            XFS, Btrfs, tmpfs), it gets the pages of dropped tensors back when the limit would be passed. A tensor that
            is dropped while a thread writes it counts no more, and its place in the file is free when that write ends.
        direct: whether to write past the page cache of the system, which otherwise grows by all bytes that are
            written: True, False, or ``"auto"`` to do it if the file system can. ``report()`` says why if it does not.
        in_flight: most bytes that wait to be written, and most bytes that are read before backward needs them; an int
            or text.

    Raises:
        UsageError: if an argument has a wrong type or value.
        StoreError: when the store is made, if no file can be made in ``directory``, or if ``direct=True``
            does not work there. In forward, if the limit is reached. Once, when the next tensor is saved or read, if a
            tensor could not be written: that tensor is still in memory, so backward can run all the same. In backward,
            if a tensor cannot be read. The error has ``path``, ``wanted`` and ``free``.

    >>> import tempfile
    >>> store = OnDisk(tempfile.gettempdir())
    >>> ticket = store.put(torch.arange(4))
    >>> store.wait()
    >>> store.get(ticket)
    tensor([0, 1, 2, 3])
    >>> store.drop(ticket)
    """

    # Measured: each tensor costs 80 µs, and about as much again for each 100 KiB (decision 41).
    min_bytes: ClassVar[int] = 64 << 10
    directory: str | os.PathLike[str]
    limit: int | str | None = None
    direct: bool | Literal["auto"] = field(default="auto", kw_only=True)
    in_flight: int | str = field(default="64 MiB", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.direct, bool) and self.direct != "auto":  # the type is tested because 1 == True
            raise UsageError(f"OnDisk: direct must be True, False or 'auto', got {self.direct!r}")
        parse_bytes(self.in_flight, "OnDisk in_flight")
        if not isinstance(self.directory, (str, os.PathLike)):
            raise UsageError(f"OnDisk: directory must be the path of one directory, got {self.directory!r}")
        object.__setattr__(self, "directory", os.fspath(self.directory))
        self.open()  # now, so that a directory that cannot be used is an error here

    @property
    def budget(self) -> ByteBudget:
        """The bytes in use in this process, and their limit."""
        return self.open().budget

    def _open(self) -> OpenOnDisk:
        directory = os.fspath(self.directory)
        return OpenOnDisk(_runtime(self), ByteBudget(self.limit, f"OnDisk({directory!r})", PAGE), directory)
