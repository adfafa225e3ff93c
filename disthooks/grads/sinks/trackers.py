"""The sinks of frameworks: TensorBoard, Weights & Biases, MLflow, Accelerate's trackers, DeepSpeed's monitor.

Each sink takes from a record the kinds of values that its framework can show: numbers, histograms, or text. No
framework is imported before a sink is opened.
"""

# [Note: records come late]
# A record is read one step after its own step, so that the host does not wait for the device. Weights & Biases drops
# values that come with an earlier step than it has seen on its own axis. So the sink for it logs the step as a value,
# `<prefix>step`, and declares that as the axis of everything else. A row of wandb is complete when the next row begins,
# and a second value of the same name overwrites the first in a row. So a record joins the row that the user's next
# `run.log()` completes, and the sink completes a row itself only if the row still has the record before.

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from disthooks._registry import register
from disthooks.errors import UsageError
from disthooks.grads.sinks.base import (
    Histogram,
    OpenSink,
    SinkSpec,
    check_prefix,
    histograms,
    import_framework,
    portable,
    scalars,
    texts,
)


@register("sink")
@dataclass(frozen=True)
class TensorBoard(SinkSpec):
    """Numbers as scalars, histograms as histograms, lists and words as text; there as soon as they are written.

    TensorBoard keeps scalars as float32. Text is logged only if there is any: ``nonfinite_at`` is logged in the steps
    that have non-finite gradients.

    Args:
        log_dir: the directory of the run; it is made if it is missing. ``torch.utils.tensorboard.SummaryWriter`` writes
            its files there.
        prefix: put in front of every name. TensorBoard shows names in sections: the prefix up to the first ``/`` is the
            section.

    Raises:
        UsageError: when attached, if tensorboard is not installed or the directory cannot be written.

    >>> TensorBoard("runs/7", prefix="train/")
    TensorBoard(log_dir='runs/7', prefix='train/')
    """

    log_dir: str | os.PathLike[str]
    prefix: str = "gradients/"

    def __post_init__(self) -> None:
        check_prefix(self, self.prefix)
        if not isinstance(self.log_dir, (str, os.PathLike)):
            raise UsageError(f"TensorBoard: log_dir is the directory of the run, got {self.log_dir!r}")

    def open(self) -> OpenSink:
        writer = import_framework("torch.utils.tensorboard", "tensorboard", self).SummaryWriter
        try:
            return _Events(self, writer(os.fspath(self.log_dir)))
        except OSError as error:
            raise UsageError(f"TensorBoard: {os.fspath(self.log_dir)!r} cannot be written: {error.strerror}") from error


class _Events(OpenSink):
    """Writes one file of TensorBoard's events."""

    def __init__(self, sink: TensorBoard, writer: Any) -> None:
        super().__init__(sink)
        self._prefix, self._writer = sink.prefix, writer

    def __call__(self, record: dict[str, Any]) -> None:
        step = record["step"]
        for name, number in scalars(record).items():
            self._writer.add_scalar(self._prefix + name, number, step)
        for name, histogram in histograms(record).items():
            self._writer.add_histogram_raw(self._prefix + name, **_raw(histogram), global_step=step)
        for name, text in texts(record, most=None).items():
            self._writer.add_text(self._prefix + name, text, step)
        # The writer's own thread may lag behind. After a flush, which takes less than a millisecond, a killed process
        # loses nothing.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _raw(histogram: Histogram) -> dict[str, Any]:
    """The arguments of ``add_histogram_raw``. In ``sum`` and ``sum_squares`` an element counts as its bucket's middle.

    TensorBoard draws the outermost buckets that are not empty as far as ``min`` and ``max``.
    """
    edges, counts = histogram
    filled = [i for i, count in enumerate(counts) if count] or [0, len(counts) - 1]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    return {
        "min": edges[filled[0]],
        "max": edges[filled[-1] + 1],
        "num": sum(counts),
        "sum": sum(count * middle for count, middle in zip(counts, middles, strict=True)),
        "sum_squares": sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
        "bucket_limits": edges[1:],
        "bucket_counts": counts,
    }


_BUCKETS = 512  # the most buckets that wandb.Histogram accepts


