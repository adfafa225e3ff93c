"""``Norm`` and ``MaxAbs``, with the sums of powers and the largest magnitudes that they are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from disthooks._registry import register
from disthooks._torch import flatten
from disthooks.errors import UsageError
from disthooks.grads.collectives import from_sortable, to_sortable
from disthooks.grads.stats.base import Fact, Local, Measure, Merge, Stat, peaks, real, stack, wide
from disthooks.grads.stats.scan import compute_facts

# [Note: float32 norms on the CPU]
# On the CPU a norm in float64 takes about a hundred times as long as one in float32 (decision 103), so norms of order 1
# and 2 are computed in float32 first. Two things can go wrong then, and each has an answer here.
# A long sum loses digits, because torch adds float32 numbers without blocking. So a long gradient is cut: each piece or
# row is summed in float32, and the pieces are summed in float64.
# A square can leave the range of float32. Then the result is infinite, or it is very small for the number of elements.
# Such a norm is doubtful: it is computed again in float64, by `scaled_norm`. The host may look at numbers on the CPU
# without waiting, so only the doubtful norms cost more. On an accelerator the host would have to wait for the device.
# There every norm is summed in float64.

_ROW = 1024  # elements of a row; the norm of each row is summed in float32
# The most elements of one piece that torch sums in float32 on the CPU. In a piece of this length random elements lose
# 2e-7 of a sum of squares and 2e-6 of a sum of magnitudes, and equal elements lose 2e-5 at most. For half precision
# torch keeps fewer partial sums at a time, so pieces are shorter.
_PIECE = {torch.float16: 2**12, torch.bfloat16: 2**12}
_LONGEST = 2**15
_LARGE = 2**17  # gradients with more elements are cut into rows, because torch shares rows between the cores
_BLOCK = 2**22  # elements that are converted to float64 at a time, so that the copy stays small
# If the root mean square of the elements is above this, float32 is wide enough. Squares below 1e-38 have fewer digits
# in float32, or none if the processor flushes them to zero, but together they are at most 1e-8 of the sum.
_SMALL = 1e-15
# The highest order of a norm. A norm of float32 elements has one of 330 exponents: from -149 to 128, and more for the
# root of their number. So its sixth power is the highest one that a float64 holds (decision 103).
_HIGHEST = 6
# The facts that make a power by themselves. One reading of the gradients finds them for all measures (decision 59).
_FACTS: dict[float, frozenset[Fact]] = {
    1.0: frozenset({"abs"}),
    2.0: frozenset({"squares"}),
    math.inf: frozenset({"high", "low"}),
}


@dataclass(frozen=True)
class Power(Measure):
    """The sum over the elements of ``|g| ** p``; for ``p = math.inf`` the largest ``|g|``.

    The sums of several ranks or parameters add up, and the largest magnitudes merge by a MAX. :meth:`norm` computes the
    norm from merged numbers.

    Attributes:
        p: the order of the norm: above 0 and up to 6, or ``math.inf``.

    Raises:
        UsageError: when ``p`` is none of these.

    >>> measure = Power(2.0)
    >>> measure.norm(torch.tensor([[9.0], [16.0]]), dim=0)
    tensor([5.])
    """

    p: float

    def __post_init__(self) -> None:
        number = isinstance(self.p, (int, float)) and not isinstance(self.p, bool)
        if not number or not (0 < self.p <= _HIGHEST or self.p == math.inf):
            raise UsageError(
                f"norm_type={self.p!r}: a number above 0 and up to {_HIGHEST}, or math.inf, is needed; use math.inf in "
                "place of a higher order"
            )

    @property
    def merge(self) -> Merge:  # type: ignore[override]
        return "max" if math.isinf(self.p) else "sum"

    @property
    def facts(self) -> frozenset[Fact]:  # type: ignore[override]
        return _FACTS.get(float(self.p), frozenset())

    def local(self, local: Local) -> torch.Tensor:
        if math.isinf(self.p):
            found = compute_facts(local, self.facts)
            # Both are minus infinity for a parameter without elements here; its largest magnitude is 0.
            # See [Note: MAX of integers keeps NaN].
            return to_sortable(torch.maximum(found["high"], found["low"]).clamp(min=0))
        for fact in self.facts & local.computed_facts.keys():  # the one fact, if the reading for all measures found it
            return local.computed_facts[fact]
        if self.p == 2:
            return squares(local.grads, local.device, local.is_summed)
        # The norm comes first and its power afterwards, because powers of single elements could overflow.
        each = stack(local.grads, lambda grads: norms(grads, self.p), local.device)
        return each.pow(self.p)

    def norm(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """The norm of all gradients along ``dim``, as if they were one vector.

        Args:
            values: merged numbers: of several parameters in one row (one dimension), or one row for each scope (two
                dimensions).
            dim: 0 for one norm of the whole row; 1 for one norm of each row.

        Returns:
            A float64 scalar tensor for ``dim=0``, else a float64 vector with one norm for each row.
        """
        if math.isinf(self.p):
            return from_sortable(values.amax(dim))
        return values.sum(dim).pow(1 / self.p)

    def each(self, values: torch.Tensor) -> torch.Tensor:
        """The norm of each parameter, from the merged numbers of all parameters in one row."""
        return self.norm(values.view(-1, 1), dim=1)


def squares(tensors: Sequence[torch.Tensor | None], device: torch.device, is_summed: bool = False) -> torch.Tensor:
    """For each tensor the sum of the squares of its elements: a float64 vector on ``device``; 0 for None."""
    if all(tensor is None for tensor in tensors):
        return torch.zeros(len(tensors), dtype=torch.float64, device=device)
    if all(tensor is None or tensor.is_cpu for tensor in tensors):
        return (_total_on_cpu if is_summed else _on_cpu)(tensors).to(device)
    return stack(tensors, lambda found: norms(found, 2.0), device).square()


def _total_on_cpu(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The sum of the squares of all tensors together, and a 0 for each tensor after the first.

    A call costs more than the sum of a short tensor. So short tensors of one dtype are copied into a piece that one
    call sums. See [Note: float32 norms on the CPU].
    """
    there = [tensor for tensor in tensors if tensor is not None]
    long: list[torch.Tensor] = []
    total = 0.0
    for dtype in dict.fromkeys(tensor.dtype for tensor in there):
        most = _PIECE.get(dtype, _LONGEST) - 1  # torch copies fast if the result has fewer than 2**15 elements
        short = 0 if dtype.is_complex else most // 8
        pieces: list[list[torch.Tensor]] = []
        room = 0
        for tensor in there:
            size = tensor.numel()
            if tensor.dtype is not dtype:
                continue
            if size > short:
                long.append(tensor)
            elif size > room:
                pieces.append([tensor])
                room = most - size
            elif size:
                pieces[-1].append(tensor)
                room -= size
        for piece in pieces:
            norm = float(norms([flatten(piece)], 2.0)[0])
            total += norm * norm
    numbers = torch.zeros(len(tensors), dtype=torch.float64)
    numbers[0] = total + float(_on_cpu(long).sum())
    return numbers


