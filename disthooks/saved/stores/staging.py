"""Copies between devices and the page-locked host memory from which files are written, and into which they are read."""

from __future__ import annotations

import collections
import sys
import weakref

import torch

from disthooks._locks import new_lock
from disthooks._streams import handed_over, on
from disthooks.saved.stores.copies import Coming, Link, Outgoing, link_of


class Staging:
    """The copies of one runtime between devices and host memory. The host waits in ``make_room`` alone."""

    def __init__(self) -> None:
        self._links: dict[torch.device, Link] = {}  # the links that were used
        self._sent: collections.deque[Outgoing] = collections.deque()  # copies that hold their sources, oldest first
        self._coming: weakref.WeakSet[Coming] = weakref.WeakSet()
        self._lock = new_lock()  # guards the two above
        self._allowed: dict[torch.device, int] = {}  # most bytes on a device

    def send(self, tensor: torch.Tensor, host: torch.Tensor) -> Outgoing:
        """Begin to copy ``tensor`` into ``host``, in the order of the current stream. Both are contiguous."""
        link = self._links[tensor.device] = link_of(tensor.device)
        outgoing = link.send(tensor, host)
        with self._lock:
            self._sent.append(outgoing)
        return outgoing

    def arrive(self, host: torch.Tensor, stream: torch.Stream) -> torch.Tensor | Coming:
        """Begin to copy ``host``, which is filled, to the device of ``stream``; ``host`` itself if there is no room."""
        with self._lock:  # so that two threads do not both take the last room
            most = self._allowed.get(stream.device, sys.maxsize)
            if self.device_bytes(stream.device) + host.nbytes > most:
                return host
            link = self._links[stream.device] = link_of(stream.device)
            with on(stream):
                coming = link.bring(host, None)
            self._coming.add(coming)
        return coming

    def take(self, found: torch.Tensor | Coming, outgoing: Outgoing | None, made_on: torch.Stream) -> torch.Tensor:
        self.poll()
        device = made_on.device
        if isinstance(found, Coming):
            return link_of(device).take(found)
        source = None if outgoing is None else outgoing.source
        if found.device == device or source is not None:
            return handed_over(found if source is None else source, made_on)
        link = link_of(device)
        return link.take(link.bring(found, None if outgoing is None else outgoing.done))

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
            arrived = [
                each for each in tuple(self._coming) if each.tensor is not None and device in (None, each.device)
            ]
            held = [each for each in self._sent if each.source is not None and device in (None, each.device)]
            return sum(each.host.nbytes for each in (*arrived, *held))

    def set_device_limit(self, nbytes: int, device: torch.device) -> int:
        """Hold at most ``nbytes`` on ``device``. The current stream waits for copies, not the host.

        Returns:
            The bytes there before.
        """
        self._allowed[device] = nbytes
        with self._lock:
            before = self.device_bytes(device)
            over = before - nbytes
            for outgoing in [each for each in self._sent if each.device == device and each.source is not None]:
                if over <= 0:
                    break
                over -= outgoing.host.nbytes
                link_of(device).let_go(outgoing)
        return before

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
