"""``trace``: shapes, sizes and times of forwards, and the order in which module and gradient hooks fire.

:class:`TraceEvent` is one thing that fired, :class:`TraceReport` the table of a trace.
"""

from __future__ import annotations

import builtins
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from disthooks._handles import Attachment, UncopiedHook
from disthooks._match import Pattern, canonical_name, match, unwrap_engine
from disthooks._tensors import format_bytes
from disthooks.errors import UsageError
from disthooks.report.watch.features import choose_modules, display_name, tensors_of

__all__ = ["KINDS", "Trace", "trace"]

#: Every kind of event, in the order in which a step makes them.
KINDS = (
    "forward_pre",
    "forward",
    "full_backward_pre",
    "output_grad",
    "full_backward",
    "tensor_hook",
    "post_accumulate",
)
# The width of the column of classes: that of TransformerEncoderLayer.
_CLASS = 23


class TraceEvent(NamedTuple):
    """One thing that fired.

    Attributes:
        kind: one of ``disthooks.report.watch.trace.KINDS``.
        name: the name of the module; for "tensor_hook" and "post_accumulate", the name of the parameter.
        type: the class name of that module or parameter.
        shape: the shape of the input for "forward_pre", of the output for "forward", and of the gradient for the other
            kinds. It is a tuple of ints for one tensor; for a structure of tensors it is that structure with such
            tuples in it; None if there is no tensor.
        dtype: the dtype of the first of those tensors.
        device: its device, which tells the replicas of DataParallel apart.
        nbytes: the bytes of all of those tensors.
        seconds: host time in the forward, with its hooks and its waiting; 0.0 for other kinds.
        note: for "forward" the error that it raised.
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


def format_event(event: TraceEvent, width: int, with_kind: bool) -> str:
    """``event`` as one line, names in a column of ``width``."""
    dtype = str(event.dtype).removeprefix("torch.") if event.dtype is not None else "-"
    first = f"{event.kind:<17} " if with_kind else ""
    text = f"{first}{display_name(event.name):<{max(width, 7)}}  {event.type:<{_CLASS}} {event.shape!s:<22} {dtype:<9}"
    took = f" {event.seconds * 1e3:8.2f} ms " if event.kind == "forward" else ""
    return f"{text}{took} {format_bytes(event.nbytes)}  {event.note}".rstrip()


class TraceRow(NamedTuple):
    """One module: its calls, the host seconds of all of them, and the bytes and the shape of its last output."""

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
        lines = [f"{'module':<{width}}  {'class':<{_CLASS}} {'calls':>5} {'host ms':>9} {'bytes':>10}  output"]
        for row in self.rows:
            lines.append(
                f"{display_name(row.name):<{width}}  {row.type:<{_CLASS}} {row.calls:>5} {row.seconds * 1e3:>9.2f} "
                f"{format_bytes(row.nbytes):>10}  {row.shape}"
            )
        return "\n".join(lines)


class RunningForward(NamedTuple):
    module: nn.Module
    begin: float
    error: BaseException | None  # which was handled already when the forward began


class ThreadForwards(threading.local):
    """The forwards under way in this thread, outermost first."""

    def __init__(self) -> None:
        self.frames: list[RunningForward] = []


class Trace(Attachment):
    """What :func:`trace` returns: ``events`` so far, oldest first, and ``report()``.

    Events hold names and numbers, no tensors. They stay readable after the ``with`` block or ``remove()``.
    """

    def __init__(self, width: int, write: Callable[[str], object] | None, show: set[str]) -> None:
        super().__init__()
        self._width, self._write, self._show = width, write, show
        self._events: list[TraceEvent] = []
        self._threads, self._is_on = ThreadForwards(), True
        self.on_remove(self._end)

    def _end(self) -> None:
        self._is_on = False

    @property
    def events(self) -> list[TraceEvent]:
        """The events so far, in the order in which they were recorded, also those of several threads."""
        return list(self._events)

    def report(self) -> TraceReport:
        """One row for each module that ran: calls, host seconds, and the bytes and shape of the last output."""
        rows: dict[str, TraceRow] = {}
        for event in self.events:
            if event.kind == "forward":
                old = rows.get(event.name)
                calls, seconds = (old.calls, old.seconds) if old is not None else (0, 0.0)
                seen = calls + 1, seconds + event.seconds, event.nbytes, event.shape
                rows[event.name] = TraceRow(event.name, event.type, *seen)
        return TraceReport(tuple(rows.values()))

    def _attach(self, model: nn.Module, chosen: dict[str, nn.Module], full_backward: bool) -> None:
        def hook(function: Callable[..., Any], *args: object) -> UncopiedHook:
            return UncopiedHook(functools.partial(function, *args))

        for name, module in chosen.items():
            # The first hook before forward and the last after it, so that the module's other hooks run in between.
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
                self.on_remove(leaf.register_hook(hook(self._gradient, *about)).remove)
                self.on_remove(leaf.register_post_accumulate_grad_hook(hook(self._accumulated, *about)).remove)

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._add("forward_pre", name, type(module).__name__, _single((*args, *kwargs.values())))
        self._threads.frames.append(RunningForward(module, time.perf_counter(), sys.exc_info()[1]))

    def _finish(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        now, frames = time.perf_counter(), self._threads.frames
        index = next((i for i in reversed(range(len(frames))) if frames[i].module is module), None)
        if index is None:  # a hook before ours raised, so the beginning was never seen
            return
        frame = frames[index]
        del frames[index:]
        error = sys.exc_info()[1]
        note = f"raised {type(error).__name__}" if error is not None and error is not frame.error else ""
        self._add("forward", name, type(module).__name__, output, now - frame.begin, note)
        # A gradient of an output is complete when the node that made it is about to run. A node may make several.
        nodes: dict[Any, int] = {}
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                nodes.setdefault(tensor.grad_fn, tensor.output_nr)
        for node, position in nodes.items():
            hook = functools.partial(self._output_grad, name, type(module).__name__, position)
            self.on_remove(node.register_prehook(hook).remove)

    def _output_grad(self, name: str, type_name: str, index: int, grads: tuple[Any, ...]) -> None:
        self._add("output_grad", name, type_name, grads[index])

    def _backward(self, kind: str, name: str, module: nn.Module, grads: tuple[Any, ...], *_: object) -> None:
        self._add(kind, name, type(module).__name__, _single(grads))

    # Hooks return None, because torch would put anything else in the place of the gradient.
    def _gradient(self, name: str, type_name: str, grad: torch.Tensor | None) -> None:
        self._add("tensor_hook", name, type_name, grad)

    def _accumulated(self, name: str, type_name: str, leaf: torch.Tensor) -> None:
        self._add("post_accumulate", name, type_name, leaf.grad)

    def _add(self, kind: str, name: str, type_name: str, value: Any, seconds: float = 0.0, note: str = "") -> None:
        if not self._is_on:
            return
        tensors, shape = tensors_of(value), None
        if tensors:
            shape = pytree.tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None, value)
        dtype, device = (tensors[0].dtype, tensors[0].device) if tensors else (None, None)
        # A sparse tensor counts the elements that it has in memory, not the zeros between them.
        counts = (each._nnz() if "sparse" in str(each.layout) else each.numel() for each in tensors)
        nbytes = sum(count * each.element_size() for count, each in zip(counts, tensors, strict=True))
        event = TraceEvent(kind, name, type_name, shape, dtype, device, nbytes, seconds, note)
        self._events.append(event)
        if self._write is not None and kind in self._show:
            self._write(format_event(event, self._width, len(self._show) > 1))


def _single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def trace(
    model: nn.Module,
    *patterns: Pattern,
    depth: int | None = None,
    print: Callable[[str], object] | None = builtins.print,
    show: str | Iterable[str] = "forward",
    full_backward: bool = False,
) -> Trace:
    """Record, in order, every hook that fires in the matching modules, and print the kinds that ``show`` names.

    The kinds of event, in the order of one training step:

    - ``forward_pre``, ``forward``: a module's forward begins, and returns;
    - ``output_grad``: the gradient of a module's output is complete, and the node that made the output runs next;
    - ``full_backward_pre``, ``full_backward``: torch's full backward hooks, only with ``full_backward=True``;
    - ``tensor_hook``, ``post_accumulate``: the gradient of a parameter arrived, and was added to ``.grad``.

    Outputs, gradients and errors are what they are without a trace. :func:`disthooks.explain` says what autograd saves.
    A trace does not see ``tensor_hook`` under FSDP, where torch never calls it. It is meant for a few steps, because
    all its events stay in memory, without their tensors.

    Args:
        model: the model; names are those inside it when it is wrapped by DDP or DataParallel.
        patterns: globs over module names, module classes or predicates; every module when there are none.
            Their parameters are followed, and those of the modules in them.
        depth: the depth of the deepest modules that are watched: 0 is the model alone, 1 the model and its children;
            None for all.
        print: the function that gets each line when the event happens; None prints nothing.
        show: the kinds to print, names or globs: ``"forward"`` is one line for each module, ``"*"`` everything.
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
    >>> [event.kind for event in traced.events][:6]
    ['forward_pre', 'forward_pre', 'forward', 'forward_pre', 'forward', 'forward']
    >>> [row.nbytes for row in traced.report().rows]
    [160, 160, 160]
    """
    if depth is not None and depth < 0:
        raise UsageError(f"trace: depth={depth} is above the model itself; 0 is the model, 1 its children too")
    kinds = match(((kind, kind) for kind in KINDS), [show] if isinstance(show, str) else show, "kind of event")
    chosen = choose_modules(model, patterns or ["*"], depth)
    made = Trace(max(map(len, chosen)), print, {kind for kind, _ in kinds})
    try:
        made._attach(model, chosen, full_backward)
    except BaseException:
        made.remove()
        raise
    return made
