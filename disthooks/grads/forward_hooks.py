"""Hooks on modules, in forward: facts of their outputs, the loss, and the times of this rank."""

# [Note: outputs are read in forward]
# An output may be changed in place or freed right after its module has returned, so its facts are computed in the hook:
# five numbers, on the output's device, in steps that are logged. They communicate with nobody, and wait for nothing;
# the measurement before the step merges them over the ranks (stats/forward.py).
# A checkpoint runs its modules twice, in forward and in backward. What was seen in forward is not read again. A
# reentrant checkpoint runs forward without gradients, and its modules are read when backward runs them again.
# A forward without gradients, such as a validation, does not count.

# [Note: whose zeros are counted]
# To count zeros takes as long on a CPU as all else that is found of an output. The zeros of an activation function tell
# how many units are dead. The output of a layer with weights has zeros only by chance, or it is zero as a whole, which
# its norm tells. So zeros are counted in the outputs of modules without parameters.
#
# [Note: fingerprints of replicas]
# nn.DataParallel runs a replica of each module in a thread of its own, and the order of the threads differs from run to
# run. So the fingerprints of replicas are added up, and those of other calls are combined in their order. They are kept
# one by one until the step, because two threads could not change one number without a lock.
#
# [Note: whose time]
# Ranks wait for one another in backward and in the step, so that all of them have the same time from step to step. What
# tells a slow rank is what it does while it waits for nobody: from the end of a step to the next forward (input), from
# there to the end of forward, and from there to the last gradient that a hook sees before its reduction. DDP waits for
# other ranks before a forward if the model has buffers, or to make its buckets anew, which counts as forward. FSDP
# gathers weights inside forward and backward, so that there only the input tells the slow rank. The times are the
# host's. On an accelerator they say how long the host took to queue the work, so that a slow loader is seen and a slow
# device is not.

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from disthooks._handles import UncopiedHook, weak_method
from disthooks._hashing import GOLDEN, Checksums, signed64
from disthooks._match import Pattern, canonical_name, match_modules
from disthooks._tensors import elements_of, floats_of, local_part
from disthooks._torch import in_backward, in_transform
from disthooks.engines.base import Engine, Removable
from disthooks.errors import MatchError, UsageError
from disthooks.grads.stats.base import PHASES, ForwardFacts, ForwardNeeds, largest_of, moved, onto, real, row_norms
from disthooks.grads.stats.scan import scan

