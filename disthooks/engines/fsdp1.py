"""``FullyShardedDataParallel`` (FSDP1): each rank has a range of flat parameters, each made of several.

:class:`FlatUnit` is one FSDP module with its flat parameter, :class:`FlatParamView` one of the user's parameters in it,
:class:`Fsdp1` the engine.
"""

# [Note: private attributes of FSDP1]
# torch has no public way to ask which parameters are in a flat one, where they lie, and on which ranks. So this file
# reads attributes of `FullyShardedDataParallel`, of its `FlatParamHandle` and of the `FlatParameter` that begin with an
# underscore. No other file does.
#
# [Note: gradients of FSDP1]
# Before the reduction, a gradient arrives on the flat parameter: whole, of this rank's micro-batch, once a backward,
# however often the module was called. No hook on the user's own parameters is ever called, with `use_orig_params=True`
# or without. So one tensor hook on the flat parameter cuts the gradient into the user's parameters. It has zeros for a
# parameter that this backward did not reach, and the user's hook must not get those. Hooks on the views that FSDP makes
# of the flat parameter for each forward say which parameters were reached; a view and its hook end with the forward.
# After the reduction, each rank has its range of the flat gradient, which is smaller than the whole one: its size says
# whether FSDP has reduced it. Under NO_SHARD the size never changes. There a hook notes in each backward whether FSDP
# is about to reduce.
# Under mixed precision a module that is called several times gives its flat parameter one gradient for each call. These
# are parts of the gradient, and edits of the parts would not be an edit of their sum, so that is an error.
#
# [Note: parameters that FSDP1 exchanges]
# FSDP1 exchanges what the modules have registered: its own parameters, or, from the forward on, views that are no
# Parameters. So `check` does not compare identities there, as it does for other engines. It compares FSDP's handle and
# flat parameter with those that were there when hooks were attached.

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from disthooks._handles import weak_method
from disthooks._match import canonical_name, is_of_class
from disthooks._registry import register
from disthooks._tensors import needing_gradients
from disthooks._torch import backward_id
from disthooks.engines.base import Engine, LocalHook, Part, Removable, Shard
from disthooks.errors import AttachError, UsageError

_FSDP1 = "FullyShardedDataParallel"


class FlatParamView(NamedTuple):
    """One of the user's parameters inside a flat one.

    Attributes:
        name: the parameter's name in the user's own model.
        module: the module that has the parameter, and ``key`` its name there.
        start: its first element in the whole flat parameter; padding may lie between parameters.
        shape: the shape of the whole parameter, and ``stride`` how its elements lie in the flat one.
        local: its first and one past its last element in this rank's shard; equal if the rank has none of it.
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
        """The parameter's part of a whole flat tensor, in the parameter's shape; it shares memory."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    def is_in_order(self) -> bool:
        """Whether the elements lie in the order of their indices; in ``channels_last`` they do not."""
        return torch.empty(self.shape, device="meta").as_strided(self.shape, self.stride).is_contiguous()

    def part(self, sharded: bool) -> Part | None:
        """Which elements are on this rank; None if they lie in another order than their indices."""
        if not self.is_in_order():
            return None
        return Part(self.shape, span=self.span) if sharded else Part.whole(self.shape)


