"""A session attaches a plan to the models of a script that knows nothing of it.

The methods of ``Session`` stand in the order of one worker's life: ``arm`` before the script starts, ``made`` for each
optimizer, ``called`` when a model runs and is attached to, ``steps`` before each step, ``finish`` at the end.
"""

# [Note: the first call with gradients on]
# Hooks are attached when a model is first called with gradients on, and not where the script wraps it. By then every
# wrapper is around it (activation checkpointing is put on after FSDP), no backward has run, and the moment is the same
# on every rank. Evaluation before training, a teacher, and other modules whose parameters no optimizer holds are passed
# by. No earlier event tells the root of `fully_shard`, and a global forward hook runs after the module has chosen its
# own hooks (docs/decisions.md, 61). Therefore `TorchPatches` replaces `nn.Module.__call__` while an optimizer waits.

# [Note: a script that attaches by itself]
# A script may call `disthooks.prepare`, or use a callback that does. Then it knows better than the file what to attach,
# and hooks attached twice would apply each rule twice. So the session yields: it takes off its own attachments, and
# attaches nothing more.

from __future__ import annotations

import multiprocessing.util
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disthooks._match import is_of_class, unwrap_compiled
from disthooks.config import Plan
from disthooks.config.locate import Found, engine_config, find, read_found
from disthooks.errors import AttachError
from disthooks.grads.attach import Gradients
from disthooks.launcher.attachment import Attachments, SaveEntries, summary_lines
from disthooks.launcher.optimizers import ScriptOptimizers, alone, calls_closure_again, refusal, started_alone
from disthooks.launcher.patches import FrameworkPatches, TorchPatches, only_fills_state


