"""``check_replicas`` compares the copies of tensors on several ranks, and names the ranks whose copy is different."""

# [Note: one sum says that all copies are the same]
# Each rank multiplies the checksum of its copy by a factor, and the factors of the ranks that should have the same
# tensor add up to zero. So the sum over all ranks is zero exactly if their checksums are equal, and it does not matter
# which tensor is on which ranks: groups of copies that cross one another (a two-dimensional mesh) go into one sum, and
# the bytes that are sent do not grow with their number. The tensors are added up in 512 sums; each tensor has a factor
# of its own, so that two differences do not cancel. A difference goes unnoticed with a probability of about 2**-60.
# Only if a sum is not zero, a second collective of that sum's tensors tells which ranks differ. All ranks must hold
# tensors of the same names, shapes and dtypes, in one order. A hash of these goes through the same collective, so if
# ranks do not agree, every rank raises the same error and no rank waits for another.

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._hashing import Checksums, signed64, splitmix64
from disthooks._match import canonical_name
from disthooks._ranks import global_rank, world_ranks
from disthooks._tensors import exotic, local_part
from disthooks.engines.base import Engine
from disthooks.engines.detect import detect_engine
from disthooks.errors import UsageError
from disthooks.grads import collectives
from disthooks.grads.plan import optimized_shards

Ranks = tuple[int, ...]

# The number of sums; see [Note: one sum says that all copies are the same]. It bounds the bytes that are sent if all
# copies are the same. If something differs, all tensors of that sum are compared one by one.
BUCKETS = 512


def format_ranks(ranks: Sequence[int], last: str = ", ") -> str:
    """Some ranks in words, with ``last`` before the last one.

    >>> format_ranks([3]), format_ranks([0, 5]), format_ranks(range(12))
    ('rank 3', 'ranks 0, 5', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more')
    >>> format_ranks([0, 5], " and "), format_ranks([1, 2, 3], " and ")
    ('ranks 0 and 5', 'ranks 1, 2 and 3')
    """
    shown = ", ".join(map(str, ranks[:8]))
    if len(ranks) > 8:
        shown += f" and {len(ranks) - 8} more"
    elif len(ranks) > 1:
        shown = last.join((", ".join(map(str, ranks[:-1])), str(ranks[-1])))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies are not all the same.

    Attributes:
        name: the name of the parameter or buffer; ``"layer.weight: exp_avg"`` for a state that an optimizer keeps.
        ranks: the global ranks whose copy is not the copy that most ranks have. If several copies are on equally many
            ranks, and no other copy is on more, nothing says which is right, and these are all ranks of the group.
        copies: how many ranks should have the same.
        agree: how many ranks have the copy that most have. If there are several groups of ranks, this is the number in
            the group that agrees least.
        shape: the shape of the whole tensor.
        dtype: its dtype.
        tied: the ranks of each group in which nothing says which copy is right.
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
        same = f"{self.agree} of {self.copies} copies are the same" if self.agree > 1 else "no two copies are the same"
        about = f"({kind}, {shape}; {few}{same})"
        if not self.tied:
            return f"{self.name} differs on {format_ranks(self.ranks)} {about}"
        said = [f"{format_ranks(group, ' and ')} differ, and nothing says which is right" for group in self.tied]
        wrong = tuple(rank for rank in self.ranks if not any(rank in group for group in self.tied))
        said += [f"it differs on {format_ranks(wrong)}"] if wrong else []
        return f"{self.name}: {'; '.join(said)} {about}"


