"""Copies between devices and the page-locked host memory from which files are written, and into which they are read."""

from __future__ import annotations

import collections
import ctypes
import sys
import weakref
from typing import Any

import torch

from disthooks._fork_safe import Order, shared_lock
from disthooks._streams import current_stream, event_on, handed_over, on
from disthooks.saved.stores.device_copy import Coming, Link, Outgoing, link_of
from disthooks.saved.stores.pools import PAGE, pool_of


class Incoming:
    """A tensor that was read from a file, on its way to its device.

    Attributes:
        coming: the copy to the device, into memory of the stream that the tensor was put on.
    """

    __slots__ = ("__weakref__", "coming")

    def __init__(self, coming: Coming) -> None:
        self.coming = coming

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, until a reader takes the tensor."""
        return 0 if self.coming.tensor is None else self.coming.host.nbytes


class _Read(Outgoing):
    """Host memory that is filled already, in the form that :meth:`Link.bring` takes."""

    __slots__ = ()

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        self.device, self.host, self.rate, self.source = device, host, None, None
        self.done = event_on(current_stream(device))  # `Link.bring` waits for the current stream anyway


class Staging:
    """The copies of one runtime between devices and host memory. The host waits in ``make_room`` alone."""

    def __init__(self) -> None:
        self._links: dict[torch.device, Link] = {}  # the links that were used
        self._sent: collections.deque[Outgoing] = collections.deque()  # copies that hold their sources, oldest first
        self._coming: weakref.WeakSet[Incoming] = weakref.WeakSet()
        self._lock = shared_lock(Order.STAGING)  # guards the two above
        self._allowed: dict[torch.device | None, int] = {}  # most bytes on a device; None: on each other one

    def send(self, tensor: torch.Tensor, host: torch.Tensor) -> Outgoing:
        """Begin to copy ``tensor`` into ``host``, in the order of the current stream. Both are contiguous."""
        link = self._links[tensor.device] = link_of(tensor.device)
        outgoing = link.send(tensor, host)
        with self._lock:
            self._sent.append(outgoing)
        return outgoing

    def arrive(self, host: torch.Tensor, stream: torch.Stream) -> torch.Tensor | Incoming:
        """Begin to copy ``host``, which is filled, to the device of ``stream``; ``host`` itself if there is no room."""
        with self._lock:  # so that two threads do not both take the last room
            most = self._allowed.get(stream.device, self._allowed.get(None, sys.maxsize))
            if self.device_bytes(stream.device) + host.nbytes > most:
                return host
            link = self._links[stream.device] = link_of(stream.device)
            with on(stream):
                incoming = Incoming(link.bring(_Read(host, stream.device)))
            self._coming.add(incoming)
        return incoming

    def take(self, found: torch.Tensor | Incoming, outgoing: Outgoing | None, made_on: torch.Stream) -> torch.Tensor:
        """A tensor on its device, for the current stream.

        Args:
            found: the tensor on its device, on its way there, or in host memory.
            outgoing: the copy that still fills the host memory; None if it is filled.
            made_on: the stream that filled the tensor on its device.
        """
        self.poll()
        device = made_on.device
        if isinstance(found, Incoming):
            return link_of(device).take(found.coming)
        source = None if outgoing is None else outgoing.source
        if found.device == device or source is not None:
            return handed_over(found if source is None else source, made_on)
        link = link_of(device)
        return link.take(link.bring(_Read(found, device) if outgoing is None else outgoing))

    def poll(self) -> None:
        """Release the sources of copies that are done."""
        for link in tuple(self._links.values()):
            link.poll()
        with self._lock:
            while self._sent and self._sent[0].source is None:
                self._sent.popleft()

    def device_bytes(self, device: torch.device | None = None) -> int:
        """Bytes on ``device``, or on all devices: of tensors that are copied from there, or came back early."""
        self.poll()
        with self._lock:
            coming = sum(each.device_bytes for each in tuple(self._coming) if device in (None, each.coming.device))
            held = [each for each in self._sent if each.source is not None and device in (None, each.device)]
            return coming + sum(outgoing.host.nbytes for outgoing in held)

    def set_device_limit(self, nbytes: int, device: torch.device | None = None) -> None:
        """Hold at most ``nbytes`` on ``device``, or on each one. The current streams wait for copies, not the host."""
        if device is None:
            self._allowed.clear()
        self._allowed[device] = nbytes
        with self._lock:
            for at in list(self._links) if device is None else [device]:
                over = self.device_bytes(at) - nbytes
                for outgoing in [each for each in self._sent if each.device == at and each.source is not None]:
                    if over <= 0:
                        break
                    over -= outgoing.host.nbytes
                    link_of(at).let_go(outgoing)

    def make_room(self, nbytes: int, most: int) -> None:
        """Make the host wait until at most ``most - nbytes`` bytes are being copied from devices.

        Copies of dropped tensors count, too: they still use memory on the device and on the host, and nothing else
        waits for them.
        """
        self.poll()
        while True:
            with self._lock:
                under_way = sum(outgoing.host.nbytes for outgoing in self._sent if outgoing.source is not None)
                if not self._sent or under_way + nbytes <= most:
                    return
                oldest = self._sent[0]
            oldest.wait()
            self.poll()


def pinned(nbytes: int, device: torch.device) -> Any:
    """A buffer of whole pages for copies from and to ``device``. It begins at a page, and is page-locked if possible.

    Raises:
        OSError: if the system has no more memory.
    """
    pool = pool_of(device, True)
    lease = pool.lease(nbytes)
    begin = -ctypes.addressof(lease) % PAGE
    if not begin:
        return lease
    # On some systems pinned memory does not begin at a page: take a page more, and skip to the next page.
    lease = pool.lease(nbytes + PAGE)
    begin = -ctypes.addressof(lease) % PAGE
    return (ctypes.c_char * ((len(lease) - begin) // PAGE * PAGE)).from_buffer(lease, begin)
