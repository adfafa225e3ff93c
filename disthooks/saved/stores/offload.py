"""The runtime behind ``OnDisk``: one owner thread moves the groups of all tapes to scratch files and back."""

# [Note: the owner]
# One thread, the owner, decides what is written and what is read ahead, and frees what is dropped. Any thread, and any
# destructor, appends a message to one deque, where the messages keep their order; nobody wakes the owner for a
# destructor. So no lock guards this state, and Ctrl-C, which reaches only the main thread, cannot stop the owner in the
# middle of a change. Threads of the crew make the system calls. A computing thread reads by itself what backward wants
# and nobody reads yet. The lock of a group lets one thread at a time read it.
#
# The owner and the crew end after a second without work. Any thread may be killed, or fail to start: a thread that
# waits looks every tenth of a second whether the owner is alive. A new owner goes on with the same messages; each of
# them does nothing when it is handled a second time. If a message fails two times, its group stays in memory, and the
# next ``put`` or ``get`` raises the error. In a forked child there is no owner: ``open()`` of the store
# makes a new runtime there, and entries of the parent's runtime can be read if they are in memory.

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from disthooks._fork_safe import Order, shared_lock, tensor_lock
from disthooks._streams import work_for
from disthooks.errors import StoreError
from disthooks.saved.stores.crew import Crew, no_thread
from disthooks.saved.stores.device_copy import Outgoing
from disthooks.saved.stores.group_files import GroupFiles, Written
from disthooks.saved.stores.order import AccessOrder, PerThread
from disthooks.saved.stores.pools import PAGE, pool_of
from disthooks.saved.stores.read_ahead import ReadAhead
from disthooks.saved.stores.scratch_file import CHUNK, ScratchFile
from disthooks.saved.stores.staging import Incoming, pinned
from disthooks.saved.stores.tape import FAILED, GONE, JOINED, OPEN, QUEUED, WRITING, WRITTEN, Entry, Group, Tape, cloned

_LOOK = 0.1  # seconds after which a waiter checks whether the threads are alive
_IDLE = 1.0  # seconds after which threads without work end
_MANY = 64  # messages: with more of them the owner is woken, so that they do not gather
_MUCH = 0.1  # if more than this part of a backward waits for reads, the memory for reads is kept (decision 44)
_STAGING = 2 * CHUNK  # bytes of idle memory that are kept for copies, besides the bytes in flight


