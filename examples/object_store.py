"""Keep saved tensors in an object store: S3, Google Cloud Storage, Azure, or any file system that fsspec knows.

Copy this file and change it. ``Objects`` writes bytes to an object, reads them and removes it. ``OnObjects`` is the
store over it, and ``kind: OnObjects`` in a configuration. In a script::

    with dh.saving(OnObjects("s3://bucket/scratch", in_flight="2 GiB")):
        loss = model(batch)

Each tensor is one object; fsspec's file systems upload a large one in parts. Credentials and endpoints come from where
fsspec looks for them (FSSPEC_S3_ENDPOINT_URL, AWS_PROFILE, ...), so that the spec stays frozen and can be printed. The
objects of a process that is killed stay, so give the prefix a lifecycle rule ("expire after a day").
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import queue
import threading
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import fsspec
import torch

from disthooks._registry import register
from disthooks._tensors import parse_bytes
from disthooks.errors import StoreError
from disthooks.saved.stores.base import ByteBudget, Store, StoreReport
from disthooks.saved.stores.host import memory_of


class Objects:
    """Objects under ``url``. A key is the path of an object, so that a fork of the process can read it too."""

    at_once = 8  # calls; more of them are not faster

    def __init__(self, url: str) -> None:
        self.url, self._names = url, itertools.count()
        self._opened: dict[int, tuple[Any, str]] = {}
        self._files()  # now, so that a URL that cannot be used is an error here

    def _files(self) -> tuple[Any, str]:
        """The file system and the prefix of this process: clients of object stores do not survive a fork."""
        if os.getpid() not in self._opened:
            try:
                files, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
                prefix = f"{root.rstrip('/')}/{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
                if "file" in files.protocol:
                    files.makedirs(prefix)
            except Exception as error:  # each file system has errors of its own
                raise StoreError(f"{self.url}: {error}", path=self.url) from error
            self._opened[os.getpid()] = files, prefix
            _remover(os.getpid()).remove_after(self, files, prefix)
        return self._opened[os.getpid()]

    def write(self, memory: memoryview) -> str:
        files, prefix = self._files()
        key = f"{prefix}/{next(self._names)}"
        self._call("written", key, memory.nbytes, lambda: files.pipe_file(key, bytes(memory)))
        return key

    def read(self, key: str, memory: memoryview) -> None:
        found = self._call("read", key, memory.nbytes, lambda: self._files()[0].cat_file(key))
        if len(found) != memory.nbytes:
            raise StoreError(f"{key} has {len(found)} bytes, not {memory.nbytes}", path=key, wanted=memory.nbytes)
        memory[:] = found

    def free(self, key: str) -> None:
        self._call("removed", key, 0, lambda: self._files()[0].rm_file(key))

    def _call(self, done: str, key: str, nbytes: int, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            what = f"{self.url}: {key} could not be {done} ({type(error).__name__}: {error})"
            raise StoreError(what, path=key, wanted=nbytes) from error


class Remover:
    """The thread of a process that removes what its stores leave.

    A finalizer must not wait for another thread, as a request to an object store does: it runs wherever the collector
    runs, also in a thread that holds a lock which that other thread needs. ``put`` of a SimpleQueue waits for nobody.
    """

    def __init__(self) -> None:
        self._left: queue.SimpleQueue[tuple[Any, str] | None] = queue.SimpleQueue()
        self._finalizers: set[weakref.finalize[Any, Any]] = set()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def remove_after(self, owner: Objects, files: Any, prefix: str) -> None:
        """Remove ``prefix`` when ``owner`` is gone, and at the end of the process at the latest."""
        finalizer = weakref.finalize(owner, self._left.put, (files, prefix))
        finalizer.atexit = False  # it would come after ``_end``
        self._finalizers = {each for each in self._finalizers if each.alive} | {finalizer}

    def _work(self) -> None:
        while (left := self._left.get()) is not None:
            files, prefix = left
            with contextlib.suppress(Exception):
                files.rm(prefix, recursive=True)

    def _end(self) -> None:
        if self._thread.is_alive():  # it is not in a fork, whose parent removes its own
            for finalizer in self._finalizers:
                finalizer()
            self._left.put(None)
            self._thread.join(60)


@functools.cache
def _remover(process: int) -> Remover:
    return Remover()


@dataclass(eq=False)
class Ticket:
    """One stored tensor: in memory until it is written, then an object."""

    opened: Opened
    tensor: torch.Tensor | None
    nbytes: int
    before: weakref.ref[Ticket] | None  # the tensor that was put before it: backward reads it next
    layout: tuple[Any, ...]  # shape, dtype, device
    key: str | None = None
    ahead: torch.Tensor | None = None
    dropped: bool = False
    process: int = field(default_factory=os.getpid)
    lock: Any = field(default_factory=threading.RLock)  # held while a thread moves it; never by a destructor


class Opened:
    """What works for a spec in one process: threads that write, read ahead and remove objects."""

    def __init__(self, spec: OnObjects) -> None:
        # Destructors may call the ``put`` of a SimpleQueue, because it takes no lock that they could interrupt.
        self.jobs: Jobs = queue.SimpleQueue()
        self.threads = 0
        self.objects = Objects(spec.url)
        self.budget = ByteBudget(spec.limit, f"OnObjects({spec.url!r})")
        self.most, self.flying = parse_bytes(spec.in_flight, "OnObjects in_flight"), 0
        self.done = threading.Condition()
        self.last: Any = threading.local()
        self.failed: list[tuple[Ticket, StoreError]] = []
        for _ in range(self.objects.at_once):
            threading.Thread(target=_work, args=(self.jobs,), daemon=True).start()
            self.threads += 1

    def __del__(self) -> None:
        for _ in range(self.threads):
            self.jobs.put(None)

    def write(self, ticket: Ticket) -> None:
        try:
            with ticket.lock:
                tensor = ticket.tensor
                if tensor is not None and not ticket.dropped and ticket.nbytes:
                    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
                    ticket.key = self.objects.write(memory_of(host))
                    ticket.tensor = None
        except StoreError as error:  # the tensor stays in memory, so that backward can run
            self.failed.append((ticket, error))
        finally:
            with self.done:
                self.flying -= ticket.nbytes
                self.done.notify_all()

    def read(self, ticket: Ticket) -> None:
        with ticket.lock:
            if ticket.key is not None and ticket.ahead is None and not ticket.dropped:
                ticket.ahead = self.bring(ticket)

    def remove(self, ticket: Ticket) -> None:
        with ticket.lock:  # a write that is under way ends first
            if ticket.key is not None:
                with contextlib.suppress(StoreError):  # the lifecycle rule of the bucket removes it
                    self.objects.free(ticket.key)

    def bring(self, ticket: Ticket) -> torch.Tensor:
        data, (shape, dtype, device) = bytearray(ticket.nbytes), ticket.layout
        self.objects.read(ticket.key, memoryview(data))
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape).to(device)

    def say(self) -> None:
        while self.failed:
            ticket, error = self.failed.pop()
            if not ticket.dropped:
                raise error


Jobs = queue.SimpleQueue[tuple[Callable[[Ticket], None], Ticket] | None]


def _work(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        with contextlib.suppress(Exception):  # a read ahead that failed: ``get`` reads again, and raises the error
            job[0](job[1])
        del job


_opened: dict[tuple[int, int], Opened] = {}  # by the identity of the spec and the process
_opening = threading.Lock()


@register("store")
@dataclass(frozen=True)
class OnObjects(Store):
    """Keep saved tensors as objects under a URL of fsspec.

    Args:
        url: such as ``"s3://bucket/prefix"``, ``"gs://bucket/prefix"`` or ``"file:///scratch"``.
        limit: most bytes in this process.
        in_flight: most bytes that wait to be written.
    """

    min_bytes: ClassVar[int] = 1 << 20  # a request takes milliseconds
    url: str
    limit: int | str | None = None
    in_flight: int | str = "1 GiB"

    def _open(self) -> Opened:
        key = id(self), os.getpid()
        with _opening:
            if key not in _opened:
                _opened[key] = Opened(self)
                weakref.finalize(self, _opened.pop, key, None)
            return _opened[key]

    def put(self, tensor: torch.Tensor) -> Ticket:
        opened, layout = self._open(), (tensor.shape, tensor.dtype, tensor.device)
        opened.say()
        opened.budget.reserve(tensor.nbytes)
        ticket = Ticket(opened, tensor, tensor.nbytes, getattr(opened.last, "ticket", None), layout)
        opened.last.ticket = weakref.ref(ticket)
        with opened.done:
            opened.done.wait_for(lambda: not opened.flying or opened.flying + ticket.nbytes <= opened.most)
            opened.flying += ticket.nbytes
        opened.jobs.put((opened.write, ticket))
        return ticket

    def get(self, ticket: Ticket) -> torch.Tensor:
        opened, tensor = ticket.opened, ticket.tensor
        if tensor is not None:
            return tensor
        if ticket.process != os.getpid():  # a fork has none of the threads
            return opened.bring(ticket)
        opened.say()
        before = ticket
        for _ in range(opened.objects.at_once):  # read ahead, in the order in which backward wants them
            found = before.before() if before.before is not None else None
            if found is None:
                break
            before = found
            opened.jobs.put((opened.read, before))
        with ticket.lock:
            found, ticket.ahead = ticket.ahead, None
            return opened.bring(ticket) if found is None else found

    def prefetch(self, ticket: Ticket) -> None:
        ticket.opened.jobs.put((ticket.opened.read, ticket))

    def drop(self, ticket: Ticket) -> None:
        ticket.dropped, ticket.tensor, ticket.ahead = True, None, None
        ticket.opened.budget.release(ticket.nbytes)
        if ticket.process == os.getpid():
            ticket.opened.jobs.put((ticket.opened.remove, ticket))

    def wait(self) -> None:
        opened = self._open()
        with opened.done:
            opened.done.wait_for(lambda: not opened.flying)
        opened.say()

    def report(self) -> tuple[StoreReport, ...]:
        opened = self._open()
        held, limit, peak = opened.budget.held, opened.budget.limit, opened.budget.most
        return (StoreReport(f"OnObjects({self.url!r})", held, limit, opened.flying, peak_held=peak),)
