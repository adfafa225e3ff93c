"""Saved tensors in CPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from disthooks._registry import register
from disthooks._streams import on_accelerator
from disthooks._tensors import format_bytes, parse_bytes, resident
from disthooks._torch import uncompiled
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.base import ByteBudget, Store, StoreReport
from disthooks.saved.stores.courier import Carried, Courier


class _Held(NamedTuple):
    """A tensor in CPU memory, and where it belongs."""

    tensor: torch.Tensor
    device: torch.device
    nbytes: int


class _Sent(NamedTuple):
    """A ticket, and who counts and moves it. It is dropped when nobody has it: Ctrl-C may take it from anybody."""

    courier: Courier
    ticket: Carried
    budget: ByteBudget

    def drop(self) -> None:
        """Drop it, if that is not done yet."""
        owed, self.ticket.owed = self.ticket.owed, 0
        parcel = self.ticket.parcel
        self.courier.drop(self.ticket)
        if owed and parcel is not None and parcel.joined:
            parcel.owed.append((self.budget.release, owed))  # its host memory goes with the last tensor in it
        else:
            self.courier.owed.give_back(parcel, self.budget.release, owed)

    @uncompiled()
    def __del__(self) -> None:
        self.drop()


@register("store")
@dataclass(frozen=True)
class OnCpu(Store):
    """Keep saved tensors of a GPU in CPU memory; a tensor that is there already stays, without a copy.

    Copies go beside the computation, on streams of their own: out as soon as a tensor is saved, small ones (up to 64
    KiB) together, and back before the backward comes to them, in the order of the last backward and by when it
    wanted each. The last ones of a forward, which come back at once, are not copied at all.

    Args:
        limit: most bytes at any time in this process, an int or text such as ``"64 GiB"``, or ``"256 GiB per node"``,
            of which each process of the node (``LOCAL_WORLD_SIZE``) gets its part; None for no limit. Bytes in flight
            count, those of dropped tensors too: at the limit the host waits for their copies.
        pin_memory: page-locked copies, which a GPU reads and writes beside the computation: True, False, or
            ``"auto"`` for wherever it can be had. One eighth of the node's memory is never taken for it.
        in_flight: most bytes that it holds on each device: what is being copied, what is not copied because it comes
            back at once, and what was brought back ahead. Of a new tensor that is larger there is one. Where more
            would be, the computation waits for a copy, on the device; the host does not. 512 MiB are 10 to 20 ms of a
            link with 25 to 55 GB/s: an operator that makes tensors faster than that for longer is not hidden by more,
            and one that takes longer needs less.

    Raises:
        UsageError: when ``limit`` or ``in_flight`` is not a size or ``pin_memory`` none of the three.
        StoreError: in forward, at the limit, or when there is no memory.

    >>> store = OnCpu("64 GiB")
    >>> x = torch.ones(3)
    >>> store.get(store.put(x)).data_ptr() == x.data_ptr()
    True
    """

    limit: int | str | None = None
    pin_memory: bool | Literal["auto"] = field(default="auto", kw_only=True)
    in_flight: int | str = field(default="512 MiB", kw_only=True)
    budget: ByteBudget = field(init=False, repr=False, compare=False)
    _couriers: dict[torch.device, Courier] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pin_memory not in (True, False, "auto"):
            raise UsageError(f"OnCpu: pin_memory must be True, False or 'auto', got {self.pin_memory!r}")
        parse_bytes(self.in_flight, "OnCpu in_flight")
        object.__setattr__(self, "budget", ByteBudget(self.limit, "OnCpu"))
        object.__setattr__(self, "_couriers", {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.limit, self.pin_memory, self.in_flight)

    def leaves_memory(self, tensor: torch.Tensor) -> bool:
        """False for a tensor in CPU memory."""
        return not tensor.is_cpu

    def put(self, tensor: torch.Tensor) -> _Held | _Sent:
        """Have ``tensor`` copied to the CPU; hold it as it is if it is there."""
        if on_accelerator(tensor):
            return self._send(tensor)
        nbytes = max(tensor.nbytes, resident(tensor) if tensor.is_cpu else 0)  # a view keeps all of its storage
        self.budget.reserve(nbytes)
        if tensor.is_cpu:
            return _Held(tensor, tensor.device, nbytes)
        try:
            return _Held(tensor.cpu(), tensor.device, nbytes)
        except BaseException:
            self.budget.release(nbytes)
            raise

    def _send(self, tensor: torch.Tensor) -> _Sent:
        courier = self.courier(tensor.device)
        self._reserve(tensor.nbytes)
        sent = None
        try:
            sent = _Sent(courier, courier.ticket(tensor), self.budget)
            sent.ticket.owed = tensor.nbytes
            courier.put(sent.ticket)
        except BaseException as error:
            if sent is None or not sent.ticket.owed:
                self.budget.release(tensor.nbytes)
            if sent is not None:
                sent.drop()
            if isinstance(error, OSError):
                what = f"OnCpu: the system has no {format_bytes(tensor.nbytes)} of memory; give it a limit="
                raise StoreError(what, wanted=tensor.nbytes) from error
            raise
        return sent

    def _reserve(self, nbytes: int) -> None:
        """Take them of the limit; if there are none, wait for copies of what nobody wants any more."""
        while True:
            try:
                self.budget.reserve(nbytes)
            except StoreError:
                if not any(courier.wait_for_memory() for courier in list(self._couriers.values())):
                    raise
            else:
                return

    def get(self, ticket: _Held | _Sent) -> torch.Tensor:
        """The tensor on the device it came from."""
        if isinstance(ticket, _Sent):
            return ticket.courier.get(ticket.ticket)
        return ticket.tensor.to(ticket.device)

    def peek(self, ticket: _Held | _Sent) -> torch.Tensor:
        """The tensor, in CPU memory; the host waits until it is there."""
        return ticket.courier.in_host(ticket.ticket) if isinstance(ticket, _Sent) else ticket.tensor

    def prefetch(self, ticket: _Held | _Sent) -> None:
        """Bring it back to its device, if there is room."""
        if isinstance(ticket, _Sent):
            ticket.courier.prefetch(ticket.ticket)

    def device_bytes(self) -> int:
        """Bytes on the devices."""
        return sum(courier.device_bytes for courier in list(self._couriers.values()))

    def set_device_limit(self, nbytes: int) -> None:
        """Hold less of them there."""
        for courier in list(self._couriers.values()):
            courier.set_device_limit(nbytes)

    def drop(self, ticket: _Held | _Sent) -> None:
        """Give the bytes back to the limit; the memory goes when no copy needs it."""
        if isinstance(ticket, _Sent):
            ticket.drop()
        else:
            self.budget.release(ticket.nbytes)

    def wait(self) -> None:
        """Wait until all that is to be copied to the CPU is there."""
        for courier in list(self._couriers.values()):
            courier.wait()

    def release_idle(self) -> None:
        """Let go of host memory that is idle."""
        for courier in list(self._couriers.values()):
            courier.release_idle()

    def report(self) -> tuple[StoreReport, ...]:
        """Bytes held, and what was copied from and to all devices."""
        return (_report(self.budget, list(self._couriers.values())),)

    def courier(self, device: torch.device) -> Courier:
        """Who moves the tensors of ``device``, an accelerator, for this store."""
        found = self._couriers.get(device)
        if found is None:
            made = Courier(device, parse_bytes(self.in_flight, "in_flight"), pin=self.pin_memory is not False)
            found = self._couriers.setdefault(device, made)  # another thread may have been faster
        return found


def _report(budget: ByteBudget, couriers: Sequence[Courier]) -> StoreReport:
    flying = sum(courier.in_flight for courier in couriers)  # first: it looks at what is done by now
    return StoreReport(
        "OnCpu()",
        held=budget.held,
        limit=budget.limit,
        in_flight=flying,
        written=sum(courier.written for courier in couriers),
        never_written=sum(courier.never_written for courier in couriers),
        from_memory=sum(courier.from_memory for courier in couriers),
        ahead=sum(courier.ahead for courier in couriers),
        in_vain=sum(courier.in_vain for courier in couriers),
        read=sum(courier.read for courier in couriers),
        write_seconds=sum(courier.out.seconds for courier in couriers),
        read_seconds=sum(courier.back.seconds for courier in couriers),
        measured_write=max((courier.out.best or 0.0 for courier in couriers), default=0.0) or None,
        measured_read=max((courier.back.best or 0.0 for courier in couriers), default=0.0) or None,
    )


def _made(limit: int | str | None, pin_memory: Any, in_flight: int | str) -> OnCpu:
    return OnCpu(limit, pin_memory=pin_memory, in_flight=in_flight)
