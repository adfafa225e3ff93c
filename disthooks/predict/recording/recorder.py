"""``Recorder`` sees one training step, on fake or on real tensors, and makes a :class:`StepRecord` of it."""

# [Note: what tells that memory goes]
# A tensor's memory goes when the last tensor over its storage goes. Fake tensors have storages without memory, and they
# live as long as the real ones would: Python and autograd hold them in the same way. So a weak reference to the storage
# tells when its memory would go. FSDP frees memory in another way: it gives a storage the size zero and keeps it. No
# dispatch mode sees that, so `UntypedStorage.resize_` is replaced while a recorder is on.
#
# [Note: operators have numbers]
# torch numbers the nodes of the autograd graph. An operator makes its node, then saves its inputs, then runs, then
# saves its outputs, all at one number. So the number tells which operator saved a tensor, and in backward it tells in
# the forward of which module the node was made.
#
# [Note: what a distributed tensor hides]
# A DTensor has a storage of the size of the whole tensor and no memory. Its operators run again on the local tensors,
# and these are what is recorded. A mode is off while it handles a call, so the recorder does not make the call itself:
# it says NotImplemented, and torch asks the DTensor, with the recorder on. To learn the shape of a result, DTensor runs
# operators on fake tensors of the global shape: that is computed nowhere, so the recorder looks away (`paused`).

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch

from disthooks._match import canonical_name
from disthooks._tensors import local_part, parts_of
from disthooks._torch import current_node, sequence_number
from disthooks.predict.fake.queries import DEVICE_OF, device_of, tensors_in
from disthooks.predict.fake.state import replaced
from disthooks.predict.recording.costs import cost
from disthooks.predict.recording.engine_sums import NO_NODE, adds_in_place, counts_of_one_holder, node_number
from disthooks.predict.recording.record import (
    CATEGORIES,
    Allocation,
    Change,
    ModuleInfo,
    Operator,
    Phase,
    SavedKind,
    SavedTensor,
    StepRecord,
    Unknown,
)
from disthooks.saved.checkpoints import AroundCheckpoints

_Mode: Any = _python_dispatch.TorchDispatchMode
_is_wrapper: Callable[[object], bool] = _python_dispatch.is_traceable_wrapper_subclass


_RANK = {category: position for position, category in enumerate(CATEGORIES)}
_NARROW = (torch.bfloat16, torch.float16)
_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_COMMUNICATION = ("c10d", "_c10d_functional", "_dtensor", "fsdp")


