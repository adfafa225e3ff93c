"""What one real training step on the CPU saves and holds: the truth that ``disthooks explain`` is compared with.

:func:`measure` runs the step for real and counts in two ways:

- ``saved_bytes``: the memory under the tensors that autograd holds after the forward, by saved-tensor hooks;
- ``peaks``: living storages, by a dispatch mode (:class:`LivingStorages`).

:func:`tracked` asks torch's own ``MemTracker``. :func:`allocated_peak` asks torch's allocator, which sees what no
dispatch mode sees. :func:`largest_batch` looks for the largest batch under a limit.
"""

# [Note: what is a saved byte]
# Autograd holds tensors, and tensors hold storages. A tensor that covers a part of its storage keeps all of it alive.
# So a saved byte is a byte of a storage, and each storage counts once, however many tensors over it are saved. The
# storages of parameters and buffers would be there anyway and do not count. Only what is held when the forward (with
# the loss) has ended counts: a graph that the forward made and dropped is gone.
#
# [Note: a mode is seen]
# Autograd adds up gradients in place where nobody else uses them. It does so only for plain tensors: with a dispatch
# mode on, or for a fake tensor, it makes a new tensor (`isTensorSubclassLike` in torch's InputBuffer). So MemTracker
# may see a higher peak in backward than there is without it. `LivingStorages` adds in place itself, and asks
# `disthooks.predict.recording.engine_sums` where. That this is right is tested against `allocated_peak`, which uses
# no mode. Some operators save other tensors with a mode on: `ctc_loss` saves its lengths. So what autograd saves is
# counted in a forward of its own, without a mode.

from __future__ import annotations

import collections
import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from disthooks.predict.recording.engine_sums import NO_NODE, adds_in_place, counts_of_one_holder, node_number

PHASES = ("forward", "backward", "optimizer")
#: Makes the optimizer of the parameters that it is given.
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
#: Gives the context of a forward and its loss, such as autocast.
MakeContext = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Measured:
    """What one real step saved and held, in bytes.

    Attributes:
        saved_bytes: the storages of what autograd holds after the forward, without weights and without the inputs.
        saved_inputs: the same for the storages of the example inputs.
        by_module: ``saved_bytes`` by the name of the innermost module whose forward ran when the storage was first
            saved; "" for the model itself and for the loss.
        inputs_by_module: ``saved_inputs`` in the same way.
        peaks: the most bytes of living storages in each of ``PHASES``, with weights, gradients, inputs and the
            optimizer's state. A phase begins with what the one before has left.
    """

    saved_bytes: int = 0
    saved_inputs: int = 0
    by_module: dict[str, int] = field(default_factory=dict)
    inputs_by_module: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of living storages in the step."""
        return max(self.peaks.values())


def measure(
    model: nn.Module,
    inputs: Any,
    autocast: MakeContext | None = None,
    optimizer: MakeOptimizer | None = None,
    peaks: bool = True,
) -> Measured:
    """Run a training step of ``model`` for real and say what it saved and held.

    The weights, the buffers and the state of the random numbers are afterwards what they were before; gradients are
    None.

    Without an ``optimizer`` the step ends with the backward. With ``peaks`` the step runs once more under
    :class:`LivingStorages`.
    """
    measured = Measured()
    with unchanged(model), saved_by_module(model, inputs) as saved, saved.hooks():
        loss = forward(model, inputs, autocast)
    del loss
    measured.saved_bytes, measured.by_module = saved.total(False), saved.totals(False)
    measured.saved_inputs, measured.inputs_by_module = saved.total(True), saved.totals(True)
    if peaks:
        with unchanged(model), LivingStorages(model, inputs) as living:
            _step(model, inputs, autocast, optimizer, measured, living)
    return measured


def _step(
    model: nn.Module,
    inputs: Any,
    autocast: MakeContext | None,
    optimizer: MakeOptimizer | None,
    measured: Measured,
    living: LivingStorages,
) -> None:
    """A step that notes the peaks of its phases in ``measured``."""
    made = optimizer([each for each in model.parameters() if each.requires_grad]) if optimizer else None
    living.begin()
    loss = forward(model, inputs, autocast)
    _note(measured, "forward", living)
    loss.backward()
    del loss
    _note(measured, "backward", living)
    if made is not None:
        made.step()
        _note(measured, "optimizer", living)


def _note(measured: Measured, phase: str, living: LivingStorages) -> None:
    measured.peaks[phase] = living.peak
    living.begin()


def dry_run(model: nn.Module, inputs: Any) -> None:
    """Run a forward without gradients if ``model`` has lazy modules, so that their weights are there, as torch asks."""
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        with torch.no_grad():
            call(model, inputs)


def forward(model: nn.Module, inputs: Any, autocast: MakeContext | None = None) -> torch.Tensor:
    """Run the forward and return the loss.

    The loss is the ``loss`` of the output if it has one; otherwise the mean of the squares of its first tensor that
    requires a gradient.
    """
    with autocast() if autocast is not None else contextlib.nullcontext():
        return loss_of(call(model, inputs))


def call(model: nn.Module, inputs: Any) -> Any:
    """``model`` called with ``inputs``: a dict, a tuple or list, or one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returned, as :func:`forward` says; a tensor without dimensions is the loss itself."""
    given = getattr(output, "loss", None)
    if isinstance(given, torch.Tensor) and given.requires_grad:
        return given
    first = next(each for each in tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad)
    return first if not first.dim() else first.float().square().mean()


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards the weights and buffers have their values of before, gradients are None, random numbers too."""
    before, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        model.load_state_dict(before)
        torch.set_rng_state(seed)


