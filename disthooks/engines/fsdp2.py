"""``fully_shard`` (FSDP2) and tensor parallelism: parameters and final gradients are DTensors, cut over the ranks.

:class:`Fsdp2` is the engine; ``shard_of`` and ``ranks_of`` say which ranks have which part of a DTensor.
"""

# [Note: gradients of FSDP2]
# While a module runs, FSDP2 registers gathered, plain parameters in place of the sharded ones, and autograd gives the
# gathered ones this rank's whole, unreduced gradient. A tensor hook on a sharded parameter is never called. So local
# hooks are put on the gathered tensors, in a forward pre-hook of the FSDP module: FSDP's own pre-hook runs first, so
# parameters are gathered by then. FSDP gathers into the same tensor again and again, so each tensor gets one hook;
# with more, an edit would be made once for each forward. The pre-hook is on the FSDP module and not on the module that
# owns a parameter, which may never run: MultiheadAttention reads `out_proj.weight` and does not call `out_proj`.
# If the program calls another method than forward, the pre-hook does not run. So a post-accumulate hook on the sharded
# parameter, which FSDP2 does call when it has reduced a gradient, raises if no local hook saw that gradient.
#
# [Note: where FSDP2 keeps unreduced gradients]
# After `set_requires_gradient_sync(False)` gradients stay whole in `unsharded_accumulated_grad` or in the gathered
# parameter's `.grad`, and the sharded parameter has none. After `set_requires_all_reduce(False)` under HSDP they are
# reduced inside a replica and wait in the group's `_partial_reduce_output`. These attributes are private, and only this
# file reads them.
#
# [Note: replicas of a DTensor]
# Two ranks have the same elements of a DTensor if they differ only along dimensions of its mesh that do not shard it.
# Under tensor parallelism with `fully_shard` a norm lies on one dimension of the mesh, a linear layer on both: the norm
# is on every rank all the same, so the dimensions that its own mesh lacks count as replicating. These dimensions are
# found by the coordinates that the mesh's ranks have in the root mesh, and not by name, because `_flatten` gives a name
# that the root does not know (`dp_shard_cp` of `dp_shard` and `cp`).

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.weak import WeakIdKeyDictionary

from disthooks._match import is_of_class
from disthooks._registry import register
from disthooks._tensors import needing_gradients
from disthooks.engines.base import Engine, LocalHook, Part, Removable, Shard
from disthooks.errors import AttachError


def shard_of(index: int, name: str, parameter: nn.Parameter, ranks: Sequence[int], rank: int) -> Shard:
    """The part of a DTensor parameter on this rank; ranks that have the same elements own the parameters in turn."""
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    placements: Sequence[Any] = parameter.placements  # type: ignore[attr-defined]
    for placement in placements:
        if placement.is_partial():
            raise AttachError(f"{name!r} is a DTensor with placement {placement}: its value is not on any rank yet")
    replicated = [placement.is_replicate() for placement in placements]
    replica_ranks = _replica_ranks(mesh, replicated, ranks, rank, name)
    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    part = Part(torch.Size(parameter.shape), box=tuple(zip(starts, sizes, strict=True)))
    mine = rank == replica_ranks[index % len(replica_ranks)]
    return Shard(name, parameter, mine, "replica" if all(replicated) else "sharded", part, replica_ranks)


def ranks_of(model: nn.Module) -> tuple[int, ...]:
    """The ranks over which the DTensor parameters of ``model`` lie.

    Parameters may be on different meshes if those are parts of one mesh; see [Note: replicas of a DTensor].

    Raises:
        AttachError: when no parameter is a DTensor, or the meshes have no mesh in common.
    """
    named = [(name, p.device_mesh) for name, p in model.named_parameters() if hasattr(p, "device_mesh")]
    first_on: dict[tuple[int, ...], str] = {}  # for each set of ranks, the name of the first parameter on it
    for name, mesh in named:
        first_on.setdefault(_ranks(mesh), name)
    if len(first_on) == 1:  # it may be one dimension of a larger mesh, whose other ranks train something else
        return next(iter(first_on))
    first_on = {}  # from here on, the ranks of the root meshes
    for name, mesh in named:
        first_on.setdefault(_ranks(mesh._get_root_mesh()), name)
    if not first_on:
        raise AttachError("fully_shard was applied, but no parameter is sharded: is everything in ignored_params?")
    most = max(first_on, key=len)
    strange = {ranks: name for ranks, name in first_on.items() if not set(ranks) <= set(most)}
    if strange:
        shown = "; ".join(f"{name!r} on ranks {list(ranks)}" for ranks, name in first_on.items())
        raise AttachError(
            f"parameters live on different sets of ranks ({shown}), so disthooks cannot tell how many ranks have each "
            "element; put them all on one device mesh, or on parts of one (mesh['dp'], mesh['tp'])"
        )
    _check_all_averaged(model)
    return most


