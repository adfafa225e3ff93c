"""A device's tensors on their way to host memory and back, beside the computation.

Everything is ordered by events; nothing here waits for the device but :meth:`Outgoing.wait`.
"""

from __future__ import annotations

import functools

import torch

from disthooks._device import current_stream, event_on, new_stream


class Outgoing:
    """A copy of a device's tensor in host memory, under way or there.

    Attributes:
        host: contiguous, of the shape and dtype of the tensor; filled once ``done`` has happened.
        source: the tensor, held until it is copied; None after that.
        done: the copy's end, on the device.
    """

    __slots__ = ("device", "done", "host", "source")

    def __init__(self, source: torch.Tensor, host: torch.Tensor, done: torch.Event) -> None:
        self.source: torch.Tensor | None = source
        self.host, self.done, self.device = host, done, source.device

    def wait(self) -> torch.Tensor:
        """``host``, once it is filled. The host waits: for threads that write it to disk."""
        self.done.synchronize()
        self.source = None
        return self.host


class Link:
    """What goes between one device and the host, in this process.

    Args:
        device: an accelerator, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = new_stream(device), new_stream(device)

    def send(self, tensor: torch.Tensor, host: torch.Tensor) -> Outgoing:
        """Begin to copy ``tensor`` into ``host``, after what the current stream was given so far."""
        source = tensor.detach().contiguous()
        self._out.wait_event(event_on(current_stream(self.device)))
        with self._out:
            host.copy_(source, non_blocking=True)
            return Outgoing(source, host, event_on(self._out))

    def fetch(self, outgoing: Outgoing) -> torch.Tensor:
        """The tensor on the device again: itself while it is there, or a copy that the current stream may use."""
        if outgoing.source is not None and not outgoing.done.query():
            return outgoing.source
        stream = current_stream(self.device)
        tensor = torch.empty_like(outgoing.host, device=self.device)
        self._back.wait_event(event_on(stream))  # the memory may have been another tensor's until now
        self._back.wait_event(outgoing.done)
        with self._back:
            tensor.copy_(outgoing.host, non_blocking=True)
            stream.wait_event(event_on(self._back))
        return tensor


@functools.cache
def link_of(device: torch.device) -> Link:
    """The link of ``device`` in this process."""
    return Link(device)
