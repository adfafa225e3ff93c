"""Where reports go. A sink is called with a dict for each logged step, on the first rank alone.

A function will do. One that has ``open()`` has it called once when it is attached, so that it can refuse early. One
that has ``close()`` has it called once after its last record: when the attachment is removed, or when the process
ends, also by an exception.
"""

from __future__ import annotations

from disthooks.grads.sinks.base import Numbers as Numbers
from disthooks.grads.sinks.base import Sink
from disthooks.grads.sinks.base import add_to as add_to
from disthooks.grads.sinks.base import as_numbers as as_numbers
from disthooks.grads.sinks.base import close_all as close_all
from disthooks.grads.sinks.base import open_all as open_all
from disthooks.grads.sinks.base import write as write
from disthooks.grads.sinks.local import Console, Jsonl
from disthooks.grads.sinks.trackers import AccelerateTracker, DeepSpeedMonitor, MLflow, TensorBoard, WandB

__all__ = ["AccelerateTracker", "Console", "DeepSpeedMonitor", "Jsonl", "MLflow", "Sink", "TensorBoard", "WandB"]