_ROW = 1024
_BLOCK = 2**18  # elements whose magnitudes are in memory at a time, on the CPU
#: Modules that return their input, or most of it.
_SAME = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class ForwardHooks:
    """The hooks on the modules of a model. See [Note: outputs are read in forward].

    Raises:
        MatchError: when a pattern matches no module.

    Attributes:
        models_called: the models that the loop calls; an engine's wrapper calls the user's own model.
        names: the names of the modules whose outputs are read, in the order of the model; on each rank those of all.
        called: the places of these modules in :attr:`names`, in the order in which they were called first.
        has_loss: whether the loss of each micro-batch is wanted.
        has_times: whether :meth:`saw_gradient` and :meth:`end_step` need to be called.
        gives_loss: whether the last forward returned a loss.
        takes_outputs: whether such a loss is kept.
    """

    def __init__(self, engine: Engine, called: Sequence[nn.Module], needs: Sequence[ForwardNeeds]) -> None:
        self._engine, self._models, self.models_called = engine, engine.models, called
        self._is_needed = any(need != ForwardNeeds() for need in needs)
        self.gives_loss, self.takes_outputs = False, True
        self.has_loss, self.has_times = any(need.loss for need in needs), any(need.times for need in needs)
        self._needs_loss_always = any(need.loss == "always" for need in needs)
        self._has_facts = any(need.facts for need in needs)
        self._print_every = max((need.prints for need in needs), default=0)
        self._is_in_forward = self._has_forward = False
        chosen = _chosen(engine, [need.modules for need in needs if need.modules is not None])
        self.names = engine.union(list(chosen))
        if not self.names and any(needs.modules for needs in needs):
            raise MatchError(f"no module of any rank matches {[needs.modules for needs in needs if needs.modules]}")
        place = {name: index for index, name in enumerate(self.names)}
        self._modules = [(place[name], module) for name, module in chosen.items()]
        # See [Note: whose zeros are counted].
        with_parameters = {shard.name.rpartition(".")[0] for shard in engine.shards}
        self._counts_zeros = [name not in with_parameters for name in self.names]
        self._is_logged = True
        self._is_printed = self._print_every > 0
        self._facts: list[tuple[int, torch.Tensor]] = []
        # Of each call, by module, of inputs (0) and of outputs (1); see [Note: fingerprints of replicas].
        self._prints: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._unread: collections.Counter[int] = collections.Counter()  # tensors that could not be read, by module
        self._unreadable: set[int] = set()  # modules that this was said of
        self._has_replicas = False
        self._checksums = Checksums()
        self.called: list[int] = []
        self._seen: set[int] = set()  # modules that were read in a forward, not in a backward
        self._losses: list[torch.Tensor] = []
        self._of_engine = 0  # how many of them the engine's backward was called with
        self._clock = Clock()

    def attach(self) -> list[Removable]:
        handles: list[Removable] = [
            module.register_forward_hook(UncopiedHook(_ModuleHook(self, index))) for index, module in self._modules
        ]
        if self._print_every:
            for index, module in self._modules:
                before = UncopiedHook(_InputReader(self, index))
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if self.has_loss:
            handles += self._engine.before_backward(weak_method(self._note_loss_of_engine))
        if self.has_loss or self.has_times:
            # Before the hooks of fully_shard, which wait for other ranks.
            begin, end = (UncopiedHook(weak_method(method)) for method in (self._begin_forward, self._end_forward))
            for module in {*self.models_called, *self._models}:
                handles.append(module.register_forward_pre_hook(begin, prepend=True))
            handles += [model.register_forward_hook(end) for model in self._models]
        return handles

    def begin(self, step: int, is_logged: bool) -> None:
        """The next forwards belong to ``step``, which is logged or not."""
        self._is_logged, self._is_in_forward, self._has_forward = is_logged, False, False
        self._is_printed = self._print_every > 0 and step % self._print_every == 0
        self._clock.begin()

    def end_step(self) -> None:
        """The optimizer has moved the parameters; a step that is left out has ended before."""
        self._clock.begin()

    def saw_gradient(self) -> None:
        """A hook has seen a gradient of this rank, before its reduction."""
        if self._has_forward:  # if the loop does not call the model itself, nobody knows when backward began
            self._clock.mark("backward")

    def note_loss(self, loss: torch.Tensor | float) -> None:
        """Keep the loss of a micro-batch.

        Raises:
            UsageError: when it is no single number.
        """
        value = torch.as_tensor(loss, dtype=torch.float64) if isinstance(loss, (int, float)) else loss
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise UsageError(f"note_loss({loss!r}): the loss of one micro-batch is needed, a single number")
        self._losses.append(local_part(value.detach()).double().reshape(()))

    def _note_loss_of_engine(self, loss: Any) -> None:
        """Keep the loss that the engine's backward is called with, unless somebody hands in losses."""
        if len(self._losses) == self._of_engine and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.note_loss(loss)
            self._of_engine += 1

    def clear(self) -> None:
        """Forget what was seen, because the step is made."""
        self._facts, self._losses, self._prints, self._of_engine = [], [], {}, 0
        self._unread = collections.Counter()
        self._clock.clear()

    def found(self, device: torch.device, is_logged: bool) -> ForwardFacts | None:
        """The numbers of the forwards since the last step, on ``device``; None if no rule or statistic needs them."""
        facts, losses, prints, seconds = self._facts, self._losses, self._prints, self._clock.seconds()
        unread = self._unread
        if not (is_logged and self._is_needed) and not self._needs_loss_always:
            return None
        if not is_logged:
            return ForwardFacts(loss=_sum_and_count(losses, device))
        zero = torch.zeros((), dtype=torch.int64, device=device)
        sides = itertools.product(range(len(self.names)), (0, 1))
        factor = 1 if self._has_replicas else signed64(GOLDEN)  # with a factor other than 1 the order counts
        of_sides = ([onto(each, device) for each in prints.get(side, [zero])] for side in sides)
        printed = [functools.reduce(lambda before, mine: before * factor + mine, each) for each in of_sides]
        return ForwardFacts(
            outputs=self._added_up(facts, unread, device),
            loss=_sum_and_count(losses, device),
            seconds=moved(torch.tensor(seconds, dtype=torch.float64), device),
            prints=torch.stack(printed).view(-1, 2) if printed else zero.new_zeros(0, 2),
        )

    def _added_up(
        self, facts: Sequence[tuple[int, torch.Tensor]], unread: Mapping[int, int], device: torch.device
    ) -> torch.Tensor:
        """The facts of each module, a row for each; zeros for a module that was not called."""
        # Most modules are called once in a step; the others are added up here, without an index on the device.
        of: dict[int, torch.Tensor] = {}
        for index, found in facts:
            of[index] = found if index not in of else _together(of[index], onto(found, of[index].device))
        none = torch.zeros(5, dtype=torch.float64, device=device)
        rows = [onto(of[index], device) if index in of else none for index in range(len(self.names))]
        counts = torch.tensor([[unread.get(index, 0)] for index in range(len(rows))], dtype=torch.float64)
        return torch.cat([torch.stack(rows), moved(counts, device)], dim=1) if rows else none.new_zeros(0, 6)

    # -- hooks

    @torch.no_grad()
    def read(self, index: int, module: nn.Module, output: Any) -> None:
        """Read the output of a module; see [Note: outputs are read in forward]."""
        self._has_replicas |= getattr(module, "_is_replica", False)
        if self._is_again(index):
            return
        if not in_backward():
            self._seen.add(index)
        if index not in self.called:
            self.called.append(index)
        for tensor in floats_of(output):
            try:
                elements = elements_of(tensor)
                if self._has_facts and elements.numel():
                    self._facts.append((index, facts_of(elements, self._counts_zeros[index])))
                self._print(index, 1, elements)
            except Exception as error:  # a user's subclass of tensors may raise anything
                self._leave_unread(index, module, error)

    @torch.no_grad()
    def read_inputs(self, index: int, module: nn.Module, inputs: Any) -> None:
        """Make the fingerprint of a module's inputs, before it may change them in place."""
        if self._is_printed and not self._is_again(index):
            for each in tree_leaves(inputs):
                try:
                    if isinstance(each, torch.Tensor):
                        self._print(index, 0, elements_of(local_part(each)))
                except Exception as error:
                    self._leave_unread(index, module, error)

    def _leave_unread(self, index: int, module: nn.Module, error: Exception) -> None:
        """Count a tensor that cannot be read, and warn of the first one of the module."""
        self._unread[index] += 1
        if index not in self._unreadable:
            self._unreadable.add(index)
            warnings.warn(
                f"statistics of forwards leave out a tensor of {self.names[index]!r} ({type(module).__name__}), which "
                f"they cannot read ({type(error).__name__}: {error}). This is said once for a module",
                stacklevel=2,
            )

    def _is_again(self, index: int) -> bool:
        """Whether a checkpoint runs the module again."""
        return (in_backward() and index in self._seen) or in_transform()

    def _print(self, index: int, side: int, elements: torch.Tensor) -> None:
        if self._is_printed and not elements.is_quantized:
            checksum = self._checksums(elements)
            self._prints.setdefault((index, side), []).append(checksum)

    @property
    def is_reading(self) -> bool:
        return self._is_logged and torch.is_grad_enabled()

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        # The wrapper may wait for other ranks before it calls the model, so it counts as forward.
        if torch.is_grad_enabled() and not in_backward() and not self._is_in_forward:
            self._is_in_forward = True
            self._clock.mark("input")

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or in_backward():
            return
        self._clock.mark("forward")
        self._is_in_forward, self._has_forward = False, True
        found = None
        with contextlib.suppress(Exception):  # `loss` may be a property that raises an error
            found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        loss = found if isinstance(found, torch.Tensor) and found.numel() == 1 else None
        self.gives_loss = loss is not None
        if self.has_loss and self.takes_outputs and loss is not None:
            self.note_loss(loss)


