"""``Norm``, ``MaxAbs`` and ``NonFinite``, with the sums of powers and the largest magnitudes that they are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.errors import UsageError
from disthooks.grads.collectives import from_sortable, to_sortable
from disthooks.grads.stats.base import Fact, Found, Local, Measure, Merge, Stat, State, peaks, real, stack, wide
from disthooks.grads.stats.scan import FirstToFail, NonFiniteCount, OwnNonFinite, known, ranks_in

_ROW = 1024
# Elements that torch may sum in float32 on the CPU: of random ones it loses 2e-7, of equal ones 2e-5 at most; of halves
# it keeps fewer sums at a time. Longer gradients are cut, the longest into rows, which two cores share.
_PIECE = {torch.float16: 2**12, torch.bfloat16: 2**12}
_LONGEST = 2**15
_LARGE = 2**17
_BLOCK = 2**22  # elements that are made float64 at a time
# Where elements are larger in the mean, float32 loses nothing that counts: squares below 1e-38, where it has fewer
# digits, or none if the processor flushes them to zero, are 1e-8 of the sum at most.
_SMALL = 1e-15
_WINDOW = 900  # exponents of two
_BINADES = 330  # exponents that a norm of float32 elements may have, from -149 to 128 and the root of their number
_ONE_WINDOW = 6.0  # the highest power of them that one float64 holds
_FACTS: dict[float, frozenset[Fact]] = {
    1.0: frozenset({"abs"}),
    2.0: frozenset({"squares"}),
    math.inf: frozenset({"high", "low"}),
}


@dataclass(frozen=True)
class Power(Measure):
    """Sum over elements of |g| to the ``p``; for infinity, the largest |g|.

    Merged over ranks and parameters it gives any ``p`` norm: :meth:`norm`.

    >>> measure = Power(2.0)
    >>> measure.norm(torch.tensor([[9.0], [16.0]]), dim=0)
    tensor([5.])
    """

    p: float

    def __post_init__(self) -> None:
        number = isinstance(self.p, (int, float)) and not isinstance(self.p, bool)
        if not number or not (0 < self.p <= 16 or math.isinf(self.p)) or self.p < 0:
            raise UsageError(
                f"norm_type={self.p!r}: a number above 0 and up to 16, or math.inf, is needed; above 16 a norm is "
                "hardly another one than that of infinity"
            )

    @property
    def merge(self) -> Merge:  # type: ignore[override]
        """SUM, or MAX for infinity."""
        return "max" if math.isinf(self.p) else "sum"

    @property
    def facts(self) -> frozenset[Fact]:  # type: ignore[override]
        """For the usual norms what others may need too."""
        return _FACTS.get(float(self.p), frozenset())

    def width(self, shard: Shard | None) -> int:
        """One number, or several where one float64 is too narrow; see [Note: high powers]."""
        return self._windows

    @property
    def _windows(self) -> int:
        return 1 if self.p <= _ONE_WINDOW or math.isinf(self.p) else math.ceil(self.p * _BINADES / _WINDOW)

    def local(self, local: Local) -> torch.Tensor:
        """The sum of powers, or the largest, for each parameter."""
        if math.isinf(self.p):
            found = known(local, self.facts)
            # See [Note: MAX of integers keeps NaN].
            return to_sortable(torch.maximum(found["high"], found["low"]).clamp(min=0))
        for fact in self.facts & local.known.keys():
            return local.known[fact]
        if self.p == 2:
            return squares(local.grads, local.device)
        each = stack(local.grads, lambda grads: norms(grads, self.p), local.device)
        return each.pow(self.p) if self._windows == 1 else self._split(each)

    def norm(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """The norm of all the gradients along ``dim``, as if they were one vector.

        Args:
            values: the numbers of several parameters in one row, or a row for each scope.
            dim: 0 for the row of all; 1 for a norm of each row.
        """
        if math.isinf(self.p):
            return from_sortable(values.amax(dim))
        if self._windows == 1:
            return values.sum(dim).pow(1 / self.p)
        return self._joined(values.view(-1, self._windows).sum(0) if values.ndim == 1 else values)

    def each(self, values: torch.Tensor) -> torch.Tensor:
        """The norm of each parameter, whose numbers are in one row."""
        return self.norm(values.view(-1, self._windows), dim=1)

    # [Note: high powers] The sixteenth power of a float32 number has an exponent between -2400 and 2100, and a float64
    # ends at 1023. So the sum has several numbers, each for a window of 900 exponents: the power of a rank's norm is
    # put into the window of its exponent, in units of the window's middle, and windows are added over ranks and
    # parameters. What is smaller than the highest window by more than one is nothing beside it.

    def _split(self, each: torch.Tensor) -> torch.Tensor:
        exponents = self.p * each.log2()
        windows = torch.arange(self._windows, device=each.device)
        at = (exponents / _WINDOW + self._windows / 2).floor()
        at = at.nan_to_num(self._windows).clamp(0, self._windows - 1)  # NaN and infinity in the highest
        scaled = torch.exp2(exponents[:, None] - self._middle(windows))
        return torch.where(at[:, None] == windows, scaled, 0.0).flatten()

    def _joined(self, rows: torch.Tensor) -> torch.Tensor:
        windows = torch.arange(self._windows, device=rows.device)
        top = torch.where(rows != 0, windows, 0).amax(-1, keepdim=True)
        below = torch.where(top > 0, rows.gather(-1, (top - 1).clamp(min=0)), 0.0)
        total = rows.gather(-1, top) + below * 2.0**-_WINDOW
        return torch.exp2((total.log2() + self._middle(top)) / self.p).squeeze(-1)

    def _middle(self, windows: torch.Tensor) -> torch.Tensor:
        return (windows - self._windows / 2 + 0.5).double() * _WINDOW


def squares(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """For each tensor the sum of its squares, float64 on ``device``; 0 where there is none."""
    if all(tensor is None or tensor.is_cpu for tensor in tensors):
        return _on_cpu(tensors).to(device)
    return stack(tensors, lambda found: norms(found, 2.0), device).square()


def _on_cpu(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """With as few calls as can be: one for all that is short, one for each long one."""
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
                parts = [flat[whole:]] if whole < size else []
            else:
                most = _PIECE.get(tensor.dtype, _LONGEST)
                parts = [tensor] if size <= most else list(torch.split(tensor.reshape(-1), most))
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
    for i, norm in _doubted(total.sqrt(), tensors, 2.0):
        total[i] = norm.square()
    return total


def norms(grads: list[torch.Tensor], p: float) -> list[torch.Tensor]:
    """The norm of each, so that no power overflows or vanishes, and a long sum loses no digits.

    Of order 1 and 2: on an accelerator summed in float64; on the CPU in float32, which is twenty times as fast there,
    and again in float64 where the result says that float32 was too narrow.
    """
    if p not in (1, 2):
        return [scaled_norm(grad, p) for grad in grads]
    short = _PIECE.get(grads[0].dtype, _LONGEST) if p == 2 and grads else 4 * _ROW
    if len(grads) == 1 and grads[0].is_cpu and 0 < grads[0].numel() <= short:  # in a hook, for each parameter: no lists
        norm = torch.linalg.vector_norm(real(grads[0]), p, dtype=wide(grads[0].dtype))
        size = float(norm)
        if _SMALL * math.sqrt(grads[0].numel()) <= size < math.inf or (size == 0 and _is_zero(grads[0])):
            return [norm]
        found = [norm]
    else:
        found = _together(grads, p)
    if any(grad.is_cpu for grad in grads):
        here = [grad if grad.is_cpu else None for grad in grads]
        sizes = torch.stack([norm.double() if norm.is_cpu else torch.ones((), dtype=torch.float64) for norm in found])
        for i, norm in _doubted(sizes, here, p):
            found[i] = norm
    return found


def _together(grads: list[torch.Tensor], p: float) -> list[torch.Tensor]:
    result: list[torch.Tensor | None] = [None] * len(grads)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, grad in enumerate(grads):
        if grad.device.type == "cpu" and grad.numel() > 4 * _ROW:
            result[i] = _long_norm(grad, p)
        else:
            together.setdefault((grad.device, grad.dtype), []).append(i)
    for (device, dtype), indices in together.items():
        group = [real(grads[i]) for i in indices]
        summed = wide(dtype) if device.type == "cpu" else torch.float64
        for i, norm in zip(indices, torch._foreach_norm(group, p, dtype=summed), strict=True):
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


def _doubted(found: torch.Tensor, grads: Sequence[torch.Tensor | None], p: float) -> Iterator[tuple[int, torch.Tensor]]:
    """Norms on the CPU that float32 may have been too narrow for, again: only there the host may look which."""
    doubt = ~torch.isfinite(found)
    if p == 2:
        doubt |= found < _SMALL * math.sqrt(max((grad.numel() for grad in grads if grad is not None), default=0))
    for i in doubt.nonzero().flatten().tolist():
        grad = grads[i]
        if grad is None or not grad.numel() or _SMALL * math.sqrt(grad.numel()) <= float(found[i]) < math.inf:
            continue
        if found[i] != 0 or not _is_zero(grad):
            yield i, scaled_norm(grad, p)


def _is_zero(grad: torch.Tensor) -> bool:
    """Whether all elements are, on the CPU; gradients of zeros are frequent, and their norms are right."""
    if grad.numel() <= _LONGEST or grad.is_complex():
        return not int(torch.count_nonzero(grad))
    return bool(grad.amax() == 0) and bool(grad.amin() == 0)


def scaled_norm(grad: torch.Tensor, p: float) -> torch.Tensor:
    """The norm of order ``p`` in float64, of elements divided by the largest one: no power can overflow or vanish."""
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
    """The name of a norm in the log.

    >>> norm_label(2.0), norm_label(1), norm_label(math.inf)
    ('grad_norm', 'grad_norm_l1', 'grad_norm_linf')
    """
    return "grad_norm" if p == 2 else f"grad_norm_l{p:g}"


@register("stat")
@dataclass(frozen=True)
class Norm(Stat):
    """The norm of all gradients as if they were one vector: ``grad_norm`` in the log.

    Args:
        norm_type: which norm; any number above 0 and up to 16, or ``math.inf``. Others than 2 are logged as
            ``grad_norm_l1``, ``grad_norm_linf`` and so on.
        per_parameter: also log that of each parameter, as ``grad_norm/param/<name>``.

    Raises:
        UsageError: when ``norm_type`` is none of these.

    >>> Norm(1.0).numbers([torch.tensor([[7.0], [3.0]])])
    {'grad_norm_l1': tensor([7., 3.])}
    """

    norm_type: float = 2.0

    def __post_init__(self) -> None:
        Power(self.norm_type)

    def measures(self) -> tuple[Measure, ...]:
        """The sum of powers."""
        return (Power(float(self.norm_type)),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The norm."""
        return {norm_label(self.norm_type): Power(float(self.norm_type)).norm(values[0], dim=1)}


