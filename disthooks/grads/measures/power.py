"""Sums of powers and largest magnitudes, of which any norm is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from disthooks.errors import UsageError
from disthooks.grads.measures.base import Fact, Local, Measure, Merge, real, stack, wide
from disthooks.grads.measures.scan import known
from disthooks.grads.order import ordered, unordered

_ROW = 1024
# Elements that torch may sum in float32 on the CPU: of random ones it loses 2e-7, of equal ones 2e-5 at most; of halves
# it keeps fewer sums at a time. Longer gradients are cut, the longest into rows, which two cores share.
_PIECE = {torch.float16: 2**12, torch.bfloat16: 2**12}
_LONGEST = 2**15
_LARGE = 2**17
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
                f"norm_type={self.p!r}: a number above 0 and up to 16 (higher powers overflow), or math.inf, is needed"
            )

    @property
    def merge(self) -> Merge:  # type: ignore[override]
        """SUM, or MAX for infinity."""
        return "max" if math.isinf(self.p) else "sum"

    @property
    def facts(self) -> frozenset[Fact]:  # type: ignore[override]
        """For the usual norms what others may need too."""
        return _FACTS.get(float(self.p), frozenset())

    def local(self, local: Local) -> torch.Tensor:
        """The sum of powers, or the largest, for each parameter."""
        if math.isinf(self.p):
            found = known(local, self.facts)
            return ordered(torch.maximum(found["high"], found["low"]).clamp(min=0))
        for fact in self.facts & local.known.keys():
            return local.known[fact]
        if self.p == 2:
            return squares(local.grads, local.device)
        return stack(local.grads, lambda grads: norms(grads, self.p), local.device).pow(self.p)

    def norm(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """The norm of all the gradients along ``dim``, as if they were one vector."""
        if math.isinf(self.p):
            return unordered(values.amax(dim))
        return values.sum(dim).pow(1 / self.p)


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
    return total


def norms(grads: list[torch.Tensor], p: float) -> list[torch.Tensor]:
    """The norm of each, accumulated so that neither fp16 overflows nor a long sum loses digits."""
    short = _PIECE.get(grads[0].dtype, _LONGEST) if p == 2 and grads else 4 * _ROW
    if len(grads) == 1 and 0 < grads[0].numel() <= short:  # in a hook, for each parameter: no lists
        return [torch.linalg.vector_norm(real(grads[0]), p, dtype=wide(grads[0].dtype))]
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


def norm_label(p: float) -> str:
    """The name of a norm in the log.

    >>> norm_label(2.0), norm_label(1), norm_label(math.inf)
    ('grad_norm', 'grad_norm_l1', 'grad_norm_linf')
    """
    return "grad_norm" if p == 2 else f"grad_norm_l{p:g}"