@register("sink", hidden=("run",))
@dataclass(frozen=True)
class WandB(SinkSpec):
    """Numbers, histograms (``wandb.Histogram``), and lists and words as short strings, in a run of Weights & Biases.

    The values have a step axis of their own, ``<prefix>step``, which the sink declares with ``define_metric``: a record
    comes one step late, and wandb drops values that come late on its own axis. A record joins the row that your next
    ``run.log()`` completes, so the step of your run does not move. If you did not log since the last record, that
    record becomes a row by itself.

    Args:
        run: the run that ``wandb.init()`` returned; None for the run that is active when this is attached.
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

    def open(self) -> OpenSink:
        wandb = import_framework("wandb", "wandb", self)
        run = wandb.run if self.run is None else self.run
        if run is None:
            raise UsageError("WandB: no run is active: call wandb.init() before, on the first rank, or give run=")
        return _Rows(self, run, wandb.Histogram)


class _Rows(OpenSink):
    """Writes records into the rows of one run. See [Note: records come late]."""

    def __init__(self, sink: WandB, run: Any, histogram: Callable[..., Any]) -> None:
        super().__init__(sink)
        self._prefix, self._run, self._histogram = sink.prefix, run, histogram
        self._defined: set[str] = set()
        self._row: int | None = None

    def __call__(self, record: dict[str, Any]) -> None:
        values: dict[str, Any] = {"step": record["step"], **scalars(record), **texts(record)}
        for name, histogram in histograms(record).items():
            edges, counts = histogram.at_most(_BUCKETS)
            values[name] = self._histogram(np_histogram=(counts, edges))
        values = {portable(self._prefix + name): value for name, value in values.items()}
        # Declare the axis of each new name. A pattern would catch the user's own metrics with the same prefix.
        step = portable(self._prefix + "step")
        for name in values.keys() - self._defined:
            self._run.define_metric(name, step_metric=None if name == step else step)
        self._defined |= values.keys()
        row = self._next_row()
        if row is not None and row == self._row:  # the row still has the last record, which this one would overwrite
            self._run.log({}, commit=True)
            row = self._next_row()
        # In a shared run a row that is not committed would never be completed, so this one is completed at once.
        self._run.log(values, commit=row is None)
        self._row = row

    def _next_row(self) -> int | None:
        """The row that the next ``log()`` writes into; None in a shared run, whose rows no process counts."""
        try:
            return int(self._run.step)
        except Exception:
            return None


@register("sink")
@dataclass(frozen=True)
class MLflow(SinkSpec):
    """Numbers as metrics of the MLflow run that is active when this is attached; lists and words are left out.

    All records go to that run, even if its ``with`` block ends before the attachment does. MLflow accepts numbers that
    are not finite; its database stores keep an infinite number as the largest float64.

    Args:
        prefix: put in front of every name. In names only letters, digits, ``_-.`` and blanks stay as they are, because
            MLflow refuses other characters. After the prefix each ``/`` becomes ``.``:
            ``gradients/grad_norm.param.fc.bias``.

    Raises:
        UsageError: when attached, if mlflow is not installed or no run is active.

    >>> MLflow(prefix="train/")
    MLflow(prefix='train/')
    """

    prefix: str = "gradients/"

    def __post_init__(self) -> None:
        check_prefix(self, self.prefix)

    def open(self) -> OpenSink:
        mlflow = import_framework("mlflow", "mlflow-skinny", self)
        run = mlflow.active_run()
        if run is None:
            raise UsageError("MLflow: no run is active: call mlflow.start_run() before, on the first rank")
        return _Metrics(self, mlflow.log_metrics, run.info.run_id)


class _Metrics(OpenSink):
    """Logs the numbers of each record as metrics of one MLflow run."""

    def __init__(self, sink: MLflow, log: Callable[..., object], run_id: str) -> None:
        super().__init__(sink)
        self._prefix, self._log, self._run_id = sink.prefix, log, run_id

    def __call__(self, record: dict[str, Any]) -> None:
        # MLflow's file store has a file for each metric, and "/" makes folders. `grad_norm` is a file there, so it
        # cannot be the folder of `grad_norm/param/w` too: after the prefix "." takes the place of "/".
        values = {
            portable(self._prefix + name.replace("/", ".")): float(number) for name, number in scalars(record).items()
        }
        self._log(values, step=record["step"], run_id=self._run_id)


#: The accelerators that ``disthooks.integrations.accelerate`` was given, and those that a script has made under
#: ``disthooks.run``. A model has no reference to its accelerator.
known_accelerators: weakref.WeakSet[Any] = weakref.WeakSet()


def _accelerate_tracker(accelerator: Any, prefix: str = "gradients/") -> AccelerateTracker:
    """Numbers to every tracker of the ``Accelerator`` that prepared the model; nothing else.

    Args:
        accelerator: the model that the hooks are attached to.
        prefix: put in front of every name. In names only letters, digits and ``_-. /`` stay as they are.

    Raises:
        UsageError: when none of :data:`known_accelerators` has prepared the model.
    """
    found = next((each for each in known_accelerators if any(one is accelerator for one in each._models)), None)
    if found is None:
        raise UsageError(
            "AccelerateTracker: no Accelerator that disthooks knows has prepared the model. Attach with "
            "disthooks.integrations.accelerate.prepare(accelerator, ...), or leave the sink out of the file and give "
            "sinks=[AccelerateTracker(accelerator)]"
        )
    return AccelerateTracker(found, prefix)


@register("sink", build=_accelerate_tracker, given="accelerator")
@dataclass(frozen=True)
class AccelerateTracker:
    """Numbers to every tracker of an ``Accelerator``, by ``accelerator.log(values, step=...)``; nothing else.

    A record comes one step late, and Weights & Biases drops values with an earlier step than it has seen. If you use
    that tracker and log before the optimizer steps, use ``WandB(accelerator.get_tracker("wandb", unwrap=True))``
    instead.

    Args:
        accelerator: the ``Accelerator``, made with ``log_with``, after ``init_trackers()``.
        prefix: put in front of every name. In names only letters, digits and ``_-. /`` stay as they are.

    Raises:
        UsageError: at once if ``accelerator`` is not an ``Accelerator``; when attached, if it has no trackers.

    >>> import types
    >>> accelerator = types.SimpleNamespace(log=lambda values, step: print(step, values), trackers=["tensorboard"])
    >>> AccelerateTracker(accelerator)({"step": 50, "grad_norm": 0.5, "nonfinite_at": []})
    50 {'gradients/grad_norm': 0.5}
    """

    accelerator: Any
    prefix: str = "gradients/"

    def __post_init__(self) -> None:
        check_prefix(self, self.prefix)
        if not callable(getattr(self.accelerator, "log", None)) or not hasattr(self.accelerator, "trackers"):
            raise UsageError(f"AccelerateTracker: give the Accelerator, got {type(self.accelerator).__name__}")

    def open(self) -> None:
        """Refuse an accelerator that would log nowhere. On a process other than the main one it never logs anything."""
        if self.accelerator.is_main_process and not self.accelerator.trackers:
            raise UsageError(
                "AccelerateTracker: the accelerator has no trackers, so nothing would be logged: make it with "
                "Accelerator(log_with=...) and call accelerator.init_trackers(name) before"
            )

    def __call__(self, record: Mapping[str, Any]) -> None:
        values = {portable(self.prefix + name): number for name, number in scalars(record).items()}
        self.accelerator.log(values, step=record["step"])


@register("sink", given="engine")
@dataclass(frozen=True)
class DeepSpeedMonitor:
    """Numbers to DeepSpeed's monitor (TensorBoard, wandb, csv, Comet: what its configuration says); nothing else.

    Numbers are logged at ``engine.global_samples``, like DeepSpeed's own numbers: the samples that the engine has seen
    when the record is read, which is before the next step.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        prefix: put in front of every name. In names only letters, digits and ``_-. /`` stay as they are.

    Raises:
        UsageError: at once if ``engine`` is not DeepSpeed's engine; when attached, if no monitor is enabled.

    >>> import types
    >>> monitor = types.SimpleNamespace(enabled=True, write_events=print)
    >>> engine = types.SimpleNamespace(monitor=monitor, global_samples=640)
    >>> DeepSpeedMonitor(engine)({"step": 9, "grad_norm": 0.5})
    [('Train/Samples/disthooks/grad_norm', 0.5, 640)]
    """

    engine: Any
    prefix: str = "Train/Samples/disthooks/"

    def __post_init__(self) -> None:
        check_prefix(self, self.prefix)
        if not hasattr(getattr(self.engine, "monitor", None), "write_events"):
            raise UsageError(f"DeepSpeedMonitor: give DeepSpeed's engine, got {type(self.engine).__name__}")

    def open(self) -> None:
        """Refuse a monitor that would write nowhere."""
        if not self.engine.monitor.enabled:
            raise UsageError(
                "DeepSpeedMonitor: no monitor is on, so nothing would be logged: enable 'tensorboard', 'wandb', "
                "'csv_monitor' or 'comet' in DeepSpeed's configuration"
            )

    def __call__(self, record: Mapping[str, Any]) -> None:
        samples = self.engine.global_samples
        self.engine.monitor.write_events(
            [(portable(self.prefix + name), number, samples) for name, number in scalars(record).items()]
        )
