"""``DistributedDataParallel``: every rank ends backward with the same whole gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _find_tensors

from disthooks._handles import Hook
from disthooks._match import canonical, inside
from disthooks.engines.base import Both, Engine, Removable, is_a
from disthooks.engines.shard import Part, Shard
from disthooks.engines.steps import Again, BeforeStep
from disthooks.errors import AttachError


class Ddp(Engine):
    """The ranks take turns at owning parameters, so each measures its part and none measures all."""

    label = "DDP"
    steps_alone = True

    def __init__(self, model: nn.Module) -> None:
        wrapper: Any = model
        ranks = dist.get_process_group_ranks(wrapper.process_group)
        self._ignored = frozenset(map(canonical, wrapper.parameters_to_ignore))
        self._wrapper = wrapper
        # How many parameters DDP found in need of gradients when it was made: it reduces those, and no others later.
        self._reduced: int = wrapper._get_ddp_logging_data().get("num_parameter_tensors", 0)
        self._prepares = True  # the last forward, for a backward that reduces
        self._reduces = True  # the last backward
        super().__init__(inside(model), ranks, dist.get_rank(wrapper.process_group))
        self._frozen = [shard for shard in self.shards if not shard.parameter.requires_grad]
        self._must_be_reduced()

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        """A ``DistributedDataParallel``."""
        return is_a(model, "DistributedDataParallel")

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        """Whole on every rank; the ranks own them in turn."""
        if name in self._ignored:
            raise AttachError(
                f"DDP was told to ignore {name!r}: its gradients stay different on every rank, so there is no final "
                "one to measure; let DDP have it"
            )
        if hasattr(parameter, "device_mesh"):
            raise AttachError(
                f"{name!r} is a DTensor inside DDP, and how often each of its elements is there cannot be told; use "
                "fully_shard with a two-dimensional mesh in place of DDP"
            )
        mine = index % len(self.ranks) == self.position
        return Shard(name, parameter, mine, "replica", Part.whole(parameter.shape), self.ranks)

    def before_step(self, optimizer: Any, run: BeforeStep, again: Again = "refuse") -> Removable:
        """Also notice which backward DDP reduces."""
        begins = self._wrapper.register_forward_pre_hook(Hook(self._begin_forward))
        ends = self._wrapper.register_forward_hook(Hook(self._end_forward))
        return Both(super().before_step(optimizer, run, again), Both(begins, ends))

    def unreduced(self) -> str:
        """After a forward and backward inside ``no_sync()``, as local SGD steps: each rank has its own gradients."""
        if self._reduces:
            return ""
        return (
            f"the last backward was of a forward inside DDP's no_sync(), so each of the ranks {list(self.ranks)} has "
            "gradients of its own, which nobody reduced, and there is none that rules could act on alike. Run the last "
            "micro-batch of a step outside of no_sync(); for local SGD, where ranks step by themselves, give no rules, "
            "or remove() the attachment"
        )

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        # DDP asks the same in its forward, and prepares its reducer or does not.
        self._prepares = bool(self._wrapper.require_backward_grad_sync)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        # The backward counts, not the forward: a rank may compute a metric inside no_sync(), without a backward.
        if not torch.is_grad_enabled():
            return
        found = [tensor for tensor in _find_tensors(output) if tensor.requires_grad]  # type: ignore[no-untyped-call]
        if not found:  # in an object that DDP does not look into either
            self._reduces = self._prepares
        for tensor in found:
            tensor.register_hook(functools.partial(self._begin_backward, self._prepares))

    def _begin_backward(self, reduces: bool, grad: torch.Tensor) -> None:
        self._reduces = reduces

    def check(self) -> None:
        """Also raise AttachError where DDP does not reduce a gradient, and under ``join()``.

        Under ``join()`` a rank that has no inputs left takes no step, and is waited for.
        """
        if self._wrapper._join_config.enable:
            raise AttachError(
                "DDP's join() lets a rank stop early, and the others would wait for its part of the gradients' "
                "statistics: give every rank the same number of steps, or remove() the attachment before join()"
            )
        super().check()
        if any(shard.parameter.requires_grad for shard in self._frozen):
            self._must_be_reduced()

    def _must_be_reduced(self) -> None:
        """Raise where more parameters need gradients than did when DDP took the model."""
        needing = sum(shard.parameter.requires_grad for shard in self.shards)
        if not 0 < self._reduced < needing:
            return
        thawed = [shard.name for shard in self._frozen if shard.parameter.requires_grad]
        which = f"{thawed[0]!r} was" if thawed else f"{needing - self._reduced} of the parameters were"
        raise AttachError(
            f"{which} frozen when DDP took the model, and DDP never reduces a gradient that comes later: every rank "
            "would train another model. Unfreeze before DDP takes the model (and freeze after it what is to rest), or "
            "make DDP anew and attach to that"
        )
