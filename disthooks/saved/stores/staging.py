"""A device's tensors on their way to a disk and back: through pinned memory, beside the computation.

Everything is ordered by events. The link holds what a copy reads and writes until the device has said that it is done,
whoever lets go of it before.
"""

from __future__ import annotations

import ctypes

import torch

from disthooks._device import current_stream, event_on, handed_over, on
from disthooks.saved.stores.buffers import PAGE, tensor_over
from disthooks.saved.stores.pinned import pool_of
from disthooks.saved.stores.transfer import Coming, Outgoing, link_of


class Incoming:
    """What was read for a device, on its way there.

    Attributes:
        coming: its copy on the device, in memory of the stream that the tensor was put on.
    """

    __slots__ = ("__weakref__", "coming")

    def __init__(self, coming: Coming) -> None:
        self.coming = coming

    @property
    def on_device(self) -> int:
        """Bytes there that nobody has taken."""
        return 0 if self.coming.tensor is None else self.coming.host.nbytes


class _Read(Outgoing):
    """Host memory that is filled already, for a link to bring."""

    __slots__ = ()

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        self.device, self.host, self.rate, self.source = device, host, None, None
        self.done = event_on(current_stream(device))  # a link that brings it waits for this anyway


def pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Host memory that ``device`` reads and writes beside the host: ``uint8``, whole pages from a page's beginning on.

    Raises:
        OSError: when the system has no more memory.
    """
    pool = pool_of(device, True)
    lease = pool.lease(nbytes)
    begin = -ctypes.addressof(lease) % PAGE
    if begin:  # not every system's pinned memory begins at a page
        lease = pool.lease(nbytes + PAGE)
        begin = -ctypes.addressof(lease) % PAGE
    return tensor_over(lease, torch.Size([(len(lease) - begin) // PAGE * PAGE]), torch.uint8, begin)


def shaped(block: torch.Tensor, shape: torch.Size, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """A contiguous tensor at byte ``offset`` of ``block``.

    >>> shaped(torch.arange(8, dtype=torch.uint8), torch.Size([2]), torch.uint8, offset=4)
    tensor([4, 5], dtype=torch.uint8)
    """
    return block[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def sent(tensor: torch.Tensor) -> Outgoing:
    """Begin to copy ``tensor``, contiguous and of some bytes, into pinned pages, in the order of the current stream.

    Raises:
        OSError: when the system has no more memory.
    """
    host = shaped(pinned(tensor.nbytes, tensor.device), tensor.shape, tensor.dtype)
    return link_of(tensor.device).send(tensor, host)


def arriving(host: torch.Tensor, stream: torch.Stream) -> Incoming:
    """Begin to copy ``host``, which is filled, to the device of ``stream``, into memory of that stream."""
    with on(stream):
        return Incoming(link_of(stream.device).bring(_Read(host, stream.device)))


def brought(host: torch.Tensor, device: torch.device, outgoing: Outgoing | None) -> torch.Tensor:
    """A copy of ``host`` on ``device`` for the current stream; ``outgoing`` may be filling it still."""
    link = link_of(device)
    return link.take(link.bring(_Read(host, device) if outgoing is None else outgoing))


def taken(incoming: Incoming, device: torch.device) -> torch.Tensor:
    """The copy of ``incoming`` for the current stream."""
    return link_of(device).take(incoming.coming)


def source_of(outgoing: Outgoing | None, made_on: torch.Stream) -> torch.Tensor | None:
    """What ``outgoing`` copies, as long as it is held, for the current stream."""
    source = None if outgoing is None else outgoing.source
    return None if source is None else handed_over(source, made_on)


def let_go(outgoing: Outgoing | None) -> None:
    """``outgoing`` is not wanted any more: its source goes at once if it is copied, or when the link is next used.

    It takes no lock and waits for nothing, for destructors.
    """
    if outgoing is not None and outgoing.is_done():
        outgoing.source = None
