"""Rules for single elements, which measure nothing and cost no collective: ``Scale``, ``Sanitize`` and ``Noise``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks._hashing import GOLDEN, mix64_, signed64
from disthooks._registry import register
from disthooks.engines.base import Part, Shard
from disthooks.errors import UsageError
from disthooks.grads.rules.base import MicroBatch, Rule, State, Work, check_whole, number
from disthooks.grads.stats.base import wide

# [Note: noise by counting]
# The noise of an element is a hash of the seed, the step, the parameter's name and the element's place in the whole
# parameter (decision 55). So every engine adds the same noise, for any number of ranks, and replicas stay replicas. A
# generator would have a state, which the ranks would have to share or cut into parts. The hash is SplitMix64's mixing
# function of the place, with two keys of 64 bits that are made of the seed, the step and the name.

_LOW = 2**32 - 1  # the lower half of 64 bits
_CHUNK = 2**20  # elements whose noise is made at a time; it takes about 40 MB of temporary memory


@register("rule")
@dataclass(frozen=True)
class Scale(Rule):
    """Multiply every element by ``factor``. It measures nothing and costs no collective; NaN stays NaN.

    Args:
        factor: any finite number.

    Raises:
        UsageError: when ``factor`` is not a finite number.

    >>> from disthooks import gradients, only
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradients(model, optimizer, rules=[only("bias", Scale(0.5))]):
    ...     model(torch.ones(1, 1)).sum().backward()
    ...     optimizer.step()
    >>> model.weight.grad, model.bias.grad
    (tensor([[1.]]), tensor([0.5000]))
    """

    can_be_local: ClassVar[bool] = True
    factor: float

    def __post_init__(self) -> None:
        if not number(self.factor):
            raise UsageError(f"Scale({self.factor!r}): a finite number is needed")

    def rewrite(self, work: Work) -> None:
        for group in work.together():
            torch._foreach_mul_(group, self.factor)

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return grad * self.factor


@register("rule")
@dataclass(frozen=True)
class Sanitize(Rule):
    """Replace NaN and infinite elements by numbers, as ``torch.nan_to_num``; it costs no collective.

    It measures nothing. It hides errors of the training: log :class:`~disthooks.stats.NonFinite` beside it, or leave
    the step out with :class:`~disthooks.SkipNonFinite` instead.

    Args:
        nan: the number in place of NaN.
        posinf: the number in place of infinity; None for the largest number of the gradient's dtype. If gradients are
            multiplied by a loss scale (DeepSpeed's fp16; ``scaler`` at "local"), rules see them divided by it, and the
            largest number would become infinite again: give a smaller number then.
        neginf: the number in place of minus infinity; None for the lowest number of the dtype.

    Raises:
        UsageError: when an argument is not a finite number.

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(3, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model.weight.grad = torch.tensor([[1.0, float("nan"), float("inf")]])
    >>> with gradients(model, optimizer, rules=[Sanitize(posinf=10.0)]):
    ...     optimizer.step()
    >>> model.weight.grad
    tensor([[ 1.,  0., 10.]])
    """

    can_be_local: ClassVar[bool] = True
    nan: float = 0.0
    posinf: float | None = None
    neginf: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("nan", self.nan), ("posinf", self.posinf), ("neginf", self.neginf)):
            if not number(value) and (name == "nan" or value is not None):
                raise UsageError(f"Sanitize({name}={value!r}): a finite number is needed")

    def rewrite(self, work: Work) -> None:
        for _, grad in work.present():  # torch has no foreach kernel for nan_to_num
            grad.nan_to_num_(self.nan, self.posinf, self.neginf)

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        return grad.nan_to_num(self.nan, self.posinf, self.neginf)


@register("rule")
@dataclass(frozen=True)
class Noise(Rule):
    """Add to each element Gaussian noise with a standard deviation of ``std``.

    The noise of an element depends only on the seed, the step, the parameter's name and the element's place in the
    whole parameter. So it is the same on every engine and for any number of ranks, and replicas stay replicas. After
    ``load_state_dict()`` of the attachment it goes on as if there had been no break. It is made on the device by
    SplitMix64's mixing function (Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014) with two keys,
    and by the transform of Box and Muller. No generator of torch is read or advanced. Elements that are NaN stay NaN.

    Differentially private SGD adds noise in this way, once for all ranks, to the sum of clipped gradients (Abadi et
    al., "Deep Learning with Differential Privacy", 2016). This rule alone does not make training private. That needs a
    clip of each example's own gradient, an accountant, and a secret, cryptographic source of noise, which this is not.

    At "local" every micro-batch gets noise of its own, on this rank's own gradient in the user's units. With
    ``alike=True`` the noise is the same on all ranks: the mean over ranks has noise of ``std``, and the sum of n
    micro-batches has noise of ``sqrt(n) * std``. With ``alike=False`` each rank has noise of its own, and the mean over
    N ranks has noise of ``std / sqrt(N)``. The count of micro-batches starts again at each step of the optimizer.

    Args:
        std: the standard deviation; positive.
        seed: an int; the same on all ranks.
        alike: whether all ranks have the same noise at "local". At "final" it must be True, because the gradients that
            the optimizer uses must not differ between replicas.

    Raises:
        UsageError: when an argument is out of its range, a gradient is complex, or the engine cannot tell
            which elements of a parameter a rank has; for ``alike=False`` at "final".

    >>> from disthooks import gradients
    >>> model = torch.nn.Linear(1000, 10)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    >>> model.weight.grad = torch.zeros(10, 1000)
    >>> with gradients(model, optimizer, rules=[Noise(0.5, seed=1)]):
    ...     optimizer.step()
    >>> f"{model.weight.grad.std():.2f}"
    '0.50'
    """

    can_be_local: ClassVar[bool] = True
    std: float
    seed: int = 0
    alike: bool = True

    def __post_init__(self) -> None:
        if not number(self.std) or self.std <= 0:
            raise UsageError(f"Noise(std={self.std!r}): a positive, finite number is needed")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise UsageError(f"Noise(seed={self.seed!r}): an int is needed")
        if not isinstance(self.alike, bool):
            raise UsageError(f"Noise(alike={self.alike!r}): True or False")

    def check(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            if shard.parameter.is_complex():
                raise UsageError(f"Noise: {shard.name!r} is complex, and the noise is real: leave it out by only()")
            if shard.part is None:
                raise UsageError(
                    f"Noise: the engine does not tell which elements of {shard.name!r} are on this rank, and the noise "
                    "depends on that: leave the parameter out by only()"
                )

    def start(self, shards: Sequence[Shard], device: torch.device) -> State:
        if not self.alike:
            raise UsageError(
                f"{self!r} at 'final' would make replicas of a parameter different for good: leave alike=False out, "
                "or give each rank its own noise before the reduction, by only(pattern, Noise(...), at='local')"
            )
        return {}

    def rewrite(self, work: Work) -> None:
        for shard, grad in work.present():
            if shard.part is not None:
                self._add(grad, shard.part, self._keys(work.step, shard.name))

    def rewrite_local(self, shard: Shard, grad: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        check_whole(self, shard, grad)
        # The word "local" keeps these keys apart from those of the final gradient with the same step and name.
        own = ("local", batch.number, *(() if self.alike else (batch.position,)))
        result = grad.clone()
        self._add(result, Part.whole(result.shape), self._keys(batch.step, shard.name, *own))
        return result

    def _keys(self, step: int, name: str, *more: object) -> tuple[int, int]:
        """Two keys of 64 bits for the noise of one parameter in one step. See [Note: noise by counting]."""
        text = repr((self.seed, step, name, *more)).encode()
        # Python's own `hash` of a text differs between processes.
        digest = hashlib.blake2b(text, digest_size=16).digest()
        return int.from_bytes(digest[:8], "little", signed=True), int.from_bytes(digest[8:], "little", signed=True)

    def _add(self, grad: torch.Tensor, part: Part, keys: tuple[int, int]) -> None:
        # The temporary memory is bounded. A gradient that is not contiguous has no flat view, so it is cut by rows.
        whole, row = (grad.view(-1), 1) if grad.is_contiguous() else (grad, grad.numel() // len(grad))
        step = max(1, _CHUNK // row)
        for i, chunk in enumerate(torch.split(whole, step)):
            where = places(part, i * step * row, chunk.numel(), grad.device)
            chunk.add_(normal(where, keys, wide(grad.dtype)).view(chunk.shape), alpha=self.std)


def places(part: Part, start: int, count: int, device: torch.device) -> torch.Tensor:
    """The places in the flattened whole parameter of ``count`` elements of the part, from element ``start`` of it on.

    Returns:
        An int64 vector of ``count`` places.

    >>> places(Part(torch.Size([3, 4]), box=((1, 2), (2, 2))), 1, 3, torch.device("cpu"))
    tensor([ 7, 10, 11])
    """
    if part.box is None:
        assert part.span is not None
        return torch.arange(part.span[0] + start, part.span[0] + start + count, device=device)
    rest = torch.arange(start, start + count, device=device)
    # If the box cuts dimension 0 only, its elements are in a row, so an offset is enough.
    if all(size == whole for (_, size), whole in zip(part.box[1:], part.shape[1:], strict=True)):
        return rest + (part.box[0][0] * part.shape[1:].numel() if part.box else 0)
    # From the last dimension to the first: the index in the box's dimension, moved by the begin of the box.
    found, stride = torch.zeros_like(rest), 1
    for (first, size), whole in zip(reversed(part.box), reversed(part.shape), strict=True):
        found += (rest % size + first) * stride
        rest, stride = rest // size, stride * whole
    return found


def normal(where: torch.Tensor, keys: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A number of the standard normal distribution for each place in ``where``; the same for the same place and keys.

    See [Note: noise by counting].
    """
    # The second key goes in between two rounds of mixing. With the first key alone, different keys would read the same
    # sequence from different places.
    bits = mix64_(mix64_((where * signed64(GOLDEN)).add_(keys[0])).bitwise_xor_(keys[1]))
    # Box and Muller: the upper half of the bits gives a radius, the lower half an angle. The half that is added keeps
    # the logarithm finite.
    radius = (bits >> 32).bitwise_and_(_LOW).to(dtype).add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    return (bits & _LOW).to(dtype).mul_(2 * math.pi * 2.0**-32).cos_().mul_(radius)
