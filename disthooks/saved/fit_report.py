"""``FitReport``: the budget, the peak of a step, and what stayed, moved, or was computed again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from disthooks._tensors import format_bytes
from disthooks.saved.computed_again import Outlook
from disthooks.saved.cost import Kind
from disthooks.saved.report import BudgetReport, SavedReport, SiteReport

_FEW = 3  # how many modules or kinds a text names


@dataclass(frozen=True)
class FitReport:
    """What :func:`fit` has found so far, on this rank.

    Attributes:
        budget: the bytes that were promised; 0 before the first forward if it is what is free then.
        device: of the memory that is counted.
        rounds: how many were measured: a forward with gradients on, or several that wait for the same backward.
        peak: the most bytes in use in the last of them; 0 before the first.
        limit: how many bytes of saved tensors stay on the device in the round that is under way.
        missing: about how many bytes more of the budget would have kept all saved tensors there in the last round.
        again: about how many bytes it has computed again: layers with a checkpoint, as far as :func:`fit` has switched
            one off and knows what it saves, and what ``Recompute`` dropped.
        checkpoints: how many layers of the model are checkpointed so that :func:`fit` can switch their checkpoints off.
        checkpoints_off: how many of these checkpoints are off in the round that is under way.
        outlook: what some bytes more or less would change in the time of a step; None while that was not measured.
        kinds: what was computed again in the last round, and about how many seconds that took; NaN if it was not
            measured. One of them may be the checkpointed layers.
        sites: what was done in the last round with the saved tensors of each module that hooks are on.
        saved: what was done with the saved tensors since :func:`fit` was called.

    >>> from dataclasses import replace
    >>> kept = SavedReport(budget=BudgetReport(60 << 30, 57 << 30, rounds=10, steps=10))
    >>> found = FitReport(60 << 30, torch.device("cuda"), 9, 57 << 30, 40 << 30, 9 << 30, saved=kept)
    >>> print(str(found).splitlines()[0])
    cuda: budget 60.0 GiB, peak 57.0 GiB, all 10 steps within; 40.0 GiB of saved tensors stay, and 9.0 GiB move
    >>> print(str(replace(found, outlook=Outlook(4 << 30, 0.04, 0.06))).splitlines()[1])
      4.0 GiB more: 4% faster; as much less: 6% slower
    >>> print(str(replace(found, kinds=(Kind("gelu", 1 << 30, 0.004),))).splitlines()[1])
      computed again: gelu 1.0 GiB in 4.0 ms
    >>> sites = {"in": SiteReport(stored=3 << 30, moved=1 << 30, copy_seconds=0.1), "out": SiteReport(stored=1 << 30)}
    >>> for line in str(replace(found, sites=sites)).splitlines()[1:3]:
    ...     print(line)
      stay: in 2.0 GiB, out 1.0 GiB
      move: in 1.0 GiB in 100.0 ms
    """

    budget: int
    device: torch.device
    rounds: int
    peak: int
    limit: int
    missing: int
    again: int = 0
    checkpoints: int = 0
    checkpoints_off: int = 0
    outlook: Outlook | None = None
    kinds: tuple[Kind, ...] = ()
    sites: dict[str, SiteReport] = field(default_factory=dict)
    saved: SavedReport = field(default_factory=SavedReport)

    def __str__(self) -> str:
        again = f", and {format_bytes(self.again)} are computed again" if self.again else ""
        layers = f"; {self.checkpoints_off} of {self.checkpoints} checkpoints are off" if self.checkpoints else ""
        moves = f"{'' if again else 'and '}{format_bytes(self.missing)} move"
        return (
            f"{self.device}: {self.saved.budget or BudgetReport(self.budget)}; {format_bytes(self.limit)} of saved "
            f"tensors stay, {moves}{again}{layers}"
            + "".join(
                f"\n{line}" for line in (*self._outlook(), *self._largest(), str(replace(self.saved, budget=None)))
            )
        )

    def record(self) -> dict[str, float]:
        """The figures for a log, in bytes, beside those of the saved tensors: ``gradients(also=[fitted])``.

        >>> FitReport(60, torch.device("cpu"), rounds=9, peak=57, limit=40, missing=9).record()["saved/fit/limit"]
        40
        """
        found = {"peak": self.peak, "limit": self.limit, "missing": self.missing, "again": self.again}
        return self.saved.record() | {f"saved/fit/{name}": nbytes for name, nbytes in found.items()}

    def _outlook(self) -> Iterator[str]:
        if self.outlook is not None:
            other, faster, slower = self.outlook
            yield f"  {format_bytes(other)} more: {100 * faster:.0f}% faster; as much less: {100 * slower:.0f}% slower"

    def _largest(self) -> Iterator[str]:
        """Which modules' tensors stay and move, if there are several, and what is computed again: the largest ones."""
        sites = self.sites.items() if len(self.sites) > 1 else ()
        for title, kinds in (
            ("stay", [Kind(name, site.stored - site.moved, math.nan) for name, site in sites]),
            ("move", [Kind(name, site.moved, site.copy_seconds) for name, site in sites]),
            ("computed again", self.kinds),
        ):
            largest = sorted((kind for kind in kinds if kind.nbytes), key=lambda kind: -kind.nbytes)
            if largest:
                more = f", and {len(largest) - _FEW} more" if len(largest) > _FEW else ""
                yield f"  {title}: {', '.join(map(_in_words, largest[:_FEW]))}{more}"


def _in_words(kind: Kind) -> str:
    took = f" in {1000 * kind.seconds:.1f} ms" if kind.seconds > 0 else ""  # NaN if it was not measured
    return f"{kind.name} {format_bytes(kind.nbytes)}{took}"
