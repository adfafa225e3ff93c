"""Copies of one tensor on several ranks: are they still the same, and if not, which rank's is another."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from disthooks.engines.base import Engine
from disthooks.engines.find import find
from disthooks.errors import UsageError
from disthooks.grads import collect, gather
from disthooks.grads.checksum import Checksums, scrambled, signed
from disthooks.grads.copies import Copies, Copy, Ranks, named

# How many sums all tensors are added up in. It bounds what is sent when all is well, whatever the model and the
# number of ranks; when something differs, the tensors of its sum are looked at, and so more of them than need be.
BUCKETS = 512


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies are not all the same.

    Attributes:
        name: of the parameter or buffer, or ``"layer.weight: exp_avg"`` for what an optimizer keeps of one.
        ranks: the global ranks whose copy is another than that of most. Where several copies are on equally many
            ranks, and no other is on more, nothing says which is right: all ranks that should have the same.
        copies: how many ranks should have the same.
        agree: how many have the copy that most have; of several groups of ranks, in the one that agrees least.
        shape: of the whole tensor.
        dtype: its dtype.
        tied: of each group of ranks in which nothing says which copy is right, its ranks.
    """

    name: str
    ranks: Ranks
    copies: int
    agree: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied: tuple[Ranks, ...] = ()

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "no dimensions"
        kind = str(self.dtype).removeprefix("torch.")
        few = "no majority: " if 2 * self.agree <= self.copies and not self.tied else ""
        about = f"({kind}, {shape}; {few}{self.agree} of {self.copies} agree)"
        if not self.tied:
            return f"{self.name} differs on {named(self.ranks)} {about}"
        said = [f"{named(group, ' and ')} differ, and nothing says which is right" for group in self.tied]
        wrong = tuple(rank for rank in self.ranks if not any(rank in group for group in self.tied))
        said += [f"it differs on {named(wrong)}"] if wrong else []
        return (
            f"{self.name}: {'; '.join(said)} {about}" if self.tied else f"{self.name} differs on {named(wrong)} {about}"
        )


@dataclass(frozen=True)
class ReplicaReport:
    """What :func:`check_replicas` found; the same on every rank.

    Attributes:
        compared: how many tensors of this rank have copies on other ranks.
        differs: those whose copies are not all the same, in the model's order.
        ranks: the global ranks that took part.
        engine: which engine was found.

    >>> print(ReplicaReport(compared=0, differs=(), ranks=(0, 1), engine="FSDP2"))
    FSDP2, 2 ranks: 0 tensors are replicated; nothing to compare
    """

    compared: int
    differs: tuple[Difference, ...]
    ranks: Ranks
    engine: str

    @property
    def ok(self) -> bool:
        """Whether something was compared and all of it is the same; False when there was nothing to compare."""
        return self.compared > 0 and not self.differs

    def __str__(self) -> str:
        count = f"{len(self.ranks)} rank{'s' if len(self.ranks) > 1 else ''}"
        if not self.compared:
            return f"{self.engine}, {count}: 0 tensors are replicated; nothing to compare"
        if not self.differs:
            return f"{self.engine}, {count}: {self.compared} tensors compared, all copies are the same"
        head = f"{self.engine}, {count}: {len(self.differs)} of {self.compared} tensors differ"
        return "\n".join([head, *(f"  {difference}" for difference in self.differs)])


