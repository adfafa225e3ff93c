"""The runtime behind ``OnDisk``: one worker thread writes the groups of all tapes to scratch files, and reads ahead."""

# [Note: the file worker]
# One lock guards the tapes, the groups and what is planned; no thread holds it during a system call. One worker thread
# writes full groups, and reads what backward will want next. A computing thread reads by itself what backward wants and
# nobody reads yet; the lock of a group lets one thread at a time read it. Destructors append to a queue that is applied
# by the next thread that takes the lock.
#
# The worker ends after a second without work, and starts again when there is some. If it fails, what was not written
# stays in memory, and the next ``put`` or ``get`` raises the error. In a forked child there is no worker: ``open()`` of
# the store makes a new runtime there.

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable

import torch

from disthooks._locks import Shared
from disthooks._streams import work_for
from disthooks.errors import StoreError
from disthooks.saved.stores.copies import Coming, Outgoing
from disthooks.saved.stores.disk_read_ahead import ReadAhead
from disthooks.saved.stores.group_file import GroupFile
from disthooks.saved.stores.host import PAGE, pool_of
from disthooks.saved.stores.order import PerThread
from disthooks.saved.stores.scratch_file import CHUNK, ScratchFile, Waste
from disthooks.saved.stores.tape import (
    FAILED,
    GONE,
    JOINED,
    OPEN,
    QUEUED,
    WRITING,
    WRITTEN,
    Entry,
    Group,
    Tape,
    cloned,
    padded,
)

_IDLE = 1.0  # seconds after which a worker without work ends
_MUCH = 0.1  # if more than this part of a backward waits for reads, the memory for reads is kept (decision 44)
_STAGING = 2 * CHUNK  # bytes of idle memory that are kept for copies, besides the bytes in flight