def _storages(tensors: Iterable[Any]) -> dict[int, torch.UntypedStorage]:
    """The storages of the plain tensors in ``tensors``, by address."""
    leaves = [each for each in tree_leaves(list(tensors)) if isinstance(each, torch.Tensor)]
    plain = [part for each in leaves for part in _inside(each) if _has_storage(part)]
    return {each.untyped_storage()._cdata: each.untyped_storage() for each in plain}


def _inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors in a wrapper, such as a jagged tensor, and in a sparse tensor."""
    if is_traceable_wrapper_subclass(tensor):
        inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # a DTensor has its mesh there
        return [part for each in inside if isinstance(each, torch.Tensor) for part in _inside(each)]
    if tensor.layout is torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    return [tensor]


def _has_storage(tensor: torch.Tensor) -> bool:
    is_memory = tensor.layout is torch.strided and not tensor.is_meta
    return is_memory and not tensor.is_nested and not is_traceable_wrapper_subclass(tensor)


# -- what autograd saves


class _Held:
    """What autograd keeps for a saved tensor while it keeps it."""

    __slots__ = ("__weakref__", "module", "tensor")

    def __init__(self, tensor: torch.Tensor, module: str) -> None:
        # An alias: the output of a node, saved by that node, would hold the node, and the node holds this.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.module = module


class SavedBytes:
    """The storages under the tensors that autograd saved, by module; see [Note: what is a saved byte].

    The parameters and buffers of ``model`` do not count, and ``inputs`` are counted apart.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._weights = _storages([*model.parameters(), *model.buffers()])
        self._inputs = _storages([inputs])
        self._stack = [""]
        self._held: list[weakref.ref[_Held]] = []
        self._counted: dict[bool, collections.Counter[str]] = {}

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """The saved-tensor hooks; what autograd holds at the end is counted."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor):
            yield
        self._count()

    def total(self, of_inputs: bool) -> int:
        """The bytes of all modules: those of the example inputs, or all others."""
        return self._counted[of_inputs].total()

    def totals(self, of_inputs: bool) -> dict[str, int]:
        """The same by module, without modules that saved nothing."""
        return {name: nbytes for name, nbytes in self._counted[of_inputs].items() if nbytes}

    def _pack(self, tensor: torch.Tensor) -> _Held:
        held = _Held(tensor, self._stack[-1])
        self._held.append(weakref.ref(held))
        return held

    def _count(self) -> None:
        self._counted = {False: collections.Counter(), True: collections.Counter()}
        seen = set(self._weights)
        for held in filter(None, (ref() for ref in self._held)):
            # Every storage is held by its `_Held`, so no two of them have the same address.
            for address, storage in _storages([held.tensor]).items():
                if address not in seen:
                    self._counted[address in self._inputs][held.module] += storage.nbytes()
                seen.add(address)

    def enter(self, module: nn.Module, args: Any) -> None:
        """A forward begins. A module that is not in the model counts as the one around it."""
        self._stack.append(self._names.get(module, self._stack[-1]))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward ended."""
        self._stack.pop()


@contextlib.contextmanager
def saved_by_module(model: nn.Module, inputs: Any) -> Iterator[SavedBytes]:
    """A :class:`SavedBytes` that knows which module's forward runs."""
    saved = SavedBytes(model, inputs)
    handles = (
        nn.modules.module.register_module_forward_pre_hook(saved.enter),
        nn.modules.module.register_module_forward_hook(saved.leave, always_call=True),
    )
    try:
        yield saved
    finally:
        for handle in handles:
            handle.remove()


# -- living storages


