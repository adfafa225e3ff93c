"""Several models, or the parts of one model on several ranks, as if one engine had all of their parameters.

:class:`Joined` stands for the models of a list, for the stages of a pipeline, and for experts of which each rank has
its own.
"""

# [Note: parameters of other ranks]
# Two stages of a pipeline have different parameters, and the numbers that are merged over the ranks have one place for
# each parameter. So at attach the ranks tell each other which parameters they have, and every rank makes the same list
# of all of them, in the order of the ranks. A rank has an empty tensor for a parameter that is on other ranks only: it
# never has a gradient and owns nothing, so rules and statistics need no code for it.
# A part is the ranks that train one model together, and the place of the model among those of the rank. Two ranks have
# the same parameter if name and part are the same. Stages that are each an `nn.Sequential` have the same names in
# different parts: then all names begin with "model0.", "model1." and so on.

# [Note: experts]
# A rank may have experts of its own, which FSDP ignores and nobody reduces. All of them have one name. They are treated
# as one parameter that is cut along its first dimension over the ranks of a group, so each rank's gradient counts, and
# the norm, the decision and the factor are those of all experts. If there are several such groups, ranks at the same
# place in them have copies, and the ranks of the first group own them.

# [Note: copies]
# Several ranks may have one weight alike, and no engine knows it: two stages of a pipeline share an embedding, or plain
# modules have a router beside experts of their own, and the loop averages the gradients. The ranks tell each other such
# a parameter by the entry of `copies` that names it, and by its place among those that the entry matches, because two
# stages may have it under different names. The ranks of the first part own it, so it counts once.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from disthooks._match import Pattern, as_patterns, is_match, match
from disthooks._ranks import global_rank, world_ranks
from disthooks._torch import scaler_under_way
from disthooks.engines.base import Engine, LocalHook, Part, Removable, Shard, Sharding
from disthooks.engines.step import parameters_of
from disthooks.errors import AttachError, MatchError, UsageError

#: For each pattern of parameters the ranks of the group, each of which has experts of its own.
Experts = Mapping[Pattern, tuple[int, ...]]

#: The patterns of each entry of ``copies``.
Copies = Sequence[tuple[Pattern, ...]]


class Described(NamedTuple):
    """A parameter as a rank tells the others of it: plain values only.

    Attributes:
        part: the ranks that train its model together, and the place of the model among those of the rank.
        name: its name in its own model.
        shape: the shape of the whole parameter; of an expert, the shape of one rank's.
        dtype: the name of its dtype.
        requires_grad: whether it needs gradients.
        group: the ranks of the group in which each rank has an expert of its own; () if it is no expert.
        copy: the number of the entry of ``copies`` that names it, and its place among those that the entry matches; ()
            if it is no copy. See [Note: copies].
    """

    part: tuple[tuple[int, ...], int]
    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    group: tuple[int, ...]
    copy: tuple[int, int] | tuple[()] = ()

    @property
    def key(self) -> tuple[object, ...]:
        return self.copy or (self.part, self.name)


@dataclasses.dataclass(frozen=True)
class OwnParameter:
    """A parameter of this rank: its engine, its index there, and its description."""

    engine: Engine
    index: int
    described: Described


