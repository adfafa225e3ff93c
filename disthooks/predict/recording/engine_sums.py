"""``adds_in_place``: which sums of gradients torch's autograd engine makes in place."""

# [Note: sums of the engine]
# If several nodes give a gradient to one node, torch's engine adds them up (`accumulate` in
# `torch/csrc/autograd/input_buffer.cpp`). Outside of `create_graph=True` it adds the new gradient into the old one if
# nobody else holds the old tensor or its storage, and if the old tensor is dense. So the sum takes no memory. But with
# a dispatch mode on, or for a fake tensor, the engine always makes a new tensor (`isTensorSubclassLike`). A recorder
# must therefore do the sum in place itself, or a step has one temporary too many.
#
# An `aten.add` is a sum of the engine if three things hold:
# - The next frame of Python's stack is torch's call of the engine. The code of a custom `Function`, of a hook and of a
#   checkpoint has frames of its own.
# - The first operand was not made by the node that runs now. So it is no sum inside the formula of a derivative. The
#   exception is a node that gives two gradients to the same place, such as that of `x * x`.
# - The counts of its holders are those of a gradient that only the engine holds. How high they are depends on torch and
#   Python, and on what ran before (after a `torch.compile` that was refused Python counts one more), so each recorder
#   measures them anew, in a small backward. torch's own test is `can_accumulate_inplace`.

from __future__ import annotations

import contextlib
import sys
from typing import Any, NamedTuple

import torch
from torch.utils import _python_dispatch

from disthooks._torch import current_node, holders

aten: Any = torch.ops.aten
_Mode: Any = _python_dispatch.TorchDispatchMode

#: The number of a node that has none, or of no node.
NO_NODE = -1
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
#: Files of torch whose functions stand between the engine and the method of a dispatch mode.
_BETWEEN = ("_compile.py", "eval_frame.py")


class HolderCounts(NamedTuple):
    """How many hold a tensor: its holders in C++, those in Python, and the tensors over its storage."""

    in_cpp: int
    in_python: int
    over_storage: int


def node_number() -> int:
    """The number of the autograd node that this thread runs; :data:`NO_NODE` if it runs none."""
    node = current_node()
    return NO_NODE if node is None else int(node._sequence_nr())


def adds_in_place(args: tuple[Any, ...], made_by: int, one_holder: HolderCounts | None) -> bool:
    """Whether this call of ``aten.add.Tensor`` is a sum that torch's engine would do in place.

    See [Note: sums of the engine]. Call it in the ``__torch_dispatch__`` of the innermost mode, in which ``args`` is a
    parameter.
    """
    if len(args) != 2 or torch.is_grad_enabled() or not _is_engine_calling():
        return False
    if not (isinstance(args[0], torch.Tensor) and isinstance(args[1], torch.Tensor)):
        return False
    node = current_node()
    if node is not None and made_by == int(node._sequence_nr()) and not _gives_twice(node):
        return False
    # The sizes and dtypes of plain gradients are the same, because the engine has made them so.
    same = args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
    return same and _is_dense(args[0]) and _counts(args[0]) == one_holder


def _is_engine_calling() -> bool:
    frame: Any = sys._getframe(3)  # this function, `adds_in_place` and `__torch_dispatch__` are 0 to 2
    while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


def _gives_twice(node: Any) -> bool:
    """Whether two gradients that ``node`` makes go to the same place."""
    targets = [each for each in node.next_functions if each[0] is not None]
    return len(set(targets)) < len(targets)


def _counts(tensor: torch.Tensor) -> HolderCounts:
    return HolderCounts(tensor._use_count(), sys.getrefcount(tensor), holders(tensor.untyped_storage()))  # type: ignore[attr-defined]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` lie side by side in memory, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class _Measure(_Mode):  # type: ignore[misc]
    found: HolderCounts | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor and not torch.is_grad_enabled():
            self.found = _measured(args)
        return func(*args, **(kwargs or {}))


def _measured(args: tuple[Any, ...]) -> HolderCounts:
    return _counts(args[0])  # as in `adds_in_place`


def counts_of_one_holder() -> HolderCounts | None:
    """The counts of a gradient that only the engine holds, measured in a small backward."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        leaf = torch.ones(1, device="cpu", requires_grad=True)
        with _Measure() as measure:
            x = leaf * 2
            torch.autograd.backward(x.exp() + x.sin())
    found: HolderCounts | None = measure.found
    return found


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