def check_replicas(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    buffers: bool = False,
    ranks: Iterable[int] | None = None,
) -> ReplicaReport:
    """Compare, bit for bit, what should be the same on several ranks, and name the ranks that have something else.

    Every rank must call it. Each computes a 64-bit checksum of each tensor on its device; one all-reduce of 8 KiB
    says whether all copies are the same, whatever the model and the number of ranks. Only if not, a second
    collective of the tensors in question tells which ranks differ. It waits for the device: call it now and then,
    between steps.

    What has copies: under DDP everything; under ``fully_shard`` on a two-dimensional mesh (HSDP) each shard, on the
    ranks with the same coordinate; under ``fully_shard`` on one dimension only parameters that it left alone; of a
    plain module or ``nn.DataParallel`` everything, since each process has a model of its own.

    Args:
        model: what the engine returned; for ``fully_shard`` the model itself.
        optimizer: also compare what it keeps for each parameter: tensors such as ``exp_avg``, and numbers.
        buffers: also compare buffers. Statistics of BatchNorm differ without fault, unless they are synchronised.
        ranks: for a plain module or ``nn.DataParallel``: the global ranks that have a copy and call this; all ranks
            of the default process group when None.

    Returns:
        A report with ``ok``, ``compared`` and ``differs``; the same on every rank.

    Raises:
        UsageError: on every rank, when they hold tensors of different names, shapes or dtypes; when a tensor is not
            dense; when ``ranks`` leaves out this rank, or the engine knows its ranks itself.
        AttachError: for an engine that is not supported, or an optimizer of another model.

    >>> report = check_replicas(nn.Linear(2, 2))  # one process: no other rank has a copy
    >>> report.ok, report.compared, report.differs
    (False, 0, ())
    """
    engine = find(model)
    alone = engine.label in ("a plain module", "DataParallel")
    everyone = _plain_ranks(ranks) if alone else _engines_ranks(engine, ranks)
    copies = Copies(engine, everyone, alone)
    copies.add_parameters()
    if buffers:
        copies.add_buffers()
    if optimizer is not None:
        copies.add_state(optimizer)
    with torch.no_grad():
        return _Comparison(engine, everyone, copies).report()


def _engines_ranks(engine: Engine, ranks: Iterable[int] | None) -> Ranks:
    if ranks is not None:
        raise UsageError(f"ranks= is for plain modules: {engine.label} knows that its ranks are {list(engine.ranks)}")
    return tuple(sorted(engine.ranks))


def _plain_ranks(ranks: Iterable[int] | None) -> Ranks:
    """The ranks that each have a plain module: those asked for, or all."""
    world = gather.world()
    chosen = world if ranks is None else tuple(sorted(set(ranks)))
    if not set(chosen) <= set(world) or gather.rank() not in chosen:
        raise UsageError(
            f"ranks={list(chosen)}: this is rank {gather.rank()} of {len(world)}; name ranks that are there, and call "
            "check_replicas on those alone"
        )
    return chosen


