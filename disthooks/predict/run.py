"""``record_step``: one training step on fake tensors, in the situation that the user describes."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from disthooks._tensors import local_part
from disthooks.errors import DisthooksError, UsageError
from disthooks.predict.cuda.attention import Backend
from disthooks.predict.cuda.autocast import cuda_autocast
from disthooks.predict.cuda.redirect import foreach_as_on_cuda, redirect_cuda
from disthooks.predict.cuda.substitutes import as_on_cuda
from disthooks.predict.engines.spec import EngineSpec, Prepared, apply_engine, held, host_storages, state_bytes
from disthooks.predict.engines.worlds import FakeWorld, Rank, fake_world
from disthooks.predict.fake.builder import Builder
from disthooks.predict.fake.fake_run import as_if_real, compiled_as_eager, fake_run, hooks_of_the_model
from disthooks.predict.fake.lazy import has_lazy
from disthooks.predict.hardware.devices import CAPABILITY, Device
from disthooks.predict.plans.planned import Entries, Planned, planned
from disthooks.predict.recording.record import StepRecord
from disthooks.predict.recording.recorder import Recorder

#: What each kind of ``engines.held`` is to a recorder.
_CATEGORY = {
    "parameters": "parameters",
    "master": "master weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "communication": "communication",
    "buffers": "buffers",
}
#: The folder of this library.
_PACKAGE = str(pathlib.Path(__file__).parents[1])
#: Methods with which a model of transformers checkpoints its layers; the first one is version 5's.
_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
#: Engines whose optimizer's state can be made by a step with gradients that nobody computed.
_TAKES_GRADIENTS = ("plain", "fsdp2", "hsdp", "tp", "fsdp2+tp")


@dataclass(frozen=True)
class Situation:
    """How the step runs. For the arguments see :func:`~disthooks.predict.explain.explain`.

    Attributes:
        hardware: the device with its figures; None if it has no name.
        plan: what is attached to the model before the engine takes it.
        change: changes the model after it is built.
    """

    device: str = "cuda"
    hardware: Device | None = None
    backend: Backend | None = None
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    engine: EngineSpec = field(default_factory=EngineSpec)
    rank: Rank = "largest"
    plan: Entries | None = None
    change: Callable[[nn.Module], None] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    batch: int | None = None
    seq: int | None = None

    def changed(self, change: Callable[[nn.Module], None]) -> Situation:
        """The situation with one more change of the model, after the one that it has."""

        def both(model: nn.Module) -> None:
            if self.change is not None:
                self.change(model)
            change(model)

        return replace(self, change=both)

    def to_dict(self) -> dict[str, Any]:
        made: Any = self.optimizer
        made = getattr(made, "func", made)  # of a partial
        return {
            "device": self.device,
            "hardware": None if self.hardware is None else self.hardware.name,
            "backend": self.backend,
            "dtype": _dtype_name(self.dtype),
            "autocast": _dtype_name(self.autocast),
            "optimizer": None if made is None else getattr(made, "__name__", type(made).__name__),
            "engine": self.engine.kind,
            "world": self.engine.world,
            "rank": self.rank,
            "batch": self.batch,
            "seq": self.seq,
        }


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


class Step(NamedTuple):
    """A step that was recorded.

    Attributes:
        state: the bytes that the engine and the optimizer hold on this rank after the backward, by kind.
        planned: what the plan did; None without a plan.
        units: the names of the modules that the engine wrapped on their own.
        switch: the call that checkpoints the layers of a model of transformers, as code; "" for other models.
        first: what happened in the first step, from which a plan learns; None without a plan.
    """

    record: StepRecord
    state: dict[str, int]
    planned: Planned | None
    units: tuple[str, ...]
    switch: str
    first: StepRecord | None = None


def record_step(builder: Builder, situation: Situation) -> Step:
    """Run one step of the model on fake tensors, and record it.

    The memory of the optimizer's state is there from the beginning, as in every step but the first. With a plan the
    first step is recorded, too: it needs other memory, because the plan has learnt nothing yet.
    """
    spec = situation.engine
    with contextlib.ExitStack() as stack:
        world = (
            None
            if spec.kind == "plain" and spec.world == 1
            else stack.enter_context(fake_world(spec.world, situation.rank))
        )
        fakes = stack.enter_context(fake_run())
        if situation.device == "cuda":
            stack.enter_context(redirect_cuda(situation.hardware))
        at_building: list[tuple[str, str]] = []
        fakes.tell(lambda *each: at_building.append(each))
        with _explained(f"{builder.name} cannot be built"):
            model, args, kwargs = builder.build(fakes, situation.batch, situation.seq)
            if situation.dtype is not None:
                model.to(situation.dtype)
                args, kwargs = pytree.tree_map(functools.partial(_to, situation.dtype), (args, kwargs))
            if situation.change is not None:
                situation.change(model)
        stack.enter_context(as_if_real())  # now, because building the model may have imported the library
        stack.enter_context(compiled_as_eager(fakes))
        stack.enter_context(hooks_of_the_model(fakes))
        if situation.device == "cuda":
            stack.enter_context(_as_on_cuda(situation))
        if has_lazy(model):  # see [Note: lazy modules]
            with _explained(f"the dry run of {type(model).__name__}"), torch.no_grad(), _autocast(situation):
                model(*args, **kwargs)
        switch = _switch(model)
        found: Planned | None = None
        if situation.plan is not None:
            found = stack.enter_context(planned(model, situation.plan, device=situation.device))
        with _explained(f"{spec.kind} cannot take {type(model).__name__}"):
            prepared = apply_engine(model, spec, situation.optimizer)
        run = _Run(prepared, args, kwargs, situation, world)
        with _explained(f"one step of {type(model).__name__}", model):
            first = None
            if found is None:
                run.warm_up(is_whole=spec.kind not in _TAKES_GRADIENTS)
            else:
                first = Recorder(model)
                run.recorded(first)
                found.begin_step()
            run.forget_gradients()
            recorder = Recorder(model)
            for each in at_building:
                recorder.assumed(*each)
            fakes.tell(recorder.assumed)
            state = run.recorded(recorder)
        return Step(recorder.record, state, found, prepared.units, switch, first and first.record)


def _switch(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if getattr(module, "supports_gradient_checkpointing", False):
            owner = f'model.get_submodule("{name}")' if name else "model"
            return next((f"{owner}.{each}()" for each in _CHECKPOINTING if hasattr(module, each)), "")
    return ""


class _Run:
    def __init__(
        self, prepared: Prepared, args: Any, kwargs: Any, situation: Situation, world: FakeWorld | None
    ) -> None:
        self._prepared, self._args, self._kwargs, self._situation = prepared, args, kwargs, situation
        self._world = world

    def warm_up(self, is_whole: bool) -> None:
        """Make the optimizer's state; by a whole step if ``is_whole``."""
        prepared = self._prepared
        if prepared.optimizer is None:
            return
        if is_whole:
            self._backward(self._forward())
        else:
            for group in prepared.optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad = torch.empty_like(weight)
        prepared.step()

    def forget_gradients(self) -> None:
        for weight in self._prepared.model.parameters():
            weight.grad = None

    def recorded(self, recorder: Recorder) -> dict[str, int]:
        """Record a step; give the bytes that are held after its backward."""
        if self._world is not None:
            self._world.around_propagation = recorder.paused
        recorder.adopt([self._args, self._kwargs], "inputs")
        _adopt(recorder, self._prepared)
        with recorder:
            return self._step(recorder)

    def _step(self, recorder: Recorder) -> dict[str, int]:
        prepared = self._prepared
        recorder.begin("forward")
        with recorder.saving():
            roots = self._forward()
        recorder.begin("backward", has_plan=self._situation.plan is not None)
        self._backward(roots)
        del roots
        _adopt(recorder, prepared)
        state = state_bytes(prepared)
        if prepared.optimizer is not None:
            recorder.begin("optimizer")
            prepared.step()
            _adopt(recorder, prepared)
        return state

    def _forward(self) -> list[torch.Tensor]:
        situation = self._situation
        with _autocast(situation):
            return _roots(self._prepared.model(*self._args, **self._kwargs), situation.loss)

    def _backward(self, roots: list[torch.Tensor]) -> None:
        if self._prepared.spec.is_deepspeed:
            is_loss = len(roots) == 1 and not roots[0].dim()
            self._prepared.backward(roots[0] if is_loss else torch.stack([root.float().sum() for root in roots]).sum())
            return
        gradients = [None if not root.dim() else torch.empty_like(root) for root in roots]
        torch.autograd.backward(roots, gradients)


