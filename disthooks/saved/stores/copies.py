"""Copies between a device and host memory, beside the computation."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from disthooks._locks import new_lock
from disthooks._streams import current_stream, event_on, new_stream, on, used_on
from disthooks._torch import capturing

# [Note: both ends of a copy]
# Copies run on two side streams for each device, one for each direction, and events order them. If memory is freed
# while another stream still reads or writes it, the allocator gives it to another tensor, and numbers are wrong. So a
# link holds the source and the target of each copy until the copy's event has happened. Those who use it call ``poll``,
# which asks the events. Nothing here makes the host wait, except ``wait``.
#
# A destructor may ask whether a copy is done. If it is, the destructor frees the memory at once; if not, the link frees
# it later. While a CUDA graph is captured, events must not be asked, so no copy counts as done.

_LARGE = 1 << 20  # bytes: the speed of a link is measured by copies of this size or more; each copy has a fixed cost


class Throughput:
    """Bytes that were copied, and the seconds that the device took for them.

    >>> rate = Throughput()
    >>> rate.add(2_000_000, 0.001); rate.add(1000, 0.001)
    >>> rate.nbytes, rate.seconds, rate.best
    (2001000, 0.002, 2000000000.0)

    Attributes:
        best: bytes a second of the fastest large copy; None before the first large copy.
        pace: seconds for a byte, as a running mean over large copies; None before the first large copy.
    """

    def __init__(self) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self.best: float | None = None
        self.pace: float | None = None

    def add(self, nbytes: int, seconds: float) -> None:
        self.nbytes += nbytes
        self.seconds += seconds
        if nbytes >= _LARGE and seconds > 0:
            self.best = max(self.best or 0.0, nbytes / seconds)
            pace = seconds / nbytes
            self.pace = pace if self.pace is None else 0.9 * self.pace + 0.1 * pace


class _Copy:
    """One copy on a side stream: the events of its begin and its end, and the ``Throughput`` that counts it."""

    __slots__ = ("begin", "device", "done", "host", "rate")

    begin: torch.Event
    done: torch.Event

    def __init__(self, device: torch.device, host: torch.Tensor, rate: Throughput | None) -> None:
        self.device, self.host, self.rate = device, host, rate

    # ``_capturing`` is an argument because destructors ask this, and as Python ends, the globals are gone.
    def is_done(self, _capturing: Callable[[], bool] = capturing) -> bool:
        """Whether the copy has ended; False while a graph is captured. See [Note: both ends of a copy]."""
        return not _capturing() and self.done.query()


class Outgoing(_Copy):
    """A copy of a device's tensor to host memory, under way or done.

    Attributes:
        host: a contiguous tensor with the shape and dtype of the source; filled once ``done`` has happened.
        source: the tensor on the device, held until it is copied; None after that.
        done: the event at the end of the copy.
        lease: the memory of ``host``, from a page on, if another store may take it over; None otherwise.
        is_taken: whether another store counts that memory now.
    """

    __slots__ = ("is_taken", "lease", "source")

    def __init__(self, source: torch.Tensor, host: torch.Tensor, rate: Throughput | None = None) -> None:
        super().__init__(source.device, host, rate)
        self.source: torch.Tensor | None = source
        self.lease: Any = None
        self.is_taken = False

    def wait(self) -> torch.Tensor:
        """Make the host wait until ``host`` is filled, and return it; threads that write to disk call this."""
        self.done.synchronize()
        self.source = None
        return self.host


class Coming(_Copy):
    """A tensor on its way back to the device.

    Attributes:
        tensor: the tensor on the device, filled once ``done`` has happened; None after a reader has taken it.
        stream: the stream that its memory belongs to.
        done: the event at the end of the copy.
    """

    __slots__ = ("__weakref__", "stream", "tensor")

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, stream: torch.Stream, rate: Throughput | None) -> None:
        super().__init__(tensor.device, host, rate)
        self.tensor: torch.Tensor | None = tensor
        self.stream = stream


class Link:
    """The copies between one device and the host in this process. See [Note: both ends of a copy].

    A caller may give a ``Throughput`` of its own, which counts the copies of that caller alone.

    Attributes:
        out: the bytes and seconds of all copies to the host.
        back: the bytes and seconds of all copies to the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = new_stream(device), new_stream(device)
        self._sent: collections.deque[Outgoing] = collections.deque()
        self._coming: collections.deque[Coming] = collections.deque()
        self.out, self.back = Throughput(), Throughput()
        self._lock = new_lock()

    # -- to the host

    def send(self, tensor: torch.Tensor, host: torch.Tensor, rate: Throughput | None = None) -> Outgoing:
        """Begin to copy ``tensor`` into ``host``, when the work now queued on the current stream is done.

        The link holds both until the copy is done. :meth:`let_go` releases ``tensor`` before that.
        """
        source = tensor.detach().contiguous()
        with self._lock:
            self._out.wait_event(event_on(current_stream(self.device)))
            outgoing = Outgoing(source, host, rate)
            with _all_of_a_copy(self._out):
                outgoing.begin = event_on(self._out, timed=True)
                host.copy_(source, non_blocking=True)
                outgoing.done = event_on(self._out, timed=True)
                self._sent.append(outgoing)
            return outgoing

    def let_go(self, outgoing: Outgoing) -> None:
        """Release the source of ``outgoing`` now. The host does not wait.

        The current stream waits for the copy, so the copy counts as one of its operators. If the source lies in memory
        of the current stream, later operators of this stream use that memory again, in the right order. If it lies in
        memory of another stream, as a batch of a data loader may, the allocator is told that the current stream uses
        it too, as for any operator.
        """
        source = outgoing.source
        if source is not None and not outgoing.is_done():
            stream = current_stream(self.device)
            stream.wait_event(outgoing.done)
            used_on(source, stream)
        outgoing.source = None

    # -- to the device

    def bring(self, host: torch.Tensor, filled: torch.Event | None, rate: Throughput | None = None) -> Coming:
        """Begin to copy ``host`` to the device, into memory of the current stream. :meth:`take` returns the tensor."""
        with self._lock:
            stream = current_stream(self.device)
            coming = Coming(torch.empty(host.shape, dtype=host.dtype, device=self.device), host, stream, rate)
            self._back.wait_event(event_on(stream))  # the new memory may have been another tensor's until now
            if filled is not None:
                self._back.wait_event(filled)
            tensor = coming.tensor
            assert tensor is not None
            with _all_of_a_copy(self._back):
                coming.begin = event_on(self._back, timed=True)
                tensor.copy_(host, non_blocking=True)
                coming.done = event_on(self._back, timed=True)
                self._coming.append(coming)
            return coming

    def take(self, coming: Coming) -> torch.Tensor:
        """The tensor of ``coming``, for the current stream; it can be taken once."""
        tensor = coming.tensor
        assert tensor is not None
        stream = current_stream(self.device)
        stream.wait_event(coming.done)
        if stream != coming.stream:
            used_on(tensor, stream)
        coming.tensor = None
        return tensor

    # -- both

    def poll(self) -> None:
        """Release the source and the target of the copies that are done, and count these copies."""
        with self._lock:
            while self._sent and self._sent[0].is_done():
                outgoing = self._sent[0]
                outgoing.source = None
                _count(outgoing, self.out)
                self._sent.popleft()
            while self._coming and self._coming[0].is_done():
                _count(self._coming[0], self.back)
                self._coming.popleft()

    def wait(self) -> None:
        """Make the host wait until all tensors that were sent have arrived."""
        with self._lock:
            last = self._sent[-1] if self._sent else None
        if last is not None:
            last.done.synchronize()
        self.poll()


@contextlib.contextmanager
def _all_of_a_copy(stream: torch.Stream) -> Iterator[None]:
    """Work on ``stream``. If Ctrl-C comes in the middle, the host waits: nobody would hold the memory of the copy."""
    try:
        with on(stream):
            yield
    except BaseException:
        stream.synchronize()
        raise


def _count(copy: _Copy, total: Throughput) -> None:
    seconds = copy.begin.elapsed_time(copy.done) / 1000
    for rate in filter(None, (total, copy.rate)):
        rate.add(copy.host.nbytes, seconds)


@functools.cache
def link_of(device: torch.device) -> Link:
    return Link(device)
