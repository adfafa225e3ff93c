"""What ``DistributedDataParallel`` has in C++, on fake tensors: flat tensors as long as all parameters, its buckets.

The rest of DDP is torch's own Python code. Counted: each bucket, from the construction on; gradients that become views
of their bucket; the flat copy of the buffers before each forward; with `find_unused_parameters` or a static graph the
two maps of the parameters that a step uses. Not counted: the copies of 250 MiB with which the first rank sends its
parameters at construction, and what the communication library allocates for itself.
"""

# [Note: DDP's reducer]
# The source is torch/csrc/distributed/c10d/reducer.cpp. A bucket is one `at::empty`, as long as all of its parameters,
# without padding. After the first step DDP frees the buckets and makes new ones, in the order in which gradients came.
# Here the first ones stay: the new ones have as many bytes in all, so only what an allocator rounds up can differ.
# With `gradient_as_bucket_view` a parameter's `.grad` becomes a view of its bucket as soon as it is ready, so what
# backward had made is freed; without views the reduced bucket is copied back into the gradients.
# `initialize_local_used_map` makes two tensors of 4 bytes for each parameter, one on the device and one in the host's
# memory; here both are counted on the device.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from disthooks.errors import UsageError

_assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
#: What DDP asks of its reducer beside that, which takes or frees no memory here.
_SILENT = {"prepare_for_forward", "prepare_for_backward", "set_logger", "_rebuild_buckets", "_delay_all_reduce"}
_SILENT |= {"_set_ddp_runtime_logging_sample_rate", "_check_reducer_finalized"}


class FakeReducer:
    """Stands in for ``torch.distributed.Reducer``; ``held`` has buckets, and maps of the parameters that are used."""

    def __init__(self, *arguments: Any) -> None:
        # As DDP gives them to the C++ class.
        params, bucket_indices, _, _, is_sparse, _, finds_unused, has_views = arguments[:8]
        if any(is_sparse):
            raise UsageError("DDP with sparse gradients has no buckets for them, and is not explained")
        self.held: dict[str, list[torch.Tensor]] = {"buckets": [], "maps": []}
        self._handles: list[Any] = []
        self._count = len(params)
        if finds_unused:
            self._set_static_graph()
        for indices in bucket_indices:
            members = [params[index] for index in indices]
            sizes = [member.numel() for member in members]
            with torch.no_grad():
                self.held["buckets"].append(members[0].new_empty(sum(sizes)))
                views = torch.split(self.held["buckets"][-1], sizes)
            for member, view in zip(members, views if has_views else (), strict=False):
                hook = _becomes(view.view(member.shape))
                self._handles.append(member.register_post_accumulate_grad_hook(hook))

    def _set_static_graph(self) -> None:
        with torch.no_grad():
            self.held["maps"] = [torch.zeros(self._count, dtype=torch.int32) for _ in range(2)]

    def _remove_autograd_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __getattr__(self, name: str) -> Any:
        if name in _SILENT:
            return lambda *args: False
        raise AttributeError(f"the reducer of a fake run has no {name!r}: this use of DDP is not explained")


def _becomes(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A hook that makes the gradient of a parameter a view of its bucket."""

    def on_gradient(parameter: torch.Tensor) -> None:
        parameter.grad = view

    return on_gradient


class FakeLogger:
    """Stands in for ``torch.distributed.Logger``, and writes nothing."""

    def __init__(self, reducer: FakeReducer) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: None


def broadcast_coalesced(group: Any, tensors: Sequence[torch.Tensor], buffer_size: int, src: int = 0) -> None:
    """What ``torch.distributed._broadcast_coalesced`` allocates: flat copies of at most ``buffer_size`` bytes.

    At most two are alive at a time (``broadcast_coalesced`` in torch/csrc/distributed/c10d/comm.cpp).
    """
    if not tensors:
        return
    waiting: list[torch.Tensor] = []
    for indices in _assign(list(tensors), [buffer_size])[0]:
        waiting = waiting[-1:]
        flat = [tensors[index].detach().flatten() for index in indices]
        waiting.append(torch.cat(flat) if len(flat) > 1 else flat[0])
