"""``fit`` keeps a training step within a number of bytes: it finds how many saved tensors may stay on the device."""

# [Note: a limit that is found]
# The memory of a step is what the step needs anyway, and the saved tensors on the device. A ``Tiered`` keeps the second
# part under a limit, what is on its way included. So a limit that is larger by some bytes makes the peak larger by no
# more than these bytes and two tensors, at whatever moment of the step the peak is (the order of copies may change).
# That is all that ``fit`` needs to know:
#
# - A round is one forward with gradients on, or several whose saved tensors wait for the same backward (two answers to
#   a prompt, a model that is applied three times). A forward goes on with the round if saved tensors of it are alive,
#   or another thread is in a forward of it, and no optimizer has made a step; otherwise it starts another one. A loop
#   that calls parts of the model, and not the model itself, says when a round begins and ends: see `begin_round`. A
#   forward of the model goes on with such a round if it is the first one in it.
# - The first round has the limit 0: every saved tensor is moved, and no choice could need less.
# - When a round starts, the peak of the last one is known, and the limit grows by what is left of the budget, less what
#   lies on the device now and did not when the round started (the optimizer's state, which the first step makes). A
#   round that needed too much makes the limit smaller.
# - The first backward after an optimizer's step makes the gradients. Later ones add to them (gradient accumulation),
#   and need less. So what rounds need is kept apart for these two.
# - A forward without gradients belongs to the step that it stands in: a metric, a moving average. After the optimizer's
#   step it is an evaluation, and the peak is not read until the next round. What a round without a backward needs is
#   kept apart.
# - Inputs of another size have a limit of their own; the size of a round is that of all its forwards. Before the first
#   round of a size, what the step needs anyway is taken from the next larger size that is known, or from the largest
#   one; see `nearest_size`. A round is expected to become as large as those that began with the same size. If it
#   becomes larger, the limit shrinks within it.
# - Two models on one device (a GAN) have a budget each, of the same memory. What the other one keeps lies there when a
#   round starts, or is a part of what the round needs. When a round of the other one starts, and no saved tensor of
#   this one is alive, the peak of this one is known: what comes later does not depend on its limit. Copies that are
#   under way when a round starts may be over at its peak, so they count under the limits of both models (decision 212).
# - What the model computes again is decided with the same limit; see [Note: what is computed again].
#
# No choice changes a number: each rank may find another limit, and gradients are the same bits. The hooks on the model
# keep the attachment alive, so a script that drops the handle trains with the same limits.

from __future__ import annotations

import functools
import math
import operator
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from disthooks import memory
from disthooks._handles import (
    Attachment,
    LoggedRecords,
    UncopiedHook,
    check_state,
    first_names,
    is_power_of_two,
    weak_method,
)
from disthooks._locks import new_lock
from disthooks._match import Pattern, unwrap_engine
from disthooks._ranks import local_world_size
from disthooks._streams import is_accelerator
from disthooks._tensors import format_bytes, parse_bytes
from disthooks._torch import uncompiled
from disthooks.errors import UsageError
from disthooks.saved.attach import SavingHandle, save_activations
from disthooks.saved.checkpointed_layers import CheckpointedLayers
from disthooks.saved.computed_again import ComputedAgain, nearest_size
from disthooks.saved.cost import Rates
from disthooks.saved.fit_report import FitReport
from disthooks.saved.pipeline import Pipeline, Stage, pipeline
from disthooks.saved.report import BudgetReport, SavedReport, SiteReport
from disthooks.saved.stopwatch import Moment, Stopwatch
from disthooks.saved.stores.cpu import OnCpu
from disthooks.saved.stores.host import container_memory, node_memory
from disthooks.saved.stores.tiers import OnDevice, Tiered

