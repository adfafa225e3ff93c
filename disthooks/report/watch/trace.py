"""``trace``: the order in which forward, backward, saved-tensor and gradient hooks fire.

:class:`TraceEvent` is one thing that fired, :class:`TraceReport` the table of a trace, and
:class:`SavedTensorObserver` the pair of saved-tensor hooks that sees what autograd saves.
"""

# [Note: a pair of hooks that only looks]
# torch calls the innermost pair of saved-tensor hooks only. A trace must not change what becomes of a tensor, so its
# pair calls the outer pair and keeps what that returns. If there is no outer pair, it does what torch does without
# hooks: it keeps the tensor and checks its version at unpack. It keeps an alias, because the tensor itself would make a
# cycle with the node that saves it. A Parameter is kept itself, because an alias would keep alive the memory that
# ZeRO-3 gathers for it. Inside a module to which disthooks' own hooks are attached, those are innermost and hide the
# trace's pair. They report what became of each tensor as an event (`_handles.SavedTensorEvent`), and the trace records
# that event instead.
#
# [Note: seen contents]
# Two saved tensors are the same content if they have one storage at one version. The storage is known by its address,
# and a weak reference is kept with it: while that exists, no other storage gets the address.

from __future__ import annotations

import builtins
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from disthooks import _handles
from disthooks._handles import Attachment, UncopiedHook
from disthooks._locks import new_lock
from disthooks._match import Pattern, canonical_name, match, unwrap_engine
from disthooks._tensors import exotic, format_bytes, storages_of
from disthooks._torch import StorageRef, hooks_allowed, top_hooks
from disthooks.errors import MutationError, UsageError
from disthooks.report.watch.features import choose_modules, display_name, tensors_of, version_of

#: What to do when torch says this of a model that is traced.
REMEDIES = {
    "BackwardHookFunction": (
        "dh.trace(full_backward=True): torch's full backward hooks pass a module's inputs and outputs through views, "
        "which must not be changed in place; without full_backward, 'output_grad' events show the same order"
    ),
    "saved tensor hooks": "dh.trace: with saved_tensors=False it uses no saved-tensor hooks",
}


# The width of the column of classes: that of TransformerEncoderLayer.
_CLASS = 23


class TraceEvent(NamedTuple):
    """One thing that fired.

    Attributes:
        kind: one of ``disthooks.report.watch.trace.KINDS``.
        name: the name of the module; for "tensor_hook" and "post_accumulate", the name of the parameter.
        type: the class name of that module or parameter.
        shape: the shape of the input for "forward_pre", of the output for "forward", of the saved tensor for "pack" and
            "unpack", and of the gradient for the other kinds. It is a tuple of ints for one tensor; for a structure of
            tensors it is that structure with such tuples in it; None if there is no tensor.
        dtype: the dtype of the first of those tensors.
        device: its device, which tells the replicas of DataParallel apart.
        nbytes: the bytes of all of those tensors. For "forward", the bytes that were saved for backward while it ran;
            each content counts once, and weights do not count.
        seconds: host time in the forward, with its hooks and its waiting; 0.0 for other kinds.
        note: for "pack" and "unpack" what became of the tensor: "saved" (it stays where it is), "parameter" (it is a
            weight, and no copy is made), "shared" (it was saved before), or "stored", "shared", "kept" by disthooks'
            own hooks. For "forward" the error that it raised.
    """

    kind: str
    name: str
    type: str
    shape: Any
    dtype: torch.dtype | None
    device: torch.device | None
    nbytes: int
    seconds: float
    note: str

    @staticmethod
    def of(
        kind: str, name: str, type_name: str, value: Any, nbytes: int | None, seconds: float, note: str
    ) -> TraceEvent:
        """The event about ``value``; it keeps no tensor of it. Without ``nbytes``, the bytes of all its tensors."""
        tensors = tensors_of(value)
        if nbytes is None:
            # A sparse tensor counts the elements that it has in memory, not the zeros between them.
            counts = (each._nnz() if "sparse" in str(each.layout) else each.numel() for each in tensors)
            nbytes = sum(count * each.element_size() for count, each in zip(counts, tensors, strict=True))
        if not tensors:
            return TraceEvent(kind, name, type_name, None, None, None, nbytes, seconds, note)
        if isinstance(value, torch.Tensor):  # the usual case, without pytree
            shape: Any = tuple(value.shape)
        else:
            shape = pytree.tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None, value)
        return TraceEvent(kind, name, type_name, shape, tensors[0].dtype, tensors[0].device, nbytes, seconds, note)