@dataclass(frozen=True)
class ReplicaReport:
    """What :func:`check_replicas` found; the same on every rank.

    Attributes:
        compared: how many tensors of this rank have copies on other ranks.
        differs: the tensors whose copies are not all the same, in the model's order.
        ranks: the global ranks that took part.
        engine: the name of the model's engine.

    >>> print(ReplicaReport(compared=0, differs=(), ranks=(0, 1), engine="FSDP2"))
    FSDP2, 2 ranks: 0 tensors are replicated; nothing to compare
    """

    compared: int
    differs: tuple[Difference, ...]
    ranks: Ranks
    engine: str

    @property
    def ok(self) -> bool:
        """Whether all copies are the same; False if there was nothing to compare."""
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
    """Compare, bit for bit, the tensors that should be the same on several ranks, and name the ranks that differ.

    Every rank must call it. Each rank computes a 64-bit checksum of each tensor on its device; one all-reduce of 8 KiB
    says whether all copies are the same, whatever the model and the number of ranks. Only if they are not, a second
    collective of the tensors in question tells which ranks differ. It waits for the device, so call it between steps,
    and not in every step.

    Under DDP all tensors have copies. Under ``fully_shard`` on a two-dimensional mesh (HSDP) each shard has copies, on
    the ranks with the same coordinate. Under ``fully_shard`` on one dimension only the parameters that it left alone
    have copies. All tensors of a plain module or ``nn.DataParallel`` have copies, since each process has a whole model.

    Args:
        model: the model that the engine returned; for ``fully_shard`` the model itself.
        optimizer: an optimizer whose state is compared too: tensors such as ``exp_avg``, and numbers.
        buffers: whether to compare buffers too. Statistics of BatchNorm differ between ranks, unless they are
            synchronised.
        ranks: for a plain module or ``nn.DataParallel``: the global ranks that have a copy and call this; all ranks
            of the default process group when None.

    Returns:
        A report with ``ok``, ``compared`` and ``differs``; the same on every rank.

    Raises:
        UsageError: on every rank, if the ranks hold tensors of different names, shapes or dtypes; if a tensor is not
            dense; if ``ranks`` leaves out this rank, or the engine knows its ranks itself.
        AttachError: for an engine that is not supported, or an optimizer of another model.

    >>> report = check_replicas(nn.Linear(2, 2))  # one process: no other rank has a copy
    >>> report.ok, report.compared, report.differs
    (False, 0, ())
    """
    engine = detect_engine(model)
    alone = engine.label in ("a plain module", "DataParallel")
    if alone:
        world = world_ranks()
        everyone = world if ranks is None else tuple(sorted(set(ranks)))
        if not set(everyone) <= set(world) or global_rank() not in everyone:
            raise UsageError(
                f"ranks={list(everyone)}: this is rank {global_rank()} of {len(world)}; name ranks that "
                "are there, and call check_replicas on those alone"
            )
    elif ranks is not None:
        raise UsageError(f"ranks= is for plain modules: {engine.label} knows that its ranks are {list(engine.ranks)}")
    else:
        everyone = tuple(sorted(engine.ranks))
    with torch.no_grad():
        tensors = list(_parameters(engine, everyone if alone else None))
        if buffers:
            for name, buffer in engine.model.named_buffers():  # also those that state_dict leaves out
                tensors += _copies(engine, canonical_name(name), buffer, everyone, tuple(buffer.shape))
        if optimizer is not None:
            tensors += _state(engine, optimizer, everyone if alone else None)
        replicated = [tensor for tensor in tensors if len(tensor.replica_ranks) > 1]
        group = collectives.group_of(everyone)
        differs = (
            () if group is None else _compare(group, everyone, tensors, replicated, engine.shards[0].values().device)
        )
    return ReplicaReport(len(replicated), differs, everyone, engine.label)


class _ReplicatedTensor(NamedTuple):
    """One tensor of this rank, and the ranks that should have the same.

    ``shape`` is the shape of the whole tensor; ``part`` is this rank's part of it, a plain strided tensor.
    """

    name: str
    part: torch.Tensor
    shape: tuple[int, ...]
    replica_ranks: Ranks


def _copies(
    engine: Engine, name: str, tensor: torch.Tensor, ranks: Ranks, shape: tuple[int, ...]
) -> list[_ReplicatedTensor]:
    """``tensor`` to be compared; ``shape`` is the same on all ranks, so it is empty if each has another part of it."""
    if hasattr(tensor, "device_mesh"):  # the placements of a DTensor say who has it, also in the optimizer's state
        ranks = engine.shard(0, name, tensor).replica_ranks  # type: ignore[arg-type]
        shape = tuple(tensor.shape)
    return [_ReplicatedTensor(name + key, part, shape, ranks) for key, part in _plain(name, tensor)]


def _parameters(engine: Engine, everyone: Ranks | None) -> Iterator[_ReplicatedTensor]:
    """The parameters; ``everyone`` are the ranks that have a copy, if the engine does not know it."""
    for shard in engine.weight_shards():
        tensor = shard.parameter if hasattr(shard.parameter, "device_mesh") else shard.values()
        shape = tuple(shard.part.shape) if shard.part is not None else ()
        yield from _copies(engine, shard.name, tensor, everyone or shard.replica_ranks, shape)