class _Watched(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that knows the storage's address, its allocation, and the node that made it."""

    __slots__ = ("address", "allocation", "nbytes", "node")
    address: int
    allocation: int
    node: int
    nbytes: int


class Recorder(AroundCheckpoints, _Mode):  # type: ignore[misc]
    """A dispatch mode that records what runs inside it. Enter the FakeTensorMode first, then this."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.record = StepRecord()
        self._phase: Phase = "before"
        self._watched: dict[int, _Watched] = {}  # by the address of the storage
        self._weights: dict[int, SavedKind] = {}  # what the allocation of a weight, or of a copy of one, is to autograd
        self._first_saved: set[int] = set()
        self._pending: list[_Pending] = []
        self._paused = 0
        self._thread = threading.get_ident()
        self._module_at: dict[int, int] = {}  # by the number of the node
        self._operator_at: dict[int, str] = {}
        self._stack: list[int] = []
        self._position: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._owner: dict[int, int] = {}  # the module of a parameter, by its identity
        self._exits = contextlib.ExitStack()
        self._one_holder = counts_of_one_holder()  # now, because it runs a backward
        self._add_modules(model)
        for weight in model.parameters():
            self._adopt(weight, "parameters")
        for buffer in model.buffers():
            self._adopt(buffer, "buffers")

    def _add_modules(self, model: nn.Module) -> None:
        by_name: dict[str, int] = {}
        for path, module in model.named_modules():
            name = canonical_name(path)
            position = len(self.record.modules)
            parent = name
            while parent and parent not in by_name:
                parent = parent.rpartition(".")[0]
            above = -1 if position == 0 else by_name.get(parent, 0)
            self.record.modules.append(ModuleInfo(name, _class_name(module), above))
            by_name[name] = position
            self._position[module] = position
            for weight in module._parameters.values():
                if weight is not None:
                    self._owner.setdefault(id(weight), position)

    # -- on and off

    def __enter__(self) -> Recorder:
        self._exits.enter_context(_resizing(self._resized))
        hooks = (
            nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
        )
        for handle in hooks:
            self._exits.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._exits.close()
        for watched in self._watched.values():
            watched.allocation = -1  # what goes from now on is not recorded
        self._watched.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside. What is made inside is found when an operator uses it later."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def begin(self, phase: Phase, has_plan: bool = False) -> None:
        """What comes now belongs to ``phase``. What autograd holds when the backward begins is what it saved.

        With a plan the recorder's own hooks have not seen the saved tensors, and all memory of the forward that is
        there when the backward begins counts as saved.
        """
        if phase == "backward":
            self._name_saved()
            for watched in self._watched.values() if has_plan else ():
                self._mark(watched.allocation, "saved for backward")
        self._phase = phase
        self.record.phases[phase] = len(self.record.operators)

    def saving(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    # -- memory

    def adopt(self, tensors: Iterable[Any], category: str, device: Literal["device", "host"] = "device") -> None:
        """Say what the memory of ``tensors`` is for, and where it is. Unseen memory is there from now on."""
        for tensor in tensors_in(tensors):
            self._adopt(tensor, category, device)

    def assumed(self, what: str, assumed: str) -> None:
        module = self.record.modules[self._stack[-1] if self._stack else 0].name
        found = Unknown(what, module, assumed)
        if found not in self.record.unknown:
            self.record.unknown.append(found)

    def _adopt(self, tensor: torch.Tensor, category: str, device: Literal["device", "host"] = "device") -> None:
        for part in self._memory_of(tensor):
            allocation = self._see(part, "")
            self._mark(allocation, category)
            self.record.allocations[allocation].device = device
            if category in ("parameters", "buffers"):
                self._weights[allocation] = "parameter" if category == "parameters" else "buffer"
                owner = self._owner.get(id(tensor))
                if owner is not None:
                    self.record.allocations[allocation].module = owner

    def _memory_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The strided tensors that ``tensor`` consists of."""
        part = local_part(tensor)
        if _has_storage(part):
            return [part]
        with self.paused():
            parts = [each for each in parts_of(part) if _has_storage(each)]
        if parts and str(part.layout).startswith("torch.sparse") and not parts[0].numel():
            self.assumed("how many elements a sparse tensor has", "none, so that its values take no memory")
        return parts

    def _mark(self, allocation: int, category: str) -> None:
        found = self.record.allocations[allocation]
        if _RANK[category] < _RANK[found.category]:
            found.category = category

    def _see(self, tensor: torch.Tensor, operator: str) -> int:
        """The allocation that ``tensor`` lies over. It is made now if it was not known."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        watched = self._watched.get(address)
        if watched is None:
            watched = _Watched(storage, self._gone)
            watched.address, watched.allocation = address, len(self.record.allocations)
            watched.nbytes, watched.node = storage.nbytes(), node_number()
            self._watched[address] = watched
            self.record.allocations.append(Allocation(watched.nbytes, "temporary", operator, self._module()))
            self._change(watched.allocation, watched.nbytes)
        elif watched.nbytes != (nbytes := storage.nbytes()):
            self._resized(storage, nbytes)  # by an operator, such as `resize_`
        return watched.allocation

    def _gone(self, watched: _Watched) -> None:
        if self._watched.get(watched.address) is watched:
            del self._watched[watched.address]
            self._change(watched.allocation, -watched.nbytes)

    def _resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        watched = self._watched.get(storage._cdata)
        if watched is not None:
            self._change(watched.allocation, nbytes - watched.nbytes)
            watched.nbytes = nbytes
            found = self.record.allocations[watched.allocation]
            found.nbytes = max(found.nbytes, nbytes)

    def _change(self, allocation: int, nbytes: int) -> None:
        if nbytes:
            self.record.changes.append(Change(max(0, len(self.record.operators) - 1), allocation, nbytes))

    # -- modules

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return  # the hooks are there for all modules of the process
        self._stack.append(self._position.get(module, self._stack[-1] if self._stack else 0))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack and threading.get_ident() == self._thread:
            self._stack.pop()

    def _module(self) -> int:
        """The position of the module in whose forward, or in whose backward, something happens now."""
        if self._stack:
            return self._stack[-1]
        node = current_node()
        if node is None:
            return 0
        weight = getattr(node, "variable", None)
        if weight is not None:
            return self._owner.get(id(weight), 0)
        return self._module_at.get(node._sequence_nr(), 0)

    # -- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return device_of(args[0])
        kwargs = kwargs or {}
        if self._paused or func.namespace == "prim":
            return func(*args, **kwargs)
        if func is _ADD and self._phase == "backward" and adds_in_place(args, self._maker(args), self._one_holder):
            func = _ADD_IN_PLACE
        arguments = tensors_in(args, kwargs)
        if any(_is_wrapper(each) for each in arguments):
            return NotImplemented  # see [Note: what a distributed tensor hides]
        position, name = self._module(), _name_of(func)
        if self._phase == "forward" or self._stack:
            number = sequence_number() - 1  # see [Note: operators have numbers]
            self._module_at.setdefault(number, position)
            self._operator_at.setdefault(number, name)
        result = func(*args, **kwargs)
        if not _is_view(func):
            found = cost(func, args, kwargs, result)
            self.record.operators.append(Operator(name, self._phase, position, *found))
            self._see_all(func.namespace in _COMMUNICATION, name, arguments, tensors_in((result,)))
        return result

    def _maker(self, args: tuple[Any, ...]) -> int:
        """The number of the autograd node that made the storage of the first argument."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not _has_storage(first):
            return NO_NODE
        watched = self._watched.get(first.untyped_storage()._cdata)
        return NO_NODE if watched is None else watched.node

    def _see_all(
        self, is_communication: bool, name: str, arguments: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        """See the memory of an operator's results, and of its arguments if it communicates."""
        if is_communication:
            for each in filter(_has_storage, [*arguments, *results]):
                self._mark(self._see(each, name), "communication")
            return
        for each in itertools.chain.from_iterable(map(self._memory_of, results)):
            allocation = self._see(each, name)
            if name == "aten._to_copy" and each.dtype in _NARROW and allocation not in self._weights:
                source = self._watched.get(arguments[0].untyped_storage()._cdata)
                if source is not None and self._weights.get(source.allocation) == "parameter":
                    self._weights[allocation] = "weight copy"

    # -- saved tensors

    def _pack(self, tensor: torch.Tensor) -> _Held:
        is_weight = isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter)
        with self.paused():
            # A tensor with a history would hold its node, and the node holds what is saved here.
            held = _Held(tensor if is_weight or not tensor.requires_grad else tensor.detach())
        if not self._paused and self._phase == "forward":
            for part in self._memory_of(tensor):
                self._add_saved(held, part, is_weight)
        return held

    def _add_saved(self, held: _Held, part: torch.Tensor, is_weight: bool) -> None:
        allocation = self._see(part, "")
        kind: SavedKind = "activation"
        if is_weight:
            kind = "parameter"
            self._mark(allocation, "gathered parameters")  # a Parameter over memory that is no parameter's own
        elif allocation in self._weights:
            kind = self._weights[allocation]
        elif self.record.allocations[allocation].category == "inputs":
            kind = "input"
        nbytes, dtype = part.numel() * part.element_size(), str(part.dtype).removeprefix("torch.")
        number, module = sequence_number() - 1, self._module()
        self._pending.append(
            _Pending(weakref.ref(held), allocation, nbytes, module, kind, number, tuple(part.shape), dtype)
        )

    def _name_saved(self) -> None:
        """Give the saved tensors that autograd holds the names of their operators, which are known by now."""
        for held, allocation, nbytes, module, kind, number, shape, dtype in self._pending:
            if held() is None:
                continue  # its graph is gone: the model made it and dropped it
            is_first = allocation not in self._first_saved
            self._first_saved.add(allocation)
            self._mark(allocation, "saved for backward")
            operator = self._operator_at.get(number, "")
            self.record.saved.append(SavedTensor(allocation, nbytes, module, operator, kind, is_first, shape, dtype))
        self._pending.clear()


class _Held:
    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Pending(NamedTuple):
    """A saved tensor whose operator is not known yet; the fields are those of ``SavedTensor``."""

    held: weakref.ref[_Held]
    allocation: int
    nbytes: int
    module: int
    kind: SavedKind
    number: int
    shape: tuple[int, ...]
    dtype: str


def _class_name(module: nn.Module) -> str:
    """The name of the user's class; ``fully_shard`` derives one of its own from it."""
    kinds = type(module).__mro__
    return next((kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.distributed.")), "")


@functools.cache
def _name_of(func: Any) -> str:
    return f"{func.namespace}.{func._schema.name.rpartition('::')[2]}"


@functools.cache
def _is_view(func: Any) -> bool:
    return bool(getattr(func, "is_view", False)) or func._schema.name in ("aten::detach", "aten::_unsafe_view")


def _has_storage(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is strided memory, and no wrapper of other tensors."""
    return tensor.layout is torch.strided and not tensor.is_nested and not _is_wrapper(tensor)


@contextlib.contextmanager
def _resizing(seen: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Call ``seen`` with a storage and its new size when it is resized. See [Note: what tells that memory goes]."""
    original: Any = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = original(storage, nbytes)
        seen(storage, int(nbytes))
        return result

    with replaced(torch.UntypedStorage, "resize_", resize_):
        yield
