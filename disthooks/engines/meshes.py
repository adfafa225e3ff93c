"""Which ranks have which part of a DTensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from disthooks.engines.shard import Part, Shard
from disthooks.errors import AttachError


def shard_of(index: int, name: str, parameter: nn.Parameter, ranks: Sequence[int], rank: int) -> Shard:
    """What this rank has of a DTensor parameter; ranks that have the same elements take turns at owning parameters."""
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    placements: Sequence[Any] = parameter.placements  # type: ignore[attr-defined]
    for placement in placements:
        if placement.is_partial():
            raise AttachError(f"{name!r} is a DTensor with placement {placement}: its value is not on any rank yet")
    replicated = [placement.is_replicate() for placement in placements]
    twins = _twins(mesh, replicated, ranks, rank, name)
    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    part = Part(torch.Size(parameter.shape), box=tuple(zip(starts, sizes, strict=True)))
    mine = rank == twins[index % len(twins)]
    return Shard(name, parameter, mine, "replica" if all(replicated) else "sharded", part, twins)


def ranks_of(model: nn.Module) -> tuple[int, ...]:
    """The ranks over which the DTensor parameters of ``model`` lie.

    Parameters may be on different meshes, if those are parts of one: under tensor parallelism with ``fully_shard``
    a linear layer lies on all of a two-dimensional mesh, a norm on one dimension of it.

    Raises:
        AttachError: when no parameter is a DTensor, or the meshes have no mesh in common.
    """
    named = [(name, p.device_mesh) for name, p in model.named_parameters() if hasattr(p, "device_mesh")]
    found: dict[tuple[int, ...], str] = {}
    for name, mesh in named:
        found.setdefault(_ranks(mesh), name)
    if len(found) == 1:  # one dimension of a larger mesh: its other ranks train something else
        return next(iter(found))
    found = {}
    for name, mesh in named:
        found.setdefault(_ranks(_root(mesh)), name)
    if not found:
        raise AttachError("fully_shard was applied, but no parameter is sharded: is everything in ignored_params?")
    most = max(found, key=len)
    strange = {ranks: name for ranks, name in found.items() if not set(ranks) <= set(most)}
    if strange:
        shown = "; ".join(f"{name!r} on ranks {list(ranks)}" for ranks, name in found.items())
        raise AttachError(
            f"parameters live on different sets of ranks ({shown}), and how often each element is there cannot be "
            "told; put them all on one device mesh, or on parts of one (mesh['dp'], mesh['tp'])"
        )
    _must_be_averaged(model)
    return most


def _must_be_averaged(model: nn.Module) -> None:
    """Raise where a DTensor's mesh lacks a dimension along which ``fully_shard`` averages other gradients."""
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
    """FSDP2's own groups of the parameters of one module; none where ``fully_shard`` was not called."""
    ask: Any = getattr(module, "_get_fsdp_state", None)
    if ask is None:
        return []
    state: Any = ask()
    found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # before torch 2.12 there is one
    return [group for group in found if group is not None]


def _ranks(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _root(mesh: Any) -> Any:
    """The mesh that ``mesh`` is a part of; itself if it is none's."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch 2.9

    return _mesh_resources.get_root_mesh(mesh)


def _twins(mesh: Any, replicated: Sequence[bool], ranks: Sequence[int], rank: int, name: str) -> tuple[int, ...]:
    """All ranks that have what ``rank`` has: they differ from it only along dimensions that do not shard."""
    at = (mesh.mesh == rank).nonzero()[0].tolist()
    index = tuple(slice(None) if same else i for i, same in zip(at, replicated, strict=True))
    alike = {int(r) for r in torch.as_tensor(mesh.mesh[index]).flatten().tolist()}
    if _ranks(mesh) == tuple(ranks):
        return tuple(sorted(alike))
    grid = _root(mesh).mesh
    found = _along_the_others(grid, mesh, alike, name)
    if len(ranks) % grid.numel() or not found <= set(ranks):
        raise AttachError(f"{name!r} lies on ranks {sorted(grid.flatten().tolist())}, the model on {list(ranks)}")
    if grid.numel() < len(ranks):
        raise AttachError(
            f"{name!r} lies on a mesh of its own, of ranks {sorted(grid.flatten().tolist())}, and other parameters on "
            f"ranks {list(ranks)}: slice both meshes from one (mesh['dp']), so that replicas can be told"
        )
    return tuple(sorted(found))


def _along_the_others(grid: torch.Tensor, mesh: Any, alike: set[int], name: str) -> set[int]:
    """The ranks ``alike`` and their counterparts along those dimensions of the root's ``grid`` that ``mesh`` lacks.

    The dimensions are found from where the mesh's ranks lie in the grid, so that a mesh whose dimensions were
    flattened into one (``dp_shard_cp`` from ``dp_shard`` and ``cp``), and has a name that the root does not know, is
    understood as well.
    """
    places = {r: (grid == r).nonzero()[0].tolist() for r in _ranks(mesh)}
    spanned = [dim for dim in range(grid.ndim) if len({place[dim] for place in places.values()}) > 1]
    if math.prod(grid.shape[dim] for dim in spanned) != len(places):
        raise AttachError(
            f"{name!r} lies on ranks {sorted(places)}, which are not whole dimensions of the mesh that they were "
            f"sliced from ({tuple(grid.shape)}), and how often each element is there cannot be told; slice the mesh "
            "by the names of its dimensions"
        )
    found: set[int] = set()
    for r in alike:
        index = tuple(places[r][dim] if dim in spanned else slice(None) for dim in range(grid.ndim))
        found |= {int(other) for other in torch.as_tensor(grid[index]).flatten().tolist()}
    return found
