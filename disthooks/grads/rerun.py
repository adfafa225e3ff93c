"""``Rerun``: makes the gradients of a bad step once more, and tells whether the fault comes again."""

# [Note: what a second run tells]
# The rules have left a step out. Was it the hardware or the program? The calls that made the gradients are made again,
# from the same arguments, random numbers and buffers. If the gradients are good this time and have other bits, the
# fault was transient, and the step is made with the new ones: training goes on with the bits of a run without a fault.
# If they have the same bits, the fault is in the data or in the program. If they are bad again with other bits, the
# program is not deterministic, and nothing is known. A function that draws its own data would look like the first
# case, so one good step is run again, too, and must give the same bits.
# Bits are compared by checksums of positions (_hashing.py), after the rules, so a gradient that a rule made NaN as a
# whole says nothing. So the merged numbers that every step measures before the rules are compared as well. Statistics
# of logged steps are not, because some of them are times.
# Reduced gradients differ on all ranks when one rank went wrong. What the function returned, the loss mostly, differs
# on that rank alone.
#
# [Note: all ranks or none]
# A second run has the collectives of a first one. So the ranks agree before it that each of them can run again, and
# made as many calls; and every error is raised on all ranks. Whether to ask follows from numbers that all ranks have
# alike: the decision, and the number of the step.
#
# [Note: gradients of others]
# A second backward adds to all gradients that the first one reached. Those of parameters that another optimizer of this
# process has are copied before it, and put back: that optimizer steps with what the first run made. Then the step is
# not made with the second gradients, because the two would not belong together, and the probe raises. Which optimizers
# there are is asked of the garbage collector, in the steps that are run again alone.
#
# [Note: what is put back]
# Before the calls: the states of rules, what hooks have noted of this step, buffers, gradients. Before each one: random
# numbers, autocast, and the engine's flags that say whether a backward reduces. After the calls the random numbers are
# those that the step had before. Arguments are held by reference, so memory is that of the micro-batches of one step;
# one that was changed in place cannot be used again.

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from disthooks._hashing import Checksums, signed64
from disthooks._streams import refuse_capture
from disthooks._tensors import local_part
from disthooks.engines.base import Engine
from disthooks.engines.scalers import scalers, stage_of
from disthooks.engines.step import Step, parameters_of
from disthooks.errors import UsageError
from disthooks.grads import collectives
from disthooks.grads.buffers import BuffersBefore
from disthooks.grads.call_context import CallContext
from disthooks.grads.capture import BadCallFinder, CallTaker, capture_folder
from disthooks.grads.step import StepResult, StepRunner

P = ParamSpec("P")
T = TypeVar("T")
AnyPath = str | os.PathLike[str]

#: Why a step cannot be run again, as ranks tell each other by the place in this list.
_REASONS = (
    "",
    "no call of the function since the last step",
    "a call raised",
    "gradients came from a backward outside of the function",
    "gradients were there before the first call, and were not 0",
    "the loop changed the gradients between the call and the step",
    "an argument was changed in place after the call",
    "the forward changed a buffer for the first time",
    "other attachments watch the same optimizers",
    "an optimizer of the attachment does not step now",
    "the first step of DDP on more than two ranks sums in another order than later ones",
    "the loop measured the norm of the gradients before the rules ran",
    "parameters of another optimizer got gradients in the function",
)


#: A checksum of the gradients, what the function returned, and the merged numbers.
_Bits = tuple[int, list[torch.Tensor], list[torch.Tensor]]


