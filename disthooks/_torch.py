"""The private functions of torch that disthooks needs, named and typed in one place.

All other files use public torch. The comments about torch hold for 2.11 to 2.15, and a test uses each name.
"""

# [Note: replacing what a wrapper calls]
# Some of torch's functions are wrappers made by a decorator: `Optimizer.step`, `clip_grad_norm_`. To see every call, a
# name in torch's module could be replaced, but scripts have imported it before, schedules and accelerate have put bound
# methods aside, and classes inherit it. All of these are the wrapper. So the wrapper stays, and the function in its
# closure is replaced (`Inner`; decision 104).
#
# [Note: looking up the stack]
# torch does not say which GradScaler is making a step, which checkpoint a `load_state_dict` is loading, or that
# `functional_call` is setting an attribute. The frames of Python's stack say so. A frame is found by the code object of
# torch's function, not by its name, which a user's function may have too. Its local variables are read, never written.
#
# [Note: torch's own counts]
# disthooks must know whether other code uses the memory of a tensor. Python's references do not show it: C++ holds a
# saved tensor, and a Python weak reference may still find a storage that is being destroyed. So disthooks asks torch's
# counts. `holders` is the number of tensors over a storage, and `StorageRef` is a weak reference that torch counts.
# `fresh_count` distinguishes a tensor that only the operator knows from a tensor that a user's code holds.

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

import torch
from torch.utils import _foreach_utils, checkpoint

_autograd: Any = torch._C._autograd

#: The number that the next graph node of this thread will get. It has grown if an operator is making its node now.
sequence_number: Callable[[], int] = _autograd._get_sequence_nr

#: False inside torch.func's transforms, which forbid saved-tensor hooks.
hooks_allowed: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled

#: The innermost pair of saved-tensor hooks of this thread, or None; call it with True.
top_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = (
    _autograd._top_saved_tensors_default_hooks
)


#: One new tensor of one dimension with the elements of all tensors in a list, which have the same dtype.
flatten: Callable[[list[torch.Tensor]], torch.Tensor] = torch._utils._flatten_dense_tensors

#: The parts of such a tensor, in the shapes of a list of tensors.
unflatten: Callable[[torch.Tensor, list[torch.Tensor]], Sequence[torch.Tensor]] = torch._utils._unflatten_dense_tensors

#: Groups of tensors of one device and one dtype, for foreach kernels, with the places of the tensors if asked for.
groups_for_foreach: Callable[..., Any] = _foreach_utils._group_tensors_by_device_and_dtype


#: The dispatch mode in which a selective checkpoint keeps the outputs of some operators.
SelectiveMode: Any = checkpoint._CachingTorchDispatchMode

#: What a non-reentrant checkpoint holds to run its function again.
CheckpointFrame: Any = checkpoint._CheckpointFrame

#: The innermost pair of hooks that is no checkpoint's own; None before torch 2.14, where a checkpoint does not know it.
hooks_around_checkpoint: Callable[[], tuple[Callable[..., Any], Callable[..., Any]] | None] | None = getattr(
    checkpoint, "_current_user_saved_tensors_hooks", None
)


#: The graph node that this thread is running, or None.
current_node: Callable[[], Any] = torch._C._current_autograd_node


#: The class of the nodes that run a user's code. Such code may read a saved tensor several times; torch's nodes read it
#: once. Outside of a backward, where there is no node, only a user's code reads saved tensors.
PYTHON_NODE = torch.autograd.function.BackwardCFunction


def at_end_of_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


