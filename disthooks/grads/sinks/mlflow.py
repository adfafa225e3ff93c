"""MLflow: the run that is active."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from disthooks.errors import UsageError
from disthooks.grads.sinks.base import Opened, Unopened, check_prefix, needed
from disthooks.grads.sinks.records import portable, scalars


@dataclass(frozen=True)
class MLflow(Unopened):
    """Numbers as metrics of the MLflow run that is active when this is attached; lists and words are left out.

    It stays that run, also when its ``with`` block ends before the attachment does. MLflow takes numbers that are not
    finite; a database keeps an infinite one as the largest float64.

    Args:
        prefix: put in front of every name. In names only letters, digits, ``_-.`` and blanks stay as they are, since
            MLflow refuses others; ``/`` becomes ``.``: ``gradients/grad_norm.param.fc.bias``.

    Raises:
        UsageError: when attached, if mlflow is not installed or no run is active.

    >>> MLflow(prefix="train/")
    MLflow(prefix='train/')
    """

    prefix: str = "gradients/"

    def __post_init__(self) -> None:
        check_prefix(self, self.prefix)

    def open(self) -> Opened:
        """Find the run."""
        mlflow = needed("mlflow", "mlflow-skinny", self)
        run = mlflow.active_run()
        if run is None:
            raise UsageError("MLflow: no run is active: call mlflow.start_run() before, on the first rank")
        return _Metrics(self, mlflow.log_metrics, run.info.run_id)


class _Metrics(Opened):
    """Metrics of one run."""

    def __init__(self, sink: MLflow, log: Callable[..., object], run_id: str) -> None:
        super().__init__(sink)
        self._prefix, self._log, self._run_id = sink.prefix, log, run_id

    def __call__(self, record: dict[str, Any]) -> None:
        values = {self._name(name): float(number) for name, number in scalars(record).items()}
        self._log(values, step=record["step"], run_id=self._run_id)

    def _name(self, name: str) -> str:
        """A store of files has one for each metric: ``grad_norm`` cannot be a folder, of ``grad_norm/param/w``, too."""
        return portable(self._prefix + name.replace("/", "."))
