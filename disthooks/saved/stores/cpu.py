"""Keep saved tensors in CPU memory: copy them there during forward, and back before backward reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from disthooks._registry import register
from disthooks._streams import on_accelerator
from disthooks._tensors import format_bytes, parse_bytes, resident
from disthooks._torch import uncompiled
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.base import ByteBudget, Counted, StoreReport, StoreSpec, Tier
from disthooks.saved.stores.copies import Outgoing
from disthooks.saved.stores.offload import Offload, Offloaded


class _Held(Counted):
    """A tensor in CPU memory, and the device that :meth:`OnCpu.get` returns it on."""

    __slots__ = ("device", "tensor")

    def __init__(self, tensor: torch.Tensor, budget: ByteBudget) -> None:
        super().__init__(budget)
        self.tensor, self.device = tensor, tensor.device


class _Sent:
    """An entry of an :class:`Offload`. Its destructor drops it: after Ctrl-C its owner may never have got it."""

    __slots__ = ("entry", "offload")

    def __init__(self, offload: Offload, entry: Offloaded) -> None:
        self.offload, self.entry = offload, entry

    def drop(self) -> None:
        """Drop the entry, unless that was done already."""
        self.offload.drop(self.entry)

    @uncompiled()
    def __del__(self) -> None:
        self.drop()


class OpenOnCpu(Tier):
    """An :class:`OnCpu` at work: the bytes under its limit, and an offload for each device."""

    def __init__(self, budget: ByteBudget, in_flight: int, pin: bool) -> None:
        self.budget, self._in_flight, self._pin = budget, in_flight, pin
        self.offloads: dict[torch.device, Offload] = {}

    def put(self, tensor: torch.Tensor) -> _Held | _Sent:
        """Copy ``tensor`` to the CPU; hold the tensor itself if it is there already."""
        if on_accelerator(tensor):
            return self._send(tensor)
        nbytes = max(tensor.nbytes, resident(tensor) if tensor.is_cpu else 0)  # a view keeps its whole storage alive
        held = _Held(tensor, self.budget)
        self.budget.reserve(nbytes, held)
        if not tensor.is_cpu:
            try:
                held.tensor = tensor.cpu()
            except BaseException:
                held.drop()  # now, because the traceback holds this frame
                raise
        return held

    def put_away(self, tensor: torch.Tensor) -> _Held | _Sent:
        """Like :meth:`put`, but a copy begins even if backward reads the tensor soon."""
        return self._send(tensor, of_tiers=True) if on_accelerator(tensor) else self.put(tensor)

    def _send(self, tensor: torch.Tensor, of_tiers: bool = False) -> _Sent:
        offload = self.offload(tensor.device)
        sent = _Sent(offload, offload.entry(tensor, of_tiers))
        try:
            self._reserve(sent.entry)
            offload.put(sent.entry)
        except BaseException as error:
            sent.drop()  # now, because the traceback holds this frame
            if isinstance(error, OSError):
                what = f"OnCpu: the system has no {format_bytes(tensor.nbytes)} of memory left; give OnCpu a limit="
                raise StoreError(what, wanted=tensor.nbytes) from error
            raise
        return sent

    def _reserve(self, entry: Offloaded) -> None:
        """Take the bytes of ``entry`` from the limit; at the limit, wait until copies of dropped tensors are done."""
        while True:
            try:
                self.budget.reserve(entry.nbytes, entry)
            except StoreError:
                if not any(offload.wait_for_memory() for offload in list(self.offloads.values())):
                    raise
            else:
                return

    def get(self, ticket: _Held | _Sent) -> torch.Tensor:
        if isinstance(ticket, _Sent):
            return ticket.offload.get(ticket.entry)
        return ticket.tensor.to(ticket.device)

    def peek(self, ticket: _Held | _Sent) -> torch.Tensor:
        return ticket.offload.in_host(ticket.entry) if isinstance(ticket, _Sent) else ticket.tensor

    def host_copy(self, ticket: _Held | _Sent) -> Outgoing | None:
        return ticket.offload.host_copy(ticket.entry) if isinstance(ticket, _Sent) else None

    def prefetch(self, ticket: _Held | _Sent) -> None:
        if isinstance(ticket, _Sent):
            ticket.offload.prefetch(ticket.entry)

    def device_bytes(self, device: torch.device | None = None) -> int:
        """Bytes of saved tensors on ``device``, or on all devices: those that ``in_flight`` limits."""
        return sum(offload.device_bytes for offload in self._of(device))

    def device_room(self, device: torch.device) -> int:
        return min((offload.device_room for offload in self._of(device)), default=super().device_room(device))

    def set_device_limit(self, nbytes: int, device: torch.device) -> int:
        offload = self.offloads.get(device)
        return 0 if offload is None else offload.set_device_limit(nbytes)

    def _of(self, device: torch.device | None) -> list[Offload]:
        if device is None:
            return list(self.offloads.values())
        offload = self.offloads.get(device)
        return [] if offload is None else [offload]

    def drop(self, ticket: _Held | _Sent) -> None:
        ticket.drop()

    def wait(self) -> None:
        for offload in list(self.offloads.values()):
            offload.wait()

    def release_idle(self) -> None:
        for offload in list(self.offloads.values()):
            offload.release_idle()

    def report(self) -> tuple[StoreReport, ...]:
        return (_report(self.budget, list(self.offloads.values())),)

    def offload(self, device: torch.device) -> Offload:
        """What copies tensors of ``device``, an accelerator, for this store."""
        found = self.offloads.get(device)
        if found is None:
            made = Offload(device, self._in_flight, self._pin, self.budget)
            found = self.offloads.setdefault(device, made)  # another thread may have added one meanwhile
        return found


def _report(budget: ByteBudget, offloads: Sequence[Offload]) -> StoreReport:
    flying = sum(offload.in_flight for offload in offloads)  # first, because it brings the other counts up to date
    return StoreReport(
        "OnCpu()",
        held=budget.held,
        limit=budget.limit,
        in_flight=flying,
        written=sum(offload.written for offload in offloads),
        never_written=sum(offload.never_written for offload in offloads),
        from_memory=sum(offload.from_memory for offload in offloads),
        ahead=sum(offload.ahead for offload in offloads),
        in_vain=sum(offload.in_vain for offload in offloads),
        read=sum(offload.read for offload in offloads),
        write_seconds=sum(offload.out.seconds for offload in offloads),
        read_seconds=sum(offload.back.seconds for offload in offloads),
        measured_write=max((offload.out.best or 0.0 for offload in offloads), default=0.0) or None,
        measured_read=max((offload.back.best or 0.0 for offload in offloads), default=0.0) or None,
        peak_held=budget.peak,
    )


@register("store")
@dataclass(frozen=True)
class OnCpu(StoreSpec["OpenOnCpu"]):
    """Keep saved tensors of a GPU in CPU memory. A tensor that is in CPU memory already stays there, without a copy.

    The copies run beside the computation, on streams of their own. A tensor is copied out as soon as it is saved;
    tensors under 64 KiB stay where they are, unless ``at_least`` says another limit. It is copied back before backward
    reads it: the store learns the order and the times of the reads from the last backward. The last tensors of a
    forward are not copied, because backward reads them at once.

    ``Tiered(OnDevice("10 GiB"), OnCpu())`` keeps so many bytes on the device by plan: those that backward reads first.

    Args:
        limit: most bytes of tensors in this process at any time: an int, text such as ``"64 GiB"``, or
            ``"256 GiB per node"``, of which each process of the node (``LOCAL_WORLD_SIZE``) gets an equal part; None
            for no limit. Bytes in flight count, also those of tensors that are dropped: at the limit the host waits
            until these copies are done.
        pin_memory: whether host memory is page-locked, so that a GPU can copy to and from it while it computes: True,
            False, or ``"auto"`` to lock memory if the system allows it. One eighth of the node's memory is never
            locked.
        in_flight: most bytes of saved tensors that stay on each device, an int or text. They are tensors that are
            being copied, tensors that are not copied because backward reads them soon, and tensors that were brought
            back before they are read. One new tensor may be larger than this. If there would be more, the computation
            on the device waits for a copy; the host does not wait. 512 MiB take 10 to 20 ms over a link with 25 to 55
            GB/s. If the model makes tensors faster than the link for longer than this, a larger value hides no more
            of the copies. If its operators take longer, a smaller value is enough.

    Raises:
        UsageError: if ``limit`` or ``in_flight`` is not a size, or ``pin_memory`` is none of the three
            values.
        StoreError: in forward, if the limit is reached or the system has no memory.

    >>> store = OnCpu("64 GiB")
    >>> x = torch.ones(3)
    >>> store.get(store.put(x)).data_ptr() == x.data_ptr()
    True
    """

    # As for OnDisk; what a small copy costs on a GPU is not measured (decision 231).
    min_bytes: ClassVar[int] = 64 << 10
    limit: int | str | None = None
    pin_memory: bool | Literal["auto"] = field(default="auto", kw_only=True)
    in_flight: int | str = field(default="512 MiB", kw_only=True)

    def __post_init__(self) -> None:
        if self.pin_memory not in (True, False, "auto"):
            raise UsageError(f"OnCpu: pin_memory must be True, False or 'auto', got {self.pin_memory!r}")
        parse_bytes(self.in_flight, "OnCpu in_flight")
        ByteBudget(self.limit, "OnCpu")

    @property
    def budget(self) -> ByteBudget:
        """The bytes of the host in use in this process, and their limit."""
        return self.open().budget

    def _open(self) -> OpenOnCpu:
        return OpenOnCpu(ByteBudget(self.limit, "OnCpu"), parse_bytes(self.in_flight), self.pin_memory is not False)

    def leaves_memory(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is elsewhere than in CPU memory."""
        return not tensor.is_cpu
