"""The stage of a pipeline that asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from disthooks.errors import UsageError


@dataclass(frozen=True)
class Recompute:
    """Stage: drop a saved tensor that is a cheap function of other saved ones, and compute it again in backward.

    Lossless, and found from the graph, the model stays as it is: the output of a ReLU behind a batch norm is computed
    from the input of the batch norm, which is saved anyway. The functions known are in
    ``disthooks/saved/recompute/formulas.py``. The first time at each place of a module the value is computed at once
    and compared with the original bit for bit; where it differs the original is stored as if this stage was not
    there, and ``report().differed`` names the place. On a GPU the host waits for this, until a place is trusted; what
    was proven is kept as long as the model (of a ``saving`` block: as long as the code that made it).

    Args:
        steps: most operators that are run for one tensor, from what is stored; views are free.
        check: ``"sampled"`` compares the 1st, 2nd, 4th, 8th, ... tensor of each place, and raises a ``StoreError``
            where it differs only later: something that the graph does not show had a hand in it. On a GPU nobody waits
            for these comparisons, and the error comes in backward or in a later step. ``"always"``
            compares each before it is dropped, for the price of computing everything twice and of waiting for the
            device: what differs is stored, whenever that is.

    Raises:
        UsageError: when ``steps`` is no positive int, or ``check`` none of the two.

    >>> import torch
    >>> from disthooks import OnDisk, pipeline, saving
    >>> x = torch.ones(256, 256, requires_grad=True)
    >>> with saving(pipeline(Recompute(), OnDisk("/tmp"))) as saved:
    ...     y = torch.nn.functional.silu(x * 2).square().sum()
    >>> y.backward()
    >>> saved.report().stored, saved.report().recomputed_by
    (262144, {'silu': 262144})
    """

    steps: int = 6
    check: Literal["sampled", "always"] = "sampled"

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise UsageError(f"Recompute: steps must be a positive int, got {self.steps!r}")
        if self.check not in ("sampled", "always"):
            raise UsageError(f"Recompute: check must be 'sampled' or 'always', got {self.check!r}")
