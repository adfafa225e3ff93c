"""What a training framework logs with already: Accelerate's trackers, DeepSpeed's monitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disthooks.errors import UsageError
from disthooks.grads.sinks.base import check_prefix
from disthooks.grads.sinks.records import portable, scalars


@dataclass(frozen=True)
class AccelerateTracker:
    """Numbers to every tracker of an ``Accelerator``, by ``accelerator.log(values, step=...)``; nothing else.

    A record is one step late, and Weights & Biases drops what comes with an earlier step than it has seen. With that
    tracker, if you log before the optimizer steps, use ``WandB(accelerator.get_tracker("wandb", unwrap=True))``.

    Args:
        accelerator: the ``Accelerator``, made with ``log_with``, after ``init_trackers()``.
        prefix: put in front of every name. In names only letters, digits and ``_-. /`` stay as they are.

    Raises:
        UsageError: at once if this is no accelerator, and when attached if it has no trackers.

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
        """Refuse an accelerator that would log nowhere; on other than its main process it logs nothing anyway."""
        if self.accelerator.is_main_process and not self.accelerator.trackers:
            raise UsageError(
                "AccelerateTracker: the accelerator has no trackers, so nothing would be logged: make it with "
                "Accelerator(log_with=...) and call accelerator.init_trackers(name) before"
            )

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Log one record."""
        values = {portable(self.prefix + name): number for name, number in scalars(record).items()}
        self.accelerator.log(values, step=record["step"])


@dataclass(frozen=True)
class DeepSpeedMonitor:
    """Numbers to DeepSpeed's monitor (TensorBoard, wandb, csv, Comet: what its configuration says); nothing else.

    They stand at ``engine.global_samples``, as DeepSpeed's own do: the samples that were seen when the record is read,
    which is before the next step.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        prefix: put in front of every name. In names only letters, digits and ``_-. /`` stay as they are.

    Raises:
        UsageError: at once if this is no engine, and when attached if no monitor is on.

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
        """Write one record."""
        samples = self.engine.global_samples
        self.engine.monitor.write_events(
            [(portable(self.prefix + name), number, samples) for name, number in scalars(record).items()]
        )