def _check_all_averaged(model: nn.Module) -> None:
    """Raise if a DTensor's mesh lacks a dimension along which ``fully_shard`` averages other gradients."""
    averaged: dict[str, str] = {}
    for path, module in model.named_modules():
        for group in groups_of(module):
            mesh = group.mesh_info.mesh
            averaged |= {dim: path for dim in mesh.mesh_dim_names or () if dim not in averaged}
    for name, parameter in model.named_parameters():
        own: Any = getattr(parameter, "device_mesh", None)
        names = (own.mesh_dim_names or ()) if own is not None else tuple(averaged)
        for dim in averaged.keys() - set(names):
            raise AttachError(
                f"the gradient of {name!r}, on a mesh with dimensions {list(names)}, is not averaged along {dim!r}, as "
                f"those of {averaged[dim] or 'the model'!r} are: put them all on one device mesh, with fully_shard for "
                "every parameter"
            )


def groups_of(module: nn.Module) -> list[Any]:
    """FSDP2's own groups of the parameters of one module; none if ``fully_shard`` was not called on it."""
    ask: Any = getattr(module, "_get_fsdp_state", None)
    if ask is None:
        return []
    state: Any = ask()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # before torch 2.12 there is one
    return [group for group in groups if group is not None]


def _ranks(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _replica_ranks(
    mesh: Any, replicated: Sequence[bool], ranks: Sequence[int], rank: int, name: str
) -> tuple[int, ...]:
    """All ranks that have the elements that ``rank`` has; see [Note: replicas of a DTensor]."""
    coordinates = (mesh.mesh == rank).nonzero()[0].tolist()
    index = tuple(slice(None) if whole else i for i, whole in zip(coordinates, replicated, strict=True))
    alike = {int(r) for r in torch.as_tensor(mesh.mesh[index]).flatten().tolist()}
    if _ranks(mesh) == tuple(ranks):
        return tuple(sorted(alike))
    # The mesh is a part of a larger one: those ranks also count that differ from `alike` along dimensions of the root
    # mesh which `mesh` lacks.
    grid = mesh._get_root_mesh().mesh
    in_root = {r: (grid == r).nonzero()[0].tolist() for r in _ranks(mesh)}
    spanned = [dim for dim in range(grid.ndim) if len({at[dim] for at in in_root.values()}) > 1]
    if math.prod(grid.shape[dim] for dim in spanned) != len(in_root):
        raise AttachError(
            f"{name!r} lies on ranks {sorted(in_root)}, which are not whole dimensions of the mesh that they were "
            f"sliced from ({tuple(grid.shape)}), so disthooks cannot tell how many ranks have each element; slice the "
            "mesh by the names of its dimensions"
        )
    same: set[int] = set()
    for r in alike:
        index = tuple(in_root[r][dim] if dim in spanned else slice(None) for dim in range(grid.ndim))
        same |= {int(other) for other in torch.as_tensor(grid[index]).flatten().tolist()}
    if len(ranks) % grid.numel() or not same <= set(ranks):
        raise AttachError(f"{name!r} lies on ranks {sorted(grid.flatten().tolist())}, the model on {list(ranks)}")
    if grid.numel() < len(ranks):
        raise AttachError(
            f"{name!r} lies on a mesh of its own, of ranks {sorted(grid.flatten().tolist())}, and other parameters on "
            f"ranks {list(ranks)}: slice both meshes from one (mesh['dp']), so that disthooks can find the replicas"
        )
    return tuple(sorted(same))


@register("engine")
class Fsdp2(Engine):
    """A model with DTensor parameters.

    A plain parameter beside them is whole on every rank, and the first rank owns it: nothing reduces its gradient.
    """

    label = "FSDP2"

    def __init__(self, model: nn.Module) -> None:
        for module in model.modules():
            if is_of_class(module, "FSDPModule"):
                # After a forward without a backward the root module still has its parameters gathered.
                module.reshard()  # type: ignore[operator]
        ranks = ranks_of(model)
        rank = dist.get_rank()
        if rank not in ranks:
            raise AttachError(f"rank {rank} is not in the device mesh of this model, which has ranks {list(ranks)}")
        super().__init__(model, ranks, ranks.index(rank))
        self._groups = [group for module in model.modules() for group in groups_of(module)]
        self._params = {id(each.sharded_param): each for group in self._groups for each in group.fsdp_params}

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return any(is_of_class(module, "FSDPModule") for module in model.modules()) or any(
            hasattr(parameter, "device_mesh") for parameter in model.parameters()
        )

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        if hasattr(parameter, "device_mesh"):
            return shard_of(index, name, parameter, self.ranks, self.ranks[self.position])
        return Shard(name, parameter, self.position == 0, "unreduced", Part.whole(parameter.shape), self.ranks)

    def is_first_gradient(self, index: int) -> bool:
        # See [Note: where FSDP2 keeps unreduced gradients].
        parameter = self.shards[index].parameter
        return parameter.grad is None and not _accumulates(self._params.get(id(parameter)))

    def reason_unreduced(self) -> str:
        # See [Note: where FSDP2 keeps unreduced gradients].
        late = next((s for s in self.shards if _accumulates(self._params.get(id(s.parameter)))), None)
        if late is not None:
            return (
                f"the gradient of {late.name!r} is not reduced yet (FSDP2): the last backward ran after "
                "set_requires_gradient_sync(False), so the optimizer has none of it; call "
                "model.set_requires_gradient_sync(True) before the last backward of each step"
            )
        if any(getattr(group, "_partial_reduce_output", None) is not None for group in self._groups):
            return (
                "the gradients are reduced inside each replica and not over the replicas (FSDP2): the last backward "
                "ran after set_requires_all_reduce(False), so the optimizer has none of it; call "
                "model.set_requires_all_reduce(True) before the last backward of each step"
            )
        return ""

    def sync_flags(self) -> list[tuple[Any, str]]:
        return [(group, name) for group in self._groups for name in ("reduce_grads", "all_reduce_grads")]

    def has_own_batch(self) -> bool:
        # FSDP must shard every DTensor over all ranks; under tensor parallelism ranks share a batch.
        spread: set[int] = set()
        for module in self.model.modules():
            for group in groups_of(module):
                info = group.mesh_info
                if info.mesh.size() == len(self.ranks) and not getattr(info, "is_spmd_mesh", False):
                    spread |= {id(each.sharded_param) for each in group.fsdp_params}
        return all(id(s.parameter) in spread for s in self.shards if hasattr(s.parameter, "device_mesh"))

    def is_stable(self, parameter: nn.Parameter) -> bool:
        return not hasattr(parameter, "device_mesh")  # while its module runs, the gathered one is in its place

    def on_local(self, wanted: Sequence[int], hook: LocalHook, must_fire: bool = True) -> list[Removable]:
        """Call ``hook`` with the whole, plain, unreduced gradient, in the dtype that forward used.

        See [Note: gradients of FSDP2].
        """
        index = {id(self.shards[i].parameter): i for i in wanted}
        local = _GatheredHooks(hook)
        covered: set[int] = set()
        for unit, registered in _gathered_by(self.model, index).items():
            covered |= {i for _, _, i in registered}
            local.handles.append(unit.register_forward_pre_hook(functools.partial(local.look, registered)))
        for i in covered if must_fire else ():
            # FSDP calls this hook when it has reduced the gradient.
            shard = self.shards[i]
            missed = functools.partial(local.check_fired, i, shard.name)
            with needing_gradients(shard.parameter) as able:
                if able:
                    handle = shard.parameter.register_post_accumulate_grad_hook(missed)  # type: ignore[no-untyped-call]
                    local.handles.append(handle)
        return [local, *super().on_local([i for i in wanted if i not in covered], hook, must_fire)]


def _accumulates(param: Any) -> bool:
    """Whether FSDP2 keeps a gradient of earlier micro-batches that it has not reduced."""
    if param is None:
        return False
    unsharded = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None


class _GatheredHooks:
    """Hooks on gathered parameters, one for each tensor; see [Note: gradients of FSDP2]."""

    def __init__(self, hook: LocalHook) -> None:
        self.hook = hook
        self.handles: list[Any] = []
        self.seen = WeakIdKeyDictionary()
        self.fired: set[int] = set()

    def fire(self, i: int, grad: torch.Tensor) -> torch.Tensor | None:
        self.fired.add(i)
        return self.hook(i, grad)

    def check_fired(self, i: int, name: str, parameter: torch.Tensor) -> None:
        """Raise if FSDP has reduced a gradient that no hook has seen."""
        if i not in self.fired:
            raise AttachError(
                f"the gradient of {name!r} was reduced before any hook saw it (FSDP2): its module did not run by "
                "forward() since attaching; attach before the forward pass, and call the FSDP module itself, not "
                "another method of it"
            )
        self.fired.discard(i)

    def look(self, registered: list[tuple[dict[str, Any], str, int]], module: nn.Module, args: Any) -> None:
        for parameters, key, i in registered:
            tensor: torch.Tensor = parameters[key]
            if tensor.requires_grad and tensor not in self.seen:
                self.seen[tensor] = True
                handle = tensor.register_hook(functools.partial(self.fire, i))  # type: ignore[no-untyped-call]
                self.handles.append(handle)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _gathered_by(model: nn.Module, index: Mapping[int, int]) -> dict[nn.Module, list[tuple[dict[str, Any], str, int]]]:
    """For each FSDP module, where the parameters that it gathers are registered; see [Note: gradients of FSDP2]."""
    units: dict[nn.Module, list[tuple[dict[str, Any], str, int]]] = {}
    left: list[tuple[nn.Module, nn.Module | None]] = [(model, None)]
    while left:
        module, unit = left.pop()
        # The nearest FSDP module around a module gathers its parameters.
        unit = module if is_of_class(module, "FSDPModule") else unit
        for key, parameter in module._parameters.items():
            if unit is not None and parameter is not None and id(parameter) in index:
                units.setdefault(unit, []).append((module._parameters, key, index[id(parameter)]))
        left += [(child, unit) for child in module.children()]
    return units