@functools.cache
def _old_graph() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An output, its leaf and a gradient. Their node has the number 0, because it is the first node of its thread."""
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def make() -> None:
        leaf = torch.ones((), requires_grad=True, device="cpu")
        found.append((leaf.clone(), leaf, leaf.detach()))

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join()
    found[0][0].grad_fn.register_prehook(lambda gradients: _numbers.append(backward_id()))  # type: ignore[union-attr]
    return found[0]


_numbers: deque[int] = deque(maxlen=1)  # that of the last backward of `_old_graph`
_of_old_graph = itertools.count(1)


def backwards_so_far() -> int:
    """How many backwards this process has begun, in all of its threads; torch numbers them all in one row."""
    output, leaf, gradient = _old_graph()
    torch.autograd.grad(output, leaf, gradient, retain_graph=True)
    return _numbers[0] - next(_of_old_graph)  # without those that were made here


def drop_failed_backward() -> None:
    """Free the graph of a backward that raised an error in this thread, unless a user's code holds it.

    After an error torch leaves the nodes that were still to run in the queue of the thread, and they hold their graph.
    The next backward takes them out, those with the highest number first. So this runs a node with the number 0, and
    makes no new node, whose number the operator that is saving tensors now would take for its own. It runs no operator
    either, which a dispatch mode would see.
    """
    if current_node() is None:
        backwards_so_far()


@functools.cache
def drop_failed_backward_at_exit() -> None:
    """Free what a failed backward of the main thread left, before the interpreter ends.

    C++ frees it after that, and memory that gives itself back by a destructor in Python needs the interpreter.
    """
    _old_graph()  # at exit no thread can be started
    process = os.getpid()  # torch runs no backward in a fork
    atexit.register(lambda: drop_failed_backward() if os.getpid() == process else None)


def node_name(node: Any) -> str:
    """The name that torch gives to the kind of ``node``; "" for a user's own node, whose ``name`` may be anything."""
    return "" if isinstance(node, PYTHON_NODE) else node.name()


class _Counts:
    """Measures the ``sys.getrefcount``, in a pack hook, of a tensor that only the operator knows."""

    def __init__(self) -> None:
        self.least = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.least = sys.getrefcount(tensor)
        return tensor.detach()


@functools.cache
def fresh_count() -> int:
    """The ``sys.getrefcount``, in a method that is a pack hook, of a tensor that no Python code has seen yet.

    The number depends on how Python counts arguments, so it is measured once, with the output of an operator. See
    [Note: torch's own counts].
    """
    counts, leaf = _Counts(), torch.ones(1, device="cpu", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(counts.pack, lambda tensor: tensor), torch.enable_grad():
        leaf.exp()
    return counts.least


def holders(storage: torch.UntypedStorage) -> int:
    """The number of tensors over ``storage``, plus one for the Python object ``storage`` itself.

    See [Note: torch's own counts].
    """
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def in_backward() -> bool:
    """Whether this thread is inside a backward, such as in a gradient hook, or in a checkpoint that recomputes."""
    running: int = torch._C._current_graph_task_id()
    return running != -1  # torch's number for no backward


#: The number of the backward that this thread is inside of. A backward inside a backward has its own number.
backward_id: Callable[[], int] = torch._C._current_graph_task_id


def accumulates(leaf: torch.Tensor) -> bool:
    """Whether the backward that this thread is inside of will add to ``leaf.grad``."""
    return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node))


def in_transform() -> bool:
    """Whether this thread is inside a transform of ``torch.func``. Every new tensor belongs to the transform then."""
    return torch._C._functorch.maybe_current_level() is not None


#: Whether `torch.jit.trace` records the operators of this thread.
recorded_by_jit: Callable[[], bool] = torch._C._is_tracing


def is_dispatched() -> bool:
    """Whether a ``TorchDispatchMode`` of this thread sees the operators."""
    return torch._C._len_torch_dispatch_stack() > 0


def being_traced() -> bool:
    """Whether the operators of this thread are recorded, by ``torch.jit.trace`` or by ``make_fx``."""
    return recorded_by_jit() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def exporting() -> bool:
    # The public `is_exporting` of torch 2.11 is also true while `torch.compile` traces.
    return torch.compiler._is_exporting_flag


_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames: Any = torch._C._dynamo.eval_frame
_SKIP, _GO_ON = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT


def uncompiled(reason: str | None = None, *, callees: bool = True) -> Callable[[_Function], _Function]:
    """Mark a function that ``torch.compile`` must not compile.

    ``torch.compiler.disable`` does the same, but it imports the compiler and adds a Python call.

    Args:
        reason: the text that the compiler shows if it meets the function while it traces a caller, whose graph breaks
            there. With None the compiler may trace the function as a part of the caller, and only calls from code that
            is not compiled are left alone.
        callees: whether the functions that this function calls are left alone too.
    """

    def mark(function: _Function) -> _Function:
        code: Any = function.__code__
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(_SKIP, _SKIP if callees else _GO_ON))
        if reason is not None:
            function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
        return function

    return mark


