"""``DistributedDataParallel``: every rank ends backward with the same whole gradients."""

# [Note: the last backward of DDP]
# The forward decides whether gradients are reduced: inside `no_sync()` DDP does not prepare its reducer, and the
# backward that comes next leaves each rank with its own gradients. A prepared reducer serves one backward: if two
# forwards come first, or two losses share one, torch does not reduce the second backward, and says nothing. So a
# forward hook notes that the reducer is prepared, and puts a tensor hook on the outputs. When a backward reaches the
# outputs and will accumulate gradients (`torch.autograd.grad` may not), that hook notes whether the reducer was
# prepared for it.
# torch's PipelineStage runs each forward inside `no_sync()`. It prepares the reducer itself before the last backward of
# a step, which alone is outside of `no_sync()`.
#
# [Note: the parameters that DDP reduces]
# DDP counts the parameters that need gradients when it is made, and reduces those. If a parameter is unfrozen later,
# nothing reduces its gradient: every rank would train another model, and a norm would be of one rank only.
# The count is in the data that DDP keeps for its log (`_get_ddp_logging_data`); it has no public name.
#
# [Note: join]
# Under `join()` a rank that has no inputs left makes no further steps. The other ranks would wait for its part of the
# statistics for ever, so a step under `join()` is refused.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _find_tensors

from disthooks._handles import UncopiedHook
from disthooks._match import canonical_name, is_of_class, unwrap_engine
from disthooks._registry import register
from disthooks._torch import accumulates, backward_id, in_pipeline_stage
from disthooks.engines.base import Engine, Part, Removable, Shard
from disthooks.errors import AttachError


@register("engine")
class Ddp(Engine):
    """``DistributedDataParallel``: every rank ends backward with the same whole gradients.

    The ranks own the parameters in turn, so each rank measures its part of them and none measures all.
    """

    label = "DDP"
    may_step_unreduced = True
    reduces_late = True
    first_sum_differs = True  # its buckets are made anew after the first step

    def __init__(self, model: nn.Module) -> None:
        wrapper: Any = model
        ranks = dist.get_process_group_ranks(wrapper.process_group)
        self._ignored = frozenset(map(canonical_name, wrapper.parameters_to_ignore))
        self._wrapper = wrapper
        # See [Note: the parameters that DDP reduces].
        self._reduced: int = wrapper._get_ddp_logging_data().get("num_parameter_tensors", 0)
        self._is_prepared = False  # the reducer, for the backward that comes next
        self._last_backward = -1  # its number
        self._last_backward_reduces = True
        self._is_of_pipeline = False  # the last forward
        super().__init__(unwrap_engine(model), ranks, dist.get_rank(wrapper.process_group))
        self._frozen = [shard for shard in self.shards if not shard.parameter.requires_grad]
        self._check_all_reduced()

    @classmethod
    def recognises(cls, model: nn.Module) -> bool:
        return is_of_class(model, "DistributedDataParallel")

    def shard(self, index: int, name: str, parameter: nn.Parameter) -> Shard:
        if name in self._ignored:
            return Shard(name, parameter, self.position == 0, "unreduced", Part.whole(parameter.shape))
        if hasattr(parameter, "device_mesh"):
            raise AttachError(
                f"{name!r} is a DTensor inside DDP, so disthooks cannot tell how many ranks have each of its elements; "
                "use fully_shard with a two-dimensional mesh instead of DDP"
            )
        mine = index % len(self.ranks) == self.position
        return Shard(name, parameter, mine, "replica", Part.whole(parameter.shape), self.ranks)

    def watch_backward(self, see: Callable[[], None]) -> list[Removable]:
        # See [Note: the last backward of DDP].
        self._see_backward = see
        begins = self._wrapper.register_forward_pre_hook(UncopiedHook(self._begin_forward))
        return [begins, self._wrapper.register_forward_hook(UncopiedHook(self._end_forward))]

    def reason_unreduced(self) -> str:
        if self._last_backward_reduces:
            return ""
        return (
            f"DDP did not reduce the gradients of the last backward: each of the ranks {list(self.ranks)} has its own, "
            "and there is none that rules could act on alike. Either its forward was inside no_sync(): run the last "
            "micro-batch of a step outside of it; for local SGD, where ranks step by themselves, give no rules, or "
            "remove() the attachment. Or it was the second backward after a forward: call each backward before the "
            "next forward, or add the losses and call one backward"
        )

    def keeps_gradients(self) -> str:
        kinds = (type(state).__name__ for _, state in self._wrapper._comm_hooks if hasattr(state, "error_dict"))
        return next((f"DDP's communication hook ({kind})" for kind in kinds), "")

    def sync_flags(self) -> list[tuple[Any, str]]:
        return [(self._wrapper, "require_backward_grad_sync")]

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        # DDP asks the same in its forward, and prepares its reducer or does not.
        prepares = bool(self._wrapper.require_backward_grad_sync)
        self._is_of_pipeline = not prepares and in_pipeline_stage()
        self._is_prepared = self._is_prepared or (prepares and torch.is_grad_enabled())

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        tensors = [tensor for tensor in _find_tensors(output) if tensor.requires_grad]  # type: ignore[no-untyped-call]
        if not tensors:  # the output is an object that DDP does not look into either
            self._last_backward_reduces, self._is_prepared = self._is_prepared, False
        for tensor in tensors:
            tensor.register_hook(functools.partial(self._begin_backward, self._is_of_pipeline))

    def _begin_backward(self, is_of_pipeline: bool, grad: torch.Tensor) -> None:
        if backward_id() == self._last_backward:  # it has reached another output before
            return
        if not any(accumulates(s.parameter) for s in self.shards if s.parameter.requires_grad):
            return
        self._last_backward = backward_id()
        prepared, self._is_prepared = self._is_prepared, False
        self._last_backward_reduces = bool(self._wrapper.require_backward_grad_sync) if is_of_pipeline else prepared
        self._see_backward()

    def check(self) -> None:
        if self._wrapper._join_config.enable:  # see [Note: join]
            raise AttachError(
                "DDP's join() lets a rank stop early, and the others would wait for its part of the gradients' "
                "statistics: give every rank the same number of steps, or remove() the attachment before join()"
            )
        super().check()
        if any(shard.parameter.requires_grad for shard in self._frozen):
            self._check_all_reduced()

    def _check_all_reduced(self) -> None:
        """Raise if DDP does not reduce a parameter's gradient; see [Note: the parameters that DDP reduces]."""
        needing = sum(s.parameter.requires_grad for s in self.shards if s.sharding != "unreduced")
        if not 0 < self._reduced < needing:
            return
        thawed = [shard.name for shard in self._frozen if shard.parameter.requires_grad]
        which = f"{thawed[0]!r} was" if thawed else f"{needing - self._reduced} of the parameters were"
        raise AttachError(
            f"{which} frozen when DDP took the model, and DDP never reduces the gradient of such a parameter: every "
            "rank would train another model. Unfreeze all parameters before DDP takes the model and freeze some of "
            "them afterwards, or make DDP anew and attach to that"
        )
