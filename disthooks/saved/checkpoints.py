"""What a non-reentrant checkpoint holds outside of the graph goes to the store as other saved tensors do."""

# [Note: selective checkpoints]
# A selective checkpoint (`torch.utils.checkpoint.create_selective_checkpoint_contexts`) keeps the outputs of some
# operators in a dispatch mode, so autograd does not save them, and hooks do not see them. From torch 2.14 on,
# `checkpoint(..., respect_saved_tensors_hooks=True)` gives them to the hooks around it. Without the argument torch
# warns that hooks are on, and keeps the tensors in memory. A library calls `checkpoint`, so a user cannot pass the
# argument. If nobody passed it and the hooks are those of disthooks, the pipeline answers in its place. All ways to
# call a checkpoint meet in the dispatch mode, whose attribute this file replaces by a property. Older versions of torch
# have no such argument. There the tensors go through the hooks when the checkpoint's forward ends.
#
# [Note: arguments of a checkpoint]
# Of the arguments of the function that it runs again, a checkpoint saves the positional ones as an operator would, and
# hooks see them. Those that are given by keyword, or that a `functools.partial` holds, it keeps as they are. So they
# are saved beside the positional ones, and the function gets them back when it runs again (torch 2.13 and newer). The
# variables of a lambda are left alone, because its author may change them; their bytes are counted and told once.

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from disthooks._torch import CheckpointFrame, SelectiveMode, hooks_around_checkpoint, top_hooks, uncompiled

_FLAG = "respect_saved_tensors_hooks"
_HOOKS = "_disthooks"  # the attribute of a mode that has the hooks around its checkpoint


class AroundCheckpoints:
    """Base of an object with a pack hook that decides what becomes of the tensors that a checkpoint inside holds.

    Attributes:
        takes_selective: whether the hooks get what a selective checkpoint keeps.
        takes_arguments: whether the hooks get arguments that are given by keyword.
    """

    takes_selective = True
    takes_arguments = False

    def leave(self, what: str, tensors: list[torch.Tensor]) -> None:
        """Note that a checkpoint holds ``tensors`` in memory, and ``what`` of it does."""


def _owner(pair: Any) -> AroundCheckpoints | None:
    """The object whose pack hook is the first of ``pair``, if it decides."""
    owner = None if pair is None else getattr(pair[0], "__self__", None)
    return owner if isinstance(owner, AroundCheckpoints) else None


# -- see [Note: selective checkpoints]

_begin, _end = SelectiveMode.__init__, SelectiveMode.__exit__


@uncompiled(callees=False)
def _mode_begins(self: Any, *args: Any, **kwargs: Any) -> None:
    self.__dict__[_HOOKS] = top_hooks(True)
    _begin(self, *args, **kwargs)


@uncompiled(callees=False)
def _mode_ends(self: Any, *error: Any) -> Any:
    pair = self.__dict__.pop(_HOOKS, None)
    owner = _owner(pair)
    if owner is not None and not owner.takes_selective:
        owner.leave("selective checkpoint", [each.val for each in _kept(self)])
    ended = _end(self, *error)
    if owner is not None and owner.takes_selective and hooks_around_checkpoint is None:
        for each in _kept(self):
            _give(each, *pair)
    return ended


def _kept(mode: Any) -> Iterator[Any]:
    """The objects of torch's that hold the tensors which the mode keeps."""
    for each in tree_leaves(list(mode.storage.values())):
        if isinstance(getattr(each, "val", None), torch.Tensor):
            yield each


def _give(kept: Any, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Give the tensor of ``kept`` to the hooks, unless it was changed since: then torch's own check raises an error."""
    if kept.val._version == kept.version:
        handle = pack(kept.val)
        kept.val, kept.version = handle, None
        kept.get_val = lambda allow_cache_entry_mutation: unpack(handle)  # without `kept`, which would be a cycle


def _respects(self: Any) -> bool | None:
    """What the caller of the checkpoint chose, or else what the pipeline of the hooks around it says."""
    chosen: bool | None = self.__dict__.get(_FLAG)
    assert hooks_around_checkpoint is not None
    owner = _owner(hooks_around_checkpoint()) if chosen is None else None
    return chosen if owner is None else owner.takes_selective


def _choose(self: Any, chosen: bool | None) -> None:
    self.__dict__[_FLAG] = chosen


SelectiveMode.__init__, SelectiveMode.__exit__ = _mode_begins, _mode_ends
if hooks_around_checkpoint is not None:
    setattr(SelectiveMode, _FLAG, property(_respects, _choose))

# -- see [Note: arguments of a checkpoint]

_save_positional = getattr(CheckpointFrame, "save_inputs", None)


@uncompiled(callees=False)
def _save_inputs(self: Any, *args: Any) -> None:
    """Save the positional arguments ``args``, and the tensors that are given in another way."""
    assert _save_positional is not None
    owner, run = _owner(top_hooks(True)), self.recompute_fn
    free = dict(zip(run.__code__.co_freevars, run.__closure__ or (), strict=True))
    if owner is None or not owner.takes_arguments or not {"fn", "kwargs"} <= free.keys():
        _save_positional(self, *args)
        return
    function, given = free["fn"].cell_contents, free["kwargs"].cell_contents
    if type(function) is functools.partial:
        function, given = functools.partial(function.func, *function.args), {**function.keywords, **given}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in given.items() if name not in tensors}
    variables = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    owner.leave("variable of a checkpoint", [x for x in variables if isinstance(x, torch.Tensor) and x.grad_fn])
    _save_positional(self, *args, *tensors.values())
    if tensors:
        self.recompute_fn = _again(run, function, rest, list(tensors), len(args))


def _again(
    run: types.FunctionType, function: Any, rest: dict[str, Any], names: list[str], count: int
) -> Callable[..., None]:
    """What ``run`` does, torch's function that calls ``function`` again, without the tensors that ``run`` holds.

    Args:
        run: has ``function`` and its keywords in its closure.
        function: the user's.
        rest: the keywords that are no tensors.
        names: the keywords of the tensors that follow ``count`` positional arguments.
        count: how many positional arguments there are.
    """
    code, module = run.__code__, run.__globals__
    free = dict(zip(code.co_freevars, run.__closure__ or (), strict=True))
    free["fn"] = types.CellType(function)
    del free["kwargs"], run

    def recompute(*saved: Any) -> None:
        keywords = {**rest, **dict(zip(names, saved[count:], strict=True))}
        cells = {**free, "kwargs": types.CellType(keywords)}
        closure = tuple(cells[name] for name in code.co_freevars)
        types.FunctionType(code, module, closure=closure)(*saved[:count])

    return recompute


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


if _save_positional is not None:
    CheckpointFrame.save_inputs = _save_inputs
