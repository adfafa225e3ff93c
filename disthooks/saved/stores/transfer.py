"""A device's tensors on their way to host memory and back, beside the computation.

Everything is ordered by events; nothing here waits for the device but :meth:`Outgoing.wait`.

Who frees memory that another stream reads or writes gives wrong numbers, so a link holds both ends of each copy until
its event has happened. That is looked at whenever the link is used.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

import torch

from disthooks._device import capturing, current_stream, event_on, new_stream, on, used_on
from disthooks._locks import Order, shared

_LARGE = 1 << 20  # bytes: smaller copies say little about the speed of a link


class Rate:
    """Bytes that were copied, and the time the device took for it.

    >>> rate = Rate()
    >>> rate.add(2_000_000, 0.001); rate.add(1000, 0.001)
    >>> rate.nbytes, rate.seconds, rate.best
    (2001000, 0.002, 2000000000.0)

    Attributes:
        best: bytes a second of the fastest large copy; None before there was one.
        pace: seconds for a byte, of the last copies above all; None before there was one.
    """

    def __init__(self) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self.best: float | None = None
        self.pace: float | None = None

    def add(self, nbytes: int, seconds: float) -> None:
        """A copy has ended."""
        self.nbytes += nbytes
        self.seconds += seconds
        if nbytes >= _LARGE and seconds > 0:
            self.best = max(self.best or 0.0, nbytes / seconds)
            pace = seconds / nbytes
            self.pace = pace if self.pace is None else 0.9 * self.pace + 0.1 * pace


class _Copy:
    """One copy in a side stream: when it began and when it is done, on the device, and who counts it."""

    __slots__ = ("begin", "device", "done", "host", "rate")

    begin: torch.Event
    done: torch.Event

    def __init__(self, device: torch.device, host: torch.Tensor, rate: Rate | None) -> None:
        self.device, self.host, self.rate = device, host, rate

    def is_done(self, _capturing: Callable[[], bool] = capturing) -> bool:  # held: Python may be ending
        """Whether it has happened; asked of a copy that an interrupt stopped on its way out, never.

        While this thread captures a CUDA graph, which a question would end, nobody knows: a destructor may ask.
        """
        return hasattr(self, "done") and not _capturing() and self.done.query()


class Outgoing(_Copy):
    """A copy of a device's tensor in host memory, under way or there.

    Attributes:
        host: contiguous, of the shape and dtype of the tensor; filled once ``done`` has happened.
        source: the tensor, held until it is copied; None after that.
        done: the copy's end, on the device.
    """

    __slots__ = ("source",)

    def __init__(self, source: torch.Tensor, host: torch.Tensor, rate: Rate | None = None) -> None:
        super().__init__(source.device, host, rate)
        self.source: torch.Tensor | None = source

    def wait(self) -> torch.Tensor:
        """``host``, once it is filled. The host waits: for threads that write it to disk."""
        self.done.synchronize()
        self.source = None
        return self.host


class Coming(_Copy):
    """A tensor on its way back to the device.

    Attributes:
        tensor: on the device, filled once ``done`` has happened; None when somebody has it.
        stream: the one its memory belongs to.
        done: the copy's end, on the device.
    """

    __slots__ = ("stream", "tensor")

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, stream: torch.Stream, rate: Rate | None) -> None:
        super().__init__(tensor.device, host, rate)
        self.tensor: torch.Tensor | None = tensor
        self.stream = stream


class Link:
    """What goes between one device and the host, in this process.

    There is one stream for each way. What a caller's ``Rate`` is given counts its copies alone.

    Args:
        device: an accelerator, with its index.

    Attributes:
        out: what was sent.
        back: what was fetched.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = new_stream(device), new_stream(device)
        self._sent: collections.deque[Outgoing] = collections.deque()
        self._coming: collections.deque[Coming] = collections.deque()
        self.out, self.back = Rate(), Rate()
        self._lock = shared(Order.LINK)

    # -- to the host

    def send(self, tensor: torch.Tensor, host: torch.Tensor, rate: Rate | None = None) -> Outgoing:
        """Begin to copy ``tensor`` into ``host``, after what the current stream was given so far.

        Both are held until that is done. ``tensor`` may be let go of before, by :meth:`let_go`.
        """
        source = tensor.detach().contiguous()
        with self._lock:
            self.poll()
            self._out.wait_event(event_on(current_stream(self.device)))
            outgoing = Outgoing(source, host, rate)
            self._sent.append(outgoing)  # before the copy begins: an interrupt may come at any time
            with on(self._out):
                outgoing.begin = event_on(self._out, timed=True)
                host.copy_(source, non_blocking=True)
                outgoing.done = event_on(self._out, timed=True)
            return outgoing

    def let_go(self, outgoing: Outgoing) -> None:
        """Let go of the source of ``outgoing`` now, without waiting on the host.

        The current stream waits for the copy. So it is as good as an operator of that stream, and so is the source:
        memory that belongs to the stream is used again by what comes later in it, and of memory that belongs to
        another one (a batch that a loader brought on a stream of its own) the allocator is told, as it has to be of
        every operator of this stream that uses it.
        """
        source = outgoing.source
        if source is not None and not outgoing.is_done():
            stream = current_stream(self.device)
            stream.wait_event(outgoing.done)
            used_on(source, stream)
        outgoing.source = None

    # -- to the device

    def fetch(self, outgoing: Outgoing, rate: Rate | None = None) -> torch.Tensor:
        """The tensor on the device again: itself while it is held, or a copy that the current stream may use."""
        source = outgoing.source
        return source if source is not None else self.take(self.bring(outgoing, rate))

    def bring(self, outgoing: Outgoing, rate: Rate | None = None) -> Coming:
        """Begin to copy it back, into memory of the current stream; :meth:`take` is for who wants it."""
        with self._lock:
            self.poll()
            stream, host = current_stream(self.device), outgoing.host
            coming = Coming(torch.empty(host.shape, dtype=host.dtype, device=self.device), host, stream, rate)
            self._back.wait_event(event_on(stream))  # the memory may have been another tensor's until now
            self._back.wait_event(outgoing.done)
            self._coming.append(coming)
            tensor = coming.tensor
            assert tensor is not None
            with on(self._back):
                coming.begin = event_on(self._back, timed=True)
                tensor.copy_(host, non_blocking=True)
                coming.done = event_on(self._back, timed=True)
            return coming

    def take(self, coming: Coming) -> torch.Tensor:
        """The tensor of ``coming``, which the current stream may use; once."""
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
        """Let go of what is copied by now."""
        with self._lock:
            self._mend()
            while self._sent and self._sent[0].is_done():
                outgoing = self._sent[0]
                outgoing.source = None
                _count(outgoing, self.out)
                self._sent.popleft()
            while self._coming and self._coming[0].is_done():
                _count(self._coming[0], self.back)
                self._coming.popleft()

    def wait(self) -> None:
        """Wait on the host until all that was sent has arrived."""
        with self._lock:
            self._mend()
            last = self._sent[-1] if self._sent else None
        if last is not None:
            last.done.synchronize()
        self.poll()

    def _mend(self) -> None:
        """An interrupt may have come in the middle of a copy, of which nobody knows: it is done when the rest is."""
        for copies, stream in ((self._sent, self._out), (self._coming, self._back)):
            if copies and not hasattr(copies[-1], "done"):
                copies[-1].begin = copies[-1].done = event_on(stream, timed=True)


def _count(copy: _Copy, total: Rate) -> None:
    seconds = copy.begin.elapsed_time(copy.done) / 1000
    for rate in filter(None, (total, copy.rate)):
        rate.add(copy.host.nbytes, seconds)


@functools.cache
def link_of(device: torch.device) -> Link:
    """The link of ``device`` in this process."""
    return Link(device)
