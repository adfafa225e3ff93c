"""Accelerate's own clipping, in a script that knows nothing of disthooks."""

from __future__ import annotations

import gc
import sys
from typing import Any

from disthooks.grads.attached import Gradients


def connect_to(optimizer: Any, gradients: Gradients) -> None:
    """Have rules and statistics come before the clipping of the ``Accelerator`` that prepared ``optimizer``, if any."""
    found = accelerator_of(optimizer)
    if found is not None:
        from disthooks.integrations.accelerate import connect

        connect(found, gradients)


def accelerator_of(optimizer: Any) -> Any:
    """The ``Accelerator`` that prepared ``optimizer``; None without one.

    Nothing leads there from a model or an optimizer, so all objects are looked at, once for each optimizer.
    """
    kind = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if kind is None or optimizer is None:
        return None
    there = (each for each in gc.get_objects() if issubclass(type(each), kind))
    return next((each for each in there if any(_is(one, optimizer) for one in each._optimizers)), None)


def _is(prepared: Any, optimizer: Any) -> bool:
    return prepared is optimizer or getattr(prepared, "optimizer", None) is optimizer
