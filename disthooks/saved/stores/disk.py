"""Keep saved tensors on disk: each process has an anonymous file in each directory, and threads that move tensors."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch

from disthooks._fork_safe import Workers
from disthooks._ranks import local_rank
from disthooks._registry import register
from disthooks._streams import on_accelerator, work_for
from disthooks._tensors import format_bytes, parse_bytes
from disthooks._torch import uncompiled
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.base import ByteBudget, Store, StoreReport, StoreSpec, opening
from disthooks.saved.stores.device_copy import Incoming, let_go
from disthooks.saved.stores.gpu_direct import GpuDirectWay
from disthooks.saved.stores.order import AccessOrder, PerThread
from disthooks.saved.stores.pools import PAGE
from disthooks.saved.stores.scratch_file import ScratchFile, Waste, file_in
from disthooks.saved.stores.transfer import (
    FAILED,
    GONE,
    QUEUED,
    WRITTEN,
    Ahead,
    Slab,
    Ticket,
    Transfer,
    padded,
    taken_together,
)

_SMALL = 256 << 10  # bytes: smaller tensors are written together, because waking a thread costs more (decision 41)
_MOST_UNPAGED = 256 << 10  # bytes: copies up to this size need no pages of their own, because they are joined to others
_JOINED = 1 << 20  # bytes: when the small tensors have so many, they are written
_MUCH = 0.1  # if more than this part of a backward waits for reads, the memory for reads is kept (decision 44)


class Mover(Workers[Slab | list[Ticket], Ticket]):
    """Moves tensors between memory and files, beside the computation.

    A tensor that is put is held until it is written. If more than ``limit`` bytes are held, ``put`` waits. Each
    ``get`` starts reads of the tensors that backward reads next, up to ``limit`` bytes.

    A thread that waits watches the threads that it waits for. If one of them dies, its job counts as failed.

    Args:
        files: the files, which are written in turn.
        limit: most bytes in flight to the files, and most bytes in flight back.
        transfer: moves the bytes.
        threads: how many threads there are at most.
    """

    def __init__(self, files: Sequence[ScratchFile], limit: int, transfer: Transfer, threads: int = 2) -> None:
        self.files, self.limit, self.process = files, limit, os.getpid()
        self.transfer = transfer
        self.stats = self.transfer.stats
        self._orders = PerThread(AccessOrder)  # one order for each thread that puts
        self._turns = itertools.cycle(files)
        self._writes: collections.deque[Ticket] = collections.deque()
        self._reads: collections.deque[Slab] = collections.deque()
        self._ahead = Ahead(limit, self.stats)
        self._flying = 0  # bytes that were put and are not written
        self._uncalled = 0  # bytes of these for which no thread was woken yet
        self._failed: tuple[Ticket, BaseException] | None = None  # a failed write that was not raised yet (decision 36)
        # How many failed writes were raised. Writes that were in flight at that moment fail for the same reason, and
        # their errors are not raised.
        self._said = 0
        self._claims: dict[int, Slab] = {}  # by thread: the slab that a thread of the computation reads itself
        super().__init__(threads)

    def after_fork(self) -> None:
        """Forget all jobs. In the child, tensors that were not written stay in memory."""
        super().after_fork()
        self.transfer.after_fork()
        for ticket in self._ahead:
            ticket.reading = False
        self._reads.clear()
        self._writes.clear()

    # -- for the threads of the computation

    def ticket(self, tensor: torch.Tensor, device: torch.device) -> Ticket:
        """A ticket for ``tensor``, to be given to :meth:`put`.

        Args:
            tensor: contiguous, in CPU memory or on an accelerator.
            device: the device that ``get`` returns it on.
        """
        return Ticket(tensor, device, self._orders())

    def put(self, ticket: Ticket) -> None:
        """Queue the tensor of ``ticket`` to be written. Waits if too many bytes are in flight.

        Raises:
            StoreError: if an earlier tensor could not be written. It stays in memory, and the error is raised once.
        """
        with self._lock:
            self._drain_releases()
            # If the mover is closed, the process ends and no thread writes any more, so waiting would never end.
            while 0 < self._flying > self.limit - ticket.nbytes and not (self._failed or self._closed):
                self._wait()
            self._say_failure()
            self.transfer.make_room(ticket.nbytes, self.limit)
            self.transfer.for_writes(self.limit)
            self.transfer.begin(ticket)
            ticket.order.put(ticket)
            self._flying += ticket.nbytes
            ticket.state, ticket.said = QUEUED, self._said
            self._writes.append(ticket)
            self._uncalled += ticket.nbytes
            if self._uncalled >= min(_JOINED, self.limit):
                self._call_for_work()

    def get(self, ticket: Ticket) -> torch.Tensor:
        """The tensor of ``ticket``: the one that was put if it is still in memory, or a copy.

        Raises:
            StoreError: if this tensor cannot be read, or has another checksum than when it was written. Also, once, if
                any tensor could not be written: that tensor stays in memory.
        """
        with self._lock:
            self._drain_releases()
            if ticket.dropped or ticket.state == GONE:
                raise StoreError("a stored tensor was read after it was dropped")
            self._say_failure()
            ticket.order.read(ticket)
            # It was read ahead, or a thread reads it now.
            if ticket.ahead is not None or (ticket.reading and ticket.slab not in self._reads):
                self.stats.ahead += ticket.nbytes
            found = self._in_memory(ticket)
            self._have_read(self._ahead.after(ticket))
        # A read into memory that was used before is faster. Such memory is kept only if backward waits for reads.
        self.transfer.for_reads(keep=2 * self.limit if ticket.order.waiting > _MUCH else 0)
        if found is None:
            begin = time.perf_counter()
            while (found := self._read_for(ticket)) is None:
                pass
            ticket.order.waited(time.perf_counter() - begin)
        return self.transfer.give(ticket, found)

    def prefetch(self, ticket: Ticket) -> None:
        """Begin to read the tensor of ``ticket``, because backward reads it soon."""
        with self._lock:
            self._drain_releases()
            self._have_read([slab] if (slab := self._ahead.one(ticket, {ticket})) is not None else [])

    def drop(self, ticket: Ticket) -> None:
        """Release the tensor of ``ticket``; destructors call this. See [Note: destructors].

        Its memory is freed at once. The next thread that takes the lock frees its place in the file.
        """
        if not ticket.dropped:
            ticket.dropped = True
            if ticket.outgoing is not None:  # tested here, because `let_go` may be gone already when Python ends
                let_go(ticket.outgoing)
            ticket.tensor = ticket.ahead = ticket.outgoing = None
            self.release(ticket)

    def wait(self) -> None:
        """Wait until all tensors are written; StoreError if one could not be."""
        with self._lock:
            self._drain_releases()
            while self._flying and not self._closed:
                self._wait()
            self._say_failure()

    def release_idle(self) -> None:
        """End idle threads, and free idle memory and unused space in the files."""
        self.end_idle()
        self.transfer.buffers.clear()
        for file in self.files:
            file.shrink(keep_peak=False)

    @property
    def in_flight(self) -> int:
        """Bytes of tensors that were put and are not written yet."""
        with self._lock:
            self._drain_releases()
            return self._flying

    def _read_for(self, ticket: Ticket) -> torch.Tensor | Incoming | None:
        """Read the slab of ``ticket`` in this thread, or wait a while for the thread that reads it.

        Returns the tensor if it is in memory after that.
        """
        me = threading.get_ident()
        tensors: list[tuple[Ticket, torch.Tensor | Incoming]] = []
        try:
            with self._lock:
                slab = self._claim(ticket, me)
                if slab is None:
                    self._wait()
            if slab is not None:
                tensors = self.transfer.read(slab)
        finally:
            with self._lock:
                slab = self._claims.get(me)
                if slab is not None:
                    self._was_read(slab, tensors)
                    self._claims.pop(me, None)  # last: after an interrupt before this line, all of it is done again
        with self._lock:
            return self._in_memory(ticket)

    # -- under the lock

    def _say_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None and not failed[0].dropped:
            self._said += 1
            try:
                raise failed[1]
            finally:
                del failed  # the traceback of the error holds this frame, so the frame must not hold the error

    def _lost(self, job: Slab | list[Ticket]) -> None:
        if isinstance(job, Slab):
            self._was_read(job, [])
        else:
            self._was_written(job, StoreError("a thread that moved a saved tensor has died"))

    def _in_memory(self, ticket: Ticket) -> torch.Tensor | Incoming | None:
        """The tensor of ``ticket`` if it is in memory, for a caller that uses it now; None otherwise."""
        if ticket.ahead is not None:
            ahead = ticket.ahead
            self._ahead.remove(ticket)
            return ahead
        if ticket.tensor is not None:
            self.stats.from_memory += ticket.nbytes
        return ticket.tensor

    def _claim(self, ticket: Ticket, reader: int) -> Slab | None:
        """The slab of ``ticket`` for the thread ``reader`` to read, or None when another thread reads it."""
        slab = ticket.slab
        if slab is None or ticket.ahead is not None:
            return None
        if slab in self._reads:
            self._reads.remove(slab)
        elif self._is_read(slab):
            return None
        self._claims[reader] = slab
        for member in slab.members:
            member.reading = not member.dropped
        return slab

    def _drain_releases(self) -> None:
        interrupted = self._claims.get(threading.get_ident())
        if interrupted is not None:
            self._was_read(interrupted, [])  # an interrupt stopped this thread: it does not read the slab any more
            self._claims.pop(threading.get_ident(), None)
        super()._drain_releases()
        self.transfer.poll()
        if not self._writes and not any(self._jobs.values()):
            self._flying = 0  # an interrupt may have left another value; see [Note: interrupts]

    def _apply_release(self, release: Ticket) -> None:
        release.order.drop(release)
        self._ahead.remove(release)
        if release.state == QUEUED:
            release.state = GONE  # it stays in the queue, where the threads skip it
            self._flying -= release.nbytes
            self.stats.never_written += release.nbytes
            self._done.notify_all()
        self._let_go(release)

    def _is_read(self, slab: Slab) -> bool:
        """Whether a thread reads ``slab``, or will. ``ticket.reading`` may be wrong after an interrupt."""
        return slab in self._reads or slab in self._jobs.values() or slab in self._claims.values()

    def _let_go(self, ticket: Ticket, read: Slab | None = None) -> None:
        """Release the place of a dropped ticket in its file, unless its slab is being read.

        Args:
            ticket: the ticket; if it is not dropped, nothing happens.
            read: the slab whose read has just ended, if that is why this is called.
        """
        slab = ticket.slab
        if slab is not None and read is None and slab in self._reads and all(m.dropped for m in slab.members):
            # Nobody wants the slab any more, and no thread has begun to read it.
            for member in slab.members:
                self._let_go(member, slab)
            self._reads.remove(slab)
        elif ticket.dropped and slab is not None and (slab is read or not self._is_read(slab)):
            slab.live.discard(ticket)
            if not slab.live and not slab.freed:
                release, extent = slab.file.release, slab.extent
                slab.freed = True
                release(extent)  # a C function: see [Note: interrupts]
            elif slab.live:  # other tensors lie in the slab: only the pages of this one are unused
                slab.file.release(Waste(slab.extent, ticket.offset, padded(ticket.nbytes)))
            ticket.slab = None

    def _have_read(self, slabs: Sequence[Slab]) -> None:
        self._reads.extend(slabs)
        with contextlib.suppress(StoreError):  # if no thread can be started, `get` reads the slabs itself
            for _ in slabs:
                self._call_for_work()

    def _next(self) -> Slab | list[Ticket] | None:
        if self._pause() == 0:
            slab = min(self._reads, key=lambda slab: slab.start)
            self._reads.remove(slab)
            return slab
        found = taken_together(self._writes, _SMALL, _JOINED)
        self._uncalled = 0
        return found or None

    def _pause(self) -> float | None:
        start = min((slab.start for slab in self._reads), default=None)
        return None if start is None else max(0.0, start - time.perf_counter())

    def _was_written(self, tickets: list[Ticket], error: BaseException | None) -> None:
        self._is_over(tickets)
        for ticket in tickets:
            self._flying -= ticket.nbytes
            ticket.state = WRITTEN if error is None else FAILED
            if error is None and ticket.slab is not None:
                ticket.tensor = ticket.outgoing = None
            elif error is not None and not ticket.dropped and ticket.said == self._said:
                self._failed = self._failed or (ticket, error)
            self._let_go(ticket)
        self._done.notify_all()

    def _was_read(self, slab: Slab, tensors: Sequence[tuple[Ticket, torch.Tensor | Incoming]]) -> None:
        """Give each ticket of ``slab`` the tensor that was read for it.

        A ticket without a tensor could not be read. Its ``get`` reads it again, and raises the error.
        """
        self._is_over(slab)  # first: a ticket that is dropped from now on is released at once
        for ticket in slab.members:
            ticket.reading = False
        for ticket, tensor in tensors:
            if not ticket.dropped and ticket.tensor is None:
                ticket.ahead = tensor
                self._ahead.add(ticket)
        for ticket in slab.members:
            if ticket.ahead is None:
                self._ahead.remove(ticket)
            self._let_go(ticket, slab)
        self._done.notify_all()

    # -- in the threads

    def _do(self, job: Slab | list[Ticket]) -> None:
        tickets = job.members if isinstance(job, Slab) else job
        if (device := next((ticket.device for ticket in tuple(tickets) if ticket.at is not None), None)) is not None:
            work_for(device)
        if isinstance(job, Slab):
            tensors: list[tuple[Ticket, torch.Tensor | Incoming]] = []
            with contextlib.suppress(BaseException):  # `get` reads the slab again, and raises the error
                tensors = self.transfer.read(job)
            with self._lock:
                self._was_read(job, tensors)
            return
        file = next(self._turns)
        try:
            self.transfer.write(job, file)
        except BaseException as error:
            with self._lock:
                self._was_written(job, error)
        else:
            with self._lock:
                self._was_written(job, None)
        self.transfer.look_after(file)


_Directory = str | os.PathLike[str]

_movers: weakref.WeakValueDictionary[Any, Mover] = weakref.WeakValueDictionary()


def _mover(store: OnDisk) -> Mover:
    """The mover of this process for the directories and options of ``store``; a forked process gets its own."""
    directories = [directory.replace("{local_rank}", local_rank()) for directory in store.directories]
    process, asked = os.getpid(), (store.direct, store.in_flight, store.checksum, store.gpu_direct)
    key = (*map(os.path.realpath, directories), process, *asked)
    with opening:
        found = _movers.get(key)
        if found is None:
            files = [file_in(directory, store.direct) for directory in directories]
            way = GpuDirectWay(files, store.checksum, store.gpu_direct)
            budget = parse_bytes(store.in_flight, "in_flight")
            found = _movers[key] = Mover(files, budget, Transfer(store.checksum, way))
        return found


class _Stored(NamedTuple):
    """A ticket with its mover and budget. Its destructor drops it: after Ctrl-C its owner may never have got it.

    If ``is_copy``, the ticket has a contiguous copy of the tensor that was put. Each reader then gets a copy of its
    own, because it may write into what it gets.
    """

    mover: Mover
    ticket: Ticket
    budget: ByteBudget
    is_copy: bool = False

    def drop(self) -> None:
        """Drop the ticket, unless it is dropped already."""
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


class OpenOnDisk(Store):
    """An :class:`OnDisk` at work: the mover of its directories, and the bytes under its limit.

    Args:
        mover: moves the tensors; specs of the same directories and options share it.
        budget: the bytes of all tensors.
        directories: for errors and reports.
    """

    def __init__(self, mover: Mover, budget: ByteBudget, directories: tuple[str, ...]) -> None:
        self.mover, self.budget = mover, budget
        self._allowed: dict[torch.device | None, int] = {}  # most bytes on devices, by the device that said so
        self._path = directories[0] if len(directories) == 1 else str(directories)
        self._name = f"OnDisk({directories[0] if len(directories) == 1 else directories!r})"
        for file in mover.files:
            file.budgets.add(budget)
            file.parts = len(mover.files)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor``. A large one gets whole pages, which are written without another copy and used again."""
        if not tensor.is_cpu or tensor.nbytes <= _MOST_UNPAGED:
            return super().own(tensor)
        try:
            return self.mover.transfer.copied(tensor)
        except OSError as error:
            what = f"{self._name}: the system has no {format_bytes(tensor.nbytes)} of host memory left"
            raise StoreError(what, path=self._path, wanted=tensor.nbytes) from error

    def put(self, tensor: torch.Tensor) -> _Stored:
        """Queue ``tensor`` to be written; wait if too many bytes are in flight."""
        content = tensor.detach()
        if not (content.is_cpu or on_accelerator(content)):
            content = content.cpu()  # a device without streams: nothing is ordered there
        return self._put(content.contiguous(), tensor.device, None, is_copy=not content.is_contiguous())

    def put_from_host(self, tensor: torch.Tensor, stream: torch.Stream) -> _Stored:
        """Queue ``tensor``, which is in host memory and belongs on the device of ``stream``, to be written."""
        return self._put(tensor.detach().cpu().contiguous(), stream.device, stream)

    def _put(
        self, content: torch.Tensor, device: torch.device, home: torch.Stream | None, is_copy: bool = False
    ) -> _Stored:
        mover = self.mover
        stored = _Stored(mover, mover.ticket(content, device), self.budget, is_copy)
        stored.ticket.at = home
        try:
            self.budget.reserve(content.nbytes, stored.ticket)
            mover.put(stored.ticket)
        except BaseException as error:
            stored.drop()
            if isinstance(error, OSError):
                what = f"{self._name}: the system has no {format_bytes(content.nbytes)} of host memory left"
                raise StoreError(what, path=self._path, wanted=content.nbytes) from error
            raise
        return stored

    def get(self, ticket: _Stored) -> torch.Tensor:
        """The tensor, on the device that it was saved on: the one that was put if it is in memory, else read."""
        found = ticket.mover.get(ticket.ticket)
        return found.clone() if ticket.is_copy else found

    def peek(self, ticket: _Stored) -> torch.Tensor | None:
        """The tensor while it is not written; None after that."""
        held = ticket.ticket.tensor
        if held is None:
            return None
        found = ticket.mover.transfer.give(ticket.ticket, held)
        return found.clone() if ticket.is_copy else found

    def pop_transfer_seconds(self, ticket: _Stored) -> float:
        """Seconds for which the tensor was written and read, since the last call."""
        seconds, ticket.ticket.seconds = ticket.ticket.seconds, 0.0
        return seconds

    def prefetch(self, ticket: _Stored) -> None:
        """Begin to read the tensor, because backward reads it soon."""
        ticket.mover.prefetch(ticket.ticket)

    def device_bytes(self, device: torch.device | None = None) -> int:
        """Bytes on all devices, whichever is asked for: of tensors that are copied from there or were read early."""
        return self.mover.transfer.device_bytes

    def set_device_limit(self, nbytes: int, device: torch.device | None = None) -> None:
        """Hold at most ``nbytes`` on all devices from now on, or less if another device has a smaller limit."""
        self._allowed[device] = nbytes
        self.mover.transfer.set_device_limit(min(list(self._allowed.values())))

    def drop(self, ticket: _Stored) -> None:
        """Let other tensors use its place in the file."""
        ticket.drop()

    def wait(self) -> None:
        """Wait until all tensors are written; StoreError if one could not be."""
        self.mover.wait()

    def report(self) -> tuple[StoreReport, ...]:
        """One entry: the bytes and the speed of all tensors that go to these directories in this process."""
        return (_report(self._name, self.mover, self.budget),)

    def release_idle(self) -> None:
        """End idle threads, and free idle memory and unused space in the file."""
        self.mover.release_idle()


