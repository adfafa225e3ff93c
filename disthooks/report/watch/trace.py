"""``trace``: shapes, sizes and times of forwards.

:class:`TraceEvent` is one forward that began or ended, :class:`TraceReport` the table of a trace.
"""

from __future__ import annotations

import builtins
import functools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from disthooks._handles import Attachment, UncopiedHook
from disthooks._match import Pattern
from disthooks._tensors import bytes_of, format_bytes
from disthooks.errors import UsageError
from disthooks.report.watch.features import choose_modules, display_name, tensors_of

__all__ = ["Trace", "trace"]

# The width of the column of classes: that of TransformerEncoderLayer.
_CLASS = 23


class TraceEvent(NamedTuple):
    """One forward that began or ended.

    Attributes:
        kind: "forward_pre" when it begins, "forward" when it returns or raises.
        name: the name of the module.
        type: its class name.
        shape: the shape of the input for "forward_pre", of the output for "forward". It is a tuple of ints for one
            tensor, with None for a dimension in which the tensors of a nested one differ; for a structure of tensors it
            is that structure with such tuples in it, or a tuple of them; None if there is no tensor.
        dtype: the dtype of the first of those tensors.
        device: its device, which tells the replicas of DataParallel apart.
        nbytes: the bytes of all of those tensors; of a sparse one those of its values and its indices.
        seconds: host time in the forward, with its hooks and its waiting; 0.0 for "forward_pre".
        note: for "forward" the error that it raised; or the error for which the tensors could not be measured.
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


def format_event(event: TraceEvent, width: int) -> str:
    dtype = str(event.dtype).removeprefix("torch.") if event.dtype is not None else "-"
    text = f"{display_name(event.name):<{max(width, 7)}}  {event.type:<{_CLASS}} {event.shape!s:<22} {dtype:<9}"
    return f"{text} {event.seconds * 1e3:8.2f} ms  {format_bytes(event.nbytes)}  {event.note}".rstrip()


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


def shape_of(tensor: torch.Tensor) -> tuple[int | None, ...]:
    """The shape of ``tensor``; of a nested one None for a dimension in which its tensors differ."""
    if tensor.is_nested and tensor.layout is torch.strided:
        sizes = tensor._nested_tensor_size().T.tolist()  # a tensor of the CPU, by dimension
        return tensor.size(0), *(each[0] if len({*each}) == 1 else None for each in sizes)
    return tuple(n if type(n) is int else None for n in tensor.shape)  # a jagged tensor has a symbol there


def shapes_in(value: object) -> Any:
    """``value`` with shapes in the place of tensors, and None in that of anything else."""
    leaves, structure = pytree.tree_flatten(value)
    shapes = [shape_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    try:
        return pytree.tree_unflatten(shapes, structure)
    except Exception:  # the class looks at what it is made of, as PackedSequence does
        return tuple(shapes)


class RunningForward(NamedTuple):
    module: nn.Module
    begin: float
    error: BaseException | None  # which was handled already when the forward began


class ThreadForwards(threading.local):
    def __init__(self) -> None:
        self.frames: list[RunningForward] = []


class Trace(Attachment):
    """What :func:`trace` returns: ``events`` so far, oldest first, and ``report()``.

    Events hold names and numbers, no tensors. They stay readable after the ``with`` block or ``remove()``.
    """

    def __init__(self, chosen: dict[str, nn.Module], write: Callable[[str], object] | None) -> None:
        super().__init__()
        self._width, self._write = max(map(len, chosen)), write
        self._events: list[TraceEvent] = []
        self._threads = ThreadForwards()
        for name, module in chosen.items():
            begin, finish = (UncopiedHook(functools.partial(hook, name)) for hook in (self._begin, self._finish))
            # The first hook before forward and the last after it, so that the module's other hooks run in between.
            self.on_remove(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
            self.on_remove(module.register_forward_hook(finish, always_call=True).remove)

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

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        self._add("forward_pre", name, module, given[0] if len(given) == 1 else given)
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
        event = self._add("forward", name, module, output, now - frame.begin, note)
        if self._write is not None:
            self._write(format_event(event, self._width))

    def _add(
        self, kind: str, name: str, module: nn.Module, value: Any, seconds: float = 0.0, note: str = ""
    ) -> TraceEvent:
        tensors: list[torch.Tensor] = []
        shape, nbytes = None, 0
        try:
            tensors = tensors_of(value)
            shape, nbytes = shapes_in(value) if tensors else None, sum(map(bytes_of, tensors))
        except Exception as error:  # a user's subclass of tensors may raise anything
            note = note or f"not measured: {type(error).__name__}"
        dtype, device = (tensors[0].dtype, tensors[0].device) if tensors else (None, None)
        event = TraceEvent(kind, name, type(module).__name__, shape, dtype, device, nbytes, seconds, note)
        self._events.append(event)
        return event


def trace(
    model: nn.Module,
    *patterns: Pattern,
    depth: int | None = None,
    print: Callable[[str], object] | None = builtins.print,
) -> Trace:
    """Record the shapes, sizes and times of the forwards of the matching modules, and print a line when one ends.

    Outputs, gradients and errors are what they are without a trace. :func:`disthooks.explain` says what autograd saves.
    It is meant for a few steps, because all its events stay in memory, without their tensors.

    Args:
        model: the model; names are those inside it when it is wrapped by DDP or DataParallel.
        patterns: globs over module names, module classes or predicates; every module when there are none.
        depth: the depth of the deepest modules that are watched: 0 is the model alone, 1 the model and its children;
            None for all.
        print: the function that gets each line when the forward ends; None prints nothing.

    Returns:
        An attachment with ``events`` and ``report()``; it ends with a ``with`` block or by ``remove()``.

    Raises:
        UsageError: when ``depth`` is negative.
        MatchError: when a pattern matches no module.
        AttachError: when a matching module is compiled or scripted, so that it calls no hooks.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
    >>> with trace(net, print=None) as traced:
    ...     net(torch.ones(5, 3)).sum().backward()
    >>> [event.kind for event in traced.events]
    ['forward_pre', 'forward_pre', 'forward', 'forward_pre', 'forward', 'forward']
    >>> [row.nbytes for row in traced.report().rows]
    [160, 160, 160]
    """
    if depth is not None and depth < 0:
        raise UsageError(f"trace: depth={depth} is above the model itself; 0 is the model, 1 its children too")
    return Trace(choose_modules(model, patterns or ["*"], depth), print)
