"""What a session has attached to one model, and the entries of ``save`` spread over several models.

From a plan to attachments, while a script that knows nothing of it trains.
"""

from __future__ import annotations

import collections
import copy
import functools
import multiprocessing.util
import operator
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from disthooks._match import is_of_class, match_modules, unwrap_compiled, unwrap_engine
from disthooks._tensors import format_bytes
from disthooks.config import Plan
from disthooks.config.locate import Found, engine_config, find, read_found
from disthooks.config.plan import at_line, tell_attached
from disthooks.errors import AttachError, MatchError
from disthooks.grads.attach import Gradients
from disthooks.grads.records import UnwrittenRecords
from disthooks.launcher import world
from disthooks.launcher.frameworks import Frameworks
from disthooks.launcher.torch_patches import Seams, only_fills_state
from disthooks.watch.watchers import Watchers

# [Note: nothing is kept alive]
# A process may train many models: folds, a search for the largest batch. The session outlives them, so it holds the
# models, optimizers and hooks weakly, and what must be told of them at the end is kept apart, in `Watched`. The last
# record of an attachment that is collected is written later, at the session's next event: a destructor runs at any
# moment, in any thread, and must neither write to a sink nor take a lock.


class Saves:
    """The entries of a plan's ``save``; each has to match in one model at least."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._missed: dict[int, MatchError] = {}
        self._matched: set[int] = set()
        self._models: list[weakref.ref[nn.Module]] = []

    def plan_for(self, model: nn.Module, more_to_come: bool) -> tuple[Plan, bool]:
        """The plan, and whether to attach it ``partly``; without ``save`` for a model that has it, or has none of it.

        Raises:
            MatchError: when an entry matches in no model, and no other is to come.
        """
        if any(unwrap_engine(model) is one() for one in self._models):
            return _without_saves(self._plan), True
        here = [i for i, (patterns, _) in enumerate(self._plan.saves) if self._matches(i, patterns, model)]
        left = [] if more_to_come else self._left()
        if left and self._models:
            raise self._missed[left[0]]
        self._models.append(weakref.ref(unwrap_engine(model)))
        if left:  # of the only model: attaching the whole plan says so on every rank
            return self._plan, False
        return (self._plan if here else _without_saves(self._plan)), True

    def unmatched(self) -> list[str]:
        """What matched in no model."""
        return [str(self._missed[i]) for i in self._left()]

    def _matches(self, index: int, patterns: Any, model: nn.Module) -> bool:
        try:
            with at_line(self._plan.source, ("save", index)):
                match_modules(model, patterns)
        except MatchError as error:
            self._missed[index] = error.with_traceback(None)  # whose frames would keep the model
            return False
        self._matched.add(index)
        return True

    def _left(self) -> list[int]:
        return [i for i in self._missed if i not in self._matched]


def _without_saves(plan: Plan) -> Plan:
    """The plan with ``watch`` alone; all else of it, also where it was read, stays."""
    part = copy.copy(plan)
    object.__setattr__(part, "saves", ())
    return part


class Watched:
    """What one optimizer's steps came to, known also when the optimizer and its model are gone.

    # See [Note: nothing is kept alive]
    """

    def __init__(self, gradients: Gradients) -> None:
        report = gradients.report()
        self.engine, self.parameters = report.engine, report.parameters
        self._alive = weakref.ref(gradients)
        self._first = self._last = gradients.steps
        self._nonfinite = 0
        self._left: collections.deque[UnwrittenRecords] = collections.deque(maxlen=1)
        gradients.leave_to(self._left.append)

    @property
    def gradients(self) -> Gradients | None:
        """The attachment, while the model lives."""
        return self._alive()

    @property
    def steps(self) -> int:
        """How many steps there were here, without those of a state that was loaded."""
        gradients = self._alive()
        self._last = gradients.steps if gradients is not None else self._last
        return self._last - self._first

    @property
    def nonfinite(self) -> int:
        """How many of the steps are known to have had gradients that were not finite."""
        gradients = self._alive()
        self._nonfinite = gradients.nonfinite_steps if gradients is not None else self._nonfinite
        return self._nonfinite

    def settle(self) -> bool:
        """Write what the attachment left when it was collected; whether it is gone."""
        while self._left:
            left = self._left.popleft()
            self._last, self._nonfinite = left.steps, left.nonfinite_steps
            left.write()
        return self._alive() is None

    def flush(self) -> None:
        """Write the record of the last step."""
        gradients = self._alive()
        if gradients is not None:
            gradients.flush()

    def remove(self) -> None:
        """Take the hooks off, which writes what is still to be logged."""
        self.settle()
        gradients = self._alive()
        if gradients is not None:
            self._last = gradients.steps
            gradients.remove()
            self._nonfinite = gradients.nonfinite_steps


class Attached:
    """The attachments to one model, which none of them keeps alive.

    Attributes:
        number: how many models were attached to before.
    """

    def __init__(self, model: nn.Module, joined: Callable[[nn.Module, Gradients], None], number: int = 0) -> None:
        self.number = number
        self._model, self._name, self._joined = weakref.ref(model), type(unwrap_engine(model)).__name__, joined
        self.saving: Any = None
        self._watchers: Callable[[], Watchers | None] = lambda: None
        self.held = 0
        self.watched: list[Watched] = []

    def attach(self, plan: Plan, partly: bool, optimizers: Sequence[Any], before: int) -> None:
        """Attach ``plan``; from the second optimizer of the script on, its records say which one it is.

        Args:
            plan: what :meth:`Saves.plan_for` gave.
            partly: what it gave too.
            optimizers: those that hold the model's parameters; None for DeepSpeed's.
            before: how many optimizers are watched already.
        """
        model: Any = self._model()
        rest, self.held = list(optimizers), len(optimizers)
        if not before and rest:  # on all ranks or on none
            prepared = plan.prepare(model, rest.pop(0), partly=partly)
            self.saving = prepared.saving
            self._looks(prepared.watchers)
            if prepared.gradients is not None:
                self._watches(model, prepared.gradients)
        else:
            self.saving = plan.save(model, partly=partly) if plan.saves else None
            self._looks(plan.look(model, rest[0]) if rest else None)
            if self.saving and not (plan.watches and rest):
                tell_attached(plan, model, self.saving, None)
        for number, optimizer in enumerate(rest, max(before, 1)) if plan.watches else ():
            also: list[Any] = [functools.partial(dict, optimizer=number), *([self.saving] if self.saving else [])]
            gradients = plan.watch(model, optimizer, also)
            if watchers := self._watchers():
                watchers.tell_nonfinite(gradients)
            tell_attached(plan, model, None if self.watched else self.saving, gradients)
            self._watches(model, gradients)

    @property
    def looks(self) -> bool:
        """Whether ``blame`` or ``check_replicas`` is attached."""
        return self._watchers() is not None

    def _looks(self, watchers: Watchers | None) -> None:
        if watchers is not None:
            self._watchers = weakref.ref(watchers)

    def _watches(self, model: nn.Module, gradients: Gradients) -> None:
        self._joined(model, gradients)
        self.watched.append(Watched(gradients))

    def settle(self) -> bool:
        """Whether the model and all that was attached to it is gone; what it left is written."""
        gone = [watched.settle() for watched in self.watched]
        return all(gone) and self._model() is None

    def told(self) -> dict[str, Any]:
        """What became of it so far, on this rank; what is still to be logged is written."""
        for watched in self.watched:
            watched.flush()
        report = self.saving.report() if self.saving else None
        seen = self.watched
        steps, parameters = max((one.steps for one in seen), default=0), sum(one.parameters for one in seen)
        bad = max((one.nonfinite for one in seen), default=0)
        return {
            "model": self._name,
            "engine": seen[0].engine if seen else None,
            "saved": {"stored": report.stored, "moved": report.moved, "calls": report.calls} if report else None,
            "watched": {"steps": steps, "parameters": parameters, "nonfinite": bad} if seen else None,
        }

    def remove(self) -> None:
        """Take them off, which writes what is still to be logged."""
        for watched in self.watched:
            watched.remove()
        for part in (self._watchers(), self.saving):
            if part:
                part.remove()


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
        model = unwrap_compiled(module)
        optimizers = (
            self._of_engine(model) if is_of_class(model, "DeepSpeedEngine") else self._held_by(model, outermost)
        )
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
            watched = [None] if is_of_class(model, "DeepSpeedEngine") else self._watchable(optimizers)
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
