"""From a plan to attachments, while a script that knows nothing of it trains."""

from __future__ import annotations

import collections
import multiprocessing.util
import operator
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disthooks._tensors import format_bytes
from disthooks.config import Plan
from disthooks.config.find import Found, engine_config, find
from disthooks.config.front import read_found
from disthooks.engines.base import is_a
from disthooks.errors import AttachError
from disthooks.grads.attached import Gradients
from disthooks.run import world
from disthooks.run.attaching import Attached, Saves
from disthooks.run.frameworks import Frameworks
from disthooks.run.seams import Seams, only_fills_state

_MANY = 3  # models alike are told of in one line
_LOOKS = 4  # times a module is looked at for the optimizers that wait


class Session:
    """Attaches a plan to the models whose parameters the script's optimizers hold.

    A model is attached to when it is first called with gradients on: every wrapper is around it by then, and
    checkpointing in it; the same moment on every rank. Evaluation before it, a teacher and other modules that no
    optimizer holds are passed by.
    """

    def __init__(self, plan: Plan, found: Found | None = None, given: str | None = None) -> None:
        self.plan = plan
        self._origin, self._given = _shown(found), given
        self._saves, self._seams = Saves(plan), Seams(self)
        self._frameworks = Frameworks(self._watching)
        self._waiting: list[weakref.ref[Any]] = []
        self._done: list[weakref.ref[Any]] = []  # attached, or nothing to attach for
        self._looked: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._why: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._parts: list[Attached] = []
        self._gone: list[tuple[int, dict[str, Any]]] = []  # what became of attachments whose models are gone
        self._count = 0  # of models attached to
        self._left: list[str] = []  # optimizers that are left alone, and why
        self._steps = 0
        self._busy = self._back = self._over = False

    def arm(self) -> None:
        """Begin to listen; also in processes that the script forks to train in them (``notebook_launcher``)."""
        if warning := world.one_of_several():
            _say(warning)
        self._seams.open()
        self._frameworks.open()
        multiprocessing.util.register_after_fork(self, Session._forked)

    def _forked(self) -> None:
        """A forked process ends without a word to the script; what was attached before it is not its own."""
        if not self._parts and not self._over:
            multiprocessing.util.Finalize(None, self._finish_fork, args=(os.getpid(),), exitpriority=100)

    def _finish_fork(self, process: int) -> None:
        self.finish(process, failed=True)

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for the model of ``optimizer``."""
        self._settle()
        if not self._back and not self._over:
            self._waiting.append(weakref.ref(optimizer))
            self._frameworks.made(optimizer)
            self._looked.clear()
            self._seams.hear_calls(True)

    def called(self, module: nn.Module, outermost: bool) -> None:
        """Attach, if an optimizer that waits holds parameters of ``module`` and of nothing else."""
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if self._busy or tracing or self._looked.get(module, 0) >= _LOOKS:
            return
        self._looked[module] = self._looked.get(module, 0) + 1
        model = world.unwrapped(module)
        optimizers = self._of_engine(model) if is_a(model, "DeepSpeedEngine") else self._held_by(model, outermost)
        if not optimizers:
            return
        if reason := world.refusal(model):
            for optimizer in optimizers:
                self._why[optimizer] = reason
            return
        self._attach(model, optimizers)

    def watches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether gradients are to be seen before ``optimizer`` steps, in a closure of its step too."""
        return bool(self.plan.watches) and not (_closes_again(optimizer) and not self.plan.strict)

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """See whether something is attached to the model of ``optimizer``; if not, it is said once, or raised.

        Raises:
            AttachError: when nothing is attached and the plan is ``strict``, or each process trains alone.
        """
        if self._back or _among(optimizer, self._done):
            self._steps += 1
            return
        if not _among(optimizer, self._waiting) or only_fills_state():
            return  # made by another optimizer, for itself
        why = world.alone()
        text = _nothing_attached(optimizer, self._why.get(optimizer) or why)
        if self.plan.strict or why:
            raise AttachError(f"the first step of {type(optimizer).__name__} begins and {text}")
        self._leave_alone(optimizer, text)
        self._settled([optimizer])

    def _leave_alone(self, optimizer: Any, text: str) -> None:
        line = f"{type(optimizer).__name__}: {text}"
        if line in self._left:
            return
        self._left.append(line)
        _say(f"{type(optimizer).__name__} is left alone: {text}. The script goes on ('strict: true' makes it an error)")

    def steps_back(self) -> None:
        """The script attaches itself: what is attached here comes off, and nothing more is."""
        if self._busy or self._back:
            return
        self._back = True
        self._waiting.clear()
        self._seams.hear_calls(False)
        self._detach()

    def finish(self, process: int, failed: bool = False) -> dict[str, Any]:
        """Take everything off and say on the first rank what was done.

        Args:
            process: the id of the process that the script began in: a fork of it has nothing to finish.
            failed: whether the script did: then nobody is told of what did not come to pass.

        Returns:
            What the record of this rank keeps: models attached to, steps, bytes saved and moved.
        """
        if os.getpid() != process:
            return {}
        self._over = True
        told = self._detach()
        self._seams.close()
        self._frameworks.close()
        if os.environ.get("RANK", "0") == "0":
            self._tell(told, failed)
        return {"attached": told, "left_alone": self._left, "optimizer_steps": self._steps}

    def _held_by(self, model: nn.Module, outermost: bool) -> list[Any]:
        if outermost:
            world.reshard(model)
        mine = {id(parameter) for parameter in model.parameters()}
        whole = []
        for optimizer in self._alive():
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if held and held <= mine:
                whole.append(optimizer)
            elif held & mine:
                self._why.setdefault(optimizer, _a_part(optimizer, model))
        return whole

    def _of_engine(self, engine: Any) -> list[Any]:
        """DeepSpeed's optimizers hold flat partitions, not what the model has."""
        own = (getattr(engine, "basic_optimizer", None), getattr(engine, "optimizer", None))
        if own[0] is None:
            return []
        return [optimizer for optimizer in self._alive() if any(optimizer is one for one in own)]

    def _attach(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self._busy = True
        try:
            self._read_again(model)
            plan, partly = self._saves.plan_for(model, more_to_come=len(self._alive()) > len(optimizers))
            before = sum(part.held for part in self._parts)
            part, self._count = Attached(model, self._joined, self._count), self._count + 1
            watched = [None] if is_a(model, "DeepSpeedEngine") else self._watchable(optimizers)
            self._parts.append(part)
            part.attach(plan, partly, watched, before)
            if not part.saving and not part.watched and not part.looks:
                self._parts.remove(part)
        finally:
            self._busy = False
        self._settled(optimizers)

    def _watchable(self, optimizers: Sequence[Any]) -> list[Any]:
        """Without those whose gradients cannot be watched."""
        if not self.plan.watches or self.plan.strict:
            return list(optimizers)
        for optimizer in optimizers:
            if _closes_again(optimizer):
                self._leave_alone(
                    optimizer,
                    "it calls its closure several times in a step, and no gradients are final before the last time, "
                    "so that they are not watched; what 'save' says is attached",
                )
        return [optimizer for optimizer in optimizers if not _closes_again(optimizer)]

    def _joined(self, model: nn.Module, gradients: Gradients) -> None:
        """See [Note: state waits for its attachment]."""
        if not self._frameworks.join(model, gradients):
            _say(
                f"{type(gradients.optimizer).__name__} goes on from a state that the script has loaded, and rules and "
                "statistics begin anew, at step 0: a checkpoint that the script writes itself has none of them. Put "
                "hooks.state_dict() into it and call hooks.load_state_dict(), with hooks = disthooks.prepare(model, "
                "optimizer); accelerate's save_state, the HF Trainer and Lightning's do it without a change"
            )

    def _watching(self, optimizer: Any) -> Gradients | None:
        """The attachment to ``optimizer``, or to the optimizer inside it."""
        inner = getattr(optimizer, "optimizer", optimizer)
        found = (watched.gradients for part in self._parts for watched in part.watched)
        return next((one for one in found if one is not None and one.optimizer is inner), None)

    def _read_again(self, model: Any) -> None:
        """DeepSpeed's own configuration comes before ./disthooks.yaml, and is known only now."""
        config = engine_config(model)
        if config is None or "disthooks" not in config or self._parts:
            return
        found = find(self._given, config)
        if _shown(found) != self._origin:
            self.plan, self._origin = read_found(found), _shown(found)
            self._saves = Saves(self.plan)

    def _settle(self) -> None:
        """Keep of attachments whose models are gone what there is to tell. See [Note: nothing is kept alive]."""
        gone = [part for part in self._parts if part.settle()]
        self._parts = [part for part in self._parts if part not in gone]
        for part in gone:
            self._gone.append((part.number, part.told()))
            part.remove()

    def _settled(self, optimizers: Sequence[Any]) -> None:
        self._done = [ref for ref in self._done if ref() is not None]
        self._done += [weakref.ref(optimizer) for optimizer in optimizers]
        self._waiting = [ref for ref in self._waiting if not _among(ref(), self._done) and ref() is not None]
        self._seams.hear_calls(bool(self._waiting))

    def _alive(self) -> list[Any]:
        return [optimizer for ref in self._waiting if (optimizer := ref()) is not None]

    def _detach(self) -> list[dict[str, Any]]:
        """Take everything off; what became of all that was attached."""
        self._settle()
        told = [*self._gone, *((part.number, part.told()) for part in self._parts)]
        while self._parts:
            try:
                self._parts.pop(0).remove()
            except Exception as error:
                _say(f"rank {os.environ.get('RANK', '0')}: while detaching: {type(error).__name__}: {error}")
        return [each for _, each in sorted(told, key=operator.itemgetter(0))]

    def _tell(self, told: Sequence[dict[str, Any]], failed: bool) -> None:
        if failed and not told:
            return
        if self._back:
            _say(f"the script attaches what it needs itself; {self._origin} was not used")
            return
        if not told and self._left:
            _say(f"WARNING: nothing was attached, and {self._origin} was not used: {self._left[0]}")
            return
        if not told:
            _say(
                f"WARNING: the script ended and no model was trained in this process: {self._origin} was not used "
                "here. Processes that the script spawns (torch.multiprocessing.spawn) know nothing of it: start them "
                "with torchrun, or call disthooks.prepare(model, optimizer) in them"
            )
            return
        for why in () if failed else self._saves.unmatched():  # the error said so
            _say(f"WARNING: nothing was saved for an entry that matches in no model: {why}")
        for line in _lines(told):
            _say(line)


def _shown(found: Found | None) -> str:
    """Where the plan comes from: the file, or what held it."""
    if found is None:
        return "the plan"
    return os.fspath(found.source) if isinstance(found.source, (str, os.PathLike)) else found.origin


def _lines(told: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each model; one for all of a kind that are many, and one for those that never stepped."""
    used = [one for one in told if not one["watched"] or one["watched"]["steps"]]
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in used:
        size = one["watched"]["parameters"] if one["watched"] else None
        kinds.setdefault((one["model"], one["engine"], size), []).append(one)
    lines = [line for ones in kinds.values() for line in ([_line(ones)] if len(ones) > _MANY else map(_line1, ones))]
    idle = collections.Counter(one["model"] for one in told if one not in used)
    for name, count in idle.items():
        times = f" ({count} of them)" if count > 1 else ""
        lines.append(f"{name}{times}: watched 0 steps, since its optimizer made none")
    return lines


def _line1(told: dict[str, Any]) -> str:
    return _line([told])


def _line(told: Sequence[dict[str, Any]]) -> str:
    """What became of one model, or of several alike together."""
    first = told[0]
    parts = [
        f"{first['model']} on {first['engine']}" if first["engine"] else first["model"]
    ]  # known where it is watched
    parts[0] += f", {len(told)} models" if len(told) > 1 else ""
    if first["saved"]:
        stored, moved = (format_bytes(sum(one["saved"][name] for one in told)) for name in ("stored", "moved"))
        parts.append(f"saved {stored} of tensors for backward, moved {moved} (this rank, in all)")
    if not first["saved"] and not first["watched"]:
        parts.append("the outputs of its modules were looked at")
    if first["watched"]:
        steps = sum(one["watched"]["steps"] for one in told)
        parts.append(f"watched {steps} steps of {first['watched']['parameters']} parameters")
        bad = sum(one["watched"]["nonfinite"] for one in told)
        if bad:
            parts[-1] += f", {bad} of them with gradients that were NOT FINITE"
    return "; ".join(parts)


def _closes_again(optimizer: Any) -> bool:
    """Whether a step of ``optimizer`` calls its closure several times."""
    return isinstance(optimizer, torch.optim.LBFGS)


def _among(optimizer: Any, refs: Sequence[weakref.ref[Any]]) -> bool:
    return any(ref() is optimizer for ref in refs)


def _a_part(optimizer: Any, model: nn.Module) -> str:
    return (
        f"{type(model).__name__} was called and has only some of the parameters that {type(optimizer).__name__} holds; "
        "call the whole model, or attach in the script with disthooks.prepare(model, optimizer); with Lightning, "
        "give the Trainer disthooks.integrations.lightning's DisthooksCallback"
    )


def _nothing_attached(optimizer: Any, why: str | None) -> str:
    reason = why or (
        "no module that holds its parameters was called with gradients on (outside of what torch.compile traces), "
        "or the optimizer was made before fully_shard, which replaces parameters; "
        "attach in the script with disthooks.prepare(model, optimizer)"
    )
    return f"nothing is attached to its model: {reason}"


def _say(text: str) -> None:
    """Once for the job, where it may be read; the record of each rank has what is left alone there."""
    if os.environ.get("RANK", "0") != "0" and not text.startswith("rank "):
        return
    print(f"disthooks: {text}", file=sys.stderr, flush=True)
