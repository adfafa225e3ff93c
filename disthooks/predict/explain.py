"""``explain``: what a model will save for backward, and the memory of a step, before anything runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import nn

from disthooks.config import Plan, from_config
from disthooks.errors import UsageError
from disthooks.predict.cuda.attention import Backend
from disthooks.predict.engines.spec import EngineSpec
from disthooks.predict.engines.worlds import Rank
from disthooks.predict.explanation import Explanation
from disthooks.predict.fake.builder import Builder
from disthooks.predict.hardware.devices import Device, device_named
from disthooks.predict.plans.planned import Entries
from disthooks.predict.run import Situation, record_step
from disthooks.saved.pipeline import Pipeline, Stage
from disthooks.saved.stores.base import Store

#: Names of dtypes that people use, beside torch's own.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}


def explain(
    model: nn.Module | Callable[..., Any] | Builder,
    *inputs: Any,
    plan: Entries | Mapping[str, Any] | str | os.PathLike[str] | Stage | Pipeline | None = None,
    optimizer: str | Callable[[Any], torch.optim.Optimizer] | None = None,
    engine: str | EngineSpec | None = None,
    world: int = 1,
    rank: Rank = "largest",
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
            better for a large model, because it is built without memory. Or a ``Builder``, which has the inputs.
        inputs: the arguments of the model's forward: tensors of any device, with any values. One mapping gives
            arguments by name.
        plan: what is attached to the model: a hooks file, a dict of its keys, a :class:`~disthooks.Plan`, pairs of
            patterns and a pipeline, or a store or pipeline for the whole model. None for nothing.
        optimizer: its name ("adamw", "sgd", ...), or a function that makes it from the parameters; None for no step.
        engine: "ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp2+tp" or "zero0" to "zero3"; or an
            :class:`~disthooks.predict.engines.spec.EngineSpec`, which says more. None for no engine.
        world: the number of ranks.
        rank: whose memory is asked for: a number, "largest" or "smallest".
        device: whose operators run: "cuda", "cpu", or the name of a GPU, such as "h100". "cuda" means a GPU of compute
            capability 9.0.
        dtype: the dtype that the model is converted to; None to leave it as it is.
        autocast: the dtype of autocast around the forward; None without autocast.
        backend: of attention: "flash", "efficient", "cudnn" or "math"; None for the one that torch would choose.
        loss: makes the loss from the model's output. Without it the output's ``loss`` is taken, or else the output
            itself, with a gradient of its size.
        batch: the batch size of one rank; None as the inputs have it.
        seq: the length of a sequence; None as the inputs have it.

    Raises:
        UsageError: if the model cannot be built or run in this way, or an argument means nothing.

    >>> from disthooks import explain
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    >>> said = explain(model, torch.empty(32, 64), device="cpu")
    >>> said.saved_bytes, said.by_module["1"], said.by_operator
    (40960, 32768, {'aten.relu': 32768, 'aten.addmm': 8192})
    """
    kind, hardware = as_device(device)
    situation = Situation(
        device=kind,
        hardware=hardware,
        backend=as_backend(backend),
        dtype=as_dtype(dtype, "dtype"),
        autocast=as_dtype(autocast, "autocast"),
        optimizer=as_optimizer(optimizer),
        engine=as_engine(engine, world),
        rank=rank,
        plan=as_entries(plan),
        loss=loss,
        batch=batch,
        seq=seq,
    )
    return explain_built(model if isinstance(model, Builder) else Builder(model, inputs), situation)


def explain_built(builder: Builder, situation: Situation) -> Explanation:
    step = record_step(builder, situation)
    is_named = "<" not in builder.name  # a lambda, or a function inside of another one, has no name for a page
    name = builder.name if is_named else step.record.modules[0].kind
    if situation.plan is None:
        return Explanation(name, situation, step)
    return Explanation(name, situation, record_step(builder, replace(situation, plan=None)), step)


def as_device(given: str) -> tuple[str, Device | None]:
    """The kind of the device, "cuda" or "cpu", and the device itself if ``given`` names one."""
    if given in ("cuda", "cpu"):
        return given, None
    found = device_named(given)
    return found.kind, found


def as_backend(given: str | None) -> Backend | None:
    if given is None or given in get_args(Backend):
        return cast("Backend | None", given)
    raise UsageError(f"backend: there is no {given!r}; there are {', '.join(get_args(Backend))}")


def as_engine(given: str | EngineSpec | None, world: int) -> EngineSpec:
    # A function that builds the model may give it to an engine itself: then the world is not that of one rank.
    return given if isinstance(given, EngineSpec) else EngineSpec(given or "plain", world)


def as_entries(given: Any) -> Entries | None:
    if given is None or isinstance(given, Plan):
        return given
    if isinstance(given, (str, os.PathLike, Mapping)):
        return from_config(given)
    if isinstance(given, (Store, Pipeline)):
        return [("", given)]
    return cast("Entries", given)


def as_dtype(given: torch.dtype | str | None, what: str) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    found = getattr(torch, _DTYPES.get(given, given), None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"{what}: {given!r} is no dtype; give bfloat16, float16 or float32")
    return found


def as_optimizer(given: str | Callable[[Any], torch.optim.Optimizer] | None) -> Any:
    if given is None or not isinstance(given, str):
        return given
    kind: Any = getattr(torch.optim, _OPTIMIZERS.get(given.lower(), given), None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UsageError(f"optimizer: torch.optim has no {given!r}; there are {', '.join(_OPTIMIZERS)}")
    make: Callable[..., torch.optim.Optimizer] = kind
    return functools.partial(make, lr=1e-3)
