"""One thing that fired, as a record, as a line, and all of them as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from disthooks._tensors import format_bytes
from disthooks.watch._modules import shown, tensors_of

#: What to do when torch says this of a model that is traced.
REMEDIES = {
    "BackwardHookFunction": (
        "dh.trace(full_backward=True): torch's full backward hooks pass a module's inputs and outputs through views, "
        "which must not be changed in place; without full_backward, 'output_grad' events show the same order"
    ),
    "saved tensor hooks": "dh.trace: with saved_tensors=False it uses no saved-tensor hooks",
}


class TraceEvent(NamedTuple):
    """One thing that fired.

    Attributes:
        kind: one of ``disthooks.watch.trace.KINDS``.
        name: of the module, or of the parameter for "tensor_hook" and "post_accumulate".
        type: the class name of that module or parameter.
        shape: a tuple of ints for one tensor; for a structure, that structure with such tuples in it. Of the
            input for "forward_pre", the output for "forward", the saved tensor for "pack" and "unpack", the
            gradient for the others; None where there is none.
        dtype: of the first of those tensors.
        device: likewise; it tells the replicas of DataParallel apart.
        nbytes: of all of those tensors; for "forward", bytes saved for backward while it ran, each content once and
            weights not counted.
        seconds: host time in the forward, hooks and what it waited for included; 0.0 for other kinds.
        note: for "pack" and "unpack" what became of the tensor: "saved" (where it is), "parameter" (a weight,
            not a copy), "shared" (saved before), or "stored", "shared", "kept" by disthooks' own hooks; for
            "forward" the error it raised.
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
        """The record of ``value``, of which nothing is kept."""
        tensors = tensors_of(value)
        size = sum(map(_nbytes, tensors)) if nbytes is None else nbytes
        if not tensors:
            return TraceEvent(kind, name, type_name, None, None, None, size, seconds, note)
        dtype, device = tensors[0].dtype, tensors[0].device
        return TraceEvent(kind, name, type_name, _shape(value), dtype, device, size, seconds, note)


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return pytree.tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None, value)


def _nbytes(tensor: torch.Tensor) -> int:
    count = tensor._nnz() if "sparse" in str(tensor.layout) else tensor.numel()
    return count * tensor.element_size()


def line(event: TraceEvent, width: int, with_kind: bool) -> str:
    """``event`` as one line, names in a column of ``width``."""
    dtype = str(event.dtype).removeprefix("torch.") if event.dtype is not None else "-"
    first = f"{event.kind:<17} " if with_kind else ""
    text = f"{first}{shown(event.name):<{max(width, 7)}}  {event.type:<17} {event.shape!s:<22} {dtype:<9}"
    if event.kind == "forward":
        text += f" {event.seconds * 1e3:8.2f} ms  saved {format_bytes(event.nbytes)}"
    elif event.nbytes:
        text += f" {format_bytes(event.nbytes)}"
    return f"{text}  {event.note}".rstrip()


class TraceRow(NamedTuple):
    """One module: calls, host seconds in all of them, bytes they saved, the shape last returned."""

    name: str
    type: str
    calls: int
    seconds: float
    nbytes: int
    shape: Any


@dataclass(frozen=True)
class TraceReport:
    """A row for each module that ran, in the order they first returned; ``str()`` is a table."""

    rows: tuple[TraceRow, ...]

    def __str__(self) -> str:
        width = max([len(shown(row.name)) for row in self.rows], default=4)
        lines = [f"{'module':<{width}}  {'class':<17} {'calls':>5} {'host ms':>9} {'saved':>10}  output"]
        for row in self.rows:
            lines.append(
                f"{shown(row.name):<{width}}  {row.type:<17} {row.calls:>5} {row.seconds * 1e3:>9.2f} "
                f"{format_bytes(row.nbytes):>10}  {row.shape}"
            )
        return "\n".join(lines)


def summary(events: Iterable[TraceEvent]) -> TraceReport:
    """The "forward" events by module."""
    rows: dict[str, TraceRow] = {}
    for event in events:
        if event.kind == "forward":
            old = rows.get(event.name, TraceRow(event.name, event.type, 0, 0.0, 0, None))
            seconds, nbytes = old.seconds + event.seconds, old.nbytes + event.nbytes
            rows[event.name] = TraceRow(event.name, event.type, old.calls + 1, seconds, nbytes, event.shape)
    return TraceReport(tuple(rows.values()))
