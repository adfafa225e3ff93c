"""``blame``: the first module whose output, or the gradient of its input, was not finite, and on which rank."""

# [Note: who is blamed]
# The module with the first non-finite output is not always the module that made it. If the code of a module's own
# forward makes a NaN between calls of its children, the next child gets it as an input and returns it first. So two
# calls are kept: the first with a non-finite output, and the first of those whose inputs were finite. If the module of
# the second call is around the module of the first, in the same forward, then its code made the NaN and it is blamed;
# otherwise the first is blamed. A call is looked at when it returns, so a child's output comes before its parent's.
#
# [Note: gradients of outputs]
# A NaN may be born in backward, from outputs that are all finite. Backward goes the other way, so the roles change: the
# gradient of a module's output is what it is given, and the gradient of its input is what it makes. Hooks on these
# tensors look at both, and the same rule finds who is blamed. A tensor has one hook for all calls that made it or got
# it. Those that got it come first, and of these the last one, so a module comes before those around it. If several
# modules side by side get the same tensor, its gradient is the sum over all of them, and the one that was called last
# is named. A module whose inputs have no history makes no gradient, so it is noted with what it was given. Gradients in
# float16 tell nothing, because a loss scale makes them overflow on purpose: as soon as there is one, the report leaves
# gradients out and says so.
#
# [Note: what is looked at once]
# Within one outermost forward, each version of a tensor is looked at once, and each module's weights once. Flags are
# not kept longer, because some code writes into weights or into a batch without counting up the version.

from __future__ import annotations

import collections
import functools
import struct
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from disthooks._handles import Attachment, UncopiedHook, first_names, weak_method
from disthooks._locks import new_lock
from disthooks._match import is_of_class, unwrap_engine
from disthooks._ranks import global_rank, world_ranks
from disthooks._tensors import floats_of
from disthooks._torch import being_traced, in_backward, in_transform
from disthooks.engines.detect import detect_engine
from disthooks.errors import AttachError, NonFiniteError
from disthooks.grads import collectives
from disthooks.report.watch.features import choose_modules, display_name
from disthooks.report.watch.finite import FiniteFlags, FirstNonFinite, ModuleCall, made_or_passed_on

_BYTES = 128  # the length of each text that is sent to other ranks; a multiple of 8
_LOW = (1 << 32) - 1