class Offload:
    """Writes the groups of tapes to files, and reads them back before backward needs them. See [Note: the owner].

    Args:
        files: the files, which are written in turn.
        limit: most bytes that wait to be written, and most bytes that are read before backward needs them. One tensor
            may be larger.
        checksum: whether to keep a CRC-32 of each tensor and to compare it when the tensor is read.

    Attributes:
        io: moves the bytes.
        stats: bytes that were moved.
        tapes: those of all threads.
    """

    def __init__(self, files: Sequence[ScratchFile], limit: int, checksum: bool) -> None:
        self.limit, self.process = limit, os.getpid()
        self.io = GroupFiles(files, checksum)
        self.files, self.buffers, self.stats, self.staging = files, self.io.buffers, self.io.stats, self.io.staging
        joined = max(PAGE, min(JOINED, limit // 8) // PAGE * PAGE)
        # Nothing here refers to this runtime strongly, so that the files are closed with the last ticket.
        self.tapes: list[Tape] = []
        self._own_tapes: dict[torch.device | None, PerThread[Tape]] = {}
        self._make_tape = functools.partial(_new_tape, weakref.ref(self), joined)
        # What other threads tell the owner: a method and its arguments, or an entry that was dropped. Their order
        # matters: a tape is over when all of it is dropped, and the owner learns from what was read before that.
        self._inbox: collections.deque[tuple[Any, ...] | Entry] = collections.deque()
        self.drop: Callable[[Entry], None] = self._inbox.append  # for destructors
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._answers: collections.deque[queue.SimpleQueue[None]] = collections.deque()  # of threads that wait
        self._planned_for: collections.deque[queue.SimpleQueue[None]] = collections.deque()  # that wait for a plan
        # Under the lock.
        self._lock = shared_lock(Order.IN_FLIGHT)
        self._owner: threading.Thread | None = None
        self._at_work = tensor_lock(Order.OWNER, again=False)  # the owner holds it as long as it works
        self._flights: dict[Group, int] = {}  # bytes of the groups that are not written yet
        # An error that was not raised yet (decision 36), and the group that could not be written; None if the owner
        # itself failed.
        self._failed: tuple[Group | None, BaseException] | None = None
        self._said = 0  # how many failed writes were raised; those that were in flight then fail for the same reason
        self._closed = False
        # The owner's.
        self._writes: collections.deque[Group] = collections.deque()
        self._ahead = ReadAhead(limit, self.stats)
        self._empty: dict[Group, None] = {}  # all entries are dropped while a thread reads
        self._asked: dict[int, tuple[Group, float]] = {}  # by tape: the group that backward read last, and when
        self._crew = Crew(self._bell)
        self._is_ending = False
        _runtimes.add(self)

    # -- for the threads of the computation

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` in the CPU memory from which it will be written; OSError if there is none."""
        return self._tape(None).own(tensor)

    def put(self, entry: Entry) -> None:
        """Add ``entry`` to the tape of this thread and of its device. Waits at the limit in flight.

        Its tensor is contiguous, in CPU memory or on its device.

        Raises:
            StoreError: if an earlier tensor could not be written: it stays in memory, and the error is raised once.
            OSError: if the system has no more memory.
        """
        if self._failed is not None:
            self._raise_failure()
        if entry.nbytes:
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        self.buffers.keep = _STAGING + self.limit
        if entry.at is not None:
            self.staging.make_room(entry.nbytes, self.limit)
        group = self._tape(None if entry.at is None else entry.at.device).add(entry)
        if group not in self._flights:
            try:
                self._reserve(group)
                if group.is_sealed:
                    self.hand_over(group)
            except BaseException:
                self._flights.pop(group, None)
                raise

    def _tape(self, device: torch.device | None) -> Tape:
        """The tape of this thread for ``device``."""
        own = self._own_tapes.get(device)
        if own is None:
            made = PerThread(functools.partial(self._make_tape, device))
            own = self._own_tapes.setdefault(device, made)  # another thread may have added one meanwhile
        return own()

    def hand_over(self, group: Group) -> None:
        """Give the owner a group that is full; StoreError if it cannot be started."""
        self._tell(Offload._queue, group)

    def get(self, entry: Entry) -> torch.Tensor:
        """The tensor of ``entry`` on its device: the one that was put if it is still there, or a copy.

        Raises:
            StoreError: if the tensor cannot be read, or has another checksum than when it was written. Also, once, if
                any tensor could not be written: that tensor stays in memory.
        """
        if self._failed is not None and not entry.dropped:
            self._raise_failure()
        held, group = self.peek(entry), entry.group
        if held is not None:
            self.stats.from_memory += entry.nbytes
            if group is not None:
                self._note_read(group)
            return held
        if group is None or entry.dropped:
            raise StoreError("a stored tensor was read after it was dropped")
        is_coming = group.is_reading or entry in group.ahead
        self.stats.ahead += entry.nbytes if is_coming else 0
        self._note_read(group)
        order = group.tape.order
        # A read into memory that was used before is faster. Such memory is kept only if backward waits for reads.
        self.buffers.trim(2 * self.limit if order.waiting > _MUCH else 0)
        tensor = group.ahead.pop(entry, None)  # one reader alone gets it
        if tensor is None:
            begin = time.perf_counter()
            group.file.check_process()
            if not is_coming:
                self._wait_for_plan()
            while tensor is None:
                tensor = self._bring(entry, group)
            self._inbox.append((Offload._has_waited, order, time.perf_counter() - begin))
        return self._on_device(entry, tensor, None)

    def peek(self, entry: Entry) -> torch.Tensor | None:
        """The tensor of ``entry`` on its device while it is in memory; None after that."""
        outgoing, tensor = entry.outgoing, entry.tensor  # in this order: the copy is forgotten when it is done
        if tensor is None:
            return None
        found = self._on_device(entry, tensor, outgoing)
        return cloned(found) if entry.is_copy else found

    def _on_device(self, entry: Entry, found: torch.Tensor | Incoming, outgoing: Outgoing | None) -> torch.Tensor:
        if entry.at is None:
            return cast(torch.Tensor, found).to(entry.device)
        return self.staging.take(found, outgoing, entry.at)

    def _bring(self, entry: Entry, group: Group) -> torch.Tensor | Incoming | None:
        """Read ``group`` in this thread, unless another thread has just read it. None if another reader was faster."""
        if entry.dropped:
            raise StoreError("a stored tensor was read after it was dropped")
        with group.lock:
            if entry not in group.ahead:
                self._read(group)
                self._inbox.append((Offload._is_ahead, group))
            return group.ahead.pop(entry, None)

    def prefetch(self, entry: Entry) -> None:
        """Begin to read ``entry``, because backward reads it soon."""
        if entry.tensor is None and not entry.is_ahead and not entry.dropped:
            with contextlib.suppress(StoreError):  # if no thread can be started, `get` reads it
                self._tell(Offload._plan_read, entry.group)

    def wait(self) -> None:
        """Wait until all tensors are written; StoreError if one could not be."""
        while True:
            self._flush()
            self._raise_failure()
            if not self._flights or not self._has_owner:
                return
            self._wait()

    @property
    def in_flight(self) -> int:
        """Bytes of tensors that were put and are not written yet."""
        return sum(
            entry.nbytes
            for group in list(self._flights)
            for entry in list(group.members if group.state == WRITING else group.entries)
            if group.state == WRITING or not entry.dropped
        )

    @property
    def never_written(self) -> int:
        """Bytes of tensors that were dropped before they were written."""
        waiting = [group for group in list(self._flights) if group.state in (OPEN, QUEUED)]
        dropped = sum(entry.nbytes for group in waiting for entry in list(group.entries) if entry.dropped)
        return self.stats.never_written + dropped

    def release_idle(self) -> None:
        """End idle threads, and free idle memory and unused space in the files."""
        with contextlib.suppress(StoreError):
            self._ring()  # the owner frees what was dropped
        self._end_threads()
        self.buffers.clear()
        self.staging.poll()
        for device in list(self._own_tapes):
            if device is not None:
                pool_of(device, True).clear()
        for file in self.files:
            file.shrink(keep_peak=False)

    def close(self) -> None:
        """End the threads when the process ends."""
        self._closed = True
        self._end_threads()

    def _end_threads(self) -> None:
        owner = self._owner
        if owner is None:
            return
        threads = [owner, *self._crew.threads]
        self._is_ending = True
        self._bell.put(None)
        for thread in threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(_IDLE)

    def _raise_failure(self) -> None:
        with self._lock:
            failed, self._failed = self._failed, None
            if failed is None or (failed[0] is not None and all(entry.dropped for entry in failed[0].entries)):
                return
            self._said += 1
        try:
            raise failed[1]
        finally:
            del failed  # the traceback of the error holds this frame, so the frame must not hold the error

    def _reserve(self, group: Group) -> None:
        """Count the bytes of ``group`` as in flight; wait while there would be too many."""
        while True:
            with self._lock:
                flying = sum(self._flights.values())
                if not flying or flying + group.size <= self.limit or not self._has_owner:
                    self._flights[group] = group.size
                    return
            self._flush()
            self._wait()
            if self._failed is not None:
                self._raise_failure()

    def _flush(self) -> None:
        for tape in list(self.tapes):
            tape.flush()

    def _note_read(self, group: Group) -> None:
        tape = group.tape
        if tape.last_read is group:
            return
        tape.last_read, group.is_read = group, True
        self._inbox.append((Offload._was_asked, group, time.perf_counter()))
        if group.state == WRITTEN or len(self._inbox) > _MANY:
            with contextlib.suppress(StoreError):  # if no thread can be started, `get` reads the group
                self._ring()

    def _wait_for_plan(self) -> None:
        """Let the owner begin the reads that follow before this thread reads by itself."""
        answer: queue.SimpleQueue[None] = queue.SimpleQueue()
        with contextlib.suppress(StoreError, queue.Empty):  # without the owner nothing is read ahead
            self._planned_for.append(answer)
            self._ring()
            if self._owner is not None:
                answer.get(timeout=_LOOK)

    # -- between the threads

    @property
    def _has_owner(self) -> bool:
        """Whether there is an owner, or can be one: not when the process ends, and not in a forked child."""
        return not self._closed and self.process == os.getpid()

    def _tell(self, *message: Any) -> None:
        self._inbox.append(message)
        self._ring()

    def _ring(self) -> None:
        """Wake the owner, or start it.

        Raises:
            StoreError: if the system starts no thread.
        """
        with self._lock:
            # After Ctrl-C, `is_alive` of a thread that lives may be False from then on (Python 3.11). Its lock tells. A
            # second owner waits until the first one ends.
            if self._owner is None or not (self._at_work.locked() or self._owner.is_alive()):
                if not self._has_owner:
                    return
                self._owner = threading.Thread(target=self._run, name="disthooks owner", daemon=True)
                try:
                    self._owner.start()
                except RuntimeError as error:
                    self._owner = None
                    raise no_thread(error) from error
        self._bell.put(None)

    def _wait(self) -> None:
        """Wait until something is written, for a tenth of a second at most."""
        answer: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._answers.append(answer)
        self._ring()
        with contextlib.suppress(queue.Empty):
            answer.get(timeout=_LOOK)

    # -- in the owner

    def _run(self) -> None:
        with self._at_work:
            self._serve()

    def _serve(self) -> None:
        idle_since, is_new = time.monotonic(), True
        while True:
            try:
                if is_new:
                    self._recover()
                is_new = False
                self._settle()
                is_busy = len(self._crew) > 0
                if is_busy or self._inbox or self._ahead.planned:
                    idle_since = time.monotonic()
                is_over = self._is_ending or time.monotonic() - idle_since >= _IDLE
                if not is_busy and is_over and self._has_ended():
                    return
                with contextlib.suppress(queue.Empty):
                    self._bell.get(timeout=min(self._ahead.pause(), _LOOK if is_busy else _IDLE))
                    while True:
                        self._bell.get_nowait()
            except Exception as error:
                self._fail(None, error)
                time.sleep(_LOOK)

    def _has_ended(self) -> bool:
        with self._lock:
            if self._inbox or (self._writes and not self._closed):
                self._is_ending = False
                return False
            self._crew.end()
            self._is_ending = False
            if self._owner is threading.current_thread():
                self._owner = None
            return True

    def _settle(self) -> None:
        """Handle all messages, free what was dropped, and plan the next reads."""
        # First: a thread sends its message before it takes a tensor, so a group that is removed here is known as read
        # before the next plan, and is not read again.
        self._ahead.forget_taken()
        while self._inbox:
            self._handle(self._inbox[0])
            self._inbox.popleft()  # last: if this thread is killed, the next owner handles the message once more
        self._bury()
        for group in list(self._empty):
            if not group.is_reading:
                self._free(group)
        while self._asked:
            group, now = self._asked.popitem()[1]
            if not group.dropped:
                self._ahead.plan_after(group, now)
        self._dispatch()
        while self._planned_for:
            self._planned_for.popleft().put(None)

    def _handle(self, message: tuple[Any, ...] | Entry) -> None:
        for is_last in (False, True):
            try:
                if isinstance(message, Entry):
                    self._was_dropped(message)
                else:
                    message[0](self, *message[1:])
                return
            except Exception as error:
                if is_last:  # the memory that was missing may have been free the second time
                    self._fail(message.group if isinstance(message, Entry) else message[1], error)

    def _fail(self, group: object, error: Exception) -> None:
        """Handle an ``error`` of this thread. If ``group`` is in flight, it stays in memory."""
        failure = StoreError(f"the thread that moves saved tensors has failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._lock:
            self._failed = self._failed or (None, failure)
        if isinstance(group, Group) and group in self._flights:
            group.state = FAILED
            self._has_landed(group)

    def _bury(self) -> None:
        """Forget the threads of the crew that were killed."""
        dead = self._crew.bury()
        for job in dead:
            if job is not None and job.state == WRITING:
                self._was_written(job, None, StoreError("a thread that moved a saved tensor has died"))
        if dead:  # maybe no thread is left for the groups that wait
            self._ahead.planned.update({group: None for group in self._crew.take_back() if group.is_planned})
            self._recover()

    def _recover(self) -> None:
        """Find the groups that were to be written when a thread was killed. A group may be written twice."""
        for group in list(self._flights):
            if group.state in (WRITTEN, FAILED, GONE):
                self._has_landed(group)
            if group.state == WRITING and not self._crew.has(group):
                group.state = QUEUED
            if group.state == QUEUED and group not in self._writes:
                self._writes.append(group)

    def _dispatch(self) -> None:
        """Give the crew what is due: reads first."""
        while (due := self._ahead.next()) is not None:
            self._crew.give(due, self._move)
            self._ahead.planned.pop(due, None)  # last, as in `_settle`
        # A group that nobody writes yet may still be dropped, so that it is never written.
        while self._writes and not self._closed and not self._crew.is_full:
            group = self._writes[0]
            if group.state == QUEUED and (members := group.stays()):
                self.stats.never_written += sum(entry.nbytes for entry in group.entries) - group.nbytes
                group.members = sorted(members, key=lambda entry: entry.offset)
                group.state = WRITING
                self._crew.give(group, self._move)
            elif group.state == QUEUED:
                self._forget(group)
            self._writes.popleft()

    def _queue(self, group: Group) -> None:
        """A group is full. A thread or a new owner may say so twice."""
        if group.state == OPEN:
            group.said = self._said
            if not group.stays():  # it is no part of the next tape, whose signature would change
                self._forget(group)
                return
            group.tape.order.put(group)
            self._writes.append(group)
            group.state = QUEUED
        elif group.state not in (QUEUED, WRITING):
            self._has_landed(group)

    def _forget(self, group: Group) -> None:
        """All entries of ``group`` were dropped before it was written."""
        self.stats.never_written += sum(entry.nbytes for entry in group.entries)
        self._is_gone(group)
        self._has_landed(group)

    def _is_gone(self, group: Group) -> None:
        group.state, group.dropped = GONE, True
        self._ahead.groups.pop(group, None)
        group.tape.order.drop(group)
        group.entries, group.members = [], []  # an entry refers to its group, and the group to the file

    def _has_landed(self, group: Group) -> None:
        """``group`` is not in flight any more."""
        group.lease = None
        self._flights.pop(group, None)
        while self._answers:
            self._answers.popleft().put(None)

    def _was_written(self, group: Group, written: Written | None, error: BaseException | None) -> None:
        if group.state != WRITING:
            if written is not None and written.extent is not group.extent:
                self.io.release(written)  # it was written twice, after a thread was killed
            return
        members = group.members
        if written is not None:
            group.file, group.extent, group.base = written
            group.state = WRITTEN
            for entry in members:
                entry.tensor = None
        else:
            group.state = FAILED
            with self._lock:
                if error is not None and group.said == self._said and self._failed is None:
                    self._failed = group, error
        self._has_landed(group)
        for entry in members:
            if entry.dropped:
                self._was_dropped(entry)

    def _was_dropped(self, entry: Entry) -> None:
        group = entry.group
        if group is None or group.state in (OPEN, WRITING) or entry not in group.live:
            return  # the dropped entries of an open group, and of one that is being written, are looked for later
        group.live.discard(entry)
        group.nbytes -= entry.nbytes
        if group.live:
            self.io.release_entry(group, entry)
        elif group.state == QUEUED:
            self._forget(group)
        else:
            self._ahead.planned.pop(group, None)
            group.is_planned = False
            self._free(group)

    def _free(self, group: Group) -> None:
        """All entries of ``group`` are dropped. If a thread reads it, its place in the file is free after that."""
        if group.is_reading:
            self._empty[group] = None
            return
        if group.extent is not None:
            self.io.release(Written(group.file, group.extent, group.base))
        self._empty.pop(group, None)
        self._is_gone(group)

    # -- reading ahead, in the owner

    def _has_waited(self, order: AccessOrder, seconds: float) -> None:
        order.waited(seconds)

    def _plan_read(self, group: Group) -> None:
        self._ahead.plan(group, {group})

    def _is_ahead(self, group: Group) -> None:
        if group.state == WRITTEN:
            self._ahead.groups.setdefault(group)

    def _was_asked(self, group: Group, now: float) -> None:
        """Backward reads ``group``, at the time ``now``."""
        if group.state not in (OPEN, GONE):
            group.tape.order.read(group, now)
            self._asked[id(group.tape)] = group, now
            self._ahead.planned.pop(group, None)  # the thread that asks reads it, unless a thread of the crew has begun

    # -- in the crew

    def _move(self, group: Group) -> Callable[[], None] | None:
        if group.device is not None:
            work_for(group.device)
        if group.state == WRITING:
            try:
                written = self.io.write(group)
            except BaseException as error:
                self._inbox.append((Offload._was_written, group, None, error))
                return None
            self._inbox.append((Offload._was_written, group, written, None))
            return functools.partial(self.io.look_after, written.file)
        # `get` reads the group again after an error, and raises it. A computing thread may have read it meanwhile.
        with contextlib.suppress(BaseException), group.lock:
            if group.is_planned:
                self._read(group)
        return None

    def _read(self, group: Group) -> None:
        with group.lock:
            try:
                group.is_reading, group.is_planned = True, False
                self.io.read(group)
            finally:
                group.is_reading = False


def _new_tape(runtime: weakref.ref[Offload], joined: int, device: torch.device | None) -> Tape:
    found = runtime()
    assert found is not None
    memory = found.buffers.lease if device is None else functools.partial(pinned, device=device)
    tape = Tape(device, memory, found.staging, joined, functools.partial(_hand_over, runtime))
    found.tapes.append(tape)
    return tape


def _hand_over(runtime: weakref.ref[Offload], group: Group) -> None:
    found = runtime()
    if found is not None:
        found.hand_over(group)


_runtimes: weakref.WeakSet[Offload] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for runtime in list(_runtimes):
        runtime.close()