def forget_compiled() -> None:
    """Make ``torch.compile`` trace each compiled function again at its next call.

    The compiler does not guard the functions of a class. If one of them is replaced, code that was compiled before
    would still call the old one.
    """
    compiler: Any = sys.modules.get("torch._dynamo")
    if compiler is not None:
        compiler.reset_code_caches()


#: Frees what ``storage._weak_ref()`` gave.
free_weak_ref: Callable[[Any], Any] = torch.UntypedStorage._free_weak_ref


class StorageRef:
    """A weak reference to a storage, by torch's own counts; see [Note: torch's own counts].

    As long as it exists, no other storage object gets the address of this one.

    >>> tensor = torch.ones(3)
    >>> ref = StorageRef(tensor.untyped_storage())
    >>> ref.get().nbytes()
    12
    >>> del tensor
    >>> ref.get()
    """

    __slots__ = ("_ref", "address")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address: int = storage._cdata
        self._ref: Any = storage._weak_ref()

    def get(self) -> torch.UntypedStorage | None:
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._ref)
        return found

    # The function is a default argument, because globals may be gone when the interpreter ends.
    @uncompiled()
    def __del__(self, _free: Callable[[Any], Any] = free_weak_ref) -> None:
        _free(self._ref)


#: Whether this build of torch has CUDA graphs. Builds without them do not have the function that `capturing` calls.
_HAS_GRAPHS = torch.version.cuda is not None or torch.version.hip is not None


def capturing() -> bool:
    """Whether a CUDA graph records the work that this thread gives to its current device, to replay it without Python.

    >>> capturing()
    False
    """
    # The last call raises an error if there is no driver, or in a fork. If a graph is being captured, this process has
    # initialized CUDA.
    return _HAS_GRAPHS and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def in_graph_memory(tensor: torch.Tensor) -> bool:
    """Whether the memory of a device's ``tensor`` belongs to CUDA graphs of the compiler (``mode="reduce-overhead"``).

    The next run of the graphs writes into that memory without a new version, and their backward expects its inputs
    there (decision 75). Each thread and device has a manager of its graphs, which knows the tensors that the current
    chain of graphs has returned. The answer is True if torch has graphs and the manager has other methods than
    expected.
    """
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False  # the compiler imports this module for its first graph, so there is no graph
    try:
        manager = trees.get_manager(tensor.device.index or 0, create_if_none_exists=False)
        node = None if manager is None else manager.current_node
        return node is not None and bool(node._is_cuda_graph_recorded_tensor(tensor))
    except AssertionError:
        return False  # a thread in which the compiler of torch 2.11 has no graphs
    except AttributeError:
        return True