def format_event(event: TraceEvent, width: int, with_kind: bool) -> str:
    """``event`` as one line, names in a column of ``width``."""
    dtype = str(event.dtype).removeprefix("torch.") if event.dtype is not None else "-"
    first = f"{event.kind:<17} " if with_kind else ""
    text = f"{first}{display_name(event.name):<{max(width, 7)}}  {event.type:<{_CLASS}} {event.shape!s:<22} {dtype:<9}"
    if event.kind == "forward":
        text += f" {event.seconds * 1e3:8.2f} ms  saved {format_bytes(event.nbytes)}"
    elif event.nbytes:
        text += f" {format_bytes(event.nbytes)}"
    return f"{text}  {event.note}".rstrip()


class TraceRow(NamedTuple):
    """One module: its calls, the host seconds and saved bytes of all of them, and the shape of its last output."""

    name: str
    type: str
    calls: int
    seconds: float
    nbytes: int
    shape: Any


@dataclass(frozen=True)
class TraceReport:
    """A row for each module that ran, in the order in which modules first returned; ``str()`` gives a table."""

    rows: tuple[TraceRow, ...]

    def __str__(self) -> str:
        width = max([len(display_name(row.name)) for row in self.rows], default=4)
        lines = [f"{'module':<{width}}  {'class':<{_CLASS}} {'calls':>5} {'host ms':>9} {'saved':>10}  output"]
        for row in self.rows:
            lines.append(
                f"{display_name(row.name):<{width}}  {row.type:<{_CLASS}} {row.calls:>5} {row.seconds * 1e3:>9.2f} "
                f"{format_bytes(row.nbytes):>10}  {row.shape}"
            )
        return "\n".join(lines)


def summarise(events: Iterable[TraceEvent]) -> TraceReport:
    rows: dict[str, TraceRow] = {}
    for event in events:
        if event.kind == "forward":
            old = rows.get(event.name, TraceRow(event.name, event.type, 0, 0.0, 0, None))
            seconds, nbytes = old.seconds + event.seconds, old.nbytes + event.nbytes
            rows[event.name] = TraceRow(event.name, event.type, old.calls + 1, seconds, nbytes, event.shape)
    return TraceReport(tuple(rows.values()))


_autograd: Any = torch._C._autograd


#: A function that is called with "pack" or "unpack", the module's name, the tensor, and what became of the tensor.
SavedTensorListener = Callable[[str, str, torch.Tensor, str], None]


class OuterHooks(threading.local):
    """What disthooks' own hooks said of the tensor that this thread has just given to the outer pair.

    Attributes:
        active: whether this thread is calling the outer pair now.
        fate: what became of the tensor; None if the outer pair is not disthooks'.
    """

    active = False
    fate: str | None = None


class SeenContents:
    """Tells which tensors are weights, and which contents were saved before; see [Note: seen contents]."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int | None], StorageRef] = {}
        self._lock = new_lock()

    def fate(self, tensor: torch.Tensor, weights: frozenset[int]) -> str:
        """Say what becomes of a tensor that autograd saves: "parameter", "shared" or "saved"."""
        if isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter):
            return "parameter"
        if exotic(tensor) is not None:
            return "saved"
        ref = StorageRef(tensor.untyped_storage())
        if ref.address in weights:
            return "parameter"
        key = (ref.address, version_of(tensor))
        with self._lock:
            return "saved" if self._seen.setdefault(key, ref) is ref else "shared"


def replica_weights(module: nn.Module) -> frozenset[int]:
    """The addresses of a DataParallel replica's weights, which are no Parameters; empty for any other module."""
    if not getattr(module, "_is_replica", False):
        return frozenset()
    return frozenset(address for address, (kind, _) in storages_of(module).items() if kind == "parameter")


class ObservedTensor:
    """The object that autograd keeps for a saved tensor: the value of the outer pair, or the tensor and its version."""

    __slots__ = ("fate", "name", "value", "version")

    def __init__(self, name: str, value: Any, version: int | None, fate: str) -> None:
        self.name, self.value, self.version, self.fate = name, value, version, fate


