"""``Values``: the real values of small tensors of integers and truth values, beside the fake tensors.

Models read such tensors to decide what to do: whether a mask masks anything, how long a sequence is, which expert takes
a token. With their values the code runs as it would for real.
"""

# [Note: values beside fake tensors]
# Positions, masks, lengths and labels are small, and they come from factories (`arange`, `ones`, `tensor`) or from the
# user's inputs. Their operators run twice: on the fake tensors, for shapes and memory, and on the real values, on the
# side, where no recorder sees it. A value is lost where an operator mixes it with a tensor that has none. Floating-
# point numbers have values too if they are few, because masks and rates of dropout are made of such: `linspace(0, 0.1,
# 12)`. Random ones have none, except a single one that `rand` draws: it is taken to be 0.5. With it a model decides
# whether it skips a layer, and a rate below one half means that it does not.
#
# [Note: routing is even]
# Which experts of a mixture take which tokens depends on floating-point values, which nobody knows. So `topk` and
# `argmax` choose each one equally often. The bytes that are saved for backward are the same for any routing, as long as
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

#: A tensor with more elements has no value: of integers and truth values, and of floating-point numbers.
_MOST, _MOST_FLOATS = 1 << 20, 1 << 16
#: Operators that choose, and which of their results has the positions.
_CHOOSE = {aten.topk.default: 1, aten.argmax.default: 0, aten.argmin.default: 0}
#: Operators that draw between 0 and 1.
_DRAW = {aten.rand.default, aten.rand.generator, aten.rand_like.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
#: Operators whose result, or its shape, depends on the elements.
_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_RANDOM = torch.Tag.nondeterministic_seeded


class Values(_Mode):  # type: ignore[misc]
    """A dispatch mode, to be entered inside a fake mode. See [Note: values beside fake tensors].

    Args:
        mode: the fake mode.
        told: called with what could not be known, and with what was assumed instead.

    >>> from disthooks.predict.fake.kernels import FakeKernels
    >>> with FakeKernels() as mode, Values(mode):
    ...     mask = torch.arange(6) % 3 == 0
    ...     bool(mask.all()), torch.empty(6, 2)[mask].shape
    (False, torch.Size([2, 2]))
    """

    def __init__(self, mode: Any, told: Callable[[str, str], None] = lambda what, assumed: None) -> None:
        super().__init__()
        self._mode, self.told = mode, told
        self._lost: dict[int, torch.UntypedStorage] = {}  # memory of values that an operator overwrote
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of the user's real tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return device_of(args[0])
        kwargs = kwargs or {}
        leaves = tensors_in(args, kwargs)
        if func is aten._pack_padded_sequence.default:
            return self._packed(*args, **kwargs)
        return self._run(func, args, kwargs, leaves)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[torch.Tensor]) -> Any:
        is_lift = "lift" in func._schema.name
        if not is_lift and any(_is_real(each) for each in leaves):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
            leaves = tensors_in(args, kwargs)
        if func in _INDEXED:
            args = self._by_position(args)
        is_known = all(self.value_of(each) is not None for each in leaves) if leaves else _is_factory(func)
        is_drawn = any(each.__dict__.get("_is_drawn") for each in leaves)
        if is_known and leaves and not _DEPENDS.isdisjoint(func.tags):
            if is_drawn:
                self.told("a random number that the model reads", "0.5")
            return self._with_values(self._on_values(func, args, kwargs))
        result = func(*args, **kwargs)
        made = [each for each in tensors_in((result,)) if isinstance(each, FakeTensor)]
        if func in _DRAW and made[0].numel() == 1:
            self._draw(made[0])
        elif made and is_known and all(_may_have_value(each, func) for each in made):
            values = [each for each in pytree.tree_leaves(self._on_values(func, args, kwargs)) if torch.is_tensor(each)]
            self._keep(made, values, is_lift)
            for each in made if is_drawn else ():
                each.__dict__["_is_drawn"] = True
        elif made and func in _CHOOSE:
            self._choose(func, made[_CHOOSE[func]], args[0])
        elif func._schema.is_mutable:
            self._lose(_written(func, args, kwargs))
        return result

    def _lose(self, written: list[torch.Tensor]) -> None:
        """Forget the values of tensors that an operator has overwritten with something unknown."""
        for each in written:
            value = each.__dict__.pop("_value", None)
            if value is not None:
                self._lost[value.untyped_storage()._cdata] = value.untyped_storage()

    def _draw(self, made: torch.Tensor) -> None:
        with _without_fakes(), _without_modes():
            made.__dict__["_value"] = torch.full(made.shape, 0.5, dtype=made.dtype)
        made.__dict__["_is_drawn"] = True

    def _packed(self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """A packed sequence. The batch sizes are a real tensor, because torch's C++ reads its memory."""
        known = self.value_of(lengths)
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

    def _keep(self, made: list[FakeTensor], values: list[torch.Tensor], is_lift: bool) -> None:
        for fake, value in zip(made, values, strict=False):
            if fake.shape == value.shape:
                # A lifted tensor lies over the memory of a real one, which goes.
                fake.__dict__["_value"] = self._copied(value) if is_lift else value

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real value of ``tensor``; None if it has none."""
        if _is_real(tensor):
            return tensor  # `torch.tensor([...])`, before it becomes fake
        value: torch.Tensor | None = tensor.__dict__.get("_value")
        return None if value is None or value.untyped_storage()._cdata in self._lost else value

    def give(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """Let ``fake`` have ``value``, if it may have one."""
        if isinstance(fake, FakeTensor) and _may_have_value(fake) and value.device.type == "cpu":
            with _without_fakes(), _without_modes():
                fake.__dict__["_value"] = value.detach().clone()  # the model may write into it

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
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.value_of, (args, kwargs))
        with _without_fakes(), _without_modes():
            return func(*args, **kwargs)

    def _copied(self, value: torch.Tensor) -> torch.Tensor:
        with _without_fakes(), _without_modes():
            return value.clone()

    def _with_values(self, values: Any) -> Any:
        def one(value: torch.Tensor) -> torch.Tensor:
            fake: torch.Tensor = self._mode.from_tensor(value)
            fake.__dict__["_value"] = value
            return fake

        return pytree.tree_map_only(torch.Tensor, one, values)

    def _by_position(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an indexing, with positions in place of the masks whose values are known."""
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8) or self.value_of(index) is None:
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
            positions.__dict__["_value"] = even.view(positions.shape)
        name = func._schema.name.rpartition("::")[2]
        self.told(f"what {name} chooses", f"each of {dimension} equally often")


def _is_real(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter


def _is_factory(func: Any) -> bool:
    """Whether ``func``, called without tensors, makes a tensor whose elements are known."""
    name = func._schema.name
    return func.namespace == "aten" and "empty" not in name and (_RANDOM not in func.tags or "randint" in name)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that ``func`` writes into."""
    given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
    names = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return [each for each in pytree.tree_leaves([given.get(name) for name in names]) if isinstance(each, torch.Tensor)]


def _may_have_value(tensor: torch.Tensor, func: Any = None) -> bool:
    if tensor.layout is not torch.strided or tensor.dtype.is_complex:
        return False
    if tensor.dtype.is_floating_point:
        return tensor.numel() <= _MOST_FLOATS and not (func is not None and _RANDOM in func.tags)
    return tensor.numel() <= _MOST