def metadata_being_loaded() -> dict[str, Any]:
    """The ``_metadata`` (module name to version) of the checkpoint that a ``load_state_dict`` further up is loading.

    torch gives a module's hook the entry of this module alone, and a wrapper must pass on the entries of the modules
    inside it (decision 14). All entries are in a variable of ``load_state_dict``; see [Note: looking up the stack].
    The dict is empty if there is no such call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.nn.Module.load_state_dict.__code__:
            found = frame.f_locals.get("metadata")
            return found if isinstance(found, dict) else {}
        frame = frame.f_back
    return {}


# The code of the wrapper that torch puts around each `step`; it is the same object in all of the wrappers.
_STEP = next(
    code
    for code in torch.optim.Optimizer.profile_hook_step.__code__.co_consts
    if getattr(code, "co_name", None) == "wrapper"
)


class Inner:
    """The function that one of torch's own wrappers calls. It can be replaced, and the wrapper stays.

    See [Note: replacing what a wrapper calls].

    >>> inner = Inner(torch.nn.utils.clip_grad_norm_)
    >>> inner.function.__name__
    'clip_grad_norm_'
    """

    __slots__ = ("_cell",)

    def __init__(self, wrapper: Any) -> None:
        # torch's decorators call their argument `func`.
        self._cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]

    @property
    def function(self) -> Callable[..., Any]:
        found: Callable[..., Any] = self._cell.cell_contents
        return found

    @function.setter
    def function(self, function: Callable[..., Any]) -> None:
        self._cell.cell_contents = function


def own_wrapper(function: Any) -> Any:
    """torch's own wrapper: ``function``, or what a user's function in its place wraps; None if that is not known.

    >>> clip = torch.nn.utils.clip_grad_norm_
    >>> own_wrapper(functools.partial(clip, max_norm=1.0)) is own_wrapper(clip) is clip
    True
    >>> own_wrapper(print)
    """
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and "func" in code.co_freevars and code.co_filename.startswith(torch.__path__[0]):
            return function
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
    return None


def step_wrapper(kind: type[torch.optim.Optimizer]) -> Any:
    """The wrapper that torch puts around the ``step`` of a class of optimizers. The wrapper calls the step's hooks.

    A class has no wrapper until one of its objects has called ``Optimizer.__init__``. If it has none, this function
    adds the wrapper that torch would add: without it no hook on the optimizer would ever be called.
    """
    found: Any = kind.step
    while found is not None:
        if getattr(found, "__code__", None) is _STEP:
            return found
        found = getattr(found, "__wrapped__", None)
    made: Any = torch.optim.Optimizer.profile_hook_step(kind.step)
    made.hooked = True  # torch adds no second wrapper to a class with this mark
    kind.step = made  # type: ignore[method-assign]
    return made


# For each function that runs while a GradScaler makes a step: the name of its variable that holds the scaler.
_SCALED: dict[CodeType, str] = {torch.amp.GradScaler.step.__code__: "self"}


def gives_scaler(name: str) -> Callable[[_Function], _Function]:
    """Mark a function. While it runs, its argument ``name`` is the ``GradScaler`` that makes the step, or None."""

    def mark(function: _Function) -> _Function:
        _SCALED[cast(Any, function).__code__] = name
        return function

    return mark


def scaler_under_way() -> Any:
    """The ``GradScaler`` whose ``step`` has called the optimizer's step that runs now; None if there is none.

    See [Note: looking up the stack].
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _SCALED:
            return frame.f_locals[_SCALED[frame.f_code]]
        frame = frame.f_back
    return None


def in_pipeline_stage() -> bool:
    """Whether a ``PipelineStage`` of torch has called the function that runs now; see [Note: looking up the stack]."""
    stage: Any = sys.modules.get("torch.distributed.pipelining.stage")
    code = None if stage is None else stage._PipelineStageBase.forward_maybe_with_nosync.__code__
    frame: FrameType | None = sys._getframe(1) if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def unscale(scaler: Any, optimizer: Any) -> None:
    """Take the scale out of the gradients of ``optimizer``, unless ``scaler`` has done that in this iteration."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
        scaler.unscale_(optimizer)


def found_inf(scaler: Any, optimizer: Any) -> list[torch.Tensor]:
    """The numbers by which ``scaler`` decides whether ``optimizer`` steps in this iteration: above 0, it does not."""
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


@contextlib.contextmanager
def name_of_next_group(name: str) -> Iterator[None]:
    """Inside, ``torch.distributed.new_group(use_local_synchronization=True)`` names its group ``name``.

    torch makes the name of a group from the number of groups so far, which may differ between ranks (decision 90).
    """
    module: Any = torch.distributed.distributed_c10d
    before = module._process_group_name
    module._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        module._process_group_name = before


def collectives_so_far() -> int | None:
    """How many collectives this process has started in all its groups; None if a backend does not count them.

    >>> collectives_so_far()
    0
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    module: Any = torch.distributed.distributed_c10d
    try:
        numbers: list[int] = [
            group._get_backend(device)._get_sequence_number_for_group()
            for group in module._world.pg_map
            for device in group._device_types
        ]
    except RuntimeError:
        return None
    return sum(numbers)


def ddp_under_way() -> Any:
    """The ``DistributedDataParallel`` whose forward runs now; None if there is none.

    >>> ddp_under_way() is None
    True
    """
    return getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