@register("store")
@dataclass(frozen=True)
class OnDisk(StoreSpec["OpenOnDisk"]):
    """Keep saved tensors in one anonymous file of this process in ``directory``.

    Threads write the tensors during forward. They read them back before backward needs them, in the order in which
    the last backward read them. A tensor that is read or dropped before it was written is never written. The copy
    that was made of a tensor when it was saved is held in memory until it is written.

    The file has no name, so the system frees it however the process ends, also after SIGKILL. Otherwise it is closed
    when the last store and the last saved tensor that use it are gone.

    Args:
        directory: a directory that exists and can be written, best on a local disk. ``"{local_rank}"`` in it stands
            for the number of the process on its node (``LOCAL_RANK``, or 0), so that each process can have a disk of
            its own. With a list of directories, tensors go to each in turn.
        limit: most bytes in this process at any time, those in flight included: an int, text such as ``"1 TiB"``, or
            ``"4 TiB per node"``, of which each process of the node (``LOCAL_WORLD_SIZE``) gets an equal part; None
            for no limit. Each tensor counts as whole pages of 4 KiB. The limit is compared with the space that the
            file takes on the disk. If the file system can make holes (ext4, XFS, Btrfs, tmpfs), it gets the pages of
            dropped tensors back when the limit would be passed. A tensor that is dropped while a thread writes it
            counts no more, and its place in the file is free when that write ends.
        direct: whether to write past the page cache of the system, which otherwise grows by all bytes that are
            written: True, False, or ``"auto"`` to do it if the file system can. ``report()`` says why if it does not.
        checksum: whether to keep a CRC-32 of each tensor in memory and to compare it when the tensor is read. This
            takes a thread a quarter of a second for each GB, each way.
        in_flight: most bytes that wait to be written, and most bytes that are read before backward needs them; an int
            or text.
        gpu_direct: whether an NVIDIA GPU writes and reads large tensors without host memory (GPUDirect Storage,
            through kvikio): True, False, or ``"auto"`` to do it if it works. ``report()`` says why if it does not.
            A tensor that is written this way stays on the GPU until it is written, up to ``in_flight`` bytes.

    Raises:
        UsageError: if an argument has a wrong type or value.
        StoreError: when the store is made, if no file can be made in ``directory``, or if ``direct=True`` or
            ``gpu_direct=True`` does not work there. In forward, if the limit is reached. Once, when the next tensor
            is saved or read, if a tensor could not be written: that tensor is still in memory, so backward can run
            all the same. In backward, if a tensor cannot be read. The error has ``path``, ``wanted`` and ``free``.

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
    directory: _Directory | Sequence[_Directory]
    limit: int | str | None = None
    direct: bool | Literal["auto"] = field(default="auto", kw_only=True)
    checksum: bool = field(default=False, kw_only=True)
    in_flight: int | str = field(default="64 MiB", kw_only=True)
    gpu_direct: bool | Literal["auto"] = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.direct, bool) and self.direct != "auto":  # the type is tested because 1 == True
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
        self.open()  # now, so that a directory that cannot be used is an error here

    @property
    def directories(self) -> tuple[str, ...]:
        """The directories, as the user wrote them."""
        return (self.directory,) if isinstance(self.directory, str) else cast("tuple[str, ...]", self.directory)

    @property
    def budget(self) -> ByteBudget:
        """The bytes in use in this process, and their limit."""
        return self.open().budget

    def _open(self) -> OpenOnDisk:
        return OpenOnDisk(_mover(self), ByteBudget(self.limit, f"OnDisk({self.directory!r})", PAGE), self.directories)
