"""How far float32 may be from float64: the norm of a vector, and training ``tests.support.engines.Net``.

A rounding to float32 changes a number by at most :data:`UNIT` of its size. So an element of a gradient is off by at
most as many units as there are roundings on its way from the input (:data:`ROUNDINGS`), times the size of the terms
that were added up; for that stands the largest element of the parameter's gradient. Which numbers are rounded to which
side depends on the CPU's instructions, its threads and the engine's halves of the batch; how many there are does not.

What a rule or a statistic makes of such an error depends on the rule: clipped gradients are small, and the elements
below the limit are as far off as the large ones were. So the same training runs in one process in float64 with errors
of that size in its gradients and weights (:func:`drawn`), and :func:`within` compares with what comes out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.support.engines import train

#: The largest relative error of one rounding to float32.
UNIT = 2.0**-24
# A sum of n products counts n. Forward: embed with its bias 7, LayerNorm two means of 7 and 4 more, mid's Linear with
# its bias 8, GELU 4, scale 1, head 5. Backward: the derivative of the loss 3, head 3, scale 1, GELU 6, Linear 5,
# LayerNorm two means of 7 and 6 more, the sum over the batch or its halves 8, over the ranks 1.
ROUNDINGS = (7 + 18 + 8 + 4 + 1 + 5) + (3 + 3 + 1 + 6 + 5 + 20 + 8 + 1)
#: Of a weight in each step: the product with lr, the difference, and the same for an update that is scaled.
OF_WEIGHTS = 4
#: Of what is compared, by the rule or statistic itself: a norm, a quotient, a factor, a product; for up to four rules.
OWN = 16
#: All gradients too large, all too small, and eight times each element to a side that is drawn.
DRAWS = 10


def of_norm(elements: int, p: float) -> float:
    """The most that a norm of order ``p`` of so many random elements is off, relative to itself.

    torch adds one element after the other, so each sum on the way to the last is rounded, by up to a unit of its own
    size, to a side that is as good as drawn. The sums grow evenly, so their squares have a mean of 1/3 of the last's;
    so has what is evenly distributed up to a unit: the deviation of the last sum is a third of a unit times the root
    of their number. Five deviations are taken, and the norm is the p-th root of the sum.
    """
    return UNIT * (OWN + 5 / 3 * math.sqrt(elements)) / min(p, 1.0)


class _Off:
    """Training in float64 that is off as far as float32 may be."""

    def __init__(self, draw: int, spoil: Callable[[nn.Module, int, int], None] | None) -> None:
        self._draw, self._spoil = draw, spoil
        self._generator = torch.Generator().manual_seed(draw)

    def _sides(self, parameter: nn.Parameter) -> torch.Tensor:
        if self._draw < 2:
            return parameter.grad.sign() * (1 - 2 * self._draw)
        return torch.randint(0, 2, parameter.shape, generator=self._generator) * 2 - 1

    def gradients(self, model: nn.Module, step: int, rank: int) -> None:
        for parameter in model.parameters():
            grad = parameter.grad
            grad.add_(self._sides(parameter) * grad.abs().max() * (ROUNDINGS * UNIT))
        if self._spoil is not None:
            self._spoil(model, step, rank)

    def optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=lr)

        @torch.no_grad()
        def weights(*_: object) -> None:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if parameter.grad is not None:
                    parameter.sub_(self._sides(parameter) * parameter.abs() * (OF_WEIGHTS * UNIT))

        optimizer.register_step_post_hook(weights)
        return optimizer


def drawn(*args: Any, spoil: Callable[[nn.Module, int, int], None] | None = None, **kwargs: Any) -> list[Any]:
    """What ``train(0, "plain", *args, **kwargs)`` gives in float64 with errors as large as those of float32."""
    offs = [_Off(draw, spoil) for draw in range(DRAWS)]
    run = functools.partial(train, 0, "plain", *args, dtype=torch.float64, **kwargs)
    return [run(spoil=off.gradients, optimizer_of=off.optimizer) for off in offs]


def within(found: Any, truth: Any, draws: Sequence[Any]) -> bool:
    """Whether ``found`` is no farther from ``truth`` than one of ``draws`` is, in whatever they are nested.

    What is no float, a count, a name or how many bins there are, is as in the truth or as in a draw: a number may be
    beside a limit.
    """
    if isinstance(truth, dict):
        inside = {key: [draw[key] for draw in draws if key in draw] for key in truth}
        return found.keys() == truth.keys() and all(within(found[key], truth[key], inside[key]) for key in truth)
    if isinstance(truth, (list, tuple)):
        if len(found) != len(truth):  # a histogram with one more bin
            return found in draws
        alike = [draw for draw in draws if len(draw) == len(truth)]
        return all(within(found[i], truth[i], [draw[i] for draw in alike]) for i in range(len(truth)))
    if not isinstance(truth, (float, torch.Tensor)):
        return found in (truth, *draws)
    found, truth, *draws = (torch.as_tensor(each, dtype=torch.float64) for each in (found, truth, *draws))
    finite = truth.isfinite()
    if not torch.allclose(found[~finite], truth[~finite], equal_nan=True):
        return False
    largest = float(truth[finite].abs().max()) if finite.any() else 0.0
    room = max((float((draw - truth)[finite].abs().max()) for draw in draws if finite.any()), default=0.0)
    return bool(((found - truth)[finite].abs() <= room + OWN * UNIT * largest).all())