@register("stat")
@dataclass(frozen=True)
class MaxAbs(Stat):
    """The largest magnitude among all elements: ``grad_max_abs``; not a number if any element is.

    >>> from disthooks.grads.collectives import to_sortable
    >>> MaxAbs().numbers([to_sortable(torch.tensor([[2.0]]))])
    {'grad_max_abs': tensor([2.], dtype=torch.float64)}
    """

    def measures(self) -> tuple[Measure, ...]:
        """The infinity norm."""
        return (Power(math.inf),)

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The largest."""
        return {"grad_max_abs": Power(math.inf).norm(values[0], dim=1)}


@register("stat")
@dataclass(frozen=True)
class NonFinite(Stat):
    """How many elements are infinite or not a number, in which parameters, and on which ranks it began.

    Logged are ``nonfinite``, the count with each element counted once, ``nonfinite_at``, a list of
    ``{"param": name, "count": n, "rank": r}`` for the parameters that have any, in model order, and
    ``nonfinite_ranks``, the global ranks whose own gradients, before any reduction, were non-finite. ``rank`` is the
    lowest of them for that parameter; None when there was none, so that the reduction itself overflowed or the loss of
    digits came after it.

    A step that is not finite is logged in any case, with its own step, whatever ``every`` is: of several in a row the
    first one (:mod:`disthooks.grads.records`). That takes a look at each gradient in every backward, and one SUM in
    every step.

    >>> counts, first = torch.tensor([[0.0], [3.0]]), torch.tensor([[0], [2]])
    >>> rows = {NonFiniteCount(): counts, FirstToFail(): first, OwnNonFinite(): torch.tensor([[0.0], [3.0]])}
    >>> NonFinite().record(Found(["w", "b"], {}, rows, [4, 5]))
    {'nonfinite': 3, 'nonfinite_at': [{'param': 'b', 'count': 3, 'rank': 4}], 'nonfinite_ranks': [4, 5]}
    """

    def measures(self) -> tuple[Measure, ...]:
        """The counts, the first rank to fail, and all of them."""
        return NonFiniteCount(), FirstToFail(), OwnNonFinite()

    def always(self) -> tuple[Measure, ...]:
        """What tells a step that is not finite: the counts and the ranks, both of a SUM."""
        return NonFiniteCount(), OwnNonFinite()

    def numbers(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The count."""
        return {"nonfinite": values[0][:, 0]}

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        """The counts and where."""
        counts, firsts, marks = (found.rows[measure][:, 0].tolist() for measure in self.measures())
        ranks = [found.ranks[len(found.ranks) - first] if first > 0 else None for first in firsts]
        at = [
            {"param": name, "count": int(count), "rank": rank}
            for name, count, rank in zip(found.names, counts, ranks, strict=True)
            if count
        ]
        made = {rank for rank, count in zip(ranks, counts, strict=True) if count and rank is not None}
        for mark, count in zip(marks, counts, strict=True):
            made |= set((ranks_in(mark, found.ranks) or ()) if count else ())
        numbers = {name: int(count) for name, count in super().record(found).items()}
        return numbers | {"nonfinite_at": at, "nonfinite_ranks": sorted(made)}
