"""A session attaches a plan to the models of a script, without a change in the script.

The methods of ``Session`` are in the order in which one worker calls them: ``arm`` before the script starts, ``made``
for each new optimizer, ``called`` when a model runs, ``steps`` before each step, ``finish`` at the end.
"""

# [Note: the first call with gradients on]
# The session attaches hooks when a model is first called with gradients on, and not where the script wraps the model.
# At this moment the model has all its wrappers (activation checkpointing is put on after FSDP), no backward has run,
# and all ranks are at the same place. Nothing is attached in an evaluation before training, or to a teacher or another
# module whose parameters no optimizer holds. No earlier event shows the root of `fully_shard`, and a global forward
# hook runs after the module has chosen its own hooks (decision 61). Therefore `TorchPatches` replaces
# `nn.Module.__call__` while an optimizer waits.

# [Note: a script that attaches by itself]
# A script may call `disthooks.prepare`, or use a callback that calls it. Then the script decides what is attached, and
# not the file. If both attached, each rule would be applied twice. So the session yields to the script: it takes off
# its own attachments, and attaches nothing more.

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
from disthooks.config.agree import reason_alone
from disthooks.config.locate import ConfigLocation, engine_config, locate_config, read_plan
from disthooks.errors import AttachError
from disthooks.grads.attachment import Gradients
from disthooks.run.attachment import Attachments, SaveEntries, summary_lines
from disthooks.run.optimizers import ScriptOptimizers, calls_closure_again, engine_to_attach, started_alone
from disthooks.run.patches import FrameworkPatches, TorchPatches, only_fills_state


class Session:
    """Attaches ``plan`` to the models whose parameters the script's optimizers hold.

    See [Note: the first call with gradients on]. ``hooks`` takes precedence over DeepSpeed's configuration.
    """

    def __init__(self, plan: Plan, location: ConfigLocation | None = None, hooks: str | None = None) -> None:
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
        """Replace the methods, also in processes that the script forks to train in them (``notebook_launcher``)."""
        if warning := started_alone():
            _say(warning)
        self._torch.open()
        self._frameworks.open()
        multiprocessing.util.register_after_fork(self, Session._on_fork)

    def _on_fork(self) -> None:
        """Let a forked process finish its own attachments when it ends: otherwise nothing calls ``finish`` there."""
        if not self._attachments and not self._is_over:
            # It is not known whether the fork has failed, so it prints nothing about unused entries.
            finish = (os.getpid(), True)
            multiprocessing.util.Finalize(None, self.finish, args=finish, exitpriority=100)

    # -- while the script runs

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        self._attachments.release_collected()
        if not self._has_yielded and not self._is_over:
            self._optimizers.add(optimizer)
            self._frameworks.made(optimizer)
            self._torch.hear_calls(True)

    def called(self, module: nn.Module, is_outermost: bool) -> None:
        is_tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if self._is_attaching or is_tracing or not self._optimizers.should_look(module):
            return
        model = unwrap_compiled(module)
        optimizers = self._optimizers.of_model(model, is_outermost)
        if not optimizers:
            return
        try:
            engine = engine_to_attach(model, bool(self.plan.watches.get("process_group")))
        except AttachError as error:
            self._optimizers.refuse(optimizers, str(error))
            return
        self._is_attaching = True
        try:
            self._read_engine_config(model)
            is_last = len(self._optimizers.waiting) <= len(optimizers)
            plan, is_partial = self._entries.plan_for(model, is_last)
            watchable: list[Any] = [None]  # DeepSpeed's engine has the optimizer
            if not is_of_class(model, "DeepSpeedEngine"):
                watchable = [one for one in optimizers if not self.plan.watches or self._is_watchable(one)]
            self._attachments.attach(model, plan, is_partial, watchable, self._on_attached, engine)
        finally:
            self._is_attaching = False
        self._mark_done(optimizers)

    def _read_engine_config(self, model: Any) -> None:
        """Read the plan in DeepSpeed's configuration, which takes precedence over ./disthooks.yaml."""
        config = engine_config(model)
        if config is None or "disthooks" not in config or self._attachments:
            return
        location = locate_config(self._hooks, config)
        if _origin(location) != self._origin:
            self.plan, self._origin = read_plan(location), _origin(location)
            self._entries = SaveEntries(self.plan)

    def _is_watchable(self, optimizer: Any) -> bool:
        """Whether the gradients of `optimizer` can be watched; prints a message if not. A strict plan raises."""
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
        """Whether the session watches the gradients of `optimizer`, also inside the closure of a step."""
        return bool(self.plan.watches) and (self.plan.strict or not calls_closure_again(optimizer))

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step. If nothing is attached to the model of `optimizer`, say so once; AttachError if ``strict``."""
        if self._has_yielded or self._optimizers.is_done(optimizer):
            self._steps += 1
            return
        if not self._optimizers.is_waiting(optimizer) or only_fills_state():
            return  # another optimizer has made this one for itself, and counts the step
        text = f"nothing is attached to its model: {self._optimizers.reason(optimizer)}"
        if self.plan.strict or reason_alone():
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
        """Take all attachments off and attach nothing more. See [Note: a script that attaches by itself]."""
        if self._is_attaching or self._has_yielded:
            return
        self._has_yielded = True
        self._optimizers.stop_waiting()
        self._torch.hear_calls(False)
        self._attachments.remove_all(_say_not_removed)

    # -- after the script

    def finish(self, process: int, failed: bool = False) -> dict[str, Any]:
        """Take all attachments off, and print a summary on the first rank; in a fork of ``process`` nothing is done."""
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
            _say(f"the script attaches hooks itself, so disthooks.run attached nothing of {self._origin}")
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


def _origin(location: ConfigLocation | None) -> str:
    """The origin of the plan, for messages: the path of its file, or the text of ``location.origin``."""
    if location is None:
        return "the plan"
    return os.fspath(location.source) if isinstance(location.source, (str, os.PathLike)) else location.origin


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"  # not the process group's: it may be gone at the end


def _say(text: str) -> None:
    """Print a message once for the job: on the first rank."""
    if _is_first_rank():
        print(f"disthooks: {text}", file=sys.stderr, flush=True)


def _say_not_removed(error: Exception) -> None:
    """Print, on every rank, that an attachment could not be taken off."""
    rank = os.environ.get("RANK", "0")
    print(f"disthooks: rank {rank}: while detaching: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
