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
# hooks see them. Those that are given by keyword, or that a `functools.partial` holds, it keeps as they are. Those of
# them that require a gradient are the inputs of a layer: they are saved beside the positional ones, and the function
# gets them back when it runs again (torch 2.13 and newer). Other keyword tensors (masks, counters) stay as they are,
# because the author may change them in place before backward, which torch allows there. Tensors in a lambda's variables
# or inside a tuple, list or dict stay, too; the bytes of those with a history are counted and told once.

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from disthooks._torch import CheckpointFrame, SelectiveMode, hooks_around_checkpoint, top_hooks, uncompiled

_FLAG = "respect_saved_tensors_hooks"
_CONTAINERS = (tuple, list, dict)  # of these a checkpoint saves nothing
_HOOKS = "_disthooks"  # the attribute of a mode that has the hooks around its checkpoint


class AroundCheckpoints:
    """Base of an object with a pack hook that decides what becomes of the tensors that a checkpoint inside holds.

    Attributes:
        takes_selective: whether the hooks get what a selective checkpoint keeps.
        takes_arguments: whether the hooks get arguments that are given by keyword.
    """

    takes_selective = True
    takes_arguments = False

    def leave(self, tensors: list[torch.Tensor], is_chosen: bool) -> None:
        """Note that a checkpoint holds ``tensors`` in memory: as the user of a selective one chose, or by its form."""


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
        owner.leave([each.val for each in _kept(self)], is_chosen=True)
    ended = _end(self, *error)
    if owner is not None and owner.takes_selective and hooks_around_checkpoint is None and error[0] is None:
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
    """Save the positional arguments ``args``, and the inputs of the layer that are given in another way."""
    assert _save_positional is not None
    owner = _owner(top_hooks(True))
    free = {} if owner is None or not owner.takes_arguments else _variables(self.recompute_fn)
    if owner is None or not {"fn", "kwargs"} <= free.keys():
        _save_positional(self, *args)
        return
    function, first, given = free["fn"], (), free["kwargs"]
    if type(function) is functools.partial:
        first, given, function = function.args, {**function.keywords, **given}, function.func
    held = {**dict(enumerate(first)), **given}
    inputs = {key: value for key, value in held.items() if isinstance(value, torch.Tensor) and value.requires_grad}
    rest = {key: value for key, value in held.items() if key not in inputs}
    unseen = tree_leaves([*_variables(function).values(), *rest.values(), *(x for x in args if type(x) in _CONTAINERS)])
    owner.leave([x for x in unseen if isinstance(x, torch.Tensor) and x.grad_fn is not None], is_chosen=False)
    _save_positional(self, *args, *inputs.values())
    if inputs:
        self.recompute_fn = _again(self.recompute_fn, function, rest, list(inputs), len(args))


def _again(
    run: types.FunctionType, function: Any, rest: dict[int | str, Any], inputs: list[int | str], count: int
) -> Callable[..., None]:
    """What ``run`` does, torch's function that calls ``function`` again, without the tensors that ``run`` holds."""
    code, module = run.__code__, run.__globals__
    free = dict(zip(code.co_freevars, run.__closure__ or (), strict=True))
    del free["fn"], free["kwargs"], run

    def recompute(*saved: Any) -> None:
        held = {**rest, **dict(zip(inputs, saved[count:], strict=True))}
        first = [held[key] for key in sorted(key for key in held if isinstance(key, int))]
        keywords = {key: value for key, value in held.items() if isinstance(key, str)}
        called = functools.partial(function, *first) if first else function
        cells = {**free, "fn": types.CellType(called), "kwargs": types.CellType(keywords)}
        closure = tuple(cells[name] for name in code.co_freevars)
        types.FunctionType(code, module, closure=closure)(*saved[:count])

    return recompute


def _variables(function: Any) -> dict[str, Any]:
    """The variables from outside that ``function`` uses, by name; without those that have no value yet."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = zip(names, getattr(function, "__closure__", None) or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


if _save_positional is not None:
    CheckpointFrame.save_inputs = _save_inputs