class FlatUnit:
    """One ``FullyShardedDataParallel`` that has a flat parameter.

    Attributes:
        name: the name of its module in the user's own model.
        flat: the flat parameter, on which gradients arrive; the optimizer holds it if ``has_original`` is false.
        inside: the user's module; when its forward begins, the parameters are whole.
        has_original: whether the optimizer holds the user's parameters (``use_orig_params=True``).
        is_sharded: whether each rank has a part; otherwise (NO_SHARD) every rank has all of it.
        views: the parameters in the flat one.
        optimizer_parameters: for each view, the parameter that an optimizer holds.
        ranks: the global ranks that train the module together.
        replica_ranks: the global ranks that have the same elements as this one.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        # See [Note: private attributes of FSDP1]. The handle is read in __dict__, because the module's __getattr__
        # would also look into the module inside.
        self.name, self._module = name, module
        self.inside = cast(nn.Module, module._fsdp_wrapped_module)
        self._handle: Any = module.__dict__["_handle"]
        self.flat: Any = self._handle.flat_param
        self.has_original: bool = self._handle._use_orig_params
        self.is_sharded: bool = self._handle.uses_sharded_strategy
        self._is_reduced = True
        self.views = tuple(self._find_views())
        self.optimizer_parameters: tuple[nn.Parameter, ...] = (
            tuple(self.flat._params) if self.has_original else (self.flat,) * len(self.views)
        )
        self.ranks, self.replica_ranks = self._ranks()
        mixed_up = [view.name for view in self.views if not view.is_in_order()]
        if mixed_up and self.has_original and not self.is_sharded:
            # Here torch 2.13 makes `p.grad` by reshape(), which puts the elements into the wrong order.
            raise AttachError(
                f"{mixed_up[0]!r} lies in another order than its indices (channels_last?), and FSDP1 mixes up the "
                "elements of its gradient with use_orig_params=True and NO_SHARD, hooks or not: make it contiguous "
                "before FSDP1 takes it, or use use_orig_params=False, another strategy or DDP"
            )

    def is_reduced(self) -> bool:
        """Whether FSDP has reduced the gradient; see [Note: gradients of FSDP1]."""
        if not self._is_reduced:  # the hook of watch_backward has seen it
            return False
        return self.flat.grad is None or self.flat.grad.size() == self.flat._sharded_size

    def watch_backward(self, see: Callable[[], None]) -> Any:
        """Put on a hook that calls ``see`` in each backward; under NO_SHARD it also notes whether FSDP reduces.

        See [Note: gradients of FSDP1].
        """

        def note(grad: torch.Tensor) -> None:
            if not self.is_sharded:
                self._is_reduced = bool(self._module.__dict__.get("_sync_gradients", True))
            see()

        with needing_gradients(self.flat):
            return self.flat.register_hook(note)

    def find_replaced(self) -> FlatParamView | None:
        """The first parameter that was replaced since this unit was made, alone or with the flat one, or None.

        See [Note: parameters that FSDP1 exchanges].
        """
        if self._module.__dict__["_handle"] is not self._handle or self._handle.flat_param is not self.flat:
            return self.views[0]
        if self.has_original:
            for view, parameter in zip(self.views, self.optimizer_parameters, strict=True):
                now = view.module._parameters.get(view.key)
                if isinstance(now, nn.Parameter) and now is not parameter:
                    return view
        return None

    def _find_views(self) -> Iterator[FlatParamView]:
        flat = self.flat
        ends = list(itertools.accumulate(flat._numels_with_padding))
        starts = [0, *ends[:-1]]
        true = [start for start, padding in zip(starts, flat._is_padding_mask, strict=True) if not padding]
        for i, (key, module, _) in enumerate(flat._param_infos):
            name, here = canonical_name(f"{self.name}.{flat._fqns[i]}".lstrip(".")), flat._shard_param_infos[i]
            if flat._param_extensions[i] is not None:
                raise AttachError(
                    f"{name!r} is a DTensor inside FSDP1, so disthooks cannot tell which of its elements a rank has; "
                    "use torch.distributed.fsdp.fully_shard with tensor parallelism"
                )
            local, span = (0, 0), (0, 0)
            if here.in_shard:
                local = here.offset_in_shard, here.offset_in_shard + here.numel_in_shard
                span = here.intra_param_start_idx, here.intra_param_end_idx + 1
            yield FlatParamView(name, module, key, true[i], flat._shapes[i], flat._strides[i], local, span)

    def _ranks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """All ranks that train the module, and those with the same elements."""
        module: Any = self._module
        shown = repr(self.name) if self.name else "the model (FSDP1)"
        ranks = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
        across = module.__dict__.get("_inter_node_pg")
        if across is None:
            return ranks, (dist.get_rank(),) if self.is_sharded else ranks
        replica_ranks = tuple(sorted(dist.get_process_group_ranks(across)))
        if not self.is_sharded and len(replica_ranks) > 1:
            raise AttachError(
                f"{shown} is HYBRID_SHARD with one rank to shard over, which FSDP1 takes for NO_SHARD and "
                f"then never averages gradients over the replicas {list(replica_ranks)}: use NO_SHARD over all "
                "ranks, DDP, or more than one rank in the second dimension of the mesh"
            )
        # The two process groups have only the ranks of this rank's row and column, so a mesh tells all the ranks.
        mesh = module.__dict__.get("_device_mesh")
        if mesh is None:
            raise AttachError(
                f"{shown} is HYBRID_SHARD without a mesh, so disthooks cannot tell which ranks train together: give "
                'FullyShardedDataParallel(device_mesh=init_device_mesh("cuda", (replicas, shards), '
                'mesh_dim_names=("replicate", "shard"))) in place of process groups'
            )
        return tuple(sorted(mesh.mesh.flatten().tolist())), replica_ranks


@dataclass(frozen=True, eq=False)
class FlatShard(Shard):
    """The part of one parameter in a flat one that is on a rank: a range of its elements, under NO_SHARD all of them.

    Attributes:
        unit: the FSDP module that has the parameter.
        view: where the parameter is in the flat one.
    """

    unit: FlatUnit = field(kw_only=True)
    view: FlatParamView = field(kw_only=True)

    @property
    def shape(self) -> torch.Size:
        return self.view.shape

    def gradient(self) -> torch.Tensor | None:
        """A view of the gradient that the optimizer uses; None if there is none, or the rank has no element of it.

        Raises:
            UsageError: when the gradient is not reduced yet.
        """
        grad = self.parameter.grad
        if grad is None or (self.unit.is_sharded and self.view.local[0] >= self.view.local[1]):
            return None
        if not self.unit.is_reduced():
            raise UsageError(
                f"the gradient of {self.name!r} on rank {dist.get_rank()} is not reduced yet (FSDP1): the last "
                "backward ran inside no_sync(); run the last one before optimizer.step() outside of it"
            )
        return grad if self.unit.has_original else self._of(grad)

    def values(self) -> torch.Tensor:
        # While the module runs, the flat parameter itself is whole, and this rank's shard is another tensor.
        flat = self.unit.flat
        return self._of(getattr(flat, "_local_shard", flat).detach())

    def optimizer_gradient(self) -> torch.Tensor | None:
        return self.gradient()  # FSDP1 has no tensor that stands for the whole gradient

    def _of(self, flat: torch.Tensor) -> torch.Tensor:
        # This rank's shard of the flat tensor has one dimension, and padding that is in no view.
        return flat[slice(*self.view.local)] if self.unit.is_sharded else self.view.of_whole(flat)


@register("engine")
class Fsdp1(Engine):
    """A model with FSDP1 modules in it.

    A parameter that is in none of them is whole on every rank and owned by the first; nothing reduces its gradient.
    """

    label = "FSDP1"
    reduces_late = True

    def __init__(self, model: nn.Module) -> None:
        units = ((name, module) for name, module in model.named_modules() if is_of_class(module, _FSDP1))
        # An FSDP module without a handle has no parameters of its own.
        self._units = tuple(FlatUnit(canonical_name(n), m) for n, m in units if m.__dict__["_handle"] is not None)
        if not self._units:
            raise AttachError("FullyShardedDataParallel has no parameters: is everything in ignored_states?")
        one = self._units[0]
        for other in self._units:
            if other.ranks != one.ranks:
                raise AttachError(
                    f"FSDP1 has {one.name or 'the model'!r} on ranks {list(one.ranks)} and "
                    f"{other.name or 'the model'!r} on {list(other.ranks)}, so disthooks cannot tell how many ranks "
                    "have each element; give them all the same process_group or device_mesh"
                )
        super().__init__(model, one.ranks, one.ranks.index(dist.get_rank()))

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return any(is_of_class(module, _FSDP1) for module in model.modules())

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        if hasattr(parameter, "device_mesh"):
            raise AttachError(
                f"{name!r} is a DTensor beside FSDP1, so disthooks cannot tell how many ranks have each of its "
                "elements; use torch.distributed.fsdp.fully_shard for the whole model"
            )
        return Shard(name, parameter, self.position == 0, "unreduced", Part.whole(parameter.shape), self.ranks)

    def is_stable(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._plain_parameters  # see [Note: parameters that FSDP1 exchanges]

    def is_first_gradient(self, index: int) -> bool:
        shard = self.shards[index]
        if not isinstance(shard, FlatShard):
            return super().is_first_gradient(index)
        # An earlier gradient is whole and in `.grad` after no_sync(), or FSDP reduced it and put it aside.
        flat = shard.unit.flat
        return flat.grad is None and getattr(flat, "_saved_grad_shard", None) is None

    def check(self) -> None:
        for unit in self._units:
            replaced = unit.find_replaced()
            if replaced is not None:
                raise AttachError(
                    f"{replaced.name!r} is no longer the parameter that was attached to (FSDP1): something replaced "
                    "it; attach after that, and make the optimizer after it too"
                )
        super().check()

    def sync_flags(self) -> list[tuple[Any, str]]:
        return [(module, "_sync_gradients") for module in self.model.modules() if is_of_class(module, _FSDP1)]

    def watch_backward(self, see: Callable[[], None]) -> list[Removable]:
        return [unit.watch_backward(see) for unit in self._units]

    def reason_unreduced(self) -> str:
        # After a backward inside no_sync() the gradient is whole on every rank, so all ranks answer alike, even those
        # that have no element of the parameter.
        late = next((unit for unit in self._units if not unit.is_reduced()), None)
        if late is None:
            return ""
        return (
            f"the gradient of {late.views[0].name!r} is not reduced yet (FSDP1): the last backward ran inside "
            "no_sync(); run the last one before optimizer.step() outside of it"
        )

    def on_local(self, wanted: Sequence[int], hook: LocalHook, must_fire: bool = True) -> list[Removable]:
        """Call ``hook`` with the whole, unreduced gradient, in the dtype that forward used.

        See [Note: gradients of FSDP1].
        """
        handles: list[Removable] = []
        for unit in self._units:
            mine = {i: s for i in wanted if isinstance(s := self.shards[i], FlatShard) and s.unit is unit}
            if mine:
                handles.append(_FlatHook(unit, mine, hook, must_fire))
        others = [i for i in wanted if not isinstance(self.shards[i], FlatShard)]
        return [*handles, *super().on_local(others, hook, must_fire)]

    def _shards(self) -> list[Shard]:
        shards: list[Shard] = []
        for unit in self._units:
            for view, parameter in zip(unit.views, unit.optimizer_parameters, strict=True):
                owner = unit.replica_ranks[len(shards) % len(unit.replica_ranks)]
                shards.append(
                    FlatShard(
                        view.name,
                        parameter,
                        is_owner=owner == self.ranks[self.position],
                        sharding="sharded" if unit.is_sharded else "replica",
                        part=view.part(unit.is_sharded),
                        replica_ranks=unit.replica_ranks,
                        unit=unit,
                        view=view,
                    )
                )
        flat = {
            id(parameter)
            for unit in self._units
            for parameter in (unit.flat, *(unit.flat._params or ()), *(unit.flat._shared_params or ()))
        }
        # Between forward and backward some strategies leave views, which are no Parameters, in the modules.
        named = [(n, p) for n, p in self.model.named_parameters() if isinstance(p, nn.Parameter) and id(p) not in flat]
        self._plain_parameters = {id(parameter) for _, parameter in named}
        shards += [self.shard(len(shards) + i, canonical_name(n), p) for i, (n, p) in enumerate(named)]
        # Units begin with the outermost module, and records name neighbours in the order of the model (decision 177).
        order = {canonical_name(name): i for i, (name, _) in enumerate(self.model.named_modules())}
        return sorted(shards, key=lambda shard: order.get(shard.name.rpartition(".")[0], len(order)))

    def _refresh(self) -> None:
        super()._refresh()
        modules = set(self.model.modules())
        for unit in self._units:
            for view in unit.views:
                if view.module not in modules:
                    raise AttachError(
                        f"{view.name!r} is no longer in the model: the module that held it was replaced since hooks "
                        "were attached (FSDP1); attach after changing the model, and make the optimizer after it too"
                    )


class _FlatHook:
    """The hook on one flat parameter. It calls the user's hook for each parameter that the backward has reached.

    See [Note: gradients of FSDP1].
    """

    def __init__(self, unit: FlatUnit, shards: Mapping[int, FlatShard], hook: LocalHook, must_fire: bool) -> None:
        self.unit, self.shards, self.hook, self.must_fire = unit, shards, hook, must_fire
        self.reached: dict[int, int] = {}  # for each index, the last backward that reached the parameter
        self.last_backward, self.has_seen_forward = -1, False
        self.on_flat: Removable | None = None
        self.before = unit.inside.register_forward_pre_hook(self.look)
        self.put()

    def put(self) -> None:
        """Put the hook on the flat parameter, which needs no gradient while no parameter in it does."""
        if self.on_flat is None and self.unit.flat.requires_grad:
            # The reference is weak, because the hook on the module already keeps this object alive.
            self.on_flat = self.unit.flat.register_hook(weak_method(self.fire))

    def look(self, module: nn.Module, args: Any) -> None:
        self.has_seen_forward = True
        self.put()
        for i, shard in self.shards.items():
            view = getattr(shard.view.module, shard.view.key)
            if shard.parameter.requires_grad and view.requires_grad:
                view.register_hook(functools.partial(weak_method(self.reach), i))  # it ends with the view

    def reach(self, i: int, grad: torch.Tensor) -> None:
        self.reached[i] = backward_id()

    def fire(self, grad: torch.Tensor) -> torch.Tensor | None:
        now = backward_id()
        if self.must_fire and not (self.has_seen_forward and self.last_backward != now):
            self.raise_unseen()
        self.last_backward = now
        grad = grad.contiguous()  # the gradient of a single parameter may be expanded
        edited: torch.Tensor | None = None
        for i, shard in self.shards.items():
            if self.reached.get(i) != now:
                continue
            result = self.hook(i, shard.view.of_whole(grad))
            if result is not None:
                edited = grad.clone() if edited is None else edited
                shard.view.of_whole(edited).copy_(result)
        return edited

    def raise_unseen(self) -> None:
        """Raise AttachError, because a gradient would pass unseen, or came in parts."""
        shown = next(iter(self.shards.values())).name
        if not self.has_seen_forward:
            raise AttachError(
                f"the gradient of {shown!r} came from a forward pass before on_gradient or gradients was attached "
                "(FSDP1): attach before the forward pass"
            )
        raise AttachError(
            f"the gradient of {shown!r} came in several parts in one backward (FSDP1): under mixed precision a "
            "module that FSDP wraps gives one for each time it is called; wrap the module that calls it instead, or "
            "leave out param_dtype"
        )

    def remove(self) -> None:
        self.before.remove()
        if self.on_flat is not None:
            self.on_flat.remove()
