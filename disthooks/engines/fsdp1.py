"""The flat parameters of FSDP1: which parameters are in them, where, and on which ranks.

torch has no public way to ask. What is private of it (the attributes of ``FullyShardedDataParallel``, of its
``FlatParamHandle`` and of the ``FlatParameter`` that begin with an underscore) is read in this file alone.

``FullyShardedDataParallel`` (FSDP1): each rank has a range of flat parameters, each made of several.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from disthooks._handles import weak_method
from disthooks._match import canonical_name, is_of_class
from disthooks._registry import register
from disthooks._torch import backward_id
from disthooks.engines.base import Engine, HandleGroup, LocalHook, Part, Removable, Shard
from disthooks.engines.optimizer_step import BeforeStep, OnRepeat
from disthooks.errors import AttachError, UsageError


class FlatParamView(NamedTuple):
    """One of the user's parameters inside a flat one.

    Attributes:
        name: in the user's own model.
        module: the module that has it, and ``key``: under what name.
        start: its first element in the whole flat parameter, where padding may lie between parameters.
        shape: of the whole parameter, and ``stride``: its elements lie in the flat one as they lay in memory.
        local: its first and one past its last element in this rank's shard; equal where the rank has none of it.
        span: the same elements, counted from the parameter's first.
    """

    name: str
    module: nn.Module
    key: str
    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    local: tuple[int, int]
    span: tuple[int, int]

    def of_whole(self, flat: torch.Tensor) -> torch.Tensor:
        """Out of a whole flat tensor, in the shape of the parameter; it shares memory."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    def of_shard(self, flat: torch.Tensor) -> torch.Tensor:
        """Out of this rank's shard of a flat tensor: of one dimension, sharing memory, without any padding."""
        return flat[self.local[0] : self.local[1]]

    def in_order(self) -> bool:
        """Whether its elements lie in the order of their indices; after ``channels_last`` they do not."""
        return torch.empty(self.shape, device="meta").as_strided(self.shape, self.stride).is_contiguous()

    def part(self, sharded: bool) -> Part | None:
        """Which elements are on this rank; None for what lies in another order than its indices."""
        if not self.in_order():
            return None
        return Part(self.shape, span=self.span) if sharded else Part.whole(self.shape)