# The part of the budget that is left free: an allocator rounds, and a step may need a little more than the last one. On
# a CPU what is in flight, and what the C library keeps, differ more from step to step.
_MARGIN, _MARGIN_CPU = 0.01, 0.02
# At the moment of the last peak, the saved tensors may have been below the limit by up to two tensors. So the bytes of
# two of the largest stay free, or of one if two are more than this part of the budget: a limit that is a little larger
# may keep one tensor more. A limit grows by a part of what is left.
_UNEVEN, _GROWTH = 0.05, 0.9
# On the CPU it is a half: what a store holds while it writes and reads does not count under the limit there.
_GROWTH_CPU = 0.5
# The part of the memory that a budget of "free" leaves to fragments between tensors and to other libraries.
_OTHERS = 0.05
# A model that uses its branches in turn stores other bytes in each round: so many of these are remembered of one size.
_PROGRAMS = 8
# Reasons to keep a saved tensor that takes no memory, because it lies there anyway.
_WEIGHTS = ("parameter", "buffer")
#: An example of a state of ``fit``, with the types that it has.
STATE = {
    "needs": {(0, True): {0: 0.0}},
    "least": {(0, True): 0.0},
    "again": {0: (0.0, 0.0, True, {"": 0.0}, {"": 0.0}, True)},
    "layers": {"": True},
}
#: The budget that is found at the first forward.
FREE = "free"