class Clock:
    """How long input, forward and backward took since the last step. See [Note: whose time].

    A mark ends a phase: what passed since the mark before belongs to it.

    >>> clock = Clock()
    >>> clock.mark("input")
    >>> clock.mark("forward")
    >>> [seconds >= 0 for seconds in clock.seconds()]
    [True, True, True]
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def begin(self) -> None:
        """A step has ended."""
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    def seconds(self) -> list[float]:
        """The seconds of each phase since the last step."""
        return list(self._seconds.values())

    def clear(self) -> None:
        """A step is made."""
        self._seconds = dict.fromkeys(PHASES, 0.0)


class _ModuleHook:
    """The hook on one module. It does nothing once the attachment is collected: nobody would take what it finds."""

    __slots__ = ("hooks", "index")

    def __init__(self, hooks: ForwardHooks, index: int) -> None:
        self.hooks, self.index = weakref.ref(hooks), index

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        hooks = self.hooks()
        if hooks is not None and hooks.is_reading:
            hooks.read(self.index, module, output)


class _InputReader(_ModuleHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        hooks = self.hooks()
        if hooks is not None and hooks.is_reading:
            hooks.read_inputs(self.index, module, (args, kwargs))


def _chosen(engine: Engine, wanted: Sequence[Sequence[Pattern]]) -> dict[str, nn.Module]:
    """The modules that any of the lists of patterns matches; an empty list is for those without modules inside."""
    chosen: dict[str, nn.Module] = {}
    for model, prefix in zip(engine.models, engine.prefixes, strict=True):
        found: set[int] = set()
        for patterns in wanted:
            if patterns:
                try:
                    found |= {id(module) for _, module in match_modules(model, patterns)}
                except MatchError:  # in other models or on other ranks there may be modules that match
                    if not engine.has_other_parts:
                        raise
            else:
                leaves = (each for each in model.modules() if not next(each.children(), None))
                found |= {id(module) for module in leaves if not isinstance(module, _SAME)}
        of_model = ((name, module) for name, module in model.named_modules() if id(module) in found)
        chosen |= {prefix + canonical_name(name): module for name, module in of_model}
    return chosen


def _sum_and_count(losses: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not losses:
        return torch.zeros(2, dtype=torch.float64, device=device)
    total = torch.stack([onto(loss, device) for loss in losses]).sum()
    return torch.stack([total, torch.full_like(total, len(losses))])


def _together(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The facts of the elements of both."""
    return torch.cat([one[:4] + other[:4], torch.maximum(one[4:], other[4:])])


