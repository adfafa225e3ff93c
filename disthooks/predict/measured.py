"""``beside``: compares a prediction with the figures that a real run measured."""

# [Note: law 19]
# A prediction is compared with a real run, and the difference is shown. In a run, the hooks count bytes, and torch
# counts memory. The hooks count from the first step on, so each of their figures is divided by the number of steps
# before it is compared. A log already has figures for each step (`saved/moved_per_step`).

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from disthooks._tensors import format_bytes
from disthooks.errors import UsageError
from disthooks.saved.report import SavedReport

#: The figures of hooks that are predicted.
_FIGURES = ("stored", "moved", "shared", "recomputed", "recast", "kept")


class Measured(NamedTuple):
    """One figure, predicted and measured, in bytes.

    Attributes:
        name: "peak", or the name of a figure in :class:`~disthooks.SavedReport`, such as "moved"; that one is for one
            step.
        predicted: what the explanation says.
        measured: what the run says.

    >>> print(Measured("moved", 1024, 1536))
    moved: predicted 1.0 KiB, measured 1.5 KiB, 50.0% more
    """

    name: str
    predicted: int
    measured: int

    @property
    def difference(self) -> int:
        """How many bytes more the run measured than were predicted; negative if it measured less."""
        return self.measured - self.predicted

    def __str__(self) -> str:
        text = f"{self.name}: predicted {format_bytes(self.predicted)}, measured {format_bytes(self.measured)}"
        if not self.difference:
            return f"{text}, the same"
        word = "more" if self.difference > 0 else "less"
        if not self.predicted:
            return f"{text}, {format_bytes(abs(self.difference))} {word}"
        return f"{text}, {abs(self.difference) / self.predicted:.1%} {word}"

    def to_dict(self) -> dict[str, Any]:
        """As a document that JSON can hold."""
        return {**self._asdict(), "difference": self.difference}


def beside(
    hooks: SavedReport | None,
    peak_bytes: int,
    run: SavedReport | str | os.PathLike[str] | None = None,
    peak: int | None = None,
) -> tuple[Measured, ...]:
    """Compare predicted figures with those of a real run. See [Note: law 19].

    Args:
        hooks: what the hooks of the run's plan would count in one step; None without a plan.
        peak_bytes: the predicted peak.
        run: what the run's ``saving.report()`` gave, after any number of whole steps; or the path of its log, in which
            ``gradients(also=[saving])`` wrote the figures of each step. None to compare the peak alone.
        peak: the peak that the run measured, in bytes, such as ``torch.cuda.max_memory_allocated()``.

    Raises:
        UsageError: if there was no plan to compare with, or the run has no figures of hooks.
    """
    found: list[Measured] = []
    if run is not None:
        if hooks is None:
            raise UsageError("there is no plan to compare with: explain the model with the plan that the run had")
        measured = _by_step(run, hooks) if isinstance(run, SavedReport) else _from_log(pathlib.Path(run))
        found += [Measured(name, getattr(hooks, name), measured[name]) for name in _FIGURES if name in measured]
    if peak is not None:
        found.append(Measured("peak", peak_bytes, peak))
    return tuple(found)


def _by_step(report: SavedReport, predicted: SavedReport) -> dict[str, int]:
    if not report.calls or not predicted.calls or report.calls % predicted.calls:
        raise UsageError(
            f"the run's hooks ran in {report.calls} calls, and those of one step run in {predicted.calls}: take the "
            "report after whole steps, with the same plan on the same model"
        )
    steps = report.calls // predicted.calls
    return {name: round(getattr(report, name) / steps) for name in _FIGURES}


def _from_log(path: pathlib.Path) -> dict[str, int]:
    last: Mapping[str, Any] = {}
    for record in _records(path):
        if any(f"saved/{name}_per_step" in record for name in _FIGURES):
            last = record
    if not last:
        raise UsageError(
            f"{path} has no figures of saved tensors by step: let the run write them with gradients(also=[saving])"
        )
    names = {name: last.get(f"saved/{name}_per_step") for name in _FIGURES}
    return {name: round(value) for name, value in names.items() if value is not None}


def _records(path: pathlib.Path) -> Iterator[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was ended
        if isinstance(record, dict):
            yield record
