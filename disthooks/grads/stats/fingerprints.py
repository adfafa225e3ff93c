"""``Fingerprints``: 64 bits of each module's input and output, of each gradient and of each parameter.

``disthooks diff`` compares those of two runs.
"""

# [Note: three sums tell a rank]
# Each rank has a fingerprint f of its own, and what is merged over the ranks may not grow with them. So three sums
# modulo 2**64 are made over the ranks: of f, of f·p and of f·p², where p is the place of the rank plus one. If one rank
# differs between two runs, by d, the sums differ by d, d·p and d·p², and no other p fits. If several differ, none fits.
# A sum of float64 numbers is no sum modulo 2**64, so each number travels as four parts of 16 bits.
#
# [Note: the same on every engine]
# The fingerprint of a final gradient, and of a parameter after the update, is a sum over its elements, and each element
# is counted by the rank that owns it. So it does not depend on how many ranks there are, nor on which parts they have.
# Outputs and own gradients depend on the batch of a rank, so they are compared only between runs of as many ranks.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from disthooks._hashing import ElementSums
from disthooks._match import Pattern, as_patterns
from disthooks._registry import register
from disthooks.engines.base import Shard
from disthooks.errors import UsageError
from disthooks.grads.stats.base import (
    ForwardNeeds,
    Found,
    Local,
    LocalFact,
    Measure,
    Merge,
    Per,
    Stat,
    State,
    moved,
    onto,
)

_PARTS = 4  # of 16 bits


def _parts(numbers: torch.Tensor) -> torch.Tensor:
    """The four parts of int64 numbers as float64, in a new last dimension. See [Note: three sums tell a rank]."""
    return torch.stack([(numbers >> 16 * k) & 0xFFFF for k in range(_PARTS)], dim=-1).double()


def _moments(prints: torch.Tensor, place: int) -> torch.Tensor:
    """The parts of f, f·p and f·p² in one row for each fingerprint."""
    p = place + 1
    return _parts(torch.stack([prints, prints * p, prints * (p * p)], dim=-1)).flatten(1)


def _words(row: Sequence[float]) -> list[int]:
    """The numbers modulo 2**64 whose parts are in ``row``."""
    return [
        sum(int(part) << 16 * k for k, part in enumerate(row[at : at + _PARTS])) % 2**64
        for at in range(0, len(row), _PARTS)
    ]


def _text(row: Sequence[float]) -> str:
    return "".join(f"{word:016x}" for word in _words(row))


def _sums(tensors: Sequence[torch.Tensor | None], shards: Sequence[Shard], device: torch.device) -> torch.Tensor:
    """For each tensor the sum over its elements by their places in the whole parameter; 0 for None."""
    of, found = ElementSums(), []
    for tensor, shard in zip(tensors, shards, strict=True):
        if tensor is None or not tensor.numel():
            found.append(torch.zeros((), dtype=torch.int64, device=device))
            continue
        first, places = _places(shard, tensor)
        found.append(onto(of(tensor, first, places), device))
    return torch.stack(found)


def _places(shard: Shard, tensor: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """Where the first element is in the whole parameter; and the place of each, if they do not follow one another."""
    part = shard.part
    if part is None:
        return 0, None
    if part.span is not None:
        return part.span[0], None
    assert part.box is not None
    whole = shard.shape.numel() // max(1, shard.shape[0]) if len(shard.shape) else 1
    if all(size == full for (_, size), full in zip(part.box[1:], shard.shape[1:], strict=True)):
        return (part.box[0][0] * whole if part.box else 0), None
    return 0, part.indices(tensor.device)


@dataclass(frozen=True)
class ModulePrints(Measure):
    """For each module the three sums of the fingerprints of its inputs, and those of its outputs."""

    merge: ClassVar[Merge] = "sum"
    per: ClassVar[Per] = "module"

    def width(self, shard: Any) -> int:
        return 2 * 3 * _PARTS

    def local(self, local: Local) -> torch.Tensor:
        assert local.forward is not None
        prints = local.forward.prints.to(local.device, non_blocking=local.device.type != "cpu")
        return torch.cat([_moments(prints[:, side], local.position) for side in (0, 1)], dim=1).flatten()


@dataclass(frozen=True)
class OwnPrints(Measure):
    """For each parameter the three sums of the fingerprints of the ranks' own gradients, before any reduction."""

    merge: ClassVar[Merge] = "sum"
    local_facts: ClassVar[frozenset[LocalFact]] = frozenset({"fingerprint"})

    def width(self, shard: Shard | None) -> int:
        return 3 * _PARTS

    def local(self, local: Local) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.int64, device=local.device)
        found = [
            zero if stats.fingerprint is None else onto(stats.fingerprint, local.device) for stats in local.local_stats
        ]
        return _moments(torch.stack(found), local.position).flatten()


