"""Weights & Biases: the run that is active, online or offline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disthooks.errors import UsageError
from disthooks.grads.sinks.base import Opened, Unopened, check_prefix, needed
from disthooks.grads.sinks.records import histograms, portable, scalars, texts

_BUCKETS = 512  # as many as wandb.Histogram takes


@dataclass(frozen=True)
class WandB(Unopened):
    """Numbers, histograms (``wandb.Histogram``), and lists and words as short strings, in a run of Weights & Biases.

    What is logged has a step axis of its own, ``<prefix>step``, declared with ``define_metric``: a record is one step
    late, and wandb drops what comes late on its own axis. Records join the row that your next ``run.log()`` completes,
    so that its step does not move; only when you did not log since the last record do they become a row themselves.

    Args:
        run: what ``wandb.init()`` returned; None means the run that is active when this is attached.
        prefix: put in front of every name. In names only letters, digits and ``_-. /`` stay as they are.

    Raises:
        UsageError: when attached, if wandb is not installed or no run is active.

    >>> WandB(prefix="train/")
    WandB(run=None, prefix='train/')
    """

    run: Any = None
    prefix: str = "gradients/"

    def __post_init__(self) -> None:
        check_prefix(self, self.prefix)
        if self.run is not None and not callable(getattr(self.run, "define_metric", None)):
            raise UsageError(f"WandB: run is what wandb.init() returned, or None for the active run; got {self.run!r}")

    def open(self) -> Opened:
        """Find the run."""
        wandb = needed("wandb", "wandb", self)
        run = wandb.run if self.run is None else self.run
        if run is None:
            raise UsageError("WandB: no run is active: call wandb.init() before, on the first rank, or give run=")
        return _Rows(self, run, wandb.Histogram)


class _Rows(Opened):
    """Rows of one run."""

    def __init__(self, sink: WandB, run: Any, histogram: Callable[..., Any]) -> None:
        super().__init__(sink)
        self._prefix, self._run, self._histogram = sink.prefix, run, histogram
        self._defined: set[str] = set()
        self._row: int | None = None

    def __call__(self, record: dict[str, Any]) -> None:
        values = self._values(record)
        self._define(values)
        row = self._next_row()
        if row is not None and row == self._row:  # it has the last record still, which this one would overwrite
            self._run.log({}, commit=True)
            row = self._next_row()
        self._run.log(values, commit=row is None)
        self._row = row

    def _values(self, record: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {"step": record["step"], **scalars(record), **texts(record)}
        for name, histogram in histograms(record).items():
            edges, counts = histogram.at_most(_BUCKETS)
            values[name] = self._histogram(np_histogram=(counts, edges))
        return {portable(self._prefix + name): value for name, value in values.items()}

    def _define(self, values: dict[str, Any]) -> None:
        """One by one: a pattern would take the axis of other metrics that begin with the same prefix."""
        step = portable(self._prefix + "step")
        for name in values.keys() - self._defined:
            self._run.define_metric(name, step_metric=None if name == step else step)
        self._defined |= values.keys()

    def _next_row(self) -> int | None:
        """Which row the next ``log()`` writes in; None in a shared run, whose rows nobody counts."""
        try:
            return int(self._run.step)
        except Exception:
            return None