class FileWorker(Shared[Entry]):
    """Writes groups of tapes to a file, and reads them back before backward needs them. See [Note: the file worker].

    Args:
        file: the file.
        limit: most bytes that wait to be written, and most bytes that are read before backward needs them. One tensor
            may be larger.

    Attributes:
        io: moves the bytes.
        stats: bytes that were moved.
        drop: lets go of an entry; destructors call it.
    """

    def __init__(self, file: ScratchFile, limit: int) -> None:
        super().__init__()
        self.limit, self.process = limit, os.getpid()
        self.io = GroupFile(file)
        self.file, self.buffers, self.stats, self.staging = file, self.io.buffers, self.io.stats, self.io.staging
        self.buffers.keep = _STAGING + limit
        self.drop: Callable[[Entry], None] = self.release
        self._joined = max(PAGE, min(JOINED, limit // 8) // PAGE * PAGE)
        self._tapes: dict[torch.device | None, PerThread[Tape]] = {}
        self._thread: threading.Thread | None = None
        self._work = threading.Condition(self._lock)  # there is something to do, or the worker should end
        self._landed = threading.Condition(self._lock)  # a group is not in flight any more
        self._writes: list[Group] = []  # groups that are full and not written yet, the oldest first
        self._writing: set[Group] = set()
        self._ahead = ReadAhead(limit, self.stats)
        # An error that was not raised yet (decision 36), and the group that could not be written; None if the worker
        # itself failed.
        self._failed: tuple[Group | None, BaseException] | None = None
        self._raised = 0  # how many failed writes were raised; those that were in flight then fail for the same reason
        self._is_ending = self._closed = False
        _workers.add(self)

    # -- for the threads of the computation

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` in the CPU memory from which it will be written; OSError if there is none."""
        tape = self._tape(None)
        if not tensor.nbytes:
            return tensor.clone(memory_format=torch.contiguous_format)
        if tensor.nbytes > tape.small:
            return tape.own_alone(tensor)
        with self._lock:
            return tape.own_joined(tensor)

    def take_over(self, copy: Outgoing, device: torch.device) -> bool:
        """Whether the tensor of ``copy``, which is put next, can be written from the memory it lies in."""
        tape, host = self._tape(device), copy.host
        if host.nbytes > tape.small:
            tape.own = {host.data_ptr(): copy.lease}
        return host.nbytes > tape.small

    def put(self, entry: Entry) -> None:
        """Add ``entry`` to the tape of this thread and of its device. Waits at the limit in flight.

        Its tensor is contiguous, in CPU memory or on its device.

        Raises:
            StoreError: if an earlier tensor could not be written: it stays in memory, and the error is raised once.
            OSError: if the system has no more memory.
        """
        if self._failed is not None:
            self._raise_failure()
        if not entry.nbytes:
            return
        if entry.at is not None:
            self.staging.make_room(entry.nbytes, self.limit)
        tape = self._tape(None if entry.at is None else entry.at.device)
        alone = tape.alone(entry) if entry.nbytes > tape.small else None
        with self._lock:
            if self._releases:
                self._apply_releases()
            if alone is not None:
                self._make_room(alone.size)
                self._queue(alone)
            elif not tape.join_copy(entry):
                if tape.begins_group(entry):
                    self._make_room(self._joined)
                tape.join(entry)
            if tape.sealed:
                self._queue_sealed(tape)

    def get(self, entry: Entry) -> torch.Tensor:
        """The tensor of ``entry`` on its device: the one that was put if it is still there, or a copy.

        Raises:
            StoreError: if the tensor cannot be read. Also, once, if any tensor could not be written: that tensor stays
                in memory.
        """
        if self._failed is not None and not entry.dropped:
            self._raise_failure()
        if self.process != os.getpid():
            self.file.check_process()
        with self._lock:
            if self._releases:
                self._apply_releases()
            outgoing, held, group = entry.outgoing, entry.tensor, entry.group
            if held is None and (group is None or entry.dropped):
                raise StoreError("a stored tensor was read after it was dropped")
            if group is not None:
                self._note_read(group)
                found = group.ahead.pop(entry, None)  # one reader alone gets it
                is_coming = found is not None or group.is_reading
        if held is not None:
            self.stats.from_memory += entry.nbytes
            return self._from_memory(entry, held, outgoing)
        assert group is not None
        self.stats.ahead += entry.nbytes if is_coming else 0
        # A read into memory that was used before is faster. Such memory is kept only if backward waits for reads.
        self.buffers.trim(2 * self.limit if group.tape.order.waiting > _MUCH else 0)
        if found is None:
            begin = time.perf_counter()
            found = self._read_now(entry, group)
            with self._lock:
                group.tape.order.waited(time.perf_counter() - begin)
        return self._on_device(entry, found)

    def peek(self, entry: Entry) -> torch.Tensor | None:
        """The tensor of ``entry`` on its device while it is in memory; None after that."""
        with self._lock:
            outgoing, held = entry.outgoing, entry.tensor
        return None if held is None else self._from_memory(entry, held, outgoing)

    def _from_memory(self, entry: Entry, held: torch.Tensor, outgoing: Outgoing | None) -> torch.Tensor:
        found = held.to(entry.device) if entry.at is None else self.staging.take(held, outgoing, entry.at)
        return cloned(found) if entry.is_copy else found

    def _on_device(self, entry: Entry, found: torch.Tensor | Coming) -> torch.Tensor:
        if isinstance(found, torch.Tensor) and entry.at is None:
            return found.to(entry.device)
        assert entry.at is not None
        return self.staging.take(found, None, entry.at)

    def _read_now(self, entry: Entry, group: Group) -> torch.Tensor | Coming:
        """Read ``group`` in this thread, unless another thread has just read it."""
        with group.lock:
            if entry not in group.ahead:
                self._read(group)
            found = group.ahead.pop(entry, None)
        if found is None:
            raise StoreError("a stored tensor was read after it was dropped")
        return found

    def prefetch(self, entry: Entry) -> None:
        group = entry.group
        with self._lock:
            if group is not None and entry.tensor is None and not entry.is_ahead and not entry.dropped:
                # Backward wants what was read ahead before this one, so nothing makes room for it.
                self._ahead.plan(group, {group, *self._ahead.groups})
                self._wake()

    def wait(self) -> None:
        """Wait until all tensors are written; StoreError if one could not be, or if no thread can be started."""
        with self._lock:
            while True:
                self._apply_releases()
                self._flush()
                self._raise_failure()
                if not self._in_flight() or not self._has_worker:
                    return
                self._wake(is_needed=True)
                self._landed.wait()

    @property
    def in_flight(self) -> int:
        """Bytes of tensors that were put and are not written yet."""
        with self._lock:
            self._apply_releases()
            return sum(
                sum(entry.nbytes for entry in group.members) if group.state == WRITING else group.nbytes
                for group in self._in_flight()
            )

    @property
    def never_written(self) -> int:
        """Bytes of tensors that were dropped before they were written."""
        with self._lock:
            self._apply_releases()
            return self.stats.never_written + sum(group.dead for group in self._in_flight())

    def release_idle(self) -> None:
        """End the worker, and free idle memory and unused space in the file."""
        with self._lock:
            self._apply_releases()
        self._end_thread()
        self.buffers.trim(0)
        self.buffers.keep = _STAGING + self.limit
        self.staging.poll()
        for device in list(self._tapes):
            if device is not None:
                pool_of(device, True).clear()
        self.file.shrink(keep_peak=False)

    def close(self) -> None:
        self._closed = True
        self._end_thread()

    # -- under the lock

    def _tape(self, device: torch.device | None) -> Tape:
        own = self._tapes.get(device)
        if own is None:
            memory = self.buffers.lease if device is None else pool_of(device, True).lease
            made = PerThread(functools.partial(Tape, device, memory, self.staging, self._joined))
            own = self._tapes.setdefault(device, made)  # another thread may have added one meanwhile
        return own()

    def _raise_failure(self) -> None:
        with self._lock:
            failed, self._failed = self._failed, None
            if failed is None or (failed[0] is not None and not failed[0].live):
                return
            self._raised += 1
        try:
            raise failed[1]
        finally:
            del failed  # the traceback of the error holds this frame, so the frame must not hold the error

    def _in_flight(self) -> list[Group]:
        """The groups that are not written yet. They are found where they are, so that Ctrl-C leaves no wrong count."""
        found = [group for tape in self._all_tapes() for group in tape.groups()]
        return [*found, *self._writes, *self._writing]

    def _make_room(self, nbytes: int) -> None:
        """Wait while a new group of ``nbytes`` would be too much in flight."""
        while self._has_worker:
            flying = sum(group.size for group in self._in_flight())
            if not flying or flying + nbytes <= self.limit:
                return
            self._flush()
            self._wake(is_needed=True)
            self._landed.wait()
            if self._failed is not None:
                self._raise_failure()

    def _flush(self) -> None:
        """Queue the open groups of all tapes."""
        for tape in self._all_tapes():
            tape.seal()
            self._queue_sealed(tape)

    def _all_tapes(self) -> list[Tape]:
        return [tape for own in list(self._tapes.values()) for tape in own.all()]

    def _queue_sealed(self, tape: Tape) -> None:
        while tape.sealed:
            self._queue(tape.sealed[0])
            tape.sealed.pop(0)  # last: after Ctrl-C the group is queued once more

    def _queue(self, group: Group) -> None:
        group.raised = self._raised
        if not group.live:  # it is no part of the next tape, whose sizes would change
            self._forget(group)
            return
        if group not in self._writes:
            group.tape.order.put(group)
            self._writes.append(group)
        group.state = QUEUED
        self._wake()

    def _note_read(self, group: Group) -> None:
        reads = group.tape
        if reads.last is group:
            return
        reads.last, group.is_read = group, True
        if group.state in (OPEN, GONE):
            return
        now = time.perf_counter()
        reads.order.read(group, now)
        reads.asked = group, now
        self._ahead.planned.pop(group, None)  # this thread reads it, unless the worker has begun
        if group.state == WRITTEN:
            self._wake()

    def _has_landed(self, group: Group) -> None:
        group.lease = None
        self._writing.discard(group)
        self._landed.notify_all()

    def _forget(self, group: Group) -> None:
        """All entries of ``group`` were dropped before it was written."""
        self.stats.never_written += group.dead
        self._is_gone(group)
        self._has_landed(group)

    def _is_gone(self, group: Group) -> None:
        if group.state != OPEN:
            group.dropped = True
            group.tape.order.drop(group)
        group.state, group.members = GONE, []  # an entry refers to its group, and the group to the file
        self._ahead.forget(group)
        group.extent = None

    def _apply_release(self, release: Entry) -> None:
        entry, group = release, release.group
        if group is None or group.state == GONE:
            return
        if entry in group.live:
            del group.live[entry]
            group.nbytes -= entry.nbytes
            group.dead += entry.nbytes if group.state in (OPEN, QUEUED) else 0
        if group.state == QUEUED and not group.live:
            if group in self._writes:
                self._writes.remove(group)
            self._forget(group)
        elif group.state in (WRITTEN, FAILED):
            self._give_back(group, entry)

    def _give_back(self, group: Group, entry: Entry) -> None:
        """Let others use the place of ``entry`` in the file; that of the whole group if nothing else of it is left."""
        extent = group.extent
        if group.live:
            if extent is not None:
                self.file.release(Waste(extent, entry.offset - group.base, padded(entry.nbytes)))
            return
        if extent is not None:
            self.file.release(extent)
        self._is_gone(group)

    # -- the worker

    @property
    def _has_worker(self) -> bool:
        """Whether there is a worker, or can be one: not when the process ends, and not in a forked child."""
        return not self._closed and self.process == os.getpid()

    def _wake(self, is_needed: bool = False) -> None:
        """Wake the worker, or start it.

        Raises:
            StoreError: if the worker is needed, and the system starts no thread.
        """
        self._work.notify()
        if self._thread is None and self._has_worker:
            self._is_ending = False
            thread = threading.Thread(target=self._run, name="disthooks file worker", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:
                if is_needed:
                    raise no_thread(error) from error

    def _end_thread(self) -> None:
        with self._lock:
            thread, self._is_ending = self._thread, True
            self._work.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_IDLE)

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            job()
            del job  # while this thread waits, it must not hold a group, and so its tensors

    def _next_job(self) -> Callable[[], None] | None:
        """What the worker does next; it waits for it. None if the worker should end."""
        with self._lock:
            idle_since = time.monotonic()
            while True:
                try:
                    job = self._find_job()
                except Exception as error:
                    self._fail(error)
                    job = None
                if job is not None:
                    return job
                left = idle_since + _IDLE - time.monotonic()
                if self._is_ending or self._closed or (left <= 0 and not self._ahead.planned):
                    self._thread = None
                    self._landed.notify_all()
                    return None
                self._work.wait(min(self._ahead.pause(), max(left, 0.001)))

    def _find_job(self) -> Callable[[], None] | None:
        self._apply_releases()
        self._ahead.forget_taken()
        for tape in self._all_tapes():
            asked, tape.reads.asked = tape.reads.asked, None
            if asked is not None and not asked[0].dropped:
                self._ahead.plan_after(*asked)
        group = self._ahead.next()
        if group is not None:
            return functools.partial(self._read_ahead, group)
        if not self._writes or self._closed:
            return None
        # A group that nobody writes yet may still be dropped, so that it is never written.
        group = self._writes.pop(0)
        self.stats.never_written += group.dead
        group.dead = 0
        group.members = sorted(group.live, key=lambda entry: entry.offset)
        group.state = WRITING
        self._writing.add(group)
        return functools.partial(self._write, group)

    def _fail(self, error: Exception) -> None:
        """An ``error`` of the worker: what was to be written stays in memory."""
        failure = StoreError(f"the thread that moves saved tensors has failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._failed = self._failed or (None, failure)
        for group in self._writes:
            group.state = FAILED
            self._has_landed(group)
        self._writes.clear()
        self._ahead.planned.clear()

    def _write(self, group: Group) -> None:
        if group.device is not None:
            work_for(group.device)
        try:
            written = self.io.write(group)
        except BaseException as error:
            # The traceback of the error holds this frame, so nothing here may hold the error.
            with self._lock:
                group.state = FAILED
                if group.raised == self._raised and self._failed is None:
                    self._failed = group, error
                self._is_moved(group)
            return
        with self._lock:
            group.extent, group.base = written
            group.state = WRITTEN
            for entry in group.members:
                entry.tensor = None
            self._is_moved(group)
        self.file.shrink(keep_peak=True)

    def _is_moved(self, group: Group) -> None:
        """``group`` is written, or could not be. Entries may have been dropped meanwhile."""
        self._has_landed(group)
        for entry in [entry for entry in group.members if entry not in group.live]:
            if group.state != GONE:
                self._give_back(group, entry)

    def _read_ahead(self, group: Group) -> None:
        if group.device is not None:
            work_for(group.device)
        try:
            with group.lock:
                if group.is_planned:
                    self._read(group)
        except BaseException:  # `get` reads the group again, and raises the error
            pass

    def _read(self, group: Group) -> None:
        """Read ``group``, whose lock this thread holds."""
        with self._lock:
            group.is_reading, group.is_planned = True, False
            if group.state == WRITTEN:
                self._ahead.groups.setdefault(group)
        try:
            self.io.read(group)
        finally:
            group.is_reading = False


def no_thread(error: RuntimeError) -> StoreError:
    return StoreError(
        f"no thread can be started to move saved tensors: {error}. The process, its user or its container has reached "
        "its limit of threads. Raise the limit (ulimit -u, pids.max, docker run --pids-limit), or use fewer threads "
        "(OMP_NUM_THREADS, workers of a DataLoader). The tensors that were saved before are still in memory, and their "
        "backward can run"
    )


_workers: weakref.WeakSet[FileWorker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in list(_workers):
        worker.close()