class _Memory:
    """Reads the bytes in use: torch's allocator counts them on an accelerator, and the system those of the process."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cpu = device, device.type == "cpu"

    def in_use(self) -> int:
        return memory.resident() if self._is_cpu else torch.accelerator.memory_allocated(self._device)

    def peak(self) -> int:
        return memory.peak_resident() if self._is_cpu else torch.accelerator.max_memory_allocated(self._device)

    def free(self) -> int:
        """Bytes that may be in use: those that are now, and what is free beside them, less a part for others."""
        if self._is_cpu:
            left = min(found[0] for found in (node_memory(), container_memory()) if found)
            return int((1 - _OTHERS) * (memory.resident() + left // local_world_size()))
        kept = torch.accelerator.memory_reserved(self._device)  # by torch's allocator; what of it is unused is free too
        return int((1 - _OTHERS) * (kept + torch.accelerator.get_memory_info(self._device)[0]))

    def reset_peak(self) -> None:
        if self._is_cpu:
            memory.reset_peak_resident()
        else:
            torch.accelerator.reset_peak_memory_stats(self._device)


@dataclass
class _Round:
    """Forwards with gradients on whose saved tensors wait for the same backward. See [Note: a limit that is found].

    Attributes:
        first: how many elements the inputs of its first forward have.
        size: how many those of all its forwards have, so far.
        expected: how many they may have in the end.
        is_first: whether no backward has added to gradients since an optimizer's step.
        begin: bytes in use when it started, without those of copies that were under way, which count under the limit.
        before: what the attachments had done with saved tensors before.
        started: when it started: by the host's clock, and by the computation's.
        forward_end, backward_end: when its forwards and its backward ended, as far as they have.
        peak: the most bytes in use in it, as far as it was read.
        has_stepped: whether an optimizer has made a step in it.
        is_over: whether its peak is known: an evaluation has followed, a forward without gradients after the
            optimizer's step; or another attachment has started a round, and no saved tensor of this one was alive; or
            the loop has ended it.
        is_alone: whether no other attachment kept saved tensors on the device in it.
        is_announced: whether the loop has begun it, and no forward of the model has been called in it.
        threads: which threads are in a forward of it now.
    """

    first: int
    size: int
    expected: int
    is_first: bool
    begin: int
    before: SavedReport
    started: tuple[float, Moment | None]
    forward_end: Moment | None = None
    backward_end: Moment | None = None
    peak: int = 0
    has_stepped: bool = False
    is_over: bool = False
    is_alone: bool = True
    is_announced: bool = False
    threads: set[int] = field(default_factory=set)

    def is_alive(self, saved: SavedReport) -> bool:
        """Whether saved tensors of this round are alive, by what was done with saved tensors until now."""
        return saved.held > self.before.held

    def has_backward(self, saved: SavedReport) -> bool:
        """Whether a backward has read what the round has stored."""
        return saved.loaded > self.before.loaded or saved.stored == self.before.stored


class _RoundHook(UncopiedHook):
    """A hook that is called also if the model was compiled: the graph breaks before forward and after it."""

    __slots__ = ()

    @uncompiled(
        "fit of disthooks measures the model's forwards, so the graph breaks before and after each: compile the model "
        "without fullgraph=True, or the layers in it, each by itself: layer.compile(fullgraph=True)"
    )
    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class Fitted(Attachment):
    """The attachment that :func:`fit` returns. See [Note: a limit that is found].

    Args:
        model: whose forwards begin a round.
        parts: the attachments that save.
        tiers: those of ``parts``; all share their first tier.
        budget: bytes on ``device``; None for what is free when the first round begins.
        device: of the memory that is counted.

    >>> model, tiers = nn.Linear(2, 2), Tiered(OnDevice(0), OnCpu())
    >>> saving = save_activations(model, "*", tiers)
    >>> with saving, Fitted(model, [saving], [tiers], 60 << 30, torch.device("cuda")) as fitted:
    ...     fitted.state_dict(), fitted.report().rounds
    ({'needs': {}, 'least': {}, 'again': {}, 'layers': {}}, 0)
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[SavingHandle],
        tiers: Sequence[Tiered],
        budget: int | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._parts, self._tiers, self._device = parts, [each.open() for each in tiers], device
        self._budget = budget or 0
        self._on_device = cast(OnDevice, tiers[0].stores[0]).open()
        self._near = self._on_device.budget
        self._near.set_limit(0)
        self._memory = _Memory(device)
        # What a round needed beside saved tensors and what lay there before: by its size and whether it was the first
        # after a step, and by the bytes that it stored, which are negative if it had no backward.
        self._needs: dict[tuple[int, bool], dict[int, int]] = {}
        self._totals: dict[int, int] = {}  # by the size of a round's first forward: the most that a round had
        self._round: _Round | None = None
        self._rounds = self._peak = self._missing = 0
        self._sites: dict[str, SiteReport] = {}
        self._kept, self._records = BudgetReport(self._budget), 0  # without the round under way; records until then
        # What rounds that came too near to the budget needed. It holds when a later round needs less.
        self._least: dict[tuple[int, bool], int] = {}
        self._watch = Stopwatch(device)
        self._again = ComputedAgain(self._watch)
        self._known: dict[str, bool] = {}  # of a state that was loaded: whether layers can do without their checkpoint
        self._has_warned, self._lock = False, new_lock()
        for part in parts:
            part._limit_drops(self._again.droppable)
        for other in _at_work:
            if other._device == device:
                self._on_device.add_below(other._on_device.below)
                other._on_device.add_below(self._on_device.below)
        _at_work.add(self)
        self.on_remove(functools.partial(_at_work.discard, self))
        self.on_remove(model.register_forward_pre_hook(_RoundHook(self._before_forward), with_kwargs=True).remove)
        after = model.register_forward_hook(_RoundHook(self.end_forward), always_call=True)
        self.on_remove(after.remove)
        # These hooks are on every optimizer of the process, so they must not keep the attachment and its model alive.
        for handle in (
            register_optimizer_step_pre_hook(weak_method(self._before_step)),
            register_optimizer_step_post_hook(weak_method(self._after_step)),
        ):
            self.on_remove(handle.remove)
            weakref.finalize(self, handle.remove).atexit = False

    def report(self) -> FitReport:
        """The budget, what was measured, and what was done with the saved tensors, on this rank."""
        if self._round is not None and not self._round.has_stepped:
            self._read_peak()
        limit, layers = self._near.limit or 0, self._again.layers
        return FitReport(
            budget=self._budget,
            device=self._device,
            rounds=self._rounds,
            peak=self._peak,
            limit=limit,
            missing=self._missing,
            again=self._again.nbytes,
            checkpoints=len(layers),
            checkpoints_off=self._again.off,
            outlook=self._again.outlook,
            kinds=self._again.kinds,
            sites=self._sites,
            saved=replace(self._saved(), budget=self._counted()),
        )

    def _counted(self, is_over: bool = False) -> BudgetReport:
        """Whether the budget was kept, with the round that is under way; it counts as a round as soon as it is over."""
        kept, now = self._kept, self._round
        kept = replace(kept, nbytes=self._budget, recent=kept.recent if self._records == LoggedRecords.count else 0)
        if now is None:
            return kept
        is_over |= now.has_stepped or now.is_over
        return replace(
            kept,
            peak=max(kept.peak, now.peak),
            recent=max(kept.recent, now.peak),
            rounds=kept.rounds + is_over,
            steps=kept.steps + now.has_stepped,
            over=kept.over + (is_over and now.peak > self._budget),
        )

    def _saved(self) -> SavedReport:
        """What was done with the saved tensors since the attachments were made."""
        return functools.reduce(operator.add, (part.report() for part in self._parts))

    def state_dict(self) -> dict[str, Any]:
        """What this attachment has learnt. A new attachment that loads it need not move every saved tensor at first."""
        needs = {which: dict(needs) for which, needs in self._needs.items()}
        layers = {**self._known, **self._again.layers.known}
        return {"needs": needs, "least": dict(self._least), "again": self._again.state_dict(), "layers": layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use what another attachment has learnt; see :meth:`state_dict`.

        Raises:
            UsageError: when ``state`` is no such state.
        """
        check_state(state, like=STATE)
        self._needs = {which: dict(needs) for which, needs in state["needs"].items()}
        self._least = dict(state["least"])
        self._again.load_state_dict(state["again"])
        self._known = dict(state["layers"])

    def begin_round(self, model: nn.Module, inputs: Any) -> None:
        """Begin a round, in a loop that calls parts of the model and never the model itself.

        Call :meth:`end_forward` when the loss is known, and :meth:`end_round` after backward and the optimizer's step.
        :class:`disthooks.integrations.lightning.DisthooksCallback` does so around a ``training_step``.

        Args:
            model: the model.
            inputs: a tensor, or nested tuples, lists and dicts of tensors, whose elements say how large the round is.
        """
        self._begin(model, _elements(inputs), is_announced=True)

    def end_forward(self, *_: Any) -> None:
        """Say that a forward of a round is over, also after an error in it; see :meth:`begin_round`."""
        with self._lock:
            self._again.layers.switch_on()  # the model is as its user made it
            self._read_peak()
            if self._round is not None:
                self._round.threads.discard(threading.get_ident())
                if torch.is_grad_enabled():
                    self._round.forward_end = self._watch.now()

    def end_round(self) -> None:
        """End the round. Memory that is used before the next round, as in an evaluation, is not a part of it."""
        self._again.layers.switch_on()  # a loop that has not said when its forward ended
        self._read_peak()
        if self._round is not None:
            self._round.is_over = True

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Go on with the round, or learn from it and start another one; an evaluation only ends it."""
        if torch.is_grad_enabled():
            self._begin(module, _elements((args, kwargs)))
        elif self._round is not None:
            self._read_peak()
            self._round.is_over |= self._round.has_stepped

    def _begin(self, module: nn.Module, size: int, is_announced: bool = False) -> None:
        """Begin a forward with inputs of this size: it goes on with the round, or starts another one."""
        with self._lock:  # forwards may run in several threads
            self._read_peak()
            saved, last, thread = self._saved(), self._round, threading.get_ident()
            is_open = last is not None and not (last.has_stepped or last.is_over)
            if last is not None and is_open and (last.is_announced or last.threads - {thread} or last.is_alive(saved)):
                last.size += size
                if last.size > last.expected:
                    last.expected = last.size
                    self._allow(last, saved, is_going_on=True)
            else:
                if last is None:
                    self._prepare(module)
                else:
                    self._learn(last, saved)
                last = self._start(size, saved)
            last.is_announced = is_announced
            last.threads.add(thread)
            self._again.layers.switch_off(self._again.off)

    def _prepare(self, module: nn.Module) -> None:
        """Find the budget and the checkpointed layers at the first forward: an engine may have come by then."""
        if not self._budget:
            self._budget = self._memory.free()
        names = [name for part in self._parts for name in part.names]
        self._again.layers = CheckpointedLayers(module, names, self._known, self._watch)
        self.on_remove(self._again.layers.remove)

    def _start(self, size: int, saved: SavedReport) -> _Round:
        """Start a round whose first forward has inputs of this size."""
        last = self._round
        is_first = last is None or last.has_stepped
        expected = max(size, self._totals.get(size, 0))
        # On a device in the 1st, 2nd, 3rd, 5th, 9th, ... round, because each part takes two events.
        self._watch.is_on = self._device.type == "cpu" or not self._rounds or is_power_of_two(self._rounds)
        started = time.perf_counter(), self._watch.now()
        under_way = sum(store.device_bytes(self._device) for store in self._on_device.below)
        begin = self._memory.in_use() - under_way
        self._round = _Round(size, size, expected, is_first, begin, saved, started)
        for tiers in self._tiers:
            tiers.most.clear()
        self._allow(self._round, saved)
        for other in _at_work:
            if other is not self and other._device == self._device and other._round is not None:
                self._meet(self._round, other, other._round)
        self._memory.reset_peak()
        return self._round

    def _meet(self, mine: _Round, other: Fitted, theirs: _Round) -> None:
        """Tell the round of another attachment of the device that one starts here, before the peak is reset."""
        other._read_peak()
        if not theirs.is_alive(other._saved()):
            theirs.is_over = True
            return
        mine.is_alone &= not other._near.limit
        theirs.is_alone &= not self._near.limit

    def _allow(self, round_: _Round, saved: SavedReport, is_going_on: bool = False) -> None:
        """Set the limit for a round, and what is computed again. Within a round a limit that was halved stays so."""
        size, last = round_.expected, self._near.limit or 0
        limit = self._limit(round_)
        limit = min(limit, last) if is_going_on else limit
        self._near.set_limit(limit)
        if self._again.choose(size, limit, self._rates(size, saved), is_going_on):
            self._near.set_limit(limit // 2)

    def _before_step(self, *_: Any) -> None:
        """Backward is over, as far as a loop with an optimizer tells."""
        self._read_peak()
        if self._round is not None and self._round.backward_end is None:
            self._round.backward_end = self._watch.now()

    def _read_peak(self, *_: Any) -> None:
        """Read the peak so far: after forward, and around each step of an optimizer. A script may reset it anywhere."""
        if self._round is not None and not self._round.is_over:
            self._round.peak = max(self._round.peak, self._memory.peak())

    def _after_step(self, *_: Any) -> None:
        """Note that an optimizer has made a step."""
        self._read_peak()
        if self._round is not None:
            self._round.has_stepped = True
        elif not self._has_warned and self._saved().stored:
            self._has_warned = True
            warnings.warn(
                "fit: modules of the model have saved tensors, and the model itself was never called, so nothing can "
                "be measured, and every saved tensor is moved: call model(...), not model.forward(...) or its parts, "
                "or call begin_round(model, inputs) of what fit returned in each step",
                stacklevel=2,
            )

    def _measure(self, last: _Round, saved: SavedReport) -> float:
        """Note how long the parts of the round took. Returns the seconds of the round by the host's clock."""
        packing = saved.pack_seconds - last.before.pack_seconds
        unpacking = saved.unpack_seconds - last.before.unpack_seconds
        if last.forward_end is not None:
            (_, begin), middle = last.started, last.forward_end
            end = self._watch.now() if last.backward_end is None else last.backward_end
            if isinstance(begin, float) and isinstance(end, float):  # on a CPU the host that waits is what computes
                begin, end = min(begin + packing, cast(float, middle)), max(end - unpacking, cast(float, middle))
            self._watch.add(f"forward {last.size}", 1, begin, middle)
            self._watch.add(f"backward {last.size}", 1, middle, end)
        self._watch.read()
        return time.perf_counter() - last.started[0]

    def _rates(self, size: int, saved: SavedReport) -> Rates | None:
        """The rates of a step of this size; None if they were not measured."""
        forward, backward = (self._watch.least(f"{phase} {size}") for phase in ("forward", "backward"))
        places = [tier for tier in saved.tiers if tier.written and tier.read]
        if forward is None or backward is None:
            return None
        if self._device.type == "cpu":  # what copies there takes the cores that compute, so nothing is hidden
            forward = backward = 0.0
        rates = None
        for place in reversed(places):
            out, back = place.write_seconds / place.written, place.read_seconds / place.read
            room = math.inf if place.limit is None else place.limit
            rates = Rates(forward, backward, out, back, self._largest(), room, rates)
        return rates

    def _largest(self) -> int:
        """Bytes of the largest saved tensor."""
        return max(tiers.largest.get(self._device, 0) for tiers in self._tiers)

    def _learn(self, last: _Round, saved: SavedReport) -> None:
        """Note what the round needed beside saved tensors, and its seconds.

        Raises:
            UsageError: when it needed more than the budget although every saved tensor was moved.
        """
        self._rounds, self._peak, limit = self._rounds + 1, (peak := last.peak), self._near.limit or 0
        self._kept, self._records = self._counted(is_over=True), LoggedRecords.count
        if peak > self._budget and not limit and last.is_alone:
            raise UsageError(
                f"fit: the step needed {format_bytes(peak)} on {self._device} with every saved tensor moved, "
                f"{format_bytes(peak - self._budget)} more than the budget of {format_bytes(self._budget)}: a smaller "
                "batch, activation checkpointing, or FSDP for weights and the optimizer need less"
                + ("; on a CPU a smaller in_flight of the store does, too" if self._device.type == "cpu" else "")
            )
        if self._rounds == 1 and not saved.calls and not saved.passed:
            names = first_names([name for part in self._parts for name in part.names])
            raise UsageError(
                f"fit: the model made a whole step, and no module with hooks was called ({names}), so no saved tensor "
                "can move. If torch.compile took the model before, call fit before it, or give fit what it returned; "
                "else name modules that are called, modules='layers.*'"
            )
        stored, kept = saved.stored - last.before.stored, _kept(saved) - _kept(last.before)
        # On the CPU what is on its way does not count.
        most = max(self._near.of(self._device).most, *(tiers.most.get(self._device, 0) for tiers in self._tiers))
        needed = max(0, peak - last.begin - min(most, limit))
        which = last.expected, last.is_first
        if last.has_backward(saved):
            self._totals[last.first] = max(last.size, self._totals.get(last.first, 0))
            self._missing = max(0, stored - limit)
            self._sites = saved.sites_since(last.before)
            seconds = self._measure(last, saved) if last.is_first else None
            needed += self._again.learn(last.size, stored + kept, needed, self._missing, seconds)
            which = last.size, last.is_first
        else:
            stored = -stored  # what the same forward needs with a backward is another figure
        needs = self._needs.setdefault(which, {})
        if peak > self._usable():
            self._least[which] = max(needed, self._least.get(which, 0))
        needs.pop(stored, None)  # the newest one is the last of the dict
        needs[stored] = needed
        if len(needs) > _PROGRAMS:
            del needs[next(iter(needs))]

    def _usable(self) -> float:
        return self._budget * (1 - (_MARGIN_CPU if self._device.type == "cpu" else _MARGIN))

    def _limit(self, round_: _Round) -> int:
        """Bytes of saved tensors that may stay in a round."""
        largest = self._largest()
        uneven = max(largest, min(2 * largest, _UNEVEN * self._budget))
        found = max(0.0, self._usable() - uneven - round_.begin - self._needed(round_))
        last, growth = self._near.limit or 0, _GROWTH_CPU if self._device.type == "cpu" else _GROWTH
        return int(found if found < last else last + growth * (found - last))

    def _needed(self, round_: _Round) -> float:
        """Bytes that a round needs beside saved tensors and what lies there; infinite if nothing is known."""
        is_first = round_.is_first or not any(not first for _, first in self._needs)  # the first after a step need more
        sizes = [size for size, first in self._needs if first is is_first]
        if not sizes:
            return math.inf
        like, growth = nearest_size(round_.expected, sizes)
        return max(*self._needs[like, is_first].values(), self._least.get((like, is_first), 0)) * growth


_at_work: weakref.WeakSet[Fitted] = weakref.WeakSet()


def _kept(saved: SavedReport) -> int:
    """Bytes of saved tensors, other than weights, that stayed in memory, the small ones."""
    return saved.kept - sum(saved.kept_by.get(reason, 0) for reason in _WEIGHTS)


def _elements(values: Any) -> int:
    """How many elements the tensors in nested tuples, lists and dicts have."""
    if isinstance(values, torch.Tensor):
        return values.numel()
    inner = values.values() if isinstance(values, Mapping) else values if isinstance(values, (list, tuple)) else ()
    return sum(map(_elements, inner))


def fit(
    model: nn.Module,
    budget: int | str,
    *stages: Stage | Pipeline,
    modules: Pattern | Iterable[Pattern] = "*",
) -> Fitted:
    """Keep what a training step has in use on the device within ``budget``, and move no more than that takes.

    Saved tensors leave the device as far as the budget asks for it, first those that backward reads last. The first
    step moves all of them. From the measured peak of each step ``fit`` computes how many may stay in the next one.
    Inputs of another size start with what the other sizes have shown. Gradients are the same bits.

    If room is left when nothing has to move, activation checkpoints are switched off, from the last layer on: of layers
    with ``gradient_checkpointing = True`` (transformers), and of torch's ``CheckpointWrapper``. A layer that changes a
    buffer or starts a collective in its first forward keeps its checkpoint, and so does one that torch.compile took.
    ``Recompute`` drops no more than the budget asks for. Once the steps of inputs of one size are alike, measured
    seconds choose what is computed again and what moves; see docs/saved-tensors/budget.md.

    The peak is that of torch's allocator (``torch.accelerator.max_memory_allocated``), so weights, gradients and the
    optimizer's state count, and memory that other libraries allocate does not. Its statistics are reset at each
    forward. On the CPU it is the resident memory of the process, libraries and all, and :func:`fit` calls
    :func:`disthooks.memory.release_promptly`. Each rank keeps its own budget by itself, without a collective.

    Args:
        model: the model, on an accelerator or the CPU; before or after an engine has wrapped it.
        budget: most bytes that torch may have in use on the device, or that the process may have resident on the CPU:
            an int, or text such as ``"62 GiB"``. ``"free"`` is what is in use and free at the first forward, less
            5%; on the CPU each process of the node takes an equal part of what is free there.
        stages: what may be done with saved tensors, as for :func:`~disthooks.save_activations`; ``OnCpu()`` by default.
            ``Recompute(), OnCpu()`` drops what can be computed again, and moves what then still has to go.
            ``Tiered(OnCpu("64 GiB"), OnDisk(...))`` gives two places. A model on the CPU needs an ``OnDisk``.
        modules: the modules whose saved tensors may be moved, as for :func:`~disthooks.save_activations`.

    Returns:
        A handle with ``report()``, ``state_dict()``, ``load_state_dict()`` and ``remove()``; also a context manager.

    Raises:
        UsageError: when ``budget`` is not a size, the model is on several devices, a store leaves saved tensors where
            they are (``OnCpu`` for a model on the CPU), the process has no peak of resident memory, or what lies on the
            device is more than the budget; from the second forward, when the first step needed more although every
            saved tensor was moved.
        MatchError, AttachError: see :func:`~disthooks.save_activations`.

    >>> fit(nn.Linear(2, 2), "62 GiB")
    Traceback (most recent call last):
    disthooks.errors.UsageError: fit: the model is on cpu, and its saved tensors would stay there with OnCpu(...
    """
    asked = pipeline(*stages or (OnCpu(),))
    tiers = Tiered(OnDevice(0), *(asked.store.stores if isinstance(asked.store, Tiered) else (asked.store,)))
    most, device = as_budget(model, budget, [tiers])
    saving = save_activations(model, modules, replace(asked, store=tiers))
    fitted = Fitted(model, [saving], [tiers], most, device)
    fitted.on_remove(saving.remove)
    return fitted


def as_budget(model: nn.Module, budget: int | str, tiers: Sequence[Tiered]) -> tuple[int | None, torch.device]:
    """The bytes of ``budget``, None for "free", and the device of that memory; the errors are those of :func:`fit`."""
    most, device = None if budget == FREE else parse_bytes(budget, "budget"), _device_of(model)
    for each in tiers:
        if not each.leaves_memory(torch.empty(1, device=device)):
            raise UsageError(
                f"fit: the model is on {device}, and its saved tensors would stay there with {each.stores[-1]!r}: give "
                "a store that takes them away, OnDisk(directory)"
            )
    if device.type == "cpu" and not (memory.reset_peak_resident() and memory.release_promptly()):
        raise UsageError("fit: the peak of resident memory can be measured and kept on Linux with glibc only")
    lies = _Memory(device).in_use()
    if most is not None and lies > most:
        raise UsageError(
            f"fit: {format_bytes(lies)} lie on {device} already, more than the budget of {format_bytes(most)}"
        )
    return most, device


def _device_of(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in unwrap_engine(model).parameters()}
    on = ", ".join(sorted(map(str, devices))) or "no device"
    if isinstance(model, nn.DataParallel):
        raise UsageError("fit: nn.DataParallel uses several devices, and a budget is of one: use DDP")
    if len(devices) != 1 or not (is_accelerator(device := devices.pop()) or device.type == "cpu"):
        raise UsageError(f"fit: the model is on {on}: its parameters have to be on one accelerator, or on the CPU")
    return device