class SavedTensorObserver:
    """The pair of hooks that one outermost forward opens in its thread; see [Note: a pair of hooks that only looks].

    Args:
        module: the module whose forward opens the pair.
        name: gives the name of the innermost watched module of this thread.
        told: the function that records each tensor that is packed or unpacked.
        contents: the contents that were saved before; all forwards of one trace share this object.
        chained: what disthooks' own hooks say if they are the outer pair; all forwards of one trace share this object.
    """

    def __init__(
        self,
        module: nn.Module,
        name: Callable[[], str],
        told: SavedTensorListener,
        contents: SeenContents,
        chained: OuterHooks,
    ) -> None:
        self._name, self._told, self._contents, self._chained = name, told, contents, chained
        self._weights = replica_weights(module)
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._open = False

    def open(self) -> None:
        """Make this the innermost pair of this thread, if torch allows hooks there and they would see anything."""
        self._outer = top_hooks(True)
        # Under checkpoint's own pair nothing is saved, and a wrapper inside would no longer find it on top.
        checkpoint = self._outer is not None and self._outer[0].__module__ == "torch.utils.checkpoint"
        if hooks_allowed() and not checkpoint:
            _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
            self._open = True

    def close(self) -> None:
        # After an interrupt the pair may still be on when the ``with`` of the outer pair ends. That takes off the
        # topmost pair, which is this one, and leaves the outer one. So the outer one is taken off here if it is on top.
        top = top_hooks(True)
        if self._open and top is not None and (top[0] == self._pack or top == self._outer):
            _autograd._pop_saved_tensors_default_hooks()
        self._open = False

    def _pack(self, tensor: torch.Tensor) -> ObservedTensor:
        name = self._name()
        fate = self._contents.fate(tensor, self._weights)
        if self._outer is None:
            alias = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
            packed = ObservedTensor(name, alias, version_of(tensor), fate)
        else:
            said, value = self._chain(self._outer[0], tensor)
            fate = said or fate
            packed = ObservedTensor(name, value, None, fate)
        self._told("pack", name, tensor, fate)
        return packed

    def _unpack(self, packed: ObservedTensor) -> torch.Tensor:
        if self._outer is not None:
            tensor: torch.Tensor = self._chain(self._outer[1], packed.value)[1]
        else:
            tensor = packed.value
            # torch checks the version of what it saves itself, and leaves the check to hooks where there are some.
            if packed.version is not None and tensor._version != packed.version:
                raise MutationError(
                    f"a tensor of shape {tuple(tensor.shape)} that {display_name(packed.name)!r} saved for backward "
                    f"was changed in place after it was saved (version {tensor._version}, saved at {packed.version}); "
                    "use an operator that is not in place, or change a clone()"
                )
        self._told("unpack", packed.name, tensor, packed.fate)
        return tensor

    def _chain(self, hook: Callable[..., Any], value: Any) -> tuple[str | None, Any]:
        self._chained.active, self._chained.fate = True, None
        try:
            result = hook(value)
            return self._chained.fate, result
        finally:
            self._chained.active = False


__all__ = ["KINDS", "Trace", "trace"]

#: Every kind of event, in the order in which a step makes them.
KINDS = (
    "forward_pre",
    "pack",
    "forward",
    "full_backward_pre",
    "output_grad",
    "unpack",
    "full_backward",
    "tensor_hook",
    "post_accumulate",
)


class RunningForward:
    __slots__ = ("begin", "error", "look", "module", "name", "saved")

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module, self.saved = name, module, 0
        self.look: SavedTensorObserver | None = None
        self.error = sys.exc_info()[1]
        self.begin = time.perf_counter()


class PerThread(threading.local):
    """The forwards under way in this thread, outermost first."""

    def __init__(self) -> None:
        self.frames: list[RunningForward] = []