class Unit:
    """One ``FullyShardedDataParallel`` that has a flat parameter.

    Attributes:
        name: of its module in the user's own model.
        flat: the flat parameter, on which gradients arrive; the optimizer's own if ``original`` is false.
        original: whether the optimizer holds the user's parameters (``use_orig_params=True``).
        sharded: whether each rank has a part; otherwise (NO_SHARD) every one has all of it.
        pieces: the parameters in it.
        ranks: the global ranks that train it together.
        replica_ranks: those that have the same elements as this one.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        # __dict__, because the module's __getattr__ goes on to ask the module inside
        self.name, self._module = name, module
        self._handle: Any = module.__dict__["_handle"]
        self.flat: Any = self._handle.flat_param
        self.original: bool = self._handle._use_orig_params
        self.sharded: bool = self._handle.uses_sharded_strategy
        self._synced = True
        self.pieces = tuple(self._pieces())
        held: list[nn.Parameter] = self.flat._params if self.original else [self.flat] * len(self.pieces)
        self._held = tuple(held)
        self.ranks, self.replica_ranks = self._ranks()
        self._must_be_right()

    @property
    def inside(self) -> nn.Module:
        """The user's module: when its forward begins, the parameters are whole."""
        return cast(nn.Module, self._module._fsdp_wrapped_module)

    def optimizer_parameters(self, number: int) -> nn.Parameter:
        """What an optimizer holds of a piece."""
        return self._held[number]

    def parameters(self) -> list[nn.Parameter]:
        """The flat parameter and those in it, tied ones too."""
        return [self.flat, *(self.flat._params or ()), *(self.flat._shared_params or ())]

    def values(self) -> torch.Tensor:
        """This rank's shard; while its module runs, the flat parameter itself is whole."""
        return cast(torch.Tensor, getattr(self.flat, "_local_shard", self.flat)).detach()

    def reduced(self) -> bool:
        """Whether the gradient has the size that it has once FSDP has reduced it.

        NO_SHARD's size never changes: there what :meth:`watch_reduction` has seen tells.
        """
        if not self._synced:
            return False
        return self.flat.grad is None or self.flat.grad.size() == self.flat._sharded_size

    def watch_reduction(self) -> Any:
        """Under NO_SHARD, a handle of a hook that notices in each backward whether FSDP reduces it; else None."""
        if self.sharded or not self.flat.requires_grad:
            return None

        def see(grad: torch.Tensor) -> None:
            self._synced = bool(self._module.__dict__.get("_sync_gradients", True))

        return self.flat.register_hook(see)

    def is_first_gradient(self) -> bool:
        """Whether there is no gradient yet, neither a whole one of ``no_sync()`` nor a reduced one put aside."""
        return self.flat.grad is None and getattr(self.flat, "_saved_grad_shard", None) is None

    def replaced(self, number: int) -> bool:
        """Whether something took the place of a piece, or of all of the flat parameter, since this was made.

        FSDP itself registers the parameters that it took, or, in mid forward, views that are no Parameters.
        """
        if self._module.__dict__["_handle"] is not self._handle or self._handle.flat_param is not self.flat:
            return True
        piece = self.pieces[number]
        now = piece.module._parameters.get(piece.key) if self.original else None
        return isinstance(now, nn.Parameter) and now is not self._held[number]

    def _pieces(self) -> Iterator[FlatParamView]:
        flat = self.flat
        ends = list(itertools.accumulate(flat._numels_with_padding))
        starts = [0, *ends[:-1]]
        true = [start for start, padding in zip(starts, flat._is_padding_mask, strict=True) if not padding]
        for i, (key, module, _) in enumerate(flat._param_infos):
            name, here = canonical_name(f"{self.name}.{flat._fqns[i]}".lstrip(".")), flat._shard_param_infos[i]
            if flat._param_extensions[i] is not None:
                raise AttachError(
                    f"{name!r} is a DTensor inside FSDP1, and which of its elements a rank has cannot be told; use "
                    "torch.distributed.fsdp.fully_shard with tensor parallelism"
                )
            local, span = (0, 0), (0, 0)
            if here.in_shard:
                local = here.offset_in_shard, here.offset_in_shard + here.numel_in_shard
                span = here.intra_param_start_idx, here.intra_param_end_idx + 1
            yield FlatParamView(name, module, key, true[i], flat._shapes[i], flat._strides[i], local, span)

    def _must_be_right(self) -> None:
        """torch 2.13 makes p.grad of such a weight by reshape(), which takes its elements in the wrong order."""
        mixed_up = [piece.name for piece in self.pieces if self.original and not self.sharded and not piece.in_order()]
        if mixed_up:
            raise AttachError(
                f"{mixed_up[0]!r} lies in another order than its indices (channels_last?), and FSDP1 mixes up the "
                "elements of its gradient with use_orig_params=True and NO_SHARD, hooks or not: make it contiguous "
                "before FSDP1 takes it, or use use_orig_params=False, another strategy or DDP"
            )

    def _ranks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        module: Any = self._module
        ranks = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
        across = module.__dict__.get("_inter_node_pg")
        if across is None:
            return ranks, (dist.get_rank(),) if self.sharded else ranks
        replica_ranks = tuple(sorted(dist.get_process_group_ranks(across)))
        if not self.sharded and len(replica_ranks) > 1:
            raise AttachError(
                f"{self._shown()} is HYBRID_SHARD with one rank to shard over, which FSDP1 takes for NO_SHARD and "
                f"then never averages gradients over the replicas {list(replica_ranks)}: use NO_SHARD over all "
                "ranks, DDP, or more than one rank in the second dimension of the mesh"
            )
        return self._all(len(ranks) * len(replica_ranks)), replica_ranks

    def _all(self, count: int) -> tuple[int, ...]:
        """The ranks of all replicas, of which the process groups name only this rank's row and column."""
        mesh = self._module.__dict__.get("_device_mesh")
        if mesh is not None:
            return tuple(sorted(mesh.mesh.flatten().tolist()))
        if count == dist.get_world_size():
            return tuple(range(count))
        raise AttachError(
            f"{self._shown()} is HYBRID_SHARD over process groups that make {count} of {dist.get_world_size()} ranks, "
            "and which ones cannot be told from them: give FullyShardedDataParallel a device_mesh in their place"
        )

    def _shown(self) -> str:
        return repr(self.name) if self.name else "the model (FSDP1)"


def units_of(model: nn.Module) -> tuple[Unit, ...]:
    """Every FSDP1 module of ``model`` that has parameters of its own, in the same order on every rank."""
    named = ((canonical_name(name), module) for name, module in model.named_modules() if is_fsdp1(module))
    return tuple(Unit(name, module) for name, module in named if module.__dict__["_handle"] is not None)


def is_fsdp1(module: nn.Module) -> bool:
    """Whether ``module`` is a ``FullyShardedDataParallel``."""
    return is_of_class(module, "FullyShardedDataParallel")


