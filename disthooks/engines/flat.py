"""The flat parameters of FSDP1: which parameters are in them, where, and on which ranks.

torch has no public way to ask. What is private of it (the attributes of ``FullyShardedDataParallel``, of its
``FlatParamHandle`` and of the ``FlatParameter`` that begin with an underscore) is read in this file alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from disthooks._match import canonical
from disthooks.engines.base import is_a
from disthooks.engines.shard import Part
from disthooks.errors import AttachError


class Piece(NamedTuple):
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
        twins: those that have the same elements as this one.
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
        self.ranks, self.twins = self._ranks()
        self._must_be_right()

    @property
    def inside(self) -> nn.Module:
        """The user's module: when its forward begins, the parameters are whole."""
        return cast(nn.Module, self._module._fsdp_wrapped_module)

    def held(self, number: int) -> nn.Parameter:
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

    def begins(self) -> bool:
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

    def _pieces(self) -> Iterator[Piece]:
        flat = self.flat
        ends = list(itertools.accumulate(flat._numels_with_padding))
        starts = [0, *ends[:-1]]
        true = [start for start, padding in zip(starts, flat._is_padding_mask, strict=True) if not padding]
        for i, (key, module, _) in enumerate(flat._param_infos):
            name, here = canonical(f"{self.name}.{flat._fqns[i]}".lstrip(".")), flat._shard_param_infos[i]
            if flat._param_extensions[i] is not None:
                raise AttachError(
                    f"{name!r} is a DTensor inside FSDP1, and which of its elements a rank has cannot be told; use "
                    "torch.distributed.fsdp.fully_shard with tensor parallelism"
                )
            local, span = (0, 0), (0, 0)
            if here.in_shard:
                local = here.offset_in_shard, here.offset_in_shard + here.numel_in_shard
                span = here.intra_param_start_idx, here.intra_param_end_idx + 1
            yield Piece(name, module, key, true[i], flat._shapes[i], flat._strides[i], local, span)

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
        twins = tuple(sorted(dist.get_process_group_ranks(across)))
        if not self.sharded and len(twins) > 1:
            raise AttachError(
                f"{self._shown()} is HYBRID_SHARD with one rank to shard over, which FSDP1 takes for NO_SHARD and then "
                f"never averages gradients over the replicas {list(twins)}: use NO_SHARD over all ranks, DDP, or more "
                "than one rank in the second dimension of the mesh"
            )
        return self._all(len(ranks) * len(twins)), twins

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
    named = ((canonical(name), module) for name, module in model.named_modules() if is_fsdp1(module))
    return tuple(Unit(name, module) for name, module in named if module.__dict__["_handle"] is not None)


def is_fsdp1(module: nn.Module) -> bool:
    """Whether ``module`` is a ``FullyShardedDataParallel``."""
    return is_a(module, "FullyShardedDataParallel")
