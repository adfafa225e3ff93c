"""``explain``: what a model will save for backward, and the memory of a step, before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from disthooks.errors import UsageError
from disthooks.predict.builder import Builder
from disthooks.predict.explanation import Explanation
from disthooks.predict.run import Situation, record_step
from disthooks.predict.timeline import Timeline

#: Names of dtypes that people use, beside torch's own.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}


def explain(
    model: nn.Module | Callable[..., Any] | Builder,
    *inputs: Any,
    optimizer: str | Callable[[Any], torch.optim.Optimizer] | None = None,
    device: str = "cuda",
    dtype: torch.dtype | str | None = None,
    autocast: torch.dtype | str | None = None,
    backend: str | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    batch: int | None = None,
    seq: int | None = None,
) -> Explanation:
    """Predict what autograd saves in one training step of a model, and how much memory the step needs.

    The step runs on fake tensors: they have shapes and no memory, and operators compute nothing. So it needs no GPU,
    and a model of any size takes seconds. The model is not changed.

    Args:
        model: a module; or a function that builds one and returns it, alone or with its example inputs. A function is
            better for a large model, because it is built without memory.
        inputs: the arguments of the model's forward: tensors of any device, with any values. One mapping gives
            arguments by name.
        optimizer: its name ("adamw", "sgd", ...), or a function that makes it from the parameters; None for no step.
        device: whose operators run: "cuda" or "cpu".
        dtype: the dtype that the model is converted to; None to leave it as it is.
        autocast: the dtype of autocast around the forward; None without autocast.
        backend: of attention: "flash", "efficient", "cudnn" or "math"; None for the one that torch would choose.
        loss: makes the loss from the model's output. Without it the output's ``loss`` is taken, or else the output
            itself, with a gradient of its size.
        batch: the batch size; None as the inputs have it.
        seq: the length of a sequence; None as the inputs have it.

    Raises:
        UsageError: if the model cannot be built or run in this way, or an argument means nothing.

    >>> from disthooks import explain
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    >>> said = explain(model, torch.empty(32, 64), device="cpu")
    >>> said.saved_bytes, said.by_module["1"], said.by_operator
    (40960, 32768, {'aten.relu': 32768, 'aten.addmm': 8192})
    """
    situation = Situation(
        device=device,
        backend=backend,
        dtype=as_dtype(dtype, "dtype"),
        autocast=as_dtype(autocast, "autocast"),
        optimizer=as_optimizer(optimizer),
        loss=loss,
        batch=batch,
        seq=seq,
    )
    return explain_built(model if isinstance(model, Builder) else Builder(model, inputs), situation)


def explain_built(builder: Builder, situation: Situation) -> Explanation:
    """The explanation of one step of what ``builder`` builds."""
    record = record_step(builder, situation)
    return Explanation(builder.name, situation, record, Timeline(record))


def as_dtype(given: torch.dtype | str | None, what: str) -> torch.dtype | None:
    """The dtype that ``given`` means.

    Raises:
        UsageError: if it means none.

    >>> as_dtype("bf16", "autocast")
    torch.bfloat16
    """
    if given is None or isinstance(given, torch.dtype):
        return given
    found = getattr(torch, _DTYPES.get(given, given), None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"{what}: {given!r} is no dtype; give bfloat16, float16 or float32")
    return found


def as_optimizer(given: str | Callable[[Any], torch.optim.Optimizer] | None) -> Any:
    """The function that makes the optimizer that ``given`` means; None for none.

    Raises:
        UsageError: if there is no such optimizer.
    """
    if given is None or not isinstance(given, str):
        return given
    kind: Any = getattr(torch.optim, _OPTIMIZERS.get(given.lower(), given), None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UsageError(f"optimizer: torch.optim has no {given!r}; there are {', '.join(_OPTIMIZERS)}")
    make: Callable[..., torch.optim.Optimizer] = kind
    return functools.partial(make, lr=1e-3)