@dataclass(frozen=True, eq=False)
class FlatShard(Shard):
    """What a rank has of one parameter in a flat one: a range of its elements, under NO_SHARD all of them.

    Attributes:
        unit: the FSDP module that has it.
        piece: where it is in the flat parameter.
    """

    unit: Unit = field(kw_only=True)
    piece: FlatParamView = field(kw_only=True)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self.piece.shape

    def gradient(self) -> torch.Tensor | None:
        """A view of what the optimizer uses; None where no backward came here, or the rank has no element of it.

        Raises:
            UsageError: when the gradient is not reduced yet.
        """
        grad = self.parameter.grad
        if grad is None or not self.present():
            return None
        if not self.unit.reduced():
            raise UsageError(
                f"the gradient of {self.name!r} on rank {dist.get_rank()} is not reduced yet (FSDP1): the last "
                "backward ran inside no_sync(); run the last one before optimizer.step() outside of it"
            )
        return grad if self.unit.original else self._of(grad)

    def values(self) -> torch.Tensor:
        """A view of this rank's shard of the flat parameter."""
        return self._of(self.unit.values())

    def optimizer_gradient(self) -> torch.Tensor | None:
        """The local part: FSDP1 has no tensor that means the whole gradient."""
        return self.gradient()

    def present(self) -> bool:
        """Whether this rank has any element of it."""
        return not self.unit.sharded or self.piece.local[0] < self.piece.local[1]

    def _of(self, flat: torch.Tensor) -> torch.Tensor:
        return self.piece.of_shard(flat) if self.unit.sharded else self.piece.of_whole(flat)


@register("engine")
class Fsdp1(Engine):
    """A model with FSDP1 modules in it; parameters that are in none of them belong to the first rank."""

    label = "FSDP1"

    def __init__(self, model: nn.Module) -> None:
        self._units = units_of(model)
        ranks = _ranks_of(self._units)
        super().__init__(model, ranks, ranks.index(dist.get_rank()))
        # The optimizer steps a flat parameter as a whole.
        self.can_exclude_parameters = all(unit.original for unit in self._units)

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        """A model with a ``FullyShardedDataParallel`` in it, or that is one."""
        return any(is_fsdp1(module) for module in model.modules())

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        """A parameter that no FSDP module has: every rank has all of it, and nothing reduces its gradient."""
        if hasattr(parameter, "device_mesh"):
            raise AttachError(
                f"{name!r} is a DTensor beside FSDP1, and how often each of its elements is there cannot be told; use "
                "torch.distributed.fsdp.fully_shard for the whole model"
            )
        return Shard(name, parameter, self.position == 0, "unreduced", Part.whole(parameter.shape), self.ranks)

    def is_stable(self, parameter: nn.Parameter) -> bool:
        """FSDP exchanges what is registered in the place of its parameters; :meth:`check` asks FSDP about them."""
        return id(parameter) in self._apart

    def is_first_gradient(self, index: int) -> bool:
        """Whether FSDP has put aside no gradient of its flat parameter from an earlier backward."""
        shard = self.shards[index]
        return shard.unit.is_first_gradient() if isinstance(shard, FlatShard) else super().is_first_gradient(index)

    def check(self) -> None:
        """Also ask whether FSDP still has the parameters that were attached to."""
        for unit in self._units:
            for i, piece in enumerate(unit.pieces):
                if unit.replaced(i):
                    raise AttachError(
                        f"{piece.name!r} is no longer the parameter that was attached to (FSDP1): something replaced "
                        "it; attach after that, and make the optimizer after it too"
                    )
        super().check()

    def before_step(self, optimizer: Any, run: BeforeStep, on_repeat: OnRepeat = "refuse") -> Removable:
        """Also notice which backward FSDP reduces where the size of a gradient does not tell."""
        hooks = [hook for unit in self._units if (hook := unit.watch_reduction()) is not None]
        return HandleGroup(super().before_step(optimizer, run, on_repeat), *hooks)

    def reason_unreduced(self) -> str:
        """After a backward inside ``no_sync()``: whole gradients, on every rank, whatever elements it holds."""
        late = next((unit for unit in self._units if not unit.reduced()), None)
        if late is None:
            return ""
        return (
            f"the gradient of {late.pieces[0].name!r} is not reduced yet (FSDP1): the last backward ran inside "
            "no_sync(); run the last one before optimizer.step() outside of it"
        )

    def on_local(self, wanted: Sequence[int], hook: LocalHook, must_fire: bool = True) -> list[Removable]:
        """Hooks on the user's parameters never fire: one goes on each flat one, whose gradient is cut into theirs.

        The hook sees the whole, unreduced gradient, in the dtype that forward used.
        """
        handles: list[Removable] = []
        for unit in self._units:
            mine = {i: s for i in wanted if isinstance(s := self.shards[i], FlatShard) and s.unit is unit}
            if mine:
                handles.append(_Local(unit, mine, hook, must_fire))
        others = [i for i in wanted if not isinstance(self.shards[i], FlatShard)]
        return [*handles, *super().on_local(others, hook, must_fire)]

    def _shards(self) -> list[Shard]:
        found: list[Shard] = []
        for unit in self._units:
            for i, piece in enumerate(unit.pieces):
                found.append(self._flat(len(found), unit, piece, unit.optimizer_parameters(i)))
        flat = {id(parameter) for unit in self._units for parameter in unit.parameters()}
        # between forward and backward some strategies leave views, which are no Parameters, in their places
        named = [(n, p) for n, p in self.model.named_parameters() if isinstance(p, nn.Parameter) and id(p) not in flat]
        self._apart = {id(parameter) for _, parameter in named}
        return [*found, *(self.shard(len(found) + i, canonical_name(n), p) for i, (n, p) in enumerate(named))]

    def _flat(self, index: int, unit: Unit, piece: FlatParamView, held: nn.Parameter) -> FlatShard:
        mine = unit.replica_ranks[index % len(unit.replica_ranks)] == self.ranks[self.position]
        layout: Any = "sharded" if unit.sharded else "replica"
        part = piece.part(unit.sharded)
        return FlatShard(piece.name, held, mine, layout, part, unit.replica_ranks, unit=unit, piece=piece)

    def _refresh(self) -> None:
        super()._refresh()
        modules = set(self.model.modules())
        for unit in self._units:
            for piece in unit.pieces:
                if piece.module not in modules:
                    raise AttachError(
                        f"{piece.name!r} is no longer in the model: the module that held it was replaced since hooks "
                        "were attached (FSDP1); attach after changing the model, and make the optimizer after it too"
                    )