class _Comparison:
    """One comparison over ``ranks``, this one among them."""

    def __init__(self, engine: Engine, ranks: Ranks, copies: Copies) -> None:
        self._engine, self._ranks, self._copies = engine, ranks, copies
        self._rank = gather.rank() if len(ranks) > 1 else ranks[0]
        self._replicated = copies.replicated()
        self._group = collect.group_of(ranks)
        self._device = collect.device_for(self._group, engine.shards[0].values().device)

    def report(self) -> ReplicaReport:
        """Compare; the second collective only when it is needed."""
        differs: tuple[Difference, ...] = ()
        if self._group is not None:
            sums = self._checksums()
            *buckets, signature = gather.total(self._group, self._sketch(sums)).tolist()
            if signature:
                raise self._strangers()
            suspects = [i for i in range(len(self._replicated)) if buckets[i % BUCKETS]]
            differs = self._differences(suspects, sums) if any(buckets) else ()
        return ReplicaReport(len(self._replicated), differs, self._ranks, self._engine.label)

    def _checksums(self) -> torch.Tensor:
        of, device = Checksums(), self._device
        sums = [of(copy.part) for copy in self._replicated]
        # From the host nothing waits; to it, the copy must have arrived before it is added up.
        moved = [each.to(device, non_blocking=each.device.type == "cpu") for each in sums]
        return torch.stack(moved) if moved else torch.zeros(0, dtype=torch.int64, device=device)

    def _sketch(self, sums: torch.Tensor) -> torch.Tensor:
        """Numbers whose totals over all ranks are zero exactly if every copy is the same: int64, ``BUCKETS + 1``.

        Over the ranks that have the same tensor, the factors of its checksum add up to zero. So groups of copies
        that cross one another share one sum, and its size does not grow with their number. A tensor that differs
        goes unnoticed with a probability of about 2**-60.
        """
        factors = [_factor(self._rank, c.twins) * (scrambled(i) | 1) for i, c in enumerate(self._replicated)]
        padded = torch.zeros(-(-len(factors) // BUCKETS) * BUCKETS, dtype=torch.int64, device=self._device)
        padded[: len(factors)] = sums * self._numbers(factors)
        signature = self._numbers([_factor(self._rank, self._ranks) * self._copies.signature()])
        return torch.cat((padded.view(-1, BUCKETS).sum(0), signature))

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        numbers = torch.tensor([signed(value) for value in values], dtype=torch.int64)
        return numbers.to(self._device, non_blocking=True)

    def _differences(self, suspects: Sequence[int], sums: torch.Tensor) -> tuple[Difference, ...]:
        """Of the tensors ``suspects``: what every rank has, and the lowest rank of those that should have the same."""
        firsts = self._numbers([self._replicated[i].twins[0] for i in suspects])
        mine = torch.stack((firsts, sums[self._numbers(suspects)]), 1).flatten()
        rows = gather.gather(self._group, mine)
        found = []
        for place, i in enumerate(suspects):
            groups: dict[int, dict[int, int]] = collections.defaultdict(dict)
            for rank, row in zip(self._ranks, rows, strict=True):
                groups[row[2 * place]][rank] = row[2 * place + 1]
            found.append(_difference(self._replicated[i], list(groups.values())))
        return tuple(each for each in found if each is not None)

    def _strangers(self) -> UsageError:
        """What to raise when ranks hold different tensors; says which ranks."""
        rows = gather.gather(self._group, self._numbers([self._copies.signature(), len(self._copies)]))
        signatures = {rank: row[0] for rank, row in zip(self._ranks, rows, strict=True)}
        counts = dict(zip(self._ranks, (row[1] for row in rows), strict=True))
        odd, _ = _odd(signatures)
        if len(odd) == len(self._ranks):
            numbers = ", ".join(str(counts[rank]) for rank in self._ranks[:8]) + (
                ", ..." if len(self._ranks) > 8 else ""
            )
            who = f"{named(odd, ' and ')} hold tensors of different names, shapes or dtypes ({numbers} tensors)"
        else:
            usual = next(counts[rank] for rank in self._ranks if rank not in odd)
            who = (
                f"{named(odd)} of {len(self._ranks)} hold tensors of other names, shapes or dtypes than the others "
                f"({counts[odd[0]]} tensors, the others {usual})"
            )
        return UsageError(
            f"check_replicas: {who}: nothing was compared. Give the same model, "
            "optimizer and buffers= on every rank, after the same number of steps; an optimizer that shards its state "
            "(ZeroRedundancyOptimizer) has no copies of it: leave it out"
        )


@functools.lru_cache(maxsize=64)
def _factor(rank: int, ranks: Ranks) -> int:
    """Of each of ``ranks`` a number that looks random; they add up to zero."""
    if rank != ranks[0]:
        return scrambled(rank) | 1
    return -sum(scrambled(other) | 1 for other in ranks[1:])


def _odd(values: dict[int, int]) -> tuple[Ranks, int]:
    """The ranks that have another value than most, and how many most are; all ranks where several values are on most.

    >>> _odd({0: 7, 1: 7, 2: 8}), _odd({0: 7, 1: 8}), _odd({0: 7, 1: 8, 2: 7, 3: 8, 4: 9}), _odd({0: 7, 1: 7})
    (((2,), 2), ((0, 1), 1), ((0, 1, 2, 3, 4), 2), ((), 2))
    """
    (right, most), *others = collections.Counter(values.values()).most_common()
    tied = any(count == most for _, count in others)
    return tuple(rank for rank in sorted(values) if tied or values[rank] != right), most


def _difference(copy: Copy, groups: Sequence[dict[int, int]]) -> Difference | None:
    looked = [(*_odd(values), len(values)) for values in groups]
    wrong = [(ranks, agree, size) for ranks, agree, size in looked if ranks]
    if not wrong:
        return None
    ranks = tuple(sorted(rank for odd, _, _ in wrong for rank in odd))
    _, agree, size = min(wrong, key=lambda each: each[1])
    tied = tuple(odd for odd, _, count in wrong if len(odd) == count)
    return Difference(copy.name, ranks, size, agree, copy.shape, copy.part.dtype, tied)
