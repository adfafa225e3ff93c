"""What is measured of each gradient: a number for every parameter, merged over the ranks by SUM or by MAX.

A measure is frozen and hashable, so rules and statistics that need the same one share it. It looks at local parts
only, and gives one float64 for each parameter; merging them needs nothing else, so the bytes that travel depend on
the number of parameters and never on how many ranks there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch

from disthooks.errors import UsageError

_ROW = 1024


class Local(NamedTuple):
    """What this rank may look at.

    Attributes:
        grads: for each parameter the local part of its final gradient; None where there is none or another rank
            owns it.
        flags: for each parameter whether its gradient before any reduction was non-finite here, as a bool tensor
            without dimensions; None where nobody looked or it had no gradient.
        position: this rank's place among the ranks.
        world: how many ranks there are.
        device: where the result is wanted.
        apart: gradients that no engine reduces and this rank does not own; a NaN in them is on this rank alone.
    """

    grads: Sequence[torch.Tensor | None]
    flags: Sequence[torch.Tensor | None]
    position: int
    world: int
    device: torch.device
    apart: Sequence[torch.Tensor | None] = ()


class Measure(Protocol):
    """One number for each parameter, float64; ``merge`` says which all-reduce merges them."""

    @property
    def merge(self) -> Literal["sum", "max"]:
        """How the numbers of several ranks become one."""
        ...

    def local(self, local: Local) -> torch.Tensor:
        """The numbers of this rank, a float64 vector; 0 where there is no gradient."""
        ...


@dataclass(frozen=True)
class Power:
    """Sum over elements of |g| to the ``p``; for infinity, the largest |g|.

    Merged over ranks and parameters it gives any ``p`` norm: :meth:`norm`.

    >>> local = Local([torch.tensor([3.0, 4.0]), None], [None, None], 0, 1, torch.device("cpu"))
    >>> Power(2.0).local(local), Power(2.0).norm(Power(2.0).local(local))
    (tensor([25.,  0.], dtype=torch.float64), tensor(5., dtype=torch.float64))
    """

    p: float

    def __post_init__(self) -> None:
        number = isinstance(self.p, (int, float)) and not isinstance(self.p, bool)
        if not number or not (0 < self.p <= 16 or math.isinf(self.p)) or self.p < 0:
            raise UsageError(
                f"norm_type={self.p!r}: a number above 0 and up to 16 (higher powers overflow), or math.inf, is needed"
            )

    @property
    def merge(self) -> Literal["sum", "max"]:
        """SUM, or MAX for infinity."""
        return "max" if math.isinf(self.p) else "sum"

    def local(self, local: Local) -> torch.Tensor:
        """The sum of powers, or the largest, for each parameter."""
        values = _stack(local.grads, lambda grads: _norms(grads, self.p), local.device)
        return values if math.isinf(self.p) else values.pow(self.p)

    def norm(self, values: torch.Tensor) -> torch.Tensor:
        """The norm of all the gradients whose numbers are ``values``, as if they were one vector."""
        if not values.numel():
            return values.new_zeros(())
        return values.amax() if math.isinf(self.p) else values.sum().pow(1 / self.p)


@dataclass(frozen=True)
class NonFiniteCount:
    """How many elements are infinite or not a number."""

    merge: ClassVar[Literal["sum", "max"]] = "sum"

    def local(self, local: Local) -> torch.Tensor:
        """The count for each parameter."""
        slots = [grad if grad is not None else other for grad, other in itertools.zip_longest(local.grads, local.apart)]
        return _stack(slots, lambda grads: [(~torch.isfinite(g)).sum() for g in grads], local.device)


@dataclass(frozen=True)
class FirstToFail:
    """Which rank comes first whose own gradient was non-finite: world minus its place, and 0 for none."""

    merge: ClassVar[Literal["sum", "max"]] = "max"

    def local(self, local: Local) -> torch.Tensor:
        """World minus this rank's place wherever its own gradient was non-finite."""
        return _stack(local.flags, list, local.device) * (local.world - local.position)


def _stack(
    slots: Sequence[torch.Tensor | None],
    measure: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    device: torch.device,
) -> torch.Tensor:
    """``measure`` of those that are there and have elements; 0 elsewhere.

    Built by stacking: an index made from a list would be copied to the device, and the host would wait.
    """
    there = [slot is not None and slot.numel() > 0 for slot in slots]
    found = measure([slot for slot, is_there in zip(slots, there, strict=True) if slot is not None and is_there])
    if not found:
        return torch.zeros(len(slots), dtype=torch.float64, device=device)
    values = iter(value.to(device, non_blocking=True) for value in found)
    zero = torch.zeros((), dtype=found[0].dtype, device=device)
    return torch.stack([next(values) if is_there else zero for is_there in there]).double()


def _norms(grads: list[torch.Tensor], p: float) -> list[torch.Tensor]:
    """The norm of each, accumulated so that neither fp16 overflows nor a long sum loses digits."""
    result: list[torch.Tensor | None] = [None] * len(grads)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, grad in enumerate(grads):
        if grad.device.type == "cpu" and grad.numel() > 4 * _ROW:
            result[i] = _long_norm(grad, p)
        else:
            together.setdefault((grad.device, grad.dtype), []).append(i)
    for (_, dtype), indices in together.items():
        group = [real(grads[i]) for i in indices]
        for i, norm in zip(indices, torch._foreach_norm(group, p, dtype=wide(dtype)), strict=True):
            result[i] = norm
    return [norm for norm in result if norm is not None]


def _long_norm(grad: torch.Tensor, p: float) -> torch.Tensor:
    """Rows first, then the rows' norms in float64.

    On the CPU torch sums a norm in float32 without blocking: over 20 million elements it was 9e-4 too low, this way
    2e-10, in the same time. On CUDA the kernel sums in blocks already.
    """
    flat, dtype = real(grad).reshape(-1), wide(grad.dtype)
    whole = flat.numel() // _ROW * _ROW
    parts = [torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), p, dim=1, dtype=dtype)]
    if whole < flat.numel():
        parts.append(torch.linalg.vector_norm(flat[whole:], p, dtype=dtype)[None])
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(parts).double(), p)
    return norm


def real(grad: torch.Tensor) -> torch.Tensor:
    """Magnitudes of complex elements; any other gradient itself."""
    return grad.abs() if grad.is_complex() else grad


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over gradients of ``dtype`` are taken in."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