class _Local:
    """The hook on one flat parameter, whose gradient arrives once a backward, however often its parameters are used.

    It has zeros for parameters that this backward did not reach, and those are not shown to anyone: which ones it
    reached is told by hooks on the views that FSDP makes of the flat parameter for each forward.
    """

    def __init__(self, unit: Unit, shards: Mapping[int, FlatShard], hook: LocalHook, must_fire: bool) -> None:
        self.unit, self.shards, self.hook, self.must_fire = unit, shards, hook, must_fire
        self.reached: dict[int, int] = {}  # index: in which backward
        self.fired, self.looked = -1, False
        self.on_flat: Removable | None = None
        self.before = unit.inside.register_forward_pre_hook(self.look)
        self.put()

    def put(self) -> None:
        """FSDP makes a flat parameter need no gradient as long as none in it does, and then no hook can be put on."""
        if self.on_flat is None and self.unit.flat.requires_grad:
            self.on_flat = self.unit.flat.register_hook(weak_method(self.fire))  # the module's hook keeps this object

    def look(self, module: nn.Module, args: Any) -> None:
        self.looked = True
        self.put()
        for i, shard in self.shards.items():
            view = getattr(shard.piece.module, shard.piece.key)
            if shard.parameter.requires_grad and view.requires_grad:
                view.register_hook(functools.partial(weak_method(self.reach), i))  # it goes when the view does

    def reach(self, i: int, grad: torch.Tensor) -> None:
        self.reached[i] = backward_id()

    def fire(self, grad: torch.Tensor) -> torch.Tensor | None:
        if self.must_fire:
            self.must_be_whole()
        self.fired = backward_id()
        grad = grad.contiguous()  # what autograd made of one parameter alone may be expanded
        edited: torch.Tensor | None = None
        for i, shard in self.shards.items():
            result = self.hook(i, shard.piece.of_whole(grad)) if self.reached.get(i) == self.fired else None
            if result is not None:
                edited = grad.clone() if edited is None else edited
                shard.piece.of_whole(edited).copy_(result)
        return edited

    def must_be_whole(self) -> None:
        """Raise where a gradient would pass unseen, or come in parts."""
        shown = next(iter(self.shards.values())).name
        if not self.looked:
            raise AttachError(
                f"the gradient of {shown!r} came from a forward pass before on_gradient or gradients was attached "
                "(FSDP1): attach before the forward pass"
            )
        if self.fired == backward_id():
            raise AttachError(
                f"the gradient of {shown!r} came in several parts in one backward (FSDP1): under mixed precision a "
                "module that FSDP wraps gives one for each time it is called; wrap the module that calls it in its "
                "place, or leave out param_dtype"
            )

    def remove(self) -> None:
        self.before.remove()
        if self.on_flat is not None:
            self.on_flat.remove()


def _ranks_of(units: Sequence[Unit]) -> tuple[int, ...]:
    if not units:
        raise AttachError("FullyShardedDataParallel has no parameters: is everything in ignored_states?")
    strange = [unit for unit in units if unit.ranks != units[0].ranks]
    if strange:
        one, other = units[0], strange[0]
        raise AttachError(
            f"FSDP1 has {one.name or 'the model'!r} on ranks {list(one.ranks)} and {other.name or 'the model'!r} on "
            f"{list(other.ranks)}, and how often each element is there cannot be told; give them all the same "
            "process_group or device_mesh"
        )
    return units[0].ranks