class Trace(Attachment):
    """What :func:`trace` returns: ``events`` so far, oldest first, and ``report()``.

    Events hold names and numbers, no tensors. They stay readable after the ``with`` block or ``remove()``.
    """

    def __init__(
        self, chosen: dict[str, nn.Module], write: Callable[[str], object] | None, show: set[str], saves: bool
    ) -> None:
        super().__init__()
        self._write, self._show, self._saves = write, show, saves
        self._width = max(map(len, chosen))
        self._chosen = {name: type(module).__name__ for name, module in chosen.items()}
        self._events: list[TraceEvent] = []
        self._on = True
        self._threads, self._chained, self._contents = PerThread(), OuterHooks(), SeenContents()
        self._module_names: dict[str, str] = {}  # names that disthooks' own hooks go by, to names here
        self.on_remove(self._end)

    @property
    def events(self) -> list[TraceEvent]:
        """The events so far, in the order in which they were recorded, also those of several threads."""
        return list(self._events)

    def report(self) -> TraceReport:
        """One row for each module that ran: calls, host seconds, saved bytes and the shape of the last output."""
        return summarise(self._events)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
        note = getattr(error, "add_note", None)  # Python 3.11 and later
        for symptom, remedy in REMEDIES.items():
            if note is not None and symptom in str(error):
                note(remedy)

    # -- hooks

    def _attach(self, model: nn.Module, chosen: dict[str, nn.Module], full_backward: bool) -> None:
        def hook(function: Callable[..., Any], *args: object) -> UncopiedHook:
            return UncopiedHook(functools.partial(function, *args))

        for name, module in chosen.items():
            # The first hook before forward and the last after it, so that the module's other hooks run in between, and
            # two traces close in the reverse order of their opening.
            before = module.register_forward_pre_hook(hook(self._begin, name), prepend=True, with_kwargs=True)
            self.on_remove(before.remove)
            self.on_remove(module.register_forward_hook(hook(self._finish, name), always_call=True).remove)
            if full_backward:
                begins = hook(self._backward, "full_backward_pre", name)
                self.on_remove(module.register_full_backward_pre_hook(begins).remove)
                ends = hook(self._backward, "full_backward", name)
                self.on_remove(module.register_full_backward_hook(ends).remove)
        followed = {id(leaf) for module in chosen.values() for leaf in module.parameters()}
        leaf: Any
        for name, leaf in unwrap_engine(model).named_parameters():
            # torch puts no hook on a parameter that has no shape yet.
            if id(leaf) in followed and not nn.parameter.is_lazy(leaf) and leaf.requires_grad and leaf.is_leaf:
                about = canonical_name(name), type(leaf).__name__
                self.on_remove(leaf.register_hook(hook(self._gradient, "tensor_hook", *about)).remove)
                done = hook(self._accumulated, *about)
                self.on_remove(leaf.register_post_accumulate_grad_hook(done).remove)
        self.on_remove(_handles.add_listener(self._heard))

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frames = self._threads.frames
        self._add("forward_pre", name, type(module).__name__, _single((*args, *kwargs.values())))
        frame = RunningForward(name, module)
        if not frames and self._saves:
            frame.look = SavedTensorObserver(module, self._innermost, self._saved, self._contents, self._chained)
            frame.look.open()
        frames.append(frame)

    def _finish(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        frames = self._threads.frames
        index = next((i for i in reversed(range(len(frames))) if frames[i].module is module), None)
        if index is None:  # a hook before ours raised, so the beginning was never seen
            return
        frame = frames[index]
        seconds = time.perf_counter() - frame.begin
        self._drop(index)
        error = sys.exc_info()[1]
        note = f"raised {type(error).__name__}" if error is not None and error is not frame.error else ""
        self._add("forward", name, type(module).__name__, output, frame.saved, seconds, note)
        # A gradient of an output is complete when the node that made it is about to run. A node may make several.
        nodes: dict[Any, int] = {}
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                nodes.setdefault(tensor.grad_fn, tensor.output_nr)
        for node, position in nodes.items():
            hook = functools.partial(self._output_grad, name, type(module).__name__, position)
            self.on_remove(node.register_prehook(hook).remove)

    def _output_grad(self, name: str, kind: str, index: int, grads: tuple[Any, ...]) -> None:
        self._add("output_grad", name, kind, grads[index])

    def _backward(self, kind: str, name: str, module: nn.Module, grads: tuple[Any, ...], *_: object) -> None:
        self._add(kind, name, type(module).__name__, _single(grads))

    # Hooks return None, because torch would put anything else in the place of the gradient.
    def _gradient(self, kind: str, name: str, type_name: str, grad: torch.Tensor | None) -> None:
        self._add(kind, name, type_name, grad)

    def _accumulated(self, name: str, type_name: str, leaf: torch.Tensor) -> None:
        self._add("post_accumulate", name, type_name, leaf.grad)

    # -- saved tensors

    def _innermost(self) -> str:
        frames = self._threads.frames
        return frames[-1].name if frames else ""

    def _saved(self, kind: str, name: str, tensor: torch.Tensor, fate: str) -> None:
        event = self._add(kind, name, self._chosen.get(name, ""), tensor, note=fate)
        if kind == "pack" and fate not in ("parameter", "shared"):
            for frame in self._threads.frames:
                frame.saved += event.nbytes

    def _heard(self, event: _handles.SavedTensorEvent) -> None:
        """Record an event of disthooks' own hooks; see [Note: a pair of hooks that only looks]."""
        if self._chained.active:
            self._chained.fate = event.outcome  # `_pack` or `_unpack` of the observer records the tensor
        elif event.kind == "pack" and self._threads.frames:
            self._module_names[event.module_name] = self._innermost()
            self._saved("pack", self._innermost(), event.tensor, event.outcome)
        elif event.kind == "unpack" and event.module_name in self._module_names:
            self._saved("unpack", self._module_names[event.module_name], event.tensor, event.outcome)

    # -- events

    def _add(
        self,
        kind: str,
        name: str,
        type_name: str,
        value: Any,
        nbytes: int | None = None,
        seconds: float = 0.0,
        note: str = "",
    ) -> TraceEvent:
        event = TraceEvent.of(kind, name, type_name, value, nbytes, seconds, note)
        if self._on:
            self._events.append(event)
            if self._write is not None and kind in self._show:
                self._write(format_event(event, self._width, len(self._show) > 1))
        return event

    def _drop(self, index: int) -> None:
        for frame in reversed(self._threads.frames[index:]):
            if frame.look is not None:
                frame.look.close()
        del self._threads.frames[index:]

    def _end(self) -> None:
        self._on = False
        self._drop(0)  # an interrupt may have left forwards open


def _single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def trace(
    model: nn.Module,
    *patterns: Pattern,
    depth: int | None = None,
    print: Callable[[str], object] | None = builtins.print,
    show: str | Iterable[str] = "forward",
    saved_tensors: bool = True,
    full_backward: bool = False,
) -> Trace:
    """Record, in order, every hook that fires in the matching modules, and print the kinds that ``show`` names.

    The kinds of event, in the order of one training step:

    - ``forward_pre``, ``forward``: a module's forward begins, and returns;
    - ``pack``, ``unpack``: autograd saves a tensor in that forward, and takes it back in backward;
    - ``output_grad``: the gradient of a module's output is complete, and the node that made the output runs next;
    - ``full_backward_pre``, ``full_backward``: torch's full backward hooks, only with ``full_backward=True``;
    - ``tensor_hook``, ``post_accumulate``: the gradient of a parameter arrived, and was added to ``.grad``.

    Outputs, gradients and errors are what they are without a trace: a saved tensor that is changed in place raises
    in backward, as torch raises without saved-tensor hooks. Hooks around the model keep working.
    A trace does not see what a module saves under saved-tensor hooks that it opens itself (``save_on_cpu``,
    checkpointing), what is saved under a checkpoint around the model, and ``tensor_hook`` under FSDP, where torch
    never calls it. A trace is meant for a few steps, because all its events stay in memory, without their tensors.

    Args:
        model: the model; names are those inside it when it is wrapped by DDP or DataParallel.
        patterns: globs over module names, module classes or predicates; every module when there are none.
            Their parameters are followed, and those of the modules in them.
        depth: the depth of the deepest modules that are watched: 0 is the model alone, 1 the model and its children;
            None for all. The tensors that a deeper module saves count for the watched module around it.
        print: the function that gets each line when the event happens; None prints nothing.
        show: the kinds to print, names or globs: ``"forward"`` is one line for each module, ``"*"`` everything.
        saved_tensors: whether to record ``pack`` and ``unpack``. Give False for a model that uses ``torch.func.grad``
            or ``vjp`` in its forward, because torch refuses these while there are saved-tensor hooks.
        full_backward: whether to use torch's full backward hooks too. They pass inputs and outputs through views, so
            torch raises if a module changes one of them in place, as ``nn.ReLU(inplace=True)`` does.

    Returns:
        An attachment with ``events`` and ``report()``; it ends with a ``with`` block or by ``remove()``.

    Raises:
        UsageError: when ``depth`` is negative.
        MatchError: when a pattern matches no module, or an entry of ``show`` no kind.
        AttachError: when a matching module is compiled or scripted, so that it calls no hooks.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
    >>> with trace(net, print=None) as traced:
    ...     net(torch.ones(5, 3)).sum().backward()
    >>> [event.kind for event in traced.events][:7]
    ['forward_pre', 'forward_pre', 'pack', 'forward', 'forward_pre', 'pack', 'forward']
    >>> [row.nbytes for row in traced.report().rows]
    [60, 160, 220]
    """
    if depth is not None and depth < 0:
        raise UsageError(f"trace: depth={depth} is above the model itself; 0 is the model, 1 its children too")
    kinds = match(((kind, kind) for kind in KINDS), [show] if isinstance(show, str) else show, "kind of event")
    chosen = choose_modules(model, patterns or ["*"], depth)
    made = Trace(chosen, print, {kind for kind, _ in kinds}, saved_tensors)
    try:
        made._attach(model, chosen, full_backward)
    except BaseException:
        made.remove()
        raise
    return made
