"""``record_step``: one training step on fake tensors, in the situation that the user describes."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from disthooks.config.plan import Plan
from disthooks.errors import DisthooksError, UsageError
from disthooks.predict.attention import Backend
from disthooks.predict.autocast import cuda_autocast
from disthooks.predict.builder import Builder
from disthooks.predict.fake import as_if_real, fake_run
from disthooks.predict.planned import planned
from disthooks.predict.record import StepRecord
from disthooks.predict.recorder import CostOf, Recorder
from disthooks.predict.redirect import foreach_as_on_cuda, redirect_cuda
from disthooks.predict.substitutes import as_on_cuda


@dataclass(frozen=True)
class Situation:
    """How the step runs.

    Attributes:
        device: "cuda" or "cpu": whose operators save the tensors.
        backend: of attention on "cuda"; None for the one that torch would choose.
        dtype: the dtype that the model is converted to; None to leave it as it is built.
        autocast: the dtype of autocast around the forward; None without autocast.
        optimizer: makes the optimizer from the parameters; None without a step.
        loss: makes the loss from the model's output; None for the output's ``loss``, or else the output itself, whose
            gradient is a tensor of its size.
        batch: the batch size; None as it comes.
        seq: the length of a sequence; None as it comes.
        plan: what the hooks of disthooks do in the step: a :class:`~disthooks.Plan`; None for no hooks.
        change: changes the model after it is built; None to leave it.
    """

    device: str = "cuda"
    backend: Backend | None = None
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    batch: int | None = None
    seq: int | None = None
    plan: Plan | None = None
    change: Callable[[nn.Module], None] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Texts and numbers; None for what is left to the model."""
        made = self.optimizer
        name = None if made is None else getattr(getattr(made, "func", made), "__name__", type(made).__name__)
        return {
            "device": self.device,
            "backend": self.backend,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "autocast": None if self.autocast is None else str(self.autocast).removeprefix("torch."),
            "optimizer": name,
            "batch": self.batch,
            "seq": self.seq,
            "plan": None if self.plan is None else self.plan.described(),
        }


def record_step(builder: Builder, situation: Situation, cost: CostOf | None = None) -> StepRecord:
    """Run one step of the model on fake tensors, and record it.

    The memory of the optimizer's state is there from the beginning, as in every step but the first.

    Raises:
        UsageError: if the model cannot be built or run in this way.
    """
    with contextlib.ExitStack() as stack:
        fakes = stack.enter_context(fake_run())
        if situation.device == "cuda":
            stack.enter_context(_as_on_cuda(situation.backend))
        with _told(f"{builder.name} cannot be built"):
            model, args, kwargs = builder.build(fakes, situation.batch, situation.seq)
            if situation.dtype is not None:
                model.to(situation.dtype)
                args, kwargs = pytree.tree_map(_to(situation.dtype), (args, kwargs))
            if situation.change is not None:
                situation.change(model)
        stack.enter_context(as_if_real())  # now, because building the model may have imported the library
        optimizer = None if situation.optimizer is None else _optimizer(situation.optimizer, model)
        recorder = Recorder(model, cost)
        fakes.tell(recorder.assumed)
        recorder.adopt([args, kwargs], "inputs")
        if optimizer is not None:
            recorder.adopt(optimizer.state.values(), "optimizer state")
        hooks = None
        if situation.plan is not None:
            clock = partial(len, recorder.record.operators)
            hooks = stack.enter_context(planned(model, situation.plan, device=situation.device, clock=clock))
        with recorder, _told(f"one step of {type(model).__name__}"):
            recorder.begin("forward")
            with recorder.saving(), _autocast(situation):
                roots = _roots(model(*args, **kwargs), situation.loss)
            recorder.begin("backward")
            gradients = [None if not root.dim() else torch.empty_like(root) for root in roots]
            torch.autograd.backward(roots, gradients)
            del roots, gradients
            recorder.adopt([weight.grad for weight in model.parameters()], "gradients")
            if optimizer is not None:
                recorder.begin("optimizer")
                optimizer.step()
                recorder.adopt(optimizer.state.values(), "optimizer state")
        if hooks is not None:
            recorder.record.stored = hooks.report().stored
    return recorder.record


@contextlib.contextmanager
def _as_on_cuda(backend: Backend | None) -> Iterator[None]:
    """Inside, the operators of fake CPU tensors save, cast and accept what those of an NVIDIA GPU do."""
    with redirect_cuda(), foreach_as_on_cuda(), as_on_cuda(backend), cuda_autocast():
        yield


def _to(dtype: torch.dtype) -> Callable[[Any], Any]:
    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return convert


def _autocast(situation: Situation) -> contextlib.AbstractContextManager[Any]:
    if situation.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(situation.device, situation.autocast)


def _optimizer(make: Callable[[Any], torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, with the state that it has after its first step."""
    optimizer = make([weight for weight in model.parameters() if weight.requires_grad])
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.empty_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def _roots(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> list[torch.Tensor]:
    """The tensors that backward begins at.

    Raises:
        UsageError: if none of them requires a gradient.
    """
    if loss is not None:
        return [loss(output)]
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(given, torch.Tensor) and given.requires_grad:
        return [given]
    found = [each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not found:
        raise UsageError("nothing in what the model returned requires a gradient, so there is no backward")
    return found


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Raise an error of the user's code as a UsageError of one line."""
    try:
        yield
    except DisthooksError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = next((each for each in reversed(frames) if "/torch/" not in each.filename), None)
        place = f" ({own.filename}:{own.lineno})" if own else ""
        text = " ".join(str(error).split())
        raise UsageError(f"{what}: {type(error).__name__}: {text}{place}") from error
