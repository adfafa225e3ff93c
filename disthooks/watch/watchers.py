"""What a configuration watches beside gradients: which module made a NaN, and whether copies are still the same."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from disthooks._handles import Attachment
from disthooks._ranks import launched_rank
from disthooks.engines.detect import detect_engine
from disthooks.errors import DisthooksError
from disthooks.grads.attach import Gradients
from disthooks.watch.blame import Blame, blame
from disthooks.watch.replicas import ReplicaReport, check_replicas

_MOST = 3  # parameters that a line names


class Watchers(Attachment):
    """What ``blame`` and ``check_replicas`` of a configuration attached.

    Attributes:
        blamed: which module's output was not finite first; None without ``blame``.
        replicas: what the last comparison found; None before the first, and without ``check_replicas``.
    """

    def __init__(self, model: nn.Module, blames: bool) -> None:
        super().__init__()
        self.blamed: Blame | None = blame(model) if blames else None
        self.replicas: ReplicaReport | None = None
        self._steps, self._differed = 0, 0
        if self.blamed is not None:
            # The hooks on the model keep this object alive, and nothing else needs to.
            self.blamed.on_remove(self._tell_last)
            self.on_remove(self.blamed.remove)
        self._told = False

    def numbers(self) -> Mapping[str, Any]:
        """The numbers of the last comparison, for the log."""
        found = self.replicas
        return {"replicas/compared": found.compared, "replicas/differ": len(found.differs)} if found else {}

    def tell_nonfinite(self, gradients: Gradients) -> None:
        """Say on stderr when gradients become infinite or NaN, and which module was the first to be."""
        first = gradients.is_first_rank

        def tell(record: dict[str, Any]) -> None:
            if first:
                say(nonfinite_line(record))
            self._tell_blame()

        gradients.on_nonfinite(tell)

    def compare_every(self, every: int, model: nn.Module, optimizer: Any) -> None:
        """Compare what should be the same on several ranks, after each so many steps; on every rank."""
        engine = detect_engine(model)
        stepping = engine.inner_optimizer(optimizer)
        first = engine.position == 0

        def compare() -> None:
            self._steps += 1
            if self._steps % every or not every:
                return
            try:
                self.replicas = check_replicas(model, None if optimizer is None else stepping)
            except DisthooksError as error:  # alike on every rank
                warnings.warn(f"check_replicas stops here, after {self._steps} steps: {error}", stacklevel=2)
                handle.remove()
                return
            if first:
                self._tell_replicas(self.replicas)
            if not self.replicas.compared:
                handle.remove()

        handle = engine.after_step(stepping, compare)
        self.on_remove(handle.remove)

    def _tell_replicas(self, report: ReplicaReport) -> None:
        if not report.compared:
            say(f"check_replicas: {report}")
        elif len(report.differs) > self._differed:
            say(f"WARNING: after {self._steps} steps what should be the same on all ranks is not: {report}")
        self._differed = max(self._differed, len(report.differs))

    def _tell_blame(self) -> None:
        if self.blamed is None or self._told:
            return
        report = self.blamed.report()  # of this rank: every rank has its own, and says it
        if report.found:
            self._told = True
            say(str(report))

    def _tell_last(self) -> None:
        """Also where nothing watches gradients, or the loss alone was not finite."""
        if sys.exc_info()[0] is None:
            self._tell_blame()


def nonfinite_line(record: Mapping[str, Any]) -> str:
    """The message about the first step whose gradients are not finite.

    >>> nonfinite_line({"step": 7, "nonfinite_params": 1, "nonfinite_at": [{"param": "w", "rank": 1}], "skipped": 1.0})
    'WARNING: step 7: gradients are not finite, of 1 parameter: w (rank 1); the step was skipped'
    >>> nonfinite_line({"step": 50, "grad_norm": float("nan")})
    'WARNING: step 50: gradients are not finite: grad_norm is nan; add {kind: NonFinite} to stats for their names'
    """
    head = f"WARNING: step {record['step']}: gradients are not finite"
    if "nonfinite_at" not in record:
        return f"{head}: grad_norm is {record.get('grad_norm')}; add {{kind: NonFinite}} to stats for their names"
    count, at = record["nonfinite_params"], record["nonfinite_at"]
    names = [one["param"] + (f" (rank {one['rank']})" if one.get("rank") is not None else "") for one in at[:_MOST]]
    more = ", ..." if len(at) > _MOST else ""
    skipped = {None: "", 0.0: "; the step was made", 1.0: "; the step was skipped"}[record.get("skipped")]
    plural = "s" if count != 1 else ""
    return f"{head}, of {count} parameter{plural}: {', '.join(names)}{more}{skipped}"


def say(text: str) -> None:
    """A line on stderr; of another rank than the first with its number."""
    rank = launched_rank()
    print(f"disthooks: {f'rank {rank}: ' if rank else ''}{text}", file=sys.stderr, flush=True)


def attach_watchers(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, blames: bool, every: int | None
) -> Watchers:
    """Attach what is asked for; the same on every rank."""
    made = Watchers(model, blames)
    try:
        if every is not None:
            made.compare_every(every, model, optimizer)
    except BaseException:
        made.remove()
        raise
    return made