class _Call:
    """One call of the function, which can be made again. See [Note: what is put back]."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, device: torch.device, flags: Any) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._context, self._flags = CallContext.now(device), flags

    @property
    def has_changed(self) -> bool:
        return any(tensor._version != version for tensor, version in self._versions)

    def make_again(self) -> Any:
        for owner, name, value in self._flags:
            setattr(owner, name, value)
        with self._context.entered():
            return self._function(*self._args, **self._kwargs)


class Rerun:
    """The calls since the last step, and the second run of them. See [Note: what a second run tells].

    Attributes:
        facts: what the records of steps say of second runs, by step.
        has_norm: whether the loop measured a norm of the first gradients, by which it would clip the second ones.
        folder: where captures go; None if there are none.
        is_used: whether a function was wrapped.
        is_wanted: whether a configuration asks for it.
        is_again: whether the second run is under way.
    """

    def __init__(self, engine: Engine, step: Step, runner: StepRunner, buffers: BuffersBefore) -> None:
        self.facts: dict[int, dict[str, Any]] = {}
        self._engine, self._step, self._runner = engine, step, runner
        self._group, self._device = runner.group, runner.device
        self._buffers, self._checksums = buffers, Checksums()
        self._should_probe, self._is_first = False, True
        self.folder: AnyPath | None = None
        self.is_used = self.is_wanted = self.is_again = self._is_inside = False
        self.forget()

    def end_step(self, number: int) -> None:
        """The step with this number is made."""
        self._is_first = False
        if self._noted:
            self.facts[number] = self._noted
        self.forget()

    def forget(self) -> None:
        """The calls belong to no step any more, and what a second run showed to no record."""
        self._noted: dict[str, Any] = {}
        self._calls: list[_Call] = []
        self._returned: list[torch.Tensor] = []
        self._problem, self.has_norm = "", False
        self._had_gradients: list[bool] = []
        self._before: list[torch.Tensor] = []  # the gradients that were there before the first call
        self._after: Any = None  # what gradients were there after the last call, and when the step began
        self._now: Any = None

    def remove(self) -> None:
        """From now on the function is called as it is."""
        self.is_used = False
        self.forget()

    def wrap(self, function: Callable[P, T], probe: bool, folder: AnyPath | None, captures: int) -> Callable[P, T]:
        if not callable(function):
            raise UsageError(f"rerun() takes the function that makes the gradients of a micro-batch, not {function!r}")
        self._refuse_strangers()
        folder = self.folder if folder is None else folder
        if folder is not None and importlib.util.find_spec("safetensors") is None:
            raise UsageError("rerun(capture=...) writes with the package safetensors: pip install 'disthooks[capture]'")
        self.is_used, self._should_probe = True, probe
        self._captures, self._searches, self.folder = captures, 4 * captures, folder

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return self._call(function, args, kwargs)

        return call

    def _refuse_strangers(self) -> None:
        if not any(bound.rule.skips for bound in self._runner.plan.rules):
            raise UsageError("rerun(): no rule leaves steps out: add SkipNonFinite() or SkipSpike()")
        if not self._buffers.puts_back:
            raise UsageError("rerun(): a second run needs the buffers from before: leave out restore_buffers=False")
        if kept := self._engine.keeps_gradients():
            raise UsageError(f"rerun(): {kept} keeps a part of each step's gradients, so a second run gives others")
        if any(isinstance(each, torch.optim.LBFGS) for each in self._step.optimizers):
            raise UsageError("rerun(): LBFGS makes gradients inside of its step, as often as it likes")
        owned = {id(each) for each in self._engine.optimizer_parameters(self._step)}
        others = [s.name for s in self._engine.shards if s.parameter.requires_grad and id(s.parameter) not in owned]
        if others:
            raise UsageError(
                f"rerun(): {others[0]!r} and {len(others) - 1} other parameters need gradients, and no optimizer of "
                "this attachment has them: a second backward would add to their gradients. Attach to all optimizers, "
                "or freeze these parameters"
            )

    # -- the first run

    def _call(self, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        if not self.is_used or self._is_inside:
            return function(*args, **kwargs)
        refuse_capture("a function of rerun()", "call it outside of the graph")
        if torch.is_inference_mode_enabled():
            raise UsageError("rerun(): the function is called in inference_mode, where no gradient is made")
        if drawn := [leaf for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "__next__")]:
            raise UsageError(
                f"rerun(): an argument is an iterator ({type(drawn[0]).__name__}), which gives other data the second "
                "time: take the batch out of it, and give that"
            )
        self._begin_call()
        if self._problem:  # it stays until the step is made, so nothing has to be held
            self._calls.clear()
            return function(*args, **kwargs)
        self._calls.append(_Call(function, args, kwargs, self._device, self._sync_flags()))
        self._is_inside = True
        try:
            returned = function(*args, **kwargs)
        except BaseException:
            self._problem = _REASONS[2]
            raise
        finally:
            self._is_inside, self._after = False, self._marks()
        self._returned += _numbers(returned)
        return returned

    def _begin_call(self) -> None:
        gradients = [shard.parameter.grad for shard in self._engine.shards]
        if self._after is not None and all(each is None for each in gradients) and any(self._after[1]):
            self.forget()  # the loop has dropped the gradients and begins again
        if self._after is None:
            self._had_gradients = [gradient is not None for gradient in gradients]
            there = [local_part(gradient) for gradient in gradients if gradient is not None]
            self._before = [torch.stack([part.count_nonzero() for part in there]).sum()] if there else []
        elif not self._problem and self._marks() != self._after:
            self._problem = _REASONS[5 if self._marks()[0] == self._after[0] else 3]

    def _marks(self) -> Any:
        """How many backwards there were, and which gradients are there, with their versions."""
        gradients = [shard.parameter.grad for shard in self._engine.shards]
        return self._step.backwards, [None if g is None else (id(g), g._version) for g in gradients]

    # -- the second run

    def begin_step(self) -> None:
        """A step begins; rules have not changed its gradients yet.

        Raises:
            UsageError: inside of the function, because a second run would make a second step.
        """
        if self._is_inside:
            raise UsageError(
                "rerun(): the optimizer steps inside of the function, so a second run would make a second step: give "
                "the part that ends with backward()"
            )
        if self.is_used:
            self._now, self._noted = self._marks(), {}

    def judge(
        self,
        number: int,
        is_measured: bool,
        result: StepResult,
        put_back: Callable[[], None],
        run: Callable[[], StepResult],
    ) -> StepResult:
        """Run the step again if ``result`` leaves it out, or to probe; the result that counts.

        Args:
            number: of the step.
            is_measured: whether statistics were measured.
            result: of the first run.
            put_back: puts back what rules and hooks have noted of the step.
            run: measures the gradients and applies the rules.

        Raises:
            UsageError: on all ranks, if a good step gave other bits the second time.
        """
        if not self.is_used:
            if self.is_wanted and not self._is_first:
                self.is_wanted = False
                warnings.warn(
                    "rerun: true does nothing here: under the HF Trainer and Lightning the callback wraps the step; in "
                    "a loop of your own call forward_backward = prepared.gradients.rerun(forward_backward)",
                    stacklevel=2,
                )
            return result
        decision = result.skip()
        is_bad = decision is not None and bool(decision)  # the host waits for the device
        if not is_bad and (self._is_first or not self._should_probe):
            return result
        began, told = time.perf_counter(), self._tell([len(self._calls), _REASONS.index(self._reason())])
        counts, why = {row[0] for row in told}, next((_REASONS[row[1]] for row in told if row[1]), "")
        if why or len(counts) > 1:
            if is_bad:
                self._note(result, "refused", why or f"the ranks made {sorted(counts)} calls", [], began)
            return result
        first = self._bits(), self._returned, self._measured(result, is_measured)
        states = self._runner.copied_states()
        others = _OtherGradients(self._engine.optimizer_parameters(self._step), self._step.optimizers)
        put_back()
        self._make_again()
        self._unscale_again()
        has_others = others.put_back()
        second = run()
        is_other, is_here = self._differs(first, (self._bits(), self._returned, self._measured(second, is_measured)))
        left = 0 if self.folder is None or not self._searches else self._captures
        found = self._tell([is_other, is_here, has_others, left])
        differs, has_others = (any(row[place] for row in found) for place in (0, 2))
        left = min(row[3] for row in found)  # one rank may have been given no folder, or another number
        ranks = [rank for rank, row in zip(self._engine.ranks, found, strict=True) if row[1]]
        if not is_bad:
            self._end_probe(differs, has_others, ranks)
            return second
        again = second.skip()
        is_good = again is not None and not bool(again)
        kind = "transient" if is_good and differs else "differs" if is_good or differs else "repeats"
        chosen = result if has_others or (kind == "differs" and is_good) else second
        if chosen is result:
            self._runner.restore_states(states)
        self._note(chosen, "refused" if has_others else kind, _REASONS[12] if has_others else "", ranks, began)
        if kind == "repeats" and not has_others and left > 0 and self.folder is not None:
            self._capture(number, pathlib.Path(self.folder), left, put_back)
            self._unscale_again()
            run()  # the gradients and the states of rules are those of the second run again
        return chosen

    def _capture(self, number: int, folder: pathlib.Path, most: int, put_back: Callable[[], None]) -> None:
        """Make the calls again to find the module that made the step bad, and once more to write what it gets.

        At most ``most`` ranks write.
        """
        rank, models = self._engine.ranks[self._engine.position], self._engine.models
        named = list(zip(self._engine.prefixes, models, strict=True))
        self._searches -= 1
        put_back()
        with BadCallFinder(named) as finder:
            self._make_again()
        found = self._tell([finder.found is not None])
        writers = [r for r, row in zip(self._engine.ranks, found, strict=True) if row[0]][:most]
        self._captures -= len(writers)
        if not writers:
            self._noted["rerun_why"] = (
                "no module was found that made it: the batch, the code of the loss, compiled code or a finite spike did"
            )
            return
        put_back()
        call = finder.found if rank in writers else None
        taker = None if call is None else CallTaker(named, call, self._device)
        with taker or contextlib.nullcontext():
            self._make_again()
        about = {"step": number, "rank": rank, "engine": self._engine.label}
        told = self._tell([0 if taker is None else taker.write(folder, about)])
        places = zip(self._engine.ranks, told, strict=True)
        written = [str(capture_folder(folder, number, r, row[0])) for r, row in places if row[0]]
        self._noted |= {"rerun_capture": written} if written else {}

    def _reason(self) -> str:
        """Why this rank cannot run the step again; "" if it can."""
        if self._problem:
            return self._problem
        if not self._calls:
            return _REASONS[1]
        is_scaled = any(scalers.is_known(each) for each in self._step.optimizers)
        checks = [
            (3, self._now[0] != self._after[0]),
            (4, any(bool(count) for count in self._before)),
            (5, self._now != self._after and not is_scaled),
            (6, any(call.has_changed for call in self._calls)),
            (7, self._buffers.has_lost()),
            (8, self._engine.has_other_functions(self._step)),
            (9, len(self._step.stepping) < len(self._step.optimizers)),
            (11, self.has_norm),
            (10, self._is_first and len(self._engine.ranks) > 2 and self._engine.first_sum_differs),
        ]
        return next((_REASONS[place] for place, is_so in checks if is_so), "")

    def _make_again(self) -> None:
        now, flags = CallContext.now(self._device), self._sync_flags()
        self._buffers.put_back_now()
        self._engine.drop_gradients(self._had_gradients)
        self._returned, self.is_again, self._is_inside = [], True, True
        try:
            for call in self._calls:
                self._returned += _numbers(call.make_again())
        finally:
            self.is_again = self._is_inside = False
            now.put_back_random()
            for owner, name, value in flags:
                setattr(owner, name, value)

    def _sync_flags(self) -> list[tuple[Any, str, Any]]:
        """The engine's flags, with their values; another version of it may lack some."""
        return [
            (owner, name, getattr(owner, name)) for owner, name in self._engine.sync_flags() if hasattr(owner, name)
        ]

    def _unscale_again(self) -> None:
        """A ``GradScaler`` has divided the first gradients; it asks ``found_inf`` of the step when it is made."""
        for optimizer in self._step.optimizers:
            scaler = scalers.of(optimizer)
            if scaler is None or not scaler.is_enabled() or stage_of(scaler, optimizer) == "READY":
                continue  # nobody has divided the first gradients: DeepSpeed does it later
            found = torch.zeros((), dtype=torch.float32, device=scaler._scale.device)
            inverse = scaler._scale.double().reciprocal().float()
            state = scaler._per_optimizer_states[id(optimizer)]
            state["found_inf_per_device"] = scaler._unscale_grads_(optimizer, inverse, found, False)

    def _bits(self) -> int:
        """A checksum of the gradients on this rank."""
        total = 0
        for place, shard in enumerate(self._engine.shards):
            gradient = shard.gradient()
            total += 0 if gradient is None else (2 * place + 1) * int(self._checksums(gradient))
        return signed64(total)

    def _measured(self, result: StepResult, is_measured: bool) -> list[torch.Tensor]:
        """The merged numbers that every step measures."""
        found = []
        for part, vectors in zip(self._runner.plan.rounds, result.merged, strict=False):
            values = part.layout(is_measured).unpack(vectors)
            found += [values[measure].clone() for measure in part.always.uses]
        return found

    @staticmethod
    def _differs(first: _Bits, second: _Bits) -> tuple[bool, bool]:
        """Whether gradients or merged numbers have other bits than the first time, and what the function returned."""
        one, other = (bits[0] for bits in (first, second))
        is_other = one != other or not _all_same(first[2], second[2])
        return is_other, not _all_same(first[1], second[1])

    def _end_probe(self, differs: bool, has_others: bool, ranks: Sequence[int]) -> None:
        self._should_probe = False
        if has_others:
            raise UsageError(
                "rerun(): parameters of another optimizer got gradients in the function, and that optimizer would step "
                "with those of the first run: attach to both optimizers, gradients(model, [first, second]), or let "
                "the others need no gradient in the function (requires_grad_(False))"
            )
        if differs:
            where = f" on the ranks {list(ranks)}" if ranks else ""
            raise UsageError(
                f"rerun(): the function gave other gradients when it was called again with the same arguments{where}: "
                "it draws its own data, has a torch.Generator of its own, or uses kernels that are not deterministic "
                "(torch.use_deterministic_algorithms). Give the data as arguments; with probe=False such a function is "
                "taken, and a fault that repeats may be called transient"
            )

    def _note(self, result: StepResult, kind: str, why: str, ranks: Sequence[int], began: float) -> None:
        self._noted = {
            "rerun": kind,
            "rerun_calls": len(self._calls),
            **({"rerun_why": why} if why else {}),
            **({"rerun_ranks": list(ranks)} if ranks else {}),
            "rerun_seconds": time.perf_counter() - began,
        }
        # The event makes a record of the step, whether it is logged or not.
        result.events.append((torch.ones((), device=self._device), {}))

    def _tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank, in the order of ranks. See [Note: all ranks or none]."""
        return collectives.gather(self._group, torch.tensor(numbers, dtype=torch.int64, device=self._device))


class _OtherGradients:
    """The gradients of the parameters of other optimizers. See [Note: gradients of others]."""

    def __init__(self, owned: Sequence[torch.Tensor], optimizers: Sequence[Any]) -> None:
        mine, ids = {id(each) for each in optimizers}, {id(each) for each in owned}
        others = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
        found = {id(p): p for each in others if id(each) not in mine for p in parameters_of(each) if id(p) not in ids}
        self._before: list[tuple[torch.Tensor, Any, Any]] = [
            (p, p.grad, None if p.grad is None else (p.grad._version, p.grad.clone())) for p in found.values()
        ]

    @torch.no_grad()
    def put_back(self) -> bool:
        """Put the gradients back; whether one had changed."""
        changed = False
        for parameter, grad, copied in self._before:
            has_version = copied is None or grad._version == copied[0]
            if parameter.grad is grad and has_version:
                continue
            changed, parameter.grad = True, grad
            if copied is not None:
                grad.copy_(copied[1])
        return changed


def _numbers(returned: Any) -> list[torch.Tensor]:
    """Copies of the tensors of one element in what the function returned, and its floats."""
    leaves = tree_leaves(returned)
    found = [each.detach().clone() for each in leaves if isinstance(each, torch.Tensor) and each.numel() == 1]
    return found + [torch.tensor(each, dtype=torch.float64) for each in leaves if isinstance(each, float)]


def _all_same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors have the same bits."""
    one, other = ([each.detach().contiguous().view(-1).view(torch.uint8) for each in given] for given in (some, others))
    return len(one) == len(other) and all(map(torch.equal, one, other))
