"""``Builder``: makes the model and its example inputs under a fake mode, at the sizes that are asked."""

# [Note: batch and length]
# A function that builds the model may take the batch size and the length of a sequence as arguments (`batch`, `seq`, or
# one of the usual other names). If it takes none, its example inputs are made larger or smaller: the batch is the first
# dimension of all of them, the length the second dimension of those that hold integers, such as token numbers.
#
# [Note: tables of positions]
# A fake tensor has no elements, so a fake look-up in a table of positions cannot see that a position is not in it. A
# real run fails there. So a module that is a table of positions by its name (GPT-2's `wpe`, `embed_positions`) and that
# gets a longer sequence than it has rows refuses the sequence.

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from disthooks.errors import UsageError
from disthooks.predict.fake.fake_run import Fakes, fake_run

#: Names of arguments that mean the batch size, and the length of a sequence.
_BATCH = ("batch", "batch_size", "bs", "b", "n")
_SEQ = ("seq", "seq_len", "seqlen", "sequence", "sequence_length", "length", "tokens", "t")
#: A size that can be asked for: the batch size, or the length of a sequence.
What = Literal["batch", "seq"]
_NAMES: dict[What, tuple[str, ...]] = {"batch": _BATCH, "seq": _SEQ}
_POSITIONS = re.compile(r"(?!.*rel)(wpe|.*pos)", re.IGNORECASE)


class Builder:
    def __init__(self, source: nn.Module | Callable[..., Any], inputs: tuple[Any, ...] = (), name: str = "") -> None:
        if not isinstance(source, nn.Module) and not callable(source):
            raise UsageError(
                f"{f'{name}: ' if name else ''}explain takes a module, or a function that builds one, not {source!r}"
            )
        self._source, self._inputs = source, inputs
        self.name = name or getattr(source, "__qualname__", "") or type(source).__name__

    def takes(self, names: tuple[str, ...]) -> str | None:
        """The first of ``names`` that the function takes as an argument; None if it takes none of them."""
        if isinstance(self._source, nn.Module):
            return None
        try:
            parameters = inspect.signature(self._source).parameters
        except (TypeError, ValueError):
            return None
        return next((name for name in names if name in parameters), None)

    def size(self, what: What) -> int:
        """The batch size, or the length of a sequence, that the inputs have as they come; at least 1."""
        name = self.takes(_NAMES[what])
        if name is not None:
            default = inspect.signature(self._source).parameters[name].default
            return default if isinstance(default, int) and default > 0 else 1
        with fake_run() as fakes:
            _, args, kwargs = self.build(fakes)
            found, _ = _sized((args, kwargs), what)
        return max(1, found)

    def build(
        self, fakes: Fakes, batch: int | None = None, seq: int | None = None
    ) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model, and the positional and keyword arguments of its forward; all of them are fake."""
        inputs: Any = self._inputs or None
        if isinstance(self._source, nn.Module):
            model = fakes.copy(self._source)
        else:
            model, given = self._call(batch, seq)
            inputs = given if inputs is None else inputs
            model = fakes.copy(model)
        if inputs is None:
            raise UsageError(
                f"{self.name} has no example inputs: a function has to return (module, example inputs); for a module "
                "alone, give the inputs to dh.explain(module, *inputs)"
            )
        args, kwargs = _as_arguments(inputs)
        args, kwargs = fakes.like(args), fakes.like(kwargs)
        if batch is not None and self.takes(_BATCH) is None:
            args, kwargs = _resized((args, kwargs), "batch", batch)
        if seq is not None:
            _watch_positions(model)
            if self.takes(_SEQ) is None:
                args, kwargs = _resized((args, kwargs), "seq", seq)
        return model, args, kwargs

    def _call(self, batch: int | None, seq: int | None) -> tuple[nn.Module, Any]:
        wanted: dict[str, int] = {}
        for value, names in ((batch, _BATCH), (seq, _SEQ)):
            name = self.takes(names)
            if value is not None and name is not None:
                wanted[name] = value
        self._check_arguments(wanted)
        made = self._source(**wanted)
        model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{self.name} gave {type(made).__name__}: it has to return a module, or (module, example inputs)"
            )
        return model, given

    def _check_arguments(self, wanted: Mapping[str, int]) -> None:
        """Refuse a function that takes arguments which nobody gives."""
        try:
            parameters = inspect.signature(self._source).parameters.values()
        except (TypeError, ValueError):
            return
        is_open = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        missing = [
            each.name
            for each in parameters
            if each.default is each.empty and each.kind not in is_open and each.name not in wanted
        ]
        if missing:
            sizes = [what for what, names in _NAMES.items() if set(names) & set(missing)]
            ask = f", or say {' and '.join(f'{what}=' for what in sizes)} (--{' and --'.join(sizes)})" if sizes else ""
            raise UsageError(
                f"{self.name} cannot be called: it needs {', '.join(map(repr, missing))}, and explain gives a function "
                f"no arguments but a batch size and a length; let each argument have a default{ask}"
            )


def _as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as the arguments of a call: a mapping has names, a tuple or list has positions."""
    if isinstance(inputs, (tuple, list)) and len(inputs) == 1 and isinstance(inputs[0], Mapping):
        inputs = inputs[0]
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _sized(values: Any, what: What) -> tuple[int, list[torch.Tensor]]:
    """The size, and the tensors that have it. See [Note: batch and length]."""
    dimension = 0 if what == "batch" else 1
    tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]
    sized = [each for each in tensors if each.dim() > dimension]
    if dimension:
        sized = [each for each in sized if not each.is_floating_point()]
    sizes = {each.shape[dimension] for each in sized}
    if len(sizes) != 1:
        called = "batch size" if what == "batch" else "length of a sequence"
        if sizes:
            why = f"dimension {dimension} of the example inputs has the sizes {', '.join(map(str, sorted(sizes)))}"
        else:
            why = "no example input is a tensor" + (" of integers with two dimensions" if dimension else "")
        raise UsageError(
            f"the {called} cannot be changed, because {why}: let the function that builds the model take an argument "
            f"{what!r}"
        )
    return sizes.pop(), sized


def _resized(values: Any, what: What, size: int) -> Any:
    _, sized = _sized(values, what)
    chosen = {id(each) for each in sized}

    def one(leaf: Any) -> Any:
        if id(leaf) not in chosen:
            return leaf
        shape = list(leaf.shape)
        shape[0 if what == "batch" else 1] = size
        return torch.empty(shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad)

    return pytree.tree_map(one, values)


def _watch_positions(model: nn.Module) -> None:
    """Make tables of positions refuse sequences that are too long. See [Note: tables of positions]."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.match(name.rpartition(".")[2]):
            rows = module.num_embeddings - int(getattr(module, "offset", 0))

            def check(module: nn.Module, args: tuple[Any, ...], name: str = name, rows: int = rows) -> None:
                if args and isinstance(args[0], torch.Tensor) and args[0].dim() and args[0].shape[-1] > rows:
                    raise UsageError(f"{name} has {rows} positions: a sequence of {args[0].shape[-1]} is too long")

            module.register_forward_pre_hook(check)
