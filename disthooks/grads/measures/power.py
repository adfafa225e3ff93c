"""Sums of powers and largest magnitudes, of which any norm is made."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from disthooks.errors import UsageError
from disthooks.grads.measures.base import Fact, Local, Measure, Merge, real, stack, wide
from disthooks.grads.measures.scan import known
from disthooks.grads.order import ordered, unordered

_ROW = 1024
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
        return stack(local.grads, lambda grads: norms(grads, self.p), local.device).pow(self.p)

    def norm(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """The norm of all the gradients along ``dim``, as if they were one vector."""
        if math.isinf(self.p):
            return unordered(values.amax(dim))
        return values.sum(dim).pow(1 / self.p)


def norms(grads: list[torch.Tensor], p: float) -> list[torch.Tensor]:
    """The norm of each, accumulated so that neither fp16 overflows nor a long sum loses digits."""
    if len(grads) == 1 and 0 < grads[0].numel() <= 4 * _ROW:  # in a hook, for each parameter: no lists
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