class Joined(Engine):
    """The engines of several models, and the parameters of all ranks; see [Note: parameters of other ranks].

    Raises:
        AttachError: on every rank, when one of them has an engine or an optimizer that cannot take part.

    Attributes:
        engines: the engine of each model.
        experts: the shards of this rank that are experts.
        whole: the parameters that this rank has whole, with their descriptions; no experts.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        ranks: Sequence[int],
        parameters: Sequence[nn.Parameter],
        experts: Experts,
        copies: Copies,
        gather: Any,
        scaler: Any = None,
    ) -> None:
        self.engines, self.ranks = tuple(engines), tuple(ranks)
        self.position = self.ranks.index(global_rank())
        self.model = nn.ModuleList([engine.model for engine in engines])
        self.label = " and ".join(dict.fromkeys(engine.label for engine in engines))  # type: ignore[misc]
        self.trains_alone = all(engine.trains_alone for engine in engines)  # type: ignore[misc]
        self.may_step_unreduced = False  # type: ignore[misc]
        self.reduces_late = any(engine.reduces_late for engine in engines)  # type: ignore[misc]
        self.has_named_state = all(engine.has_named_state for engine in engines)
        self.first_sum_differs = any(engine.first_sum_differs for engine in engines)  # type: ignore[misc]
        failure = ""
        local: list[OwnParameter] = []
        try:
            self._check(parameters)
            local = list(self._local(parameters, experts, copies))
        except UsageError as error:  # raised on all ranks, so that none waits for this one
            failure = str(error)
        self._gather = gather
        told = gather((failure, [tuple(each.described) for each in local]))
        if failed := next((text for text, _ in told if text), ""):
            raise AttachError(failed)
        everyone = [[Described(*fields) for fields in described] for _, described in told]
        self._has_experts = any(each.group for described in everyone for each in described)
        if experts and not self._has_experts:
            raise MatchError(f"experts: no parameter of any rank matches {' or '.join(map(repr, experts))}")
        self.has_stages = len({each.part[0] for described in everyone for each in described}) > 1
        self.has_other_parts = self.has_stages or len(engines) > 1
        self._refuse_scaler(scaler)
        copied = {each.copy[0] for described in everyone for each in described if each.copy}
        if missed := [patterns for entry, patterns in enumerate(copies) if entry not in copied]:
            raise MatchError(f"copies: no parameter of any rank matches {' or '.join(map(repr, missed[0]))}")
        self.experts: list[Shard] = []
        self.copied = frozenset()
        self.whole = [
            (each.described, each.engine.shards[each.index])
            for each in local
            if not each.described.group and each.engine.shards[each.index].sharding != "sharded"
        ]
        self.shards = tuple(self._union(local, everyone))

    @property
    def models(self) -> Sequence[nn.Module]:
        return [model for engine in self.engines for model in engine.models]

    @property
    def prefixes(self) -> Sequence[str]:
        return self._prefixes

    def sync_flags(self) -> list[tuple[Any, str]]:
        return [flag for engine in self.engines for flag in engine.sync_flags()]

    def union(self, names: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(name for told in self._gather(list(names)) for name in told))

    # -- making the list of parameters

    def _check(self, parameters: Sequence[nn.Parameter]) -> None:
        for engine in self.engines:
            if engine.label.startswith("DeepSpeed"):
                raise AttachError(
                    "a DeepSpeed engine steps an optimizer of its own, so it cannot share a step with other models or "
                    "ranks: attach to it alone, gradients(engine, ...)"
                )
            if not set(engine.ranks) <= set(self.ranks):
                raise AttachError(
                    f"the model is on the ranks {list(engine.ranks)} ({engine.label}), and process_group= has the "
                    f"ranks {list(self.ranks)}: give a group that has all ranks of each model"
                )
        ids = {id(shard.parameter) for engine in self.engines for shard in engine.shards}
        strangers = [parameter for parameter in parameters if id(parameter) not in ids]
        if strangers:
            raise AttachError(
                f"{len(strangers)} parameters of the optimizers on rank {global_rank()} (shapes "
                f"{', '.join(str(tuple(each.shape)) for each in strangers[:3])}) are in none of the models "
                f"({self.label}): make the optimizers from their parameters, after the engines took the models"
            )

    def _local(self, parameters: Sequence[nn.Parameter], experts: Experts, copies: Copies) -> Iterator[OwnParameter]:
        ids = {id(parameter) for parameter in parameters}
        engine_of: dict[int, Engine] = {}  # a parameter that two models share counts in the first
        for place, engine in enumerate(self.engines):
            groups, copied = _groups_of(engine, experts), _copies_of(engine, copies)
            for index, shard in enumerate(engine.shards):
                if id(shard.parameter) in ids and engine_of.setdefault(id(shard.parameter), engine) is engine:
                    dtype = str(shard.parameter.dtype).removeprefix("torch.")
                    described = Described(
                        (engine.ranks, place),
                        shard.name,
                        tuple(shard.shape),
                        dtype,
                        shard.parameter.requires_grad,
                        groups.get(index, ()),
                        copied.get(index, ()),
                    )
                    yield OwnParameter(engine, index, described)

    def _union(self, local: Sequence[OwnParameter], everyone: Sequence[Sequence[Described]]) -> Iterator[Shard]:
        """One shard for each parameter of any rank, in the same order on every rank."""
        mine = {each.described.key: each for each in local}
        of_key: dict[tuple[object, ...], list[Described]] = {}
        for described in everyone:
            for each in described:
                of_key.setdefault(each.key, []).append(each)
        parts = {part: n for n, part in enumerate(dict.fromkeys(each[0].part for each in of_key.values()))}
        names = [each[0].name for each in of_key.values()]
        prefix = {part: f"model{n}." if len(set(names)) < len(names) else "" for part, n in parts.items()}
        self._prefixes = [prefix.get((engine.ranks, place), "") for place, engine in enumerate(self.engines)]
        device = local[0].engine.shards[local[0].index].parameter.device if local else torch.device("cpu")
        self._local_of: dict[int, tuple[Engine, int]] = {}
        self._absent: list[nn.Parameter] = []
        for index, (key, described) in enumerate(of_key.items()):
            one = described[0]
            name = prefix[one.part] + one.name
            here = mine.get(key)
            if here is not None:
                self._local_of[index] = here.engine, here.index
                shard = dataclasses.replace(here.engine.shards[here.index], name=name)
                if one.group:
                    shard = self._expert(shard, described, here.described.group)
                    self.experts.append(shard)
                if one.copy:
                    shard = self._copy(shard, described, here.described)
                yield shard
                continue
            empty = torch.empty(0, dtype=getattr(torch, one.dtype), device=device)
            self._absent.append(nn.Parameter(empty, requires_grad=one.requires_grad and empty.is_floating_point()))
            kind: Sharding = "unreduced" if one.copy and len(one.part[0]) == 1 else "sharded"
            ranks = _ranks_of(described) if one.copy else one.part[0]
            yield Shard(name, self._absent[-1], False, kind, Part(_stacked(one), span=(0, 0)), ranks)

    def _expert(self, shard: Shard, described: Sequence[Described], group: tuple[int, ...]) -> Shard:
        """The shard of an expert of this rank; see [Note: experts]."""
        groups = list(dict.fromkeys(each.group for each in described))
        place = group.index(self.ranks[self.position])
        if len({(each.shape, len(each.group)) for each in described}) > 1:
            raise AttachError(
                f"experts: {shard.name!r} has other shapes on other ranks, or the groups have other sizes "
                f"({[(each.shape, each.group) for each in described[:3]]}): give each shape a name of its own"
            )
        shape = described[0].shape
        rows = shape[0] if shape else 1
        box = ((place * rows, rows), *((0, size) for size in shape[1:]))
        return dataclasses.replace(
            shard,
            is_owner=group == groups[0],
            sharding="sharded",
            part=Part(_stacked(described[0]), box=box),
            replica_ranks=tuple(sorted(each[place] for each in groups)),
        )

    def _copy(self, shard: Shard, described: Sequence[Described], here: Described) -> Shard:
        """The shard of a parameter that other ranks have too; see [Note: copies]."""
        if len({(each.shape, len(each.part[0])) for each in described}) > 1:
            raise AttachError(
                f"copies: {shard.name!r} has other shapes or other engines on other ranks "
                f"({[(each.name, each.shape) for each in described[:3]]}): an entry names one parameter of each "
                "rank, or several in the same order"
            )
        kind: Sharding = "unreduced" if len(here.part[0]) == 1 else shard.sharding
        is_owner = shard.is_owner and here.part == described[0].part
        self.copied |= {shard.name}
        ranks = _ranks_of(described) if kind == "unreduced" else shard.replica_ranks
        return dataclasses.replace(shard, is_owner=is_owner, sharding=kind, replica_ranks=ranks)

    # -- what all engines do together

    def optimizer_parameters(self, optimizer: Any) -> list[nn.Parameter]:
        return [*parameters_of(optimizer), *self._absent]

    def has_own_batch(self) -> bool:
        same = all(set(engine.ranks) == set(self.ranks) and engine.has_own_batch() for engine in self.engines)
        return same and not self._has_experts

    def check(self) -> None:
        self._refuse_scaler(scaler_under_way())
        for engine in self.engines:
            engine.check()

    def _refuse_scaler(self, scaler: Any) -> None:
        if self.has_stages and scaler is not None and scaler.is_enabled():
            raise UsageError(
                "process_group= with a GradScaler: each stage's scaler would look at the gradients of its own stage, "
                "leave the step out alone and take another scale, while other stages step: train in bfloat16, which "
                "needs no scaler, or in float32"
            )

    def reason_unreduced(self) -> str:
        return next((why for engine in self.engines if (why := engine.reason_unreduced())), "")

    def keeps_gradients(self) -> str:
        return next((what for engine in self.engines if (what := engine.keeps_gradients())), "")

    def watch_backward(self, see: Callable[[], None]) -> list[Removable]:
        return [handle for engine in self.engines for handle in engine.watch_backward(see)]

    def is_first_gradient(self, index: int) -> bool:
        engine, own = self._local_of[index]
        return engine.is_first_gradient(own)

    def on_local(self, wanted: Sequence[int], hook: LocalHook, must_fire: bool = True) -> list[Removable]:
        handles: list[Removable] = []
        for engine in self.engines:
            own = {self._local_of[i][1]: i for i in wanted if i in self._local_of and self._local_of[i][0] is engine}
            handles += engine.on_local(list(own), functools.partial(_called, hook, own), must_fire)
        return handles


def _called(hook: LocalHook, of: Mapping[int, int], index: int, grad: torch.Tensor) -> torch.Tensor | None:
    return hook(of[index], grad)


def _groups_of(engine: Engine, experts: Experts) -> dict[int, tuple[int, ...]]:
    """For each parameter of ``engine`` that is an expert, the ranks of its group."""
    found: dict[int, tuple[int, ...]] = {}
    named = [(shard.name, shard.as_full_parameter()) for shard in engine.shards]
    for pattern, ranks in experts.items():
        try:
            names = {name for name, _ in match(named, (pattern,), "parameter")}
        except MatchError:  # another rank may have experts of this name
            continue
        for index, shard in enumerate(engine.shards):
            if shard.name not in names:
                continue
            if shard.sharding == "sharded" or (shard.sharding == "replica" and len(engine.ranks) > 1):
                raise AttachError(
                    f"experts: {engine.label} has {shard.name!r} itself, on the ranks {list(shard.replica_ranks)}, and "
                    "reduces its gradient: experts= is for parameters that the engine ignores (ignored_params of "
                    "fully_shard, ignored_states of FSDP1)"
                )
            found[index] = ranks
    return found


def _ranks_of(described: Sequence[Described]) -> tuple[int, ...]:
    """The ranks that have a parameter."""
    return tuple(sorted({rank for each in described for rank in each.part[0]}))


def _copies_of(engine: Engine, copies: Copies) -> dict[int, tuple[int, int]]:
    """For each parameter of ``engine`` that other ranks have too, its entry and its place there."""
    found: dict[int, tuple[int, int]] = {}
    named = [(shard.name, shard.as_full_parameter()) for shard in engine.shards]
    for entry, patterns in enumerate(copies):
        matched = [i for i, (name, value) in enumerate(named) if any(is_match(p, name, value) for p in patterns)]
        found |= {index: (entry, place) for place, index in enumerate(matched)}
    return found


def _stacked(described: Described) -> torch.Size:
    """The shape of a parameter; of an expert, that of the experts of all ranks of a group, one behind the other."""
    if not described.group:
        return torch.Size(described.shape)
    first, *rest = described.shape or (1,)
    return torch.Size((first * len(described.group), *rest))


def ranks_of_group(what: str, group: Any) -> tuple[int, ...]:
    """The global ranks of a process group, in its order.

    Raises:
        UsageError: when it is something else, or this rank is not in it.
    """
    if isinstance(group, str) and group == "world":
        return world_ranks()
    group = group.get_group() if hasattr(group, "get_group") else group
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"{what}={group!r}: give a process group, a DeviceMesh of one dimension, or 'world'")
    return tuple(dist.get_process_group_ranks(group))


def copies_of(given: Any, ranks: tuple[int, ...]) -> Copies:
    """The argument ``copies``: patterns, or a dict of patterns and groups, which have to be among ``ranks``.

    Raises:
        UsageError: when it is something else.
    """
    if not isinstance(given, Mapping):
        return [(pattern,) for pattern in as_patterns(given)] if given else []
    for group in given.values():
        if group is not None and not set(found := ranks_of_group("copies", group)) <= set(ranks):
            raise UsageError(f"copies: the ranks {list(found)} are not all among those that step, {list(ranks)}")
    return [as_patterns(patterns) for patterns in given]


def experts_of(given: Any, ranks: tuple[int, ...]) -> Experts:
    """The argument ``experts``: patterns, or a dict of patterns and groups; without a group it is ``ranks``.

    Raises:
        UsageError: when it is something else.
    """
    if not isinstance(given, Mapping):
        return {} if given is None else dict.fromkeys(as_patterns(given), ranks)
    return {
        pattern: ranks if group is None else ranks_of_group("experts", group)
        for patterns, group in given.items()
        for pattern in as_patterns(patterns)
    }
