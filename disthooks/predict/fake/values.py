"""``Values``: the real values of small tensors of integers and of masks, beside the fake tensors.

Models read such tensors to decide what to do: whether a mask masks anything, how long a sequence is, which expert takes
a token. With their values the code runs as it would for real.
"""

# [Note: values beside fake tensors]
# Positions, masks, lengths and labels are small, and they come from factories (`arange`, `ones`, `tensor`) or from the
# user's inputs. Their operators run twice: on the fake tensors, for shapes and memory, and on the real values, on the
# side, where no recorder sees it. A value is lost where an operator mixes it with a tensor that has none. The memory of
# a lost value is given back at once, and that is how the values of its views know that they are lost too.
#
# [Note: floating-point numbers with values]
# torch and transformers make masks of 0 and minus infinity, and ask whether such a mask is causal or masks anything. So
# a tensor of floating-point numbers has a value if it has at most two different numbers. Rates of dropout and the like
# are few numbers, as in `linspace(0, 0.1, 12)`: a small tensor has a value, too. The user's inputs must be masks, with
# exactly two numbers: others are often placeholders, and say nothing. Random numbers have no value, except a single one
# that `rand` draws: it is taken to be 0.5. With it a model decides whether it skips a layer, and a rate below one half
# means that it does not.
#
# [Note: routing is even]
# The routing of a mixture of experts depends on floating-point values that are not known. So `topk` and `argmax` choose
# each expert equally often. The bytes that are saved for backward are the same for any routing, as long as
# each expert takes some token; the peak in backward rises if some experts take more than others.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from disthooks.predict.fake.queries import DEVICE_OF, device_of, tensors_in

_Mode: Any = _python_dispatch.TorchDispatchMode
_without_fakes: Callable[[], Any] = unset_fake_temporarily
_without_modes: Callable[[], Any] = no_dispatch
aten: Any = torch.ops.aten

#: A tensor with more elements has no value; one of floating-point numbers neither, unless it is a mask.
_MOST, _MOST_FLOATS = 1 << 20, 1 << 16
#: Operators that choose, and which of their results has the positions.
_CHOOSE = {aten.topk.default: 1, aten.argmax.default: 0, aten.argmin.default: 0}
#: Operators that draw between 0 and 1.
_DRAW = {aten.rand.default, aten.rand.generator, aten.rand_like.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
#: Operators whose result, or its shape, depends on the elements.
_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_PINNED = aten._pin_memory.default  # it needs an accelerator
_RANDOM = torch.Tag.nondeterministic_seeded
#: Operators that take from a tensor its shape alone and fill a new one with a number, and the number.
_FILL: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    aten.zeros_like.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.full_like.default: lambda args: args[1],
    aten.new_zeros.default: lambda args: 0,
    aten.new_ones.default: lambda args: 1,
    aten.new_full.default: lambda args: args[2],
}