def _state(engine: Engine, optimizer: Any, everyone: Ranks | None) -> Iterator[_ReplicatedTensor]:
    """The tensors and numbers that ``optimizer`` keeps for each parameter, on the ranks of that parameter."""
    if not engine.has_named_state:
        raise UsageError(
            f"check_replicas(optimizer=...): the optimizer of {engine.label} keeps its state in partitions, "
            "of which no rank has a copy: leave it out"
        )
    step = engine.step_of(optimizer)
    shards = [engine.shards[i] for i in optimized_shards(engine, engine.optimizer_parameters(step))]
    first: dict[int, Any] = {}  # a flat parameter of FSDP1 stands for several of the user's
    for shard in shards:
        first.setdefault(id(shard.parameter), shard)
    for shard in first.values():
        if shard.sharding == "sharded" and not hasattr(shard.parameter, "device_mesh"):
            # A rank without any element of the parameter may have no state, so states are not compared.
            if len(shard.replica_ranks) > 1:
                raise UsageError(
                    f"check_replicas(optimizer=...): the state of {shard.name!r} lies in ranges of flat "
                    f"parameters ({engine.label}), and not every rank has the same entries of it: leave the "
                    "optimizer out"
                )
            continue
        for key, value in _leaves(step.state_of(shard.parameter)):
            yield from _copies(
                engine, f"{shard.name}: {key}", value, everyone or shard.replica_ranks, tuple(value.shape)
            )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors and numbers in nested dicts and lists, by path, in an order that does not depend on insertion."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (bool, int)):
        yield path, torch.tensor(signed64(value))
    elif isinstance(value, (float, complex)):
        yield path, torch.tensor(value, dtype=torch.complex128)
    else:
        items: Iterable[tuple[object, Any]] = ()
        if isinstance(value, dict):
            items = sorted(value.items(), key=lambda item: str(item[0]))  # in one order on every rank
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        for key, inner in items:
            yield from _leaves(inner, f"{path}.{key}".lstrip("."))


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The local part as a strided tensor; for a subclass that is made of several tensors, each of them."""
    part = local_part(tensor).detach()
    reason = exotic(part)
    if reason == "subclass" and hasattr(part, "__tensor_flatten__"):
        for key in part.__tensor_flatten__()[0]:
            yield from ((f".{key}{deeper}", leaf) for deeper, leaf in _plain(name, getattr(part, key)))
    elif reason is not None:
        raise UsageError(f"{name!r} cannot be compared: its {type(part).__name__} is {reason}, not dense memory")
    else:
        yield "", part


def _compare(
    group: Any,
    ranks: Ranks,
    tensors: Sequence[_ReplicatedTensor],
    replicated: Sequence[_ReplicatedTensor],
    device: torch.device,
) -> tuple[Difference, ...]:
    """The tensors whose copies differ. The second collective runs only if something does."""
    device, of = collectives.device_for(group, device), Checksums()
    # A copy from the host need not be waited for; a copy to the host must have arrived before it is added up.
    moved = [each.to(device, non_blocking=each.is_cpu) for each in (of(copy.part) for copy in replicated)]
    sums = torch.stack(moved) if moved else torch.zeros(0, dtype=torch.int64, device=device)
    lines = "\n".join(f"{c.name} {list(c.shape)} {c.part.dtype} {len(c.replica_ranks)}" for c in tensors)
    signature = int.from_bytes(hashlib.blake2b(lines.encode(), digest_size=8).digest(), "little")
    sketch = _sketch(sums, [copy.replica_ranks for copy in replicated], global_rank(), ranks, signature)
    *buckets, is_other = collectives.total(group, sketch).tolist()
    if is_other:
        rows = collectives.gather(group, _numbers([signature, len(tensors)], device))
        raise _strangers(dict(zip(ranks, rows, strict=True)))
    suspects = [i for i in range(len(replicated)) if buckets[i % BUCKETS]]
    if not any(buckets):
        return ()
    # Each rank sends its checksum of each of these tensors, and the lowest rank that should have the same.
    firsts = _numbers([replicated[i].replica_ranks[0] for i in suspects], device)
    rows = collectives.gather(group, torch.stack((firsts, sums[_numbers(suspects, device)]), 1).flatten())
    found = []
    for place, i in enumerate(suspects):
        # The checksum of each rank, in groups of ranks that should have the same.
        groups: dict[int, dict[int, int]] = collections.defaultdict(dict)
        for other, row in zip(ranks, rows, strict=True):
            groups[row[2 * place]][other] = row[2 * place + 1]
        # Of each group in which ranks differ: these ranks, how many agree, and the number of its ranks.
        wrong = [(odd, agree, len(values)) for values in groups.values() for odd, agree in [_odd(values)] if odd]
        if wrong:  # if not, another tensor of the same sum differs
            copy = replicated[i]
            _, agree, size = min(wrong, key=lambda each: each[1])
            tied = tuple(odd for odd, _, size in wrong if len(odd) == size)
            all_odd = tuple(sorted(other for odd, _, _ in wrong for other in odd))
            found.append(Difference(copy.name, all_odd, size, agree, copy.shape, copy.part.dtype, tied))
    return tuple(found)


def _sketch(
    sums: torch.Tensor, replica_ranks: Sequence[Ranks], rank: int, ranks: Ranks, signature: int
) -> torch.Tensor:
    """``BUCKETS + 1`` int64 numbers, whose totals over all ranks are zero exactly if every copy is the same.

    See [Note: one sum says that all copies are the same]. The last one is of the signatures alone.
    """
    factors = [_factor(rank, copies) * (splitmix64(i) | 1) for i, copies in enumerate(replica_ranks)]
    padded = torch.zeros(-(-len(factors) // BUCKETS) * BUCKETS, dtype=torch.int64, device=sums.device)
    padded[: len(factors)] = sums * _numbers(factors, sums.device)
    return torch.cat((padded.view(-1, BUCKETS).sum(0), _numbers([_factor(rank, ranks) * signature], sums.device)))


def _numbers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([signed64(value) for value in values], dtype=torch.int64).to(device, non_blocking=True)


def _strangers(rows: dict[int, Sequence[int]]) -> UsageError:
    """The error for ranks that hold different tensors; of each rank its signature, and how many tensors it has."""
    odd, _ = _odd({rank: signature for rank, (signature, _) in rows.items()})
    if len(odd) == len(rows):
        counts = [str(many) for _, many in rows.values()]
        shown = ", ".join([*counts[:8], *(["..."] if len(counts) > 8 else [])])
        who = f"{format_ranks(odd, ' and ')} hold tensors of different names, shapes or dtypes ({shown} tensors)"
    else:
        usual = next(many for rank, (_, many) in rows.items() if rank not in odd)
        who = (
            f"{format_ranks(odd)} of {len(rows)} hold tensors of other names, shapes or dtypes than the others "
            f"({rows[odd[0]][1]} tensors, the others {usual})"
        )
    return UsageError(
        f"check_replicas: {who}: nothing was compared. Give the same model, optimizer and buffers= on every rank, "
        "after the same number of steps; an optimizer that shards its state (ZeroRedundancyOptimizer) has no copies "
        "of it: leave it out"
    )


@functools.lru_cache(maxsize=64)
def _factor(rank: int, ranks: Ranks) -> int:
    """The factor of ``rank`` for a tensor of ``ranks``: a number that looks random; all of them add up to zero."""
    if rank != ranks[0]:
        return splitmix64(rank) | 1
    return -sum(splitmix64(other) | 1 for other in ranks[1:])


def _odd(values: dict[int, int]) -> tuple[Ranks, int]:
    """The ranks whose value is not the most frequent one, and how many ranks have that one; all ranks if several tie.

    >>> _odd({0: 7, 1: 7, 2: 8}), _odd({0: 7, 1: 8}), _odd({0: 7, 1: 8, 2: 7, 3: 8, 4: 9}), _odd({0: 7, 1: 7})
    (((2,), 2), ((0, 1), 1), ((0, 1, 2, 3, 4), 2), ((), 2))
    """
    (right, most), *others = collections.Counter(values.values()).most_common()
    tied = any(count == most for _, count in others)
    return tuple(rank for rank in sorted(values) if tied or values[rank] != right), most
