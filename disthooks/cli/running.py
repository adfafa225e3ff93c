"""One forward and backward for real, and what each module saved in it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from disthooks._match import Pattern
from disthooks.cli.building import said
from disthooks.errors import DisthooksError, UsageError
from disthooks.saved.inplace import Saving, save_activations
from disthooks.saved.pipeline import Pipeline
from disthooks.saved.report import SavedReport
from disthooks.watch._modules import tensors_of

Placed = Sequence[tuple[str, nn.Module, Pipeline]]


def step(model: nn.Module, inputs: Any) -> None:
    """One forward and backward, after which there are no gradients again.

    Raises:
        UsageError: when the model raises, or nothing in what it returns could be differentiated.
    """
    try:
        torch.autograd.backward(_loss(_called(model, inputs)))
    except DisthooksError:
        raise
    except Exception as error:
        raise UsageError(f"one forward and backward of {type(model).__name__}: {said(error)}") from error
    finally:
        model.zero_grad(set_to_none=True)


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _loss(output: Any) -> torch.Tensor:
    """The loss that the output names, or the sum of all in it that has a gradient."""
    given = getattr(output, "loss", None)
    if isinstance(given, torch.Tensor) and given.requires_grad:
        return given.sum()
    parts = [tensor.abs().sum() for tensor in tensors_of(output) if tensor.requires_grad]
    if not parts:
        raise UsageError("nothing in what the model returned requires a gradient, so there is no backward")
    return torch.stack([part.float() for part in parts]).sum()


def reports(model: nn.Module, inputs: Any, placed: Placed) -> dict[str, SavedReport]:
    """What became of the saved tensors of each module of ``placed`` in one forward and backward."""
    attached: dict[str, Saving] = {}
    try:
        for name, module, line in placed:
            attached[name] = save_activations(model, _the_one(module), line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they would say is told with the conflicts
            step(model, inputs)
        return {name: saving.report() for name, saving in attached.items()}
    finally:
        for saving in attached.values():
            saving.remove()


def figures(report: SavedReport) -> dict[str, Any]:
    """Bytes by what became of them; ``kept`` without the weights, which nobody would move."""
    weights = report.kept_by.get("parameter", 0)
    keys = ("calls", "stored", "moved", "shared", "recomputed", "recast", "passed", "errors")
    return {key: getattr(report, key) for key in keys} | {"kept": report.kept - weights, "weights": weights}


def _the_one(module: nn.Module) -> Pattern:
    return lambda _, other: other is module