class LivingStorages(TorchDispatchMode):
    """Counts the bytes of the storages that live, on real tensors; see [Note: a mode is seen].

    A storage is known from the first operator on that returns a tensor over it, until it is gone. Its size may change
    by an operator such as ``aten.resize_``. Memory that an operator takes and frees inside itself is not seen.

    The storages of ``there`` (models, optimizers, tensors) are there from the beginning.
    """

    def __init__(self, *there: Any) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._makers: dict[int, int] = {}  # the number of the autograd node that made a storage
        self._one_holder = counts_of_one_holder()
        for each in there:
            self._see(_tensors_of(each))

    def begin(self) -> None:
        """A new phase: its peak is at least what lives now."""
        self.peak = self.bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and adds_in_place(args, self._maker(args), self._one_holder):
            func = torch.ops.aten.add_.Tensor  # see [Note: a mode is seen]
        result = func(*args, **(kwargs or {}))
        # Arguments too: an operator that writes into one may give it another size.
        self._see((args, kwargs, result))
        return result

    def _maker(self, args: tuple[Any, ...]) -> int:
        is_plain = isinstance(args[0], torch.Tensor) and _has_storage(args[0])
        return self._makers.get(args[0].untyped_storage()._cdata, NO_NODE) if is_plain else NO_NODE

    def _see(self, tensors: Any) -> None:
        for address, storage in _storages([tensors]).items():
            if address not in self._sizes:
                self._sizes[address], self._makers[address] = 0, node_number()
                weakref.finalize(storage, self._gone, address).atexit = False
            self._change(address, storage.nbytes())

    def _change(self, address: int, nbytes: int) -> None:
        self.bytes += nbytes - self._sizes[address]
        self.peak = max(self.peak, self.bytes)
        self._sizes[address] = nbytes

    def _gone(self, address: int) -> None:
        self.bytes -= self._sizes.pop(address)
        del self._makers[address]


def _tensors_of(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        gradients = [each.grad for each in value.parameters()]
        return [*value.parameters(), *value.buffers(), *gradients]
    if isinstance(value, torch.optim.Optimizer):
        return [list(state.values()) for state in value.state.values()]
    return [value]


# -- torch's own counts


def tracked(
    model: nn.Module, inputs: Any, autocast: MakeContext | None = None, optimizer: MakeOptimizer | None = None
) -> tuple[int, dict[str, int]]:
    """The peak of a step by torch's MemTracker, and the bytes of each of its categories at that moment."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker: Any = MemTracker()
    # It would put hooks on the gradients of frozen parameters, which torch refuses. It puts none where it has some.
    for frozen in (each for each in model.parameters() if not each.requires_grad):
        tracker._param_to_grad_hook_handles[frozen] = (_no_handle(), _no_handle())
    made = optimizer([each for each in model.parameters() if each.requires_grad]) if optimizer else None
    tracker.track_external(model, *([made] if made else []))
    tracker.track_external(*[each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)])
    with tracker:
        forward(model, inputs, autocast).backward()
        if made is not None:
            made.step()
    found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    by_category = {getattr(key, "value", key): nbytes for key, nbytes in found.items()}
    return by_category.pop("Total"), by_category


def _no_handle() -> RemovableHandle:
    return RemovableHandle(collections.OrderedDict())


def allocated_peak(model: nn.Module, inputs: Any) -> dict[str, int]:
    """The most bytes that torch's CPU allocator gave out in forward and in backward, and what lived before the step.

    No mode is on, and the memory that an operator takes for itself counts. The figures come from the profiler.
    """
    before = sum(each.nbytes() for each in _storages([*_tensors_of(model), inputs]).values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = forward(model, inputs)
        _mark()
        loss.backward()
        del loss
        _mark()
    return _peaks_of(profile, before)


def _mark() -> None:
    """A place in the profile: an operator that nothing else runs."""
    with torch.profiler.record_function("oracle: a phase ended"):
        pass


def _peaks_of(profile: Any, before: int) -> dict[str, int]:
    bytes_, peaks, phase = before, {}, 0
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    for event in events:
        if event.name() == "oracle: a phase ended":
            phase += 1
        elif event.name() == "[memory]" and phase < len(PHASES):
            bytes_ += event.nbytes()
            peaks[PHASES[phase]] = max(peaks.get(PHASES[phase], bytes_), bytes_)
    return peaks


# -- what fits


def largest_batch(
    build: Callable[[int], tuple[nn.Module, Any]],
    limit_bytes: int,
    optimizer: MakeOptimizer | None = None,
    most: int = 1 << 12,
) -> int:
    """The largest batch whose real step stays within ``limit_bytes`` of living storages; 0 if none does.

    It doubles the batch until a step is too large, and then halves the interval: it takes for granted that a larger
    batch takes more memory. No batch above ``most`` is tried.
    """

    def fits(batch: int) -> bool:
        model, inputs = build(batch)
        return measure(model, inputs, optimizer=optimizer).peak_bytes <= limit_bytes

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