class Session:
    """Attaches a plan to the models whose parameters the script's optimizers hold.

    See [Note: the first call with gradients on].

    Args:
        plan: what to attach.
        location: where the plan was found; the messages name it.
        hooks: the file that ``--hooks`` names, which comes before DeepSpeed's configuration.
    """

    def __init__(self, plan: Plan, location: Found | None = None, hooks: str | None = None) -> None:
        self.plan = plan
        self._origin, self._hooks = _origin(location), hooks
        self._entries, self._attachments = SaveEntries(plan), Attachments()
        self._optimizers = ScriptOptimizers()
        self._torch = TorchPatches(self)
        self._frameworks = FrameworkPatches(self._attachments.gradients_of)
        self._steps = 0
        self._is_attaching = self._has_yielded = self._is_over = False

    # -- before the script

    def arm(self) -> None:
        """Begin to listen; also in processes that the script forks to train in them (``notebook_launcher``)."""
        if warning := started_alone():
            _say(warning)
        self._torch.open()
        self._frameworks.open()
        multiprocessing.util.register_after_fork(self, Session._on_fork)

    def _on_fork(self) -> None:
        """Finish in a forked process too: it ends without a word to the script, and has its own attachments."""
        if not self._attachments and not self._is_over:
            finish = (os.getpid(), True)  # a fork's own failure is not known here: nothing is said of unused entries
            multiprocessing.util.Finalize(None, self.finish, args=finish, exitpriority=100)

    # -- while the script runs

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for the model of an optimizer that the script has made."""
        self._attachments.release_collected()
        if not self._has_yielded and not self._is_over:
            self._optimizers.add(optimizer)
            self._frameworks.made(optimizer)
            self._torch.hear_calls(True)

    def called(self, module: nn.Module, is_outermost: bool) -> None:
        """Attach to `module` if it is the model of an optimizer that waits."""
        is_tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if self._is_attaching or is_tracing or not self._optimizers.should_look(module):
            return
        model = unwrap_compiled(module)
        optimizers = self._optimizers.of_model(model, is_outermost)
        if not optimizers:
            return
        if reason := refusal(model):
            self._optimizers.refuse(optimizers, reason)
            return
        self._is_attaching = True
        try:
            self._attach(model, optimizers)
        finally:
            self._is_attaching = False
        self._mark_done(optimizers)

    def _attach(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self._read_engine_config(model)
        is_last = len(self._optimizers.waiting) <= len(optimizers)
        plan, is_partial = self._entries.plan_for(model, is_last)
        watchable: list[Any] = [None]  # DeepSpeed's engine has the optimizer
        if not is_of_class(model, "DeepSpeedEngine"):
            watchable = [one for one in optimizers if not self.plan.watches or self._is_watchable(one)]
        self._attachments.attach(model, plan, is_partial, watchable, self._on_attached)

    def _read_engine_config(self, model: Any) -> None:
        """Read the plan in DeepSpeed's configuration, which comes before ./disthooks.yaml and is known only now."""
        config = engine_config(model)
        if config is None or "disthooks" not in config or self._attachments:
            return
        location = find(self._hooks, config)
        if _origin(location) != self._origin:
            self.plan, self._origin = read_found(location), _origin(location)
            self._entries = SaveEntries(self.plan)

    def _is_watchable(self, optimizer: Any) -> bool:
        """Whether the gradients of `optimizer` can be watched; if not, say so. A strict plan attaches, and raises."""
        if self.plan.strict or not calls_closure_again(optimizer):
            return True
        self._leave_alone(
            optimizer,
            "it calls its closure several times in a step, and no gradients are final before the last time, "
            "so that they are not watched; what 'save' says is attached",
        )
        return False

    def _on_attached(self, model: nn.Module, gradients: Gradients) -> None:
        """Load the state that the script has loaded already; see [Note: state waits for its attachment]."""
        if not self._frameworks.join(model, gradients):
            _say(
                f"{type(gradients.optimizer).__name__} goes on from a state that the script has loaded, and rules and "
                "statistics begin anew, at step 0: a checkpoint that the script writes itself has none of them. Put "
                "hooks.state_dict() into it and call hooks.load_state_dict(), with hooks = disthooks.prepare(model, "
                "optimizer); accelerate's save_state, the HF Trainer and Lightning's do it without a change"
            )

    def watches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether gradients shall be seen before `optimizer` steps, also inside a closure of its step."""
        return bool(self.plan.watches) and (self.plan.strict or not calls_closure_again(optimizer))

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step; if nothing is attached to the model of `optimizer`, say so once, or raise.

        Raises:
            AttachError: if nothing is attached and the plan is ``strict``, or each process trains alone.
        """
        if self._has_yielded or self._optimizers.is_done(optimizer):
            self._steps += 1
            return
        if not self._optimizers.is_waiting(optimizer) or only_fills_state():
            return  # another optimizer has made this one for itself
        text = f"nothing is attached to its model: {self._optimizers.reason(optimizer)}"
        if self.plan.strict or alone():
            raise AttachError(f"the first step of {type(optimizer).__name__} begins and {text}")
        self._leave_alone(optimizer, text)
        self._mark_done([optimizer])

    def _leave_alone(self, optimizer: Any, reason: str) -> None:
        name = type(optimizer).__name__
        if self._optimizers.leave_alone(optimizer, reason):
            _say(f"{name} is left alone: {reason}. The script goes on ('strict: true' makes it an error)")

    def _mark_done(self, optimizers: Sequence[Any]) -> None:
        self._optimizers.mark_done(optimizers)
        self._torch.hear_calls(bool(self._optimizers.waiting))

    def yield_to_script(self) -> None:
        """Take everything off and attach nothing more. See [Note: a script that attaches by itself]."""
        if self._is_attaching or self._has_yielded:
            return
        self._has_yielded = True
        self._optimizers.stop_waiting()
        self._torch.hear_calls(False)
        self._attachments.remove_all(_say_not_removed)

    # -- after the script

    def finish(self, process: int, failed: bool = False) -> dict[str, Any]:
        """Take everything off, and say on the first rank what became of it.

        Args:
            process: the id of the process that the script began in: a fork of it has nothing to finish.
            failed: whether the script failed: then nothing is said of what it did not come to.

        Returns:
            What the record of this rank keeps: for each model its engine, bytes and steps.
        """
        if os.getpid() != process:
            return {}
        self._is_over = True
        outcomes = self._attachments.remove_all(_say_not_removed)
        self._torch.close()
        self._frameworks.close()
        if _is_first_rank():
            self._summarize(outcomes, failed)
        return {"attached": outcomes, "left_alone": self._optimizers.left_alone, "optimizer_steps": self._steps}

    def _summarize(self, outcomes: Sequence[dict[str, Any]], failed: bool) -> None:
        if failed and not outcomes:
            return
        left_alone = self._optimizers.left_alone
        if self._has_yielded:
            _say(f"the script attaches what it needs itself; {self._origin} was not used")
        elif not outcomes and left_alone:
            _say(f"WARNING: nothing was attached, and {self._origin} was not used: {left_alone[0]}")
        elif not outcomes:
            _say(
                f"WARNING: the script ended and no model was trained in this process: {self._origin} was not used "
                "here. Processes that the script spawns (torch.multiprocessing.spawn) know nothing of it: start them "
                "with torchrun, or call disthooks.prepare(model, optimizer) in them"
            )
        else:
            for error in () if failed else self._entries.unmatched():  # a failed script has raised it
                _say(f"WARNING: nothing was saved for an entry that matches in no model: {error}")
            for line in summary_lines(outcomes):
                _say(line)


def _origin(location: Found | None) -> str:
    """Where the plan comes from, for messages: the path of its file, or what contains it."""
    if location is None:
        return "the plan"
    return os.fspath(location.source) if isinstance(location.source, (str, os.PathLike)) else location.origin


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"  # of the launcher: the process group may be gone at the end


def _say(text: str) -> None:
    """Print a message once for the job; the records of the other ranks have what is theirs."""
    if _is_first_rank():
        print(f"disthooks: {text}", file=sys.stderr, flush=True)


def _say_not_removed(error: Exception) -> None:
    """Print, on every rank, that an attachment could not be taken off."""
    rank = os.environ.get("RANK", "0")
    print(f"disthooks: rank {rank}: while detaching: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