@dataclass(frozen=True)
class GradientPrints(Measure):
    """For each parameter the fingerprint of its final gradient. See [Note: the same on every engine]."""

    merge: ClassVar[Merge] = "sum"
    every: int = 1

    def width(self, shard: Shard | None) -> int:
        return _PARTS

    def local(self, local: Local) -> torch.Tensor:
        grads = local.grads if local.step % self.every == 0 else [None] * len(local.grads)
        return _parts(_sums(grads, local.shards, local.device)).flatten()


@dataclass(frozen=True)
class StartPrints(Measure):
    """For each parameter before the first update its fingerprint: other code, or other weights from the start?"""

    merge: ClassVar[Merge] = "sum"

    def width(self, shard: Shard | None) -> int:
        return _PARTS

    def local(self, local: Local) -> torch.Tensor:
        counted = [shard.values().detach() if shard.is_owner and not local.step else None for shard in local.shards]
        return _parts(_sums(counted, local.shards, local.device)).flatten()


@dataclass(frozen=True)
class ParameterPrints(Measure):
    """For each parameter after the update its fingerprint, and the three sums of those of the ranks' own copies."""

    merge: ClassVar[Merge] = "sum"
    after: ClassVar[bool] = True
    every: int = 1

    def width(self, shard: Shard | None) -> int:
        return 4 * _PARTS

    def local(self, local: Local) -> torch.Tensor:
        here = local.step % self.every == 0
        values = [shard.values().detach() if here else None for shard in local.shards]
        own = _sums(values, local.shards, local.device)
        is_owner = torch.tensor([shard.is_owner for shard in local.shards])
        counted = torch.where(moved(is_owner, local.device), own, 0)
        return torch.cat([_parts(counted), _moments(own, local.position)], dim=1).flatten()


@register("stat")
@dataclass(frozen=True)
class Fingerprints(Stat):
    """64 bits of each module's input and output, each gradient and each parameter, for ``disthooks diff``.

    Two runs whose fingerprints are the same computed the same bits. Of each module the log gets ``fingerprint/input``
    and ``fingerprint/output``; of each parameter ``fingerprint/own`` (the ranks' own gradients before any reduction),
    ``fingerprint/grad`` (the final gradient before any rule) and ``fingerprint/update`` (the parameter after the
    update), and in step 0 ``fingerprint/start`` (the parameter before it): texts of hexadecimal digits. They are merged
    in the SUM that the step makes anyway, and still tell the rank if one rank alone differs.

    Args:
        every: of logged steps only those whose number is a multiple of it.
        modules: a pattern of names of modules, or several, as for :class:`Activations`.

    Raises:
        UsageError: when ``every`` is not at least 1.
        MatchError: when attached, if a pattern matches no module.

    >>> from disthooks import gradients
    >>> texts = []
    >>> for sign in (1.0, 1.0, -1.0):
    ...     model = torch.nn.Linear(2, 1, bias=False)
    ...     _ = model.weight.data.fill_(0.5)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     with gradients(model, optimizer, stats=[Fingerprints()]) as watch:
    ...         model(torch.tensor([[3.0, sign]])).sum().backward()
    ...         optimizer.step()
    ...     texts.append(watch.latest["fingerprint/grad/param/weight"])
    >>> texts[0] == texts[1], texts[0] == texts[2]
    (True, False)
    """

    every: int = 1
    modules: Pattern | Iterable[Pattern] = ()

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise UsageError(f"Fingerprints(every={self.every!r}): every how many steps? An int of at least 1")
        object.__setattr__(self, "modules", as_patterns(self.modules) if self.modules else ())

    def forward_needs(self) -> ForwardNeeds:
        return ForwardNeeds(modules=tuple(self.modules), prints=self.every)  # type: ignore[arg-type]

    def measures(self) -> tuple[Measure, ...]:
        return ModulePrints(), OwnPrints(), GradientPrints(self.every), StartPrints(), ParameterPrints(self.every)

    def record(self, found: Found, state: State | None = None) -> dict[str, Any]:
        modules, own, grads, start, after = (found.rows[measure].tolist() for measure in self.measures())
        if found.step % self.every:
            return {}
        half = 3 * _PARTS
        recorded: dict[str, Any] = {}
        for name, row in zip(found.modules, modules, strict=True):
            recorded[f"fingerprint/input/module/{name}"] = _text(row[:half])
            recorded[f"fingerprint/output/module/{name}"] = _text(row[half:])
        for name, mine, final, before, then in zip(found.names, own, grads, start, after, strict=True):
            recorded[f"fingerprint/start/param/{name}"] = None if found.step else _text(before)
            recorded[f"fingerprint/own/param/{name}"] = _text(mine)
            recorded[f"fingerprint/grad/param/{name}"] = _text(final)
            recorded[f"fingerprint/update/param/{name}"] = _text(then)
        return recorded