@dataclass(frozen=True)
class Blamed:
    """The first module call with a non-finite output, or gradient of its input, on one rank; see [Note: who is blamed].

    If code of a module made the output, between calls of its children, the module is blamed and ``seen`` is the child
    whose output was the first to be non-finite. If ``in_backward``, the same is said of gradients: "inputs" is the
    gradient of its output, and "output" is the gradient of its input. See [Note: gradients of outputs].

    Attributes:
        rank: the global rank.
        forward: the number of the model's forward since attaching, from 0.
        module: the canonical name of the module; ``""`` is the model itself.
        kind: the name of its class.
        call: the number of its call in that forward, from 0.
        inputs_finite: whether its inputs were finite, except for ``-inf``, which masks have. If not, the non-finite
            value came into the model with its inputs.
        weights_finite: whether its own parameters and buffers were finite.
        seen: the name of the module whose output was the first to be non-finite.
        masked: whether its inputs had ``-inf`` in them.
        in_backward: whether it was a gradient, in the backward of that forward.

    >>> print(Blamed(0, 7, "a", "Root", 0, True, True, "a", in_backward=True))
    rank 0, backward of forward 7: a (Root), call 0: the gradient of its output was finite, that of its input was not
    >>> print(Blamed(3, 0, "block.fc", "Linear", 0, True, False, "block.fc"))
    rank 3, forward 0: block.fc (Linear), call 0: its inputs were finite, its weights were not
    """

    rank: int
    forward: int
    module: str
    kind: str
    call: int
    inputs_finite: bool
    weights_finite: bool
    seen: str
    masked: bool = False
    in_backward: bool = False

    def __str__(self) -> str:
        who = f"{display_name(self.module)} ({self.kind})"
        when = f"{'backward of ' if self.in_backward else ''}forward {self.forward}"
        head = f"rank {self.rank}, {when}: {who}, call {self.call}: "
        first = display_name(self.seen)
        if self.in_backward:
            if not self.inputs_finite:
                return (
                    f"{head}the gradient of its output was not finite, and no module after it made it so: the loss "
                    "did, or code that was not looked at"
                )
            where = "" if self.seen == self.module else f"; first seen at the input of {first}, inside it"
            return f"{head}the gradient of its output was finite, that of its input was not{where}"
        if not self.inputs_finite:
            return f"{head}its inputs were not finite, and no module before it made them so"
        weights = "and its weights were finite" if self.weights_finite else "its weights were not"
        where = "" if self.seen == self.module else f"; first seen in the output of {first}, inside it"
        comma = " " if self.weights_finite else ", "
        mask = " but for -inf, as in a mask," if self.masked else ""
        return f"{head}its inputs were finite{mask}{' ' if mask else comma}{weights}{where}"

    def numbers(self) -> list[int]:
        """The same as int64 numbers for an all-gather. Their count is always the same, so long names are cut."""
        inputs = int(self.inputs_finite) + int(self.masked)
        numbers = [1 + self.in_backward, self.rank, self.forward, self.call, inputs, int(self.weights_finite)]
        for text in (self.module, self.kind, self.seen):
            content = text.encode()[-_BYTES:].ljust(_BYTES, b"\0")  # the end of a name says most
            numbers += struct.unpack(f"<{_BYTES // 8}q", content)
        return numbers

    @staticmethod
    def of(numbers: Sequence[int]) -> Blamed | None:
        """The call of which :meth:`numbers` gave these numbers; None for those of :func:`nobody`.

        >>> one = Blamed(3, 0, "block.fc", "Linear", 0, True, False, "block.fc")
        >>> Blamed.of(one.numbers()) == one, Blamed.of(nobody()), len(nobody()) == len(one.numbers())
        (True, None, True)
        """
        found, rank, forward, call, inputs, weights, *rest = numbers
        if not found:
            return None
        content = struct.pack(f"<{len(rest)}q", *rest)
        texts = (content[i * _BYTES : (i + 1) * _BYTES].rstrip(b"\0") for i in range(3))
        module, kind, seen = (text.decode(errors="replace") for text in texts)
        return Blamed(rank, forward, module, kind, call, bool(inputs), bool(weights), seen, inputs == 2, found == 2)