def _on_cpu(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The sums of squares on the CPU, by one call for all short pieces and one call for each long tensor.

    See [Note: float32 norms on the CPU]. A call costs more than the sum of a short tensor.
    """
    total = torch.zeros(len(tensors), dtype=torch.float64)
    short: dict[torch.dtype, tuple[list[torch.Tensor], list[int]]] = {}
    long: list[tuple[int, torch.Tensor]] = []
    for i, tensor in enumerate(tensors):
        if tensor is not None and (size := tensor.numel()):
            pieces, owners = short.setdefault(tensor.dtype, ([], []))
            if size > _LARGE:
                flat = real(tensor).reshape(-1)
                whole = size // _ROW * _ROW
                rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=wide(tensor.dtype))
                long.append((i, rows))
                parts = [flat[whole:]] if whole < size else []  # the elements that do not fill a row
            else:
                many = -(-size // _PIECE.get(tensor.dtype, _LONGEST))
                if many > 1 and tensor.shape[0] % many:
                    tensor = tensor.reshape(-1)
                parts = [tensor] if many == 1 else list(tensor.chunk(many))
            pieces += parts
            owners += [i] * len(parts)
    for dtype, (pieces, owners) in short.items():
        pieces = [real(piece) for piece in pieces] if dtype.is_complex else pieces
        if pieces:
            found = torch.stack(torch._foreach_norm(pieces, 2, dtype=wide(dtype)))
            total.index_add_(0, torch.tensor(owners), found.double().square())
    if long:
        counts = torch.tensor([len(rows) for _, rows in long])
        owner = torch.repeat_interleave(torch.tensor([i for i, _ in long]), counts)
        total.index_add_(0, owner, torch.cat([rows.double() for _, rows in long]).square())
    for i, norm in _doubted(total.sqrt(), tensors, 2.0):  # see [Note: float32 norms on the CPU]
        total[i] = norm.square()
    return total


def norms(grads: list[torch.Tensor], p: float) -> list[torch.Tensor]:
    """The norm of order ``p`` of each gradient: scalar tensors, on the gradients' devices, in the same order.

    No power overflows or vanishes, and a long sum loses no digits. Norms of order 1 and 2 are summed in float64 on an
    accelerator. On the CPU they are summed in float32, and again in float64 if float32 was too narrow. See
    [Note: float32 norms on the CPU].
    """
    if p not in (1, 2):
        return [scaled_norm(grad, p) for grad in grads]
    short = _PIECE.get(grads[0].dtype, _LONGEST) if p == 2 and grads else 4 * _ROW
    if len(grads) == 1 and grads[0].is_cpu and 0 < grads[0].numel() <= short:
        # A hook calls this for each parameter in every backward, so this case makes no lists.
        norm = torch.linalg.vector_norm(real(grads[0]), p, dtype=wide(grads[0].dtype))
        size = float(norm)
        if _SMALL * math.sqrt(grads[0].numel()) <= size < math.inf or (size == 0 and _is_zero(grads[0])):
            return [norm]
        found = [norm]
    else:
        found = _together(grads, p)
    if any(grad.is_cpu for grad in grads):
        here = [grad if grad.is_cpu else None for grad in grads]
        # Norms on another device count as 1, which is never doubtful, so the host does not wait for them.
        sizes = torch.stack([norm.double() if norm.is_cpu else torch.ones((), dtype=torch.float64) for norm in found])
        for i, norm in _doubted(sizes, here, p):
            found[i] = norm
    return found


def _together(grads: list[torch.Tensor], p: float) -> list[torch.Tensor]:
    """The norm of each, by one kernel launch for all gradients of the same device and dtype.

    See [Note: float32 norms on the CPU].
    """
    result: list[torch.Tensor | None] = [None] * len(grads)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, grad in enumerate(grads):
        if grad.is_cpu and grad.numel() > 4 * _ROW:
            # A long gradient on the CPU: the norms of its rows, and then their norm in float64. Without rows the norm
            # of 20 million elements was 9e-4 too low. With rows the error was 2e-10, in the same time.
            flat, dtype = real(grad).reshape(-1), wide(grad.dtype)
            whole = flat.numel() // _ROW * _ROW
            parts = [torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), p, dim=1, dtype=dtype)]
            if whole < flat.numel():
                parts.append(torch.linalg.vector_norm(flat[whole:], p, dtype=dtype)[None])
            result[i] = torch.linalg.vector_norm(torch.cat(parts).double(), p)
        else:
            together.setdefault((grad.device, grad.dtype), []).append(i)
    for (device, dtype), indices in together.items():
        group = [real(grads[i]) for i in indices]
        summed = wide(dtype) if device.type == "cpu" else torch.float64
        for i, norm in zip(indices, torch._foreach_norm(group, p, dtype=summed), strict=True):
            result[i] = norm
    return [norm for norm in result if norm is not None]


def _doubted(found: torch.Tensor, grads: Sequence[torch.Tensor | None], p: float) -> Iterator[tuple[int, torch.Tensor]]:
    """The places of the doubtful norms, each with the norm in float64. See [Note: float32 norms on the CPU]."""
    doubt = ~torch.isfinite(found)
    if p == 2:
        # The bound for the longest gradient is the highest. The loop below compares each norm with its own bound.
        doubt |= found < _SMALL * math.sqrt(max((grad.numel() for grad in grads if grad is not None), default=0))
    for i in doubt.nonzero().flatten().tolist():
        grad = grads[i]
        if grad is None or not grad.numel() or _SMALL * math.sqrt(grad.numel()) <= float(found[i]) < math.inf:
            continue
        if found[i] != 0 or not _is_zero(grad):
            yield i, scaled_norm(grad, p)


def _is_zero(grad: torch.Tensor) -> bool:
    """Whether all elements are zero. Such gradients on the CPU are frequent, and their norm of 0 is right."""
    if grad.numel() <= _LONGEST or grad.is_complex():
        return not int(torch.count_nonzero(grad))
    # In a long gradient the extremes are found faster than the zeros are counted.
    return bool(grad.amax() == 0) and bool(grad.amin() == 0)


def scaled_norm(grad: torch.Tensor, p: float) -> torch.Tensor:
    """The norm of order ``p``, a float64 scalar tensor; no power can overflow or vanish.

    The elements of each block are divided by the largest magnitude of the block before their powers are summed.
    """
    parts = [_scaled(part) for part in torch.split(real(grad).reshape(-1), _BLOCK)] if grad.numel() else []
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=grad.device)
    found = torch.stack([peak * torch.linalg.vector_norm(rest, p) for peak, rest in parts])
    peak, rest = _scaled(found)
    return peak * torch.linalg.vector_norm(rest, p) if len(parts) > 1 else found[0]


def _scaled(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = values.double().abs()
    peak = peaks(sizes.amax())
    return peak, sizes / peak


def norm_label(p: float) -> str:
    """The name of the norm of order ``p`` in the log.

    >>> norm_label(2.0), norm_label(1), norm_label(math.inf)
    ('grad_norm', 'grad_norm_l1', 'grad_norm_linf')
    """
    return "grad_norm" if p == 2 else f"grad_norm_l{p:g}"


@register("stat")
@dataclass(frozen=True)
class Norm(Stat):
    """The norm of all gradients as if they were one vector: ``grad_norm`` in the log.

    Args:
        norm_type: the order of the norm: any number above 0 and up to 6, or ``math.inf``. The log names orders other
            than 2: ``grad_norm_l1``, ``grad_norm_linf`` and so on.
        per_parameter: log the norm of each parameter too, as ``grad_norm/param/<name>``.

    Raises:
        UsageError: when ``norm_type`` is out of this range.

    >>> Norm(1.0).numbers([torch.tensor([[7.0], [3.0]])])
    {'grad_norm_l1': tensor([7., 3.])}
    """

    norm_type: float = 2.0

    def __post_init__(self) -> None:
        Power(self.norm_type)

    def measures(self) -> tuple[Measure, ...]:
        return (Power(float(self.norm_type)),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {norm_label(self.norm_type): Power(float(self.norm_type)).norm(values[0], dim=1)}


@register("stat")
@dataclass(frozen=True)
class MaxAbs(Stat):
    """The largest magnitude among all elements: ``grad_max_abs``; NaN if any element is NaN.

    >>> from disthooks.grads.collectives import to_sortable
    >>> MaxAbs().numbers([to_sortable(torch.tensor([[2.0]]))])
    {'grad_max_abs': tensor([2.], dtype=torch.float64)}
    """

    def measures(self) -> tuple[Measure, ...]:
        return (Power(math.inf),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"grad_max_abs": Power(math.inf).norm(values[0], dim=1)}
