"""What a configuration watches besides gradients: which module made a NaN, and whether copies are still the same."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from disthooks._handles import Attachment, is_power_of_two
from disthooks._ranks import launched_rank
from disthooks.engines.base import Engine
from disthooks.engines.detect import detect_engine
from disthooks.errors import DisthooksError
from disthooks.grads.attachment import Gradients
from disthooks.grads.sinks.base import FINITE_WHEN_MEASURED, is_finite_when_measured, places_words
from disthooks.report.watch.blame import Blame, Blamed, blame
from disthooks.report.watch.replicas import ReplicaReport, check_replicas

_MOST = 3  # the number of parameters that a line names


class Watchers(Attachment):
    """What ``blame`` and ``check_replicas`` of a configuration attached.

    Attributes:
        blamed: the handle of ``blame``; None if the configuration does not ask for it.
        replicas: the report of the last comparison; None before the first one, and without ``check_replicas``.
    """

    def __init__(self, model: nn.Module, blames: bool) -> None:
        super().__init__()
        self.blamed: Blame | None = blame(model) if blames else None
        self.replicas: ReplicaReport | None = None
        self._gradients: Callable[[], Gradients | None] | None = None  # whose steps are counted
        self._compared_after = 0  # the number of steps of the run before the last comparison
        self._blamed: list[str] = []  # what blame has found, on this rank or, after a comparison, on all
        self._is_printed = False  # whether stderr has what blame has found on this rank
        if self.blamed is not None:
            # The hooks on the model keep `blamed` alive, and so this object. Nothing else has to keep it.
            self.blamed.on_remove(self._tell_last)
            self.on_remove(self.blamed.remove)

    def numbers(self) -> Mapping[str, Any]:
        """What blame has found, and the numbers of the last comparison, for the log."""
        found, blamed = self.replicas, {"blame": self._blamed} if self._blamed else {}
        if not found:
            return blamed
        numbers = {"replicas/compared": found.compared, "replicas/differ": len(found.differs)}
        differs: dict[str, Any] = {}
        if found.differs:
            differs["replicas/at"] = [str(each) for each in found.differs[:_MOST]]
            differs["replicas/names"] = [each.name for each in found.differs[:_MOST]]
            differs["replicas/ranks"] = list(found.differs[0].ranks)
        return blamed | numbers | {"replicas/steps": self._compared_after} | differs

    def tell_nonfinite(self, gradients: Gradients) -> None:
        """Say on stderr when gradients become infinite or NaN, and which module's output was so first.

        From now on the steps of ``gradients`` are counted, which go on from a checkpoint.
        """
        first = gradients.is_first_rank
        self._gradients = weakref.ref(gradients)

        def tell(record: dict[str, Any]) -> None:
            if first:
                say(nonfinite_line(record))
            self._tell_blame()

        gradients.on_nonfinite(tell)

    def compare_every(self, every: int, model: nn.Module, optimizer: Any, engine: Engine | None = None) -> None:
        """Compare copies after 1, 2, 4, 8, ... steps, then after each ``every`` steps; call it on all ranks.

        The steps since attaching decide when, and are the same on all ranks.
        """
        engine = engine or detect_engine(model)
        step = engine.step_of(optimizer)
        steps = differed = 0
        gathered: tuple[Blamed, ...] = ()

        def compare() -> None:
            nonlocal steps, differed, gathered
            steps += 1
            if steps % every and not (steps < every and is_power_of_two(steps)):
                return
            watching = self._gradients and self._gradients()
            made = steps if watching is None else watching.steps
            try:
                # It finds the engine anew: since attaching, parameters may have been added to the model, or replaced.
                report = self.replicas = check_replicas(model, optimizer)
                self._compared_after = made
            except DisthooksError as error:  # every rank gets the same error, so no rank waits for another
                warnings.warn(f"check_replicas stops here, after {made} steps: {error}", stacklevel=2)
                handle.remove()
                return
            if not report.compared:
                handle.remove()
            if engine.position == 0 and not report.compared:
                say(f"check_replicas: {report}")
            elif engine.position == 0 and len(report.differs) > differed:  # say it again only if more tensors differ
                say(f"WARNING: after {made} steps what should be the same on all ranks is not: {report}")
            differed = max(differed, len(report.differs))
            if self.blamed is not None and not gathered:
                # All ranks are here in the same step, so what each of them has found can be gathered for the log.
                gathered = self.blamed.report(all_ranks=True).found
                self._blamed = list(map(str, gathered)) or self._blamed

        handle = engine.after_step(step, compare)
        self.on_remove(handle.remove)

    def _tell_blame(self) -> None:
        if self.blamed is None or self._is_printed:
            return
        report = self.blamed.report()  # this rank's own; every rank prints its own
        if report.found:
            self._is_printed = True
            self._blamed = self._blamed or list(map(str, report.found))
            say(str(report))

    def _tell_last(self) -> None:
        """Report at the end, because nothing may watch gradients, or the loss alone may not have been finite."""
        if sys.exc_info()[0] is None:
            self._tell_blame()


def nonfinite_line(record: Mapping[str, Any]) -> str:
    """The message about the first step whose gradients are not finite.

    >>> nonfinite_line({"step": 7, "nonfinite_params": 1, "nonfinite_at": [{"param": "w", "rank": 1}], "skipped": 1.0})
    'WARNING: step 7: gradients are not finite, of 1 parameter: w on rank 1; the step was skipped'
    >>> late = nonfinite_line({"step": 7, "nonfinite_params": 1, "nonfinite_at": [{"param": "w", "rank": None}]})
    >>> FINITE_WHEN_MEASURED in late
    True
    >>> nonfinite_line({"step": 50, "grad_norm": float("nan")})
    'WARNING: step 50: gradients are not finite: grad_norm is nan; add {kind: NonFinite} to stats for their names'
    """
    head = f"WARNING: step {record['step']}: gradients are not finite"
    if "nonfinite_at" not in record:
        return f"{head}: grad_norm is {record.get('grad_norm')}; add {{kind: NonFinite}} to stats for their names"
    count, at = record["nonfinite_params"], record["nonfinite_at"]
    is_late = is_finite_when_measured(at)
    late = f" ({FINITE_WHEN_MEASURED})" if is_late else ""
    skipped = {None: "", 0.0: "; the step was made", 1.0: "; the step was skipped"}[record.get("skipped")]
    plural = "s" if count != 1 else ""
    return f"{head}, of {count} parameter{plural}: {places_words(at, count, _MOST, not is_late)}{late}{skipped}"


def say(text: str) -> None:
    """Print a line on stderr, with the number of the rank if it is not the first."""
    rank = launched_rank()
    # One write for all lines: after a line end print writes the rest by itself, and another rank may write in between.
    sys.stderr.write(f"disthooks: {f'rank {rank}: ' if rank else ''}{text}\n")
    sys.stderr.flush()
