"""One parameter as this rank sees it: its name, and which part of it and of its gradient is here."""

# [Note: placements of a gradient]
# Autograd gives a DTensor parameter a gradient with placements of its own. Under sequence parallelism the gradient of a
# replicated norm weight is `Partial` (each rank has the sum over its part of the sequence), and the gradient of an
# embedding sharded by rows is `Replicate`. Each operator of the optimizer redistributes such a gradient when it reads
# it. `Shard.gradient` redistributes it once, before the step, and keeps the result in `.grad`: the optimizer computes
# with the same values, and a rule or a statistic sees the elements that this rank's part of the parameter has. All
# ranks of the mesh have the same placements, and call `gradient` for the parameters in the same order, so the
# collectives of the redistributions meet.

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from disthooks._tensors import local_part
from disthooks.errors import UsageError

Sharding = Literal["whole", "replica", "sharded", "unreduced"]


@dataclass(frozen=True)
class Part:
    """Which elements of a whole parameter are on this rank: a box of it, or a range of it when flattened.

    Attributes:
        shape: of the whole parameter.
        box: for each dimension where the part starts and how long it is; None when it is a range.
        span: first and one past the last element of the flattened parameter; None when it is a box.

    >>> Part.whole(torch.Size([2, 3])).indices(torch.device("cpu"))
    tensor([[0, 1, 2],
            [3, 4, 5]])
    >>> Part(torch.Size([2, 3]), box=((1, 1), (0, 2))).indices(torch.device("cpu"))
    tensor([[3, 4]])
    >>> Part(torch.Size([2, 3]), span=(2, 5)).indices(torch.device("cpu"))
    tensor([2, 3, 4])
    """

    shape: torch.Size
    box: tuple[tuple[int, int], ...] | None = None
    span: tuple[int, int] | None = None

    @staticmethod
    def whole(shape: torch.Size) -> Part:
        """All of it."""
        return Part(shape, box=tuple((0, size) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the tensors that hold this part: of one dimension when it is a range."""
        if self.box is not None:
            return tuple(size for _, size in self.box)
        assert self.span is not None
        return (self.span[1] - self.span[0],)

    def indices(self, device: torch.device) -> torch.Tensor:
        """For each element here, its place in the flattened whole parameter; int64, of the local shape."""
        if self.box is None:
            assert self.span is not None
            return torch.arange(*self.span, device=device)
        found = torch.zeros((), dtype=torch.int64, device=device)
        for dim, (start, size) in enumerate(self.box):
            stride = math.prod(self.shape[dim + 1 :])
            along = torch.arange(start, start + size, device=device) * stride
            found = found.unsqueeze(-1) + along
        return found


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of one parameter that is on this rank.

    Engines whose gradients are not in ``parameter.grad`` override :meth:`gradient`, :meth:`values` and
    :meth:`optimizer_gradient`.

    Attributes:
        name: the parameter's name in the user's own model, without what engines put into it.
        parameter: the parameter that the optimizer holds.
        is_owner: whether this rank counts its elements; over all ranks every element is counted once.
        sharding: "whole" when no other rank has any of it, "replica" when every rank has all of it, "sharded"
            when this rank has a part, "unreduced" when every rank has all of it and nothing reduces its gradient.
        part: which elements are here; None where that cannot be told.
        replica_ranks: the global ranks that have the same elements, in order, this one among them.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> shard = Shard("weight", layer.weight, is_owner=True, sharding="whole", part=Part.whole(layer.weight.shape))
    >>> shard.gradient(), shard.values() is layer.weight
    (tensor([[1., 1.]]), True)
    """

    name: str
    parameter: nn.Parameter
    is_owner: bool
    sharding: Sharding
    part: Part | None
    replica_ranks: tuple[int, ...] = (0,)
    _plain: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_plain", not hasattr(self.parameter, "placements"))  # asked in every step

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self.parameter.shape if self.part is None else self.part.shape

    def as_full_parameter(self) -> nn.Parameter:
        """What patterns are shown: the parameter, or where that is a fragment here one of the whole's shape, without
        values."""
        if self.shape == self.parameter.shape:
            return self.parameter
        whole = torch.empty(self.shape, dtype=self.parameter.dtype, device="meta")
        return nn.Parameter(whole, self.parameter.requires_grad)

    def gradient(self) -> torch.Tensor | None:
        """The local part of the gradient, sharing its memory; None while there is none.

        A DTensor's gradient is first given the placements of its parameter, on every rank of its mesh at once.
        See [Note: placements of a gradient].

        Raises:
            UsageError: when it is sparse, or only one of gradient and parameter is a DTensor.
        """
        grad = self.parameter.grad
        if grad is None or (type(grad) is torch.Tensor and grad.layout is torch.strided and self._plain):
            return grad
        grad = self._as_parameter(grad)
        local = local_part(grad)
        if local.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self.name!r} is {local.layout}: rules and statistics need dense gradients; build "
                "the layer with sparse=False, or give this parameter an optimizer that is not watched"
            )
        return local

    def values(self) -> torch.Tensor:
        """The local part of the parameter itself, which lies as :meth:`gradient` does and shares its memory."""
        return local_part(self.parameter)

    def optimizer_gradient(self) -> torch.Tensor | None:
        """The gradient as the engine has it for the optimizer: the whole one, or what stands for it (a DTensor)."""
        grad = self.parameter.grad
        return grad if grad is None else self._as_parameter(grad)

    def _as_parameter(self, grad: torch.Tensor) -> torch.Tensor:
        """``grad``, kept in ``.grad``, with the placements of its parameter; see [Note: placements of a gradient]."""
        mine, theirs = getattr(grad, "placements", None), getattr(self.parameter, "placements", None)
        if mine is theirs or mine == theirs:
            return grad
        redistribute: Any = getattr(grad, "redistribute", None)
        if redistribute is None or theirs is None or grad.device_mesh != self.parameter.device_mesh:  # type: ignore[attr-defined]
            raise UsageError(
                f"the gradient of {self.name!r} has placements {mine} and the parameter has {theirs}, and no "
                "redistribution leads from one to the other; before optimizer.step(), set p.grad to a tensor of "
                "the kind of its parameter, on the same device mesh"
            )
        with torch.no_grad():
            self.parameter.grad = redistribute(placements=theirs)
        return self.parameter.grad