class Values(_Mode):  # type: ignore[misc]
    """A dispatch mode, to be entered inside a fake mode. See [Note: values beside fake tensors]."""

    def __init__(self, mode: Any, told: Callable[[str, str], None] = lambda what, assumed: None) -> None:
        super().__init__()
        self._mode, self.told = mode, told
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of the user's real tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return device_of(args[0])
        kwargs = kwargs or {}
        if func is aten._pack_padded_sequence.default:
            return self._packed(*args, **kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = tensors_in(args, kwargs)
        if "lift" not in func._schema.name and any(_is_real(each) for each in leaves):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
            leaves = tensors_in(args, kwargs)
        if func in _INDEXED:
            args = self._by_position(args)
        is_known = all(value_of(each) is not None for each in leaves) if leaves else _is_factory(func)
        is_known = is_known and func is not _PINNED and not (leaves and _is_random(func))
        is_drawn = any(each.__dict__.get("_is_drawn") for each in leaves)
        if is_known and leaves and not _DEPENDS.isdisjoint(func.tags):
            if is_drawn:
                self.told("a random number that the model reads", "0.5")
            return self._with_values(self._on_values(func, args, kwargs))
        result = func(*args, **kwargs)
        made = [each for each in tensors_in((result,)) if isinstance(each, FakeTensor)]
        if is_known:
            is_known = self._keep_all(func, args, kwargs, made)
            for each in made if is_drawn else ():
                each.__dict__["_is_drawn"] = True
        if not is_known:
            self._assume(func, args, kwargs, made)
        return result

    def _keep_all(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Any]) -> bool:
        """Give all tensors that an operator made their values, if they are small; return whether they are."""
        if not made or not all(_may_have_value(each) for each in made):
            return False
        values = [each for each in pytree.tree_leaves(self._on_values(func, args, kwargs)) if torch.is_tensor(each)]
        for fake, value in zip(made, values, strict=False):
            # A lifted tensor lies over the memory of a real one, which goes.
            self._keep(fake, self._copied(value) if "lift" in func._schema.name else value)
        return True

    def _assume(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Any]) -> None:
        """Give values to what an operator made of tensors without values, or take the values of what it overwrote."""
        is_small = bool(made) and all(_may_have_value(each) for each in made)
        if func in _DRAW and made[0].numel() == 1:
            _set_value(made[0], self._filled(made[0], 0.5))
            made[0].__dict__["_is_drawn"] = True
        elif is_small and func in _FILL:
            self._keep(made[0], self._filled(made[0], _FILL[func](args)))
        elif made and func in _CHOOSE:
            self._choose(func, made[_CHOOSE[func]], args[0])
        elif func._schema.is_mutable:
            for each in _written(func, args, kwargs):
                _lose(each)

    def _packed(self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """A packed sequence. The batch sizes are a real tensor, because torch's C++ reads its memory."""
        known = value_of(lengths)
        steps, count = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
        if known is None:
            self.told("the lengths of a packed sequence", f"all are {steps}")
        with _without_fakes(), _without_modes():
            known = torch.full((count,), steps) if known is None else known
            template = torch.empty(count, steps, 1) if batch_first else torch.empty(steps, count, 1)
            sizes = aten._pack_padded_sequence.default(template, known, batch_first)[1]
            total = int(sizes.sum())
        sizes.__dict__["_is_of_packed"] = True
        return x.new_empty((total, *x.shape[2:])), sizes

    def _keep(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        if fake.shape != value.shape:
            return
        if self._is_telling(value):
            # Only memory that can be given back can tell that a value is lost.
            _set_value(fake, value if value.untyped_storage().resizable() else self._copied(value))
        else:
            _lose(fake)  # an operator may have written into it

    def _is_telling(self, value: torch.Tensor, fewest: int = 1) -> bool:
        """Whether a value is worth keeping. See [Note: floating-point numbers with values].

        A mask of floating-point numbers has ``fewest`` different elements or more: 1 or 2.
        """
        if not _is_fraction(value.dtype) or value.numel() <= (1 if fewest == 2 else _MOST_FLOATS):
            return True
        with _without_fakes(), _without_modes():
            if len(set(value.flatten()[:64].tolist())) > 2:  # most tensors of fractions: the rest need not be read
                return False
            least, most = value.aminmax()
            if least == most:
                return fewest < 2
            return bool(((value == least) | (value == most)).all())

    def give(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """Let ``fake`` have ``value``, if it may have one."""
        if not (isinstance(fake, FakeTensor) and _may_have_value(fake) and value.device.type == "cpu"):
            return
        if self._is_telling(value, fewest=2):
            with _without_fakes(), _without_modes():
                copied = value.detach().clone()  # the model may write into it
            _set_value(fake, copied)

    def doubt(self, placeholder: torch.Tensor) -> None:
        """Let an input of the user's have no value if it may be a placeholder; see :meth:`give`."""
        value = value_of(placeholder)
        if value is not None and not self._is_telling(value, fewest=2):
            del placeholder.__dict__["_value"]

    def _as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """One fake tensor for each real one that the user's code holds; torch would make a new one at each use."""
        if not _is_real(tensor):
            return tensor
        known = self._fakes.get(id(tensor))
        if known is None:
            fake: torch.Tensor = self._mode.from_tensor(tensor)
            self.give(fake, tensor)
            if "_is_of_packed" in tensor.__dict__:
                return fake  # the tensor goes when the packed sequence goes
            known = self._fakes[id(tensor)] = tensor, fake
        return known[1]

    def _on_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, value_of, (args, kwargs))
        with _without_fakes(), _without_modes():
            return func(*args, **kwargs)

    def _filled(self, fake: torch.Tensor, number: Any) -> torch.Tensor:
        with _without_fakes(), _without_modes():
            return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype).fill_(number)

    def _copied(self, value: torch.Tensor) -> torch.Tensor:
        with _without_fakes(), _without_modes():
            return value.clone()

    def _with_values(self, values: Any) -> Any:
        def one(value: torch.Tensor) -> torch.Tensor:
            fake: torch.Tensor = self._mode.from_tensor(value)
            _set_value(fake, value)
            return fake

        return pytree.tree_map_only(torch.Tensor, one, values)

    def _by_position(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an indexing, with positions in place of the masks whose values are known."""
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8) or value_of(index) is None:
                indices.append(index)
            else:
                found = self._on_values(aten.nonzero.default, (index,), {})
                with _without_fakes(), _without_modes():
                    positions = list(found.unbind(-1))  # with the modes on they would be fake, and have no values
                indices += self._with_values(positions)
        return (args[0], indices, *args[2:])

    def _choose(self, func: Any, positions: torch.Tensor, of: torch.Tensor) -> None:
        """Let ``positions`` choose evenly. See [Note: routing is even]."""
        if positions.numel() > _MOST:
            return
        dimension = of.shape[-1] if of.dim() else 1
        with _without_fakes(), _without_modes():
            even = torch.arange(positions.numel()) % max(1, dimension)
            even = even.view(positions.shape)
        _set_value(positions, even)
        name = func._schema.name.rpartition("::")[2]
        self.told(f"what {name} chooses", f"each of {dimension} equally often")


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    if _is_real(tensor):
        return tensor  # `torch.tensor([...])`, before it becomes fake
    value: torch.Tensor | None = tensor.__dict__.get("_value")
    if value is None or (value.numel() and not value.untyped_storage().nbytes()):
        return None
    # An engine may have given the tensor other memory, by `tensor.data = ...`.
    is_same = value.shape == tensor.shape and tensor.untyped_storage()._cdata == tensor.__dict__["_value_at"]
    return value if is_same else None


def _set_value(fake: torch.Tensor, value: torch.Tensor) -> None:
    fake.__dict__.update(_value=value, _value_at=fake.untyped_storage()._cdata)


def _lose(tensor: torch.Tensor) -> None:
    """From now on ``tensor`` and its views have no value. See [Note: values beside fake tensors]."""
    value = tensor.__dict__.pop("_value", None)
    if value is not None:
        value.untyped_storage().resize_(0)


def _is_real(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter


def _is_random(func: Any) -> bool:
    return _RANDOM in func.tags and "randint" not in func._schema.name


def _is_factory(func: Any) -> bool:
    """Whether ``func``, called without tensors, makes a tensor whose elements are known."""
    return func.namespace == "aten" and "empty" not in func._schema.name and not _is_random(func)


def _is_fraction(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
    names = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return [each for each in pytree.tree_leaves([given.get(name) for name in names]) if isinstance(each, torch.Tensor)]


def _may_have_value(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.numel() > _MOST:
        return False
    return not tensor.dtype.is_complex or tensor.numel() <= 1