def _adopt(recorder: Recorder, prepared: Prepared) -> None:
    host = host_storages(prepared)
    for kind, tensor in held(prepared):
        is_host = local_part(tensor).untyped_storage()._cdata in host
        recorder.adopt([tensor], _CATEGORY[kind], "host" if is_host else "device")


@contextlib.contextmanager
def _as_on_cuda(situation: Situation) -> Iterator[None]:
    """Inside, the operators of fake CPU tensors save, cast and accept what those of the GPU do."""
    hardware, backend = situation.hardware, situation.backend
    capability = CAPABILITY if hardware is None else hardware.capability
    if backend is None and hardware is not None and not hardware.has_cudnn:
        backend = "flash"
    with foreach_as_on_cuda(), as_on_cuda(backend, capability=capability), cuda_autocast():
        yield


def _autocast(situation: Situation) -> contextlib.AbstractContextManager[Any]:
    if situation.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(situation.device, situation.autocast)


def _to(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _roots(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> list[torch.Tensor]:
    """The tensors that backward begins at."""
    if loss is not None:
        return [loss(output)]
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(given, torch.Tensor) and given.requires_grad:
        return [given]
    found = [each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not found:
        raise UsageError(
            "no tensor that the model returns requires a gradient, so there is no backward: let the forward return the "
            "loss or its outputs, and let some parameter require a gradient"
        )
    return found


@contextlib.contextmanager
def _explained(what: str, model: nn.Module | None = None) -> Iterator[None]:
    """Raise an error of the user's code as a UsageError of one line."""
    try:
        yield
    except DisthooksError:
        raise
    except Exception as error:
        frames = [each for each, _ in traceback.walk_tb(error.__traceback__)]
        lines = traceback.extract_tb(error.__traceback__)
        where = "" if model is None else _running(model, frames)
        # Lines of torch and of disthooks tell users nothing about their code.
        theirs = [f for f in lines if not f.filename.startswith(("<", _PACKAGE)) and "/torch/" not in f.filename]
        own = theirs[-1] if theirs else None
        place = f" ({own.filename}:{own.lineno})" if own else ""
        text = " ".join(str(error).split())
        raise UsageError(f"{what}{where}: {type(error).__name__}: {text}{place}") from error


def _running(model: nn.Module, frames: list[FrameType]) -> str:
    """The innermost part of ``model`` whose code is in ``frames``, as text; "" if none is."""
    names = {id(module): name for name, module in model.named_modules() if name}
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if id(module) in names:
            return f", in {names[id(module)]} ({type(module).__name__})"
    return ""