def nobody() -> list[int]:
    """The numbers that a rank sends if it has found nothing."""
    return [0] * (6 + 3 * _BYTES // 8)


@dataclass(frozen=True)
class BlameReport:
    """What ``blame(model).report()`` returns.

    Attributes:
        found: one entry for this rank, or for each rank that has one; empty when every output and gradient was finite.
        forwards: forwards of the model on this rank since attaching.
        calls: module calls that were looked at on this rank.
        notes: what was not looked at, and why.
        gradients: gradients of inputs and outputs of modules that were looked at on this rank.

    >>> print(BlameReport((), forwards=2, calls=10, notes=()))
    2 forwards, 10 module calls: every output was finite
    """

    found: tuple[Blamed, ...]
    forwards: int
    calls: int
    notes: tuple[str, ...]
    gradients: int = 0

    def __str__(self) -> str:
        kinds = sorted({"gradient" if each.in_backward else "output" for each in self.found}, reverse=True)
        lines = [f"first non-finite {' or '.join(kinds)}:", *(f"  {each}" for each in self.found)] if self.found else []
        if not self.found and self.calls:
            outputs = "output and gradient" if self.gradients else "output"
            lines = [f"{self.forwards} forwards, {self.calls} module calls: every {outputs} was finite"]
        return "\n".join([*lines, *(f"not looked at: {note}" for note in self.notes)])


__all__ = ["Blame", "blame"]


class RunningCall:
    __slots__ = ("inputs", "module", "rest")

    def __init__(self, module: nn.Module, rest: FinishedCall) -> None:
        self.module, self.rest = module, rest
        self.inputs: torch.Tensor | None = None


class FinishedCall:
    """One call of a module, for its backward: the hooks on its inputs and outputs keep it, and it keeps no module."""

    __slots__ = ("forward", "grads", "has_inputs", "weights", "where")

    def __init__(self, forward: int, where: int, weights: torch.Tensor | None) -> None:
        self.forward, self.where, self.weights = forward, where, weights
        self.grads: torch.Tensor | None = None
        self.has_inputs = False


class CallsOfTensor:
    """The calls that made a tensor at one of its versions, and those that got it, in the order of the forward."""

    __slots__ = ("got", "made", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.made: list[FinishedCall] = []
        self.got: list[FinishedCall] = []


class ThreadCalls(threading.local):
    """The calls under way in this thread, and the flags since the first began; see [Note: what is looked at once]."""

    def __init__(self, only_nan: bool, unknown: set[str]) -> None:
        self._args = (only_nan, unknown)
        self.frames: list[RunningCall] = []
        self.begin()

    def begin(self) -> None:
        self.looked = FiniteFlags(*self._args)
        self.weights: dict[int, torch.Tensor | None] = {}
        self.calls: Any = WeakIdKeyDictionary()  # for each tensor with a hook its CallsOfTensor


class Blame(Attachment):
    """What :func:`blame` attached.

    Attributes:
        forwards: forwards of the model since attaching.
        calls: module calls that were looked at.
        gradients: gradients of inputs and outputs of modules that were looked at.
        left_out: what is said of modules that call no hooks; empty if there are none.
    """

    left_out = ""

    def __init__(self, model: nn.Module, chosen: dict[str, nn.Module], raise_error: bool, only_nan: bool) -> None:
        super().__init__()
        self.forwards = self.calls = self.gradients = 0
        self._model, self._raise = model, raise_error
        self._names: list[tuple[str, str]] = []  # the name and the class of each watched module
        self._unknown: set[str] = set()
        self._threads = ThreadCalls(only_nan, self._unknown)
        # By device; the second dict has the calls whose gradients were not finite.
        self._first_calls: tuple[dict[torch.device, FirstNonFinite], dict[torch.device, FirstNonFinite]] = {}, {}
        # The graph keeps the hooks, so they do not keep this object.
        self._on_gradient = weak_method(self._look_at_gradient)
        self._has_half = False  # whether there was a gradient in float16
        self._lock = new_lock()
        self._order = 0  # how many calls have returned in this forward, or how many gradients there were
        self._calls: collections.Counter[int] = collections.Counter()  # in this forward, by module
        self._passed = 0  # calls that were not looked at, because torch.func or a tracer made them
        # Each replica of DataParallel calls the hooks of the model inside, so forwards are counted on the wrapper.
        root = model if is_of_class(model, "DataParallel") else unwrap_engine(model)
        self.on_remove(root.register_forward_pre_hook(UncopiedHook(self._begin_forward), prepend=True).remove)
        for index, (name, module) in enumerate(chosen.items()):
            kind = type(module)
            if any(base.__name__ == "FSDPModule" for base in kind.__bases__):
                kind = kind.__bases__[-1]  # `fully_shard` derives a class from FSDPModule and the user's class
            self._names.append((name, kind.__name__))
            before, after = (UncopiedHook(functools.partial(hook, index)) for hook in (self._begin, self._finish))
            self.on_remove(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            self.on_remove(module.register_forward_hook(after, always_call=True).remove)

    def report(self, all_ranks: bool = False) -> BlameReport:
        """Find the first module call whose output, or the gradient of its input, was not finite.

        This waits for the device. See [Note: who is blamed].

        Args:
            all_ranks: gather what each rank has found, in one all-gather of 432 bytes from each. Every rank must call
                it: those of DDP or ``fully_shard``; all of the default process group for any other model.

        Returns:
            A report whose ``found`` has one entry for each rank that has found something.
        """
        mine = self._found()
        everyone = self._ranks() if all_ranks else (0,)
        found: list[Blamed | None] = [mine]
        if len(everyone) > 1:
            group = collectives.group_of(everyone)
            here = next((tensor.device for tensor in self._model.parameters()), torch.device("cpu"))
            device = collectives.device_for(group, here)
            numbers = torch.tensor(nobody() if mine is None else mine.numbers(), device=device)
            found = [Blamed.of(row) for row in collectives.gather(group, numbers)]
        notes = [f"tensors of kind {kind}" for kind in sorted(self._unknown)]
        if self._passed:
            notes.append(f"{self._passed} module calls inside torch.func or a tracer")
        if self.left_out:
            notes.append(self.left_out)
        if self._has_half:
            notes.append("gradients: there are some in float16, which a loss scale lets overflow on purpose")
        if not self.calls:
            notes.append(
                "anything: no module returned a floating-point tensor with elements since attaching, or torch.compile "
                "ran the model without Python (run it uncompiled)"
            )
        return BlameReport(
            tuple(f for f in found if f is not None), self.forwards, self.calls, tuple(notes), self.gradients
        )

    # -- hooks

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if not getattr(module, "_is_replica", False) and not in_backward():
            self.forwards += 1
            self._order = 0
            self._calls.clear()

    def _begin(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_backward():  # a checkpoint computes again what was looked at
            return
        if in_transform() or being_traced():
            self._passed += 1
            return
        with self._lock:
            call = self._calls[id(module)]
            self._calls[id(module)] += 1
        if not self._threads.frames:
            self._threads.begin()
        inputs = floats_of((args, kwargs) if kwargs else args)
        weights = self._threads.weights
        if id(module) not in weights:
            copies = getattr(module, "_former_parameters", {})  # a DataParallel replica has its weights there
            own = [*module._parameters.values(), *module._buffers.values(), *copies.values()]
            weights[id(module)] = self._threads.looked(floats_of(own), known=False)
        frame = RunningCall(module, FinishedCall(max(self.forwards - 1, 0), (index << 32) + call, weights[id(module)]))
        frame.inputs = self._threads.looked(inputs)
        for of_tensor in self._hooked(inputs):
            of_tensor.got.append(frame.rest)
            frame.rest.has_inputs = True
        self._threads.frames.append(frame)

    def _finish(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        # Find the call that ends. Calls inside it that never ended, because they raised, end with it.
        frames = self._threads.frames
        position = next((i for i in reversed(range(len(frames))) if frames[i].module is module), None)
        if position is None:
            return
        frame = frames[position]
        del frames[position:]
        tensors = floats_of(output)
        outputs = self._threads.looked(tensors)
        if outputs is None:
            return
        for of_tensor in self._hooked(tensors):
            of_tensor.made.append(frame.rest)
        with self._lock:
            self.calls += 1
            when = (max(self.forwards - 1, 0) << 32) + self._order
            self._order += 1
        rest = frame.rest
        self._add(ModuleCall(outputs, frame.inputs, rest.weights, when, rest.where), in_backward=False)

    # -- hooks in backward, see [Note: gradients of outputs]

    def _hooked(self, tensors: Sequence[torch.Tensor]) -> Iterator[CallsOfTensor]:
        """The calls of each tensor that has a history. A leaf would keep a hook for ever."""
        for tensor in tensors:
            if tensor.grad_fn is None:
                continue
            found = self._threads.calls.get(tensor)
            if found is None or found.version != tensor._version:
                found = self._threads.calls[tensor] = CallsOfTensor(tensor._version)
                tensor.register_hook(functools.partial(self._on_gradient, found))  # type: ignore[no-untyped-call]
            yield found

    def _look_at_gradient(self, calls: CallsOfTensor, grad: torch.Tensor) -> None:
        if grad.dtype is torch.float16:
            self._has_half = True
            return
        flag = self._threads.looked([grad])
        if flag is None:
            return
        self.gradients += 1
        for call in reversed(calls.got):
            if call.grads is not None:  # without a gradient of its output it did not make this one
                self._add_gradient(call, flag, call.grads)
        for call in calls.made:
            call.grads = flag if call.grads is None else call.grads + flag.to(call.grads.device, non_blocking=True)
            if not call.has_inputs:
                self._add_gradient(call, flag, flag)

    def _add_gradient(self, call: FinishedCall, made: torch.Tensor, given: torch.Tensor) -> None:
        with self._lock:
            when = (call.forward << 32) + self._order
            self._order += 1
        self._add(ModuleCall(made, given, call.weights, when, call.where), in_backward=True)

    def _add(self, call: ModuleCall, in_backward: bool) -> None:
        made, given = call.outputs, call.inputs
        with self._lock:
            book = self._first_calls[in_backward].setdefault(made.device, FirstNonFinite(made.device))
        book.add(call)
        inputs = torch.zeros_like(made) if given is None else given.to(made.device)
        if self._raise and bool(made_or_passed_on(made, inputs)):
            raise NonFiniteError(f"{self.report()}\n(raised by blame(raise_error=True) on rank {global_rank()})")

    # -- reading

    def _found(self) -> Blamed | None:
        found = [self._blamed(False), None if self._has_half else self._blamed(True)]
        return min((one for one in found if one is not None), key=lambda one: one.forward, default=None)

    def _blamed(self, in_backward: bool) -> Blamed | None:
        """The call to blame for outputs, or for gradients. See [Note: who is blamed]."""
        with self._lock:
            devices = list(self._first_calls[in_backward].values())
        # Two rows from each device: the first call with a non-finite output, and the first with finite inputs besides.
        read = [each.read() for each in devices]
        first, made = ([rows[i] for rows in read if rows[i][0] >= 0] for i in (0, 1))
        if not first:
            return None
        seen = blamed = min(first)
        seen_in = self._names[seen[1] >> 32][0]
        for row in sorted(made):
            outer = self._names[row[1] >> 32][0]
            # The same forward, and the same module or one around it; the name of the model itself is empty.
            if row[0] >> 32 == seen[0] >> 32 and (not outer or f"{seen_in}.".startswith(f"{outer}.")):
                blamed = row
                break
        when, where, inputs, weights = blamed
        module, kind = self._names[where >> 32]
        return Blamed(
            rank=global_rank(),
            forward=when >> 32,
            module=module,
            kind=kind,
            call=where & _LOW,
            inputs_finite=bool(inputs),
            weights_finite=bool(weights),
            seen=seen_in,
            masked=inputs == 2,
            in_backward=in_backward,
        )

    def _ranks(self) -> tuple[int, ...]:
        try:
            ranks = detect_engine(self._model).ranks
        except AttachError:  # such as the model inside a DeepSpeed engine: its hooks work, and every rank takes part
            return world_ranks()
        return ranks if len(ranks) > 1 else world_ranks()


def blame(model: nn.Module, *, raise_error: bool = False, only_nan: bool = False) -> Blame:
    """Watch every module, and report whose output, or the gradient of whose input, was the first to be infinite or NaN.

    The report tells the module that made a non-finite value from the modules that passed it on: it is the first with
    finite inputs and a non-finite output, or in backward the first with a finite gradient of its output and a
    non-finite gradient of its input. Nothing waits for the device before ``report()``; outputs, gradients and memory
    stay as they are. While it is attached, each output and its gradient is read once more, and each weight once in a
    forward.

    It may be attached before or after DDP, FSDP (1 or 2), DeepSpeed or checkpointing take the model; a checkpoint's
    second forward is not looked at. Of ``nn.DataParallel`` pass the wrapper, so that forwards are counted. Gradients of
    weights are not looked at: ``gradients(stats=[stats.NonFinite()])`` does that. Gradients in float16 are left out,
    because a loss scale makes them overflow on purpose.

    Args:
        model: the model; names are those inside it when it is wrapped by DDP or DataParallel.
        raise_error: whether to raise in the forward or backward itself, at the first that is not finite. This is for
            debugging: it waits for the device at every module call, and it stops this rank only, while the other ranks
            wait for this one in their next collective.
        only_nan: whether infinities count as finite, for a model whose modules return them on purpose, such as masks of
            ``-inf``.

    Returns:
        A handle with ``report()``, ``remove()`` and ``with``. Its report can be read after it is removed.

    Raises:
        AttachError: when all of the model is compiled or scripted, so that it calls no hooks. If it is a part, a
            warning and the report say which modules are not looked at.
        NonFiniteError: from the model's forward or backward, if ``raise_error``.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softplus(), nn.Linear(2, 1))
    >>> _ = nn.init.constant_(model[2].weight, torch.inf)
    >>> with blame(model) as found:
    ...     y = model(torch.ones(3, 2))
    >>> print(found.report())
    first non-finite output:
      rank 0, forward 0: 2 (Linear), call 0: its inputs were finite, its weights were not
    """
    left_out: list[str] = []
    chosen = choose_modules(model, ["*"], left_out=left_out)
    made = Blame(model, chosen, raise_error, only_nan)
    if left_out:
        made.left_out = (
            f"{len(left_out)} modules that were compiled or scripted before blame came, and call no new hooks "
            f"({first_names(left_out)}); a module around them is looked at"
        )
        warnings.warn(f"blame does not look at {made.left_out}", stacklevel=2)
    return made