def facts_of(tensor: torch.Tensor, counts_zeros: bool = True) -> torch.Tensor:
    """How many elements, the sum of squares, how many are zero, how many are not finite, and the largest magnitude.

    Returns:
        A float64 tensor of shape (5,) on the device of ``tensor``.

    >>> facts_of(torch.tensor([3.0, -4.0, 0.0])).tolist()
    [3.0, 25.0, 1.0, 0.0, 4.0]
    """
    if not tensor.is_cpu:
        wanted = ("squares", "zeros", "nonfinite", "high", "low")
        found = scan([tensor], frozenset(wanted), tensor.device).facts  # type: ignore[arg-type]
        squares, zeros, nonfinite, high, low = (found[name][0] for name in wanted)  # type: ignore[index]
        count = torch.full_like(squares, tensor.numel())
        zeros = zeros if counts_zeros else torch.full_like(squares, torch.nan)
        return torch.stack([count, squares, zeros, nonfinite, torch.maximum(high, low)])
    # A whole scan takes three times as long as these readings, and a model has many modules.
    flat = real(tensor).reshape(-1)
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    whole = flat.numel() // _ROW * _ROW
    norms = [row_norms(part) for part in (flat[:whole].view(-1, _ROW), flat[None, whole:]) if part.numel()]
    power = float(torch.cat(norms).square().sum())
    bad = 0 if power < torch.inf else int((~torch.isfinite(flat)).sum())
    empty = _zeros(flat) if counts_zeros else torch.nan
    return torch.tensor([flat.numel(), power, empty, bad, float(largest_of(flat))], dtype=torch.float64)


def _zeros(flat: torch.Tensor) -> int:
    """How many elements are zero. The bits of a magnitude, read as an integer, are zero only if it is zero."""
    found = 0
    room = torch.empty(min(_BLOCK, flat.numel()), dtype=flat.dtype)
    for part in torch.split(flat, _BLOCK):
        magnitudes = torch.abs(part, out=room[: part.numel()])
        if not float(magnitudes.amin()) > 0:  # NaN is not greater
            bits = magnitudes.view(torch.int32 if flat.dtype is torch.float32 else torch.int64)
            found += part.numel() - int(bits.clamp_(max=1).sum(dtype=torch.int32))
    return found
