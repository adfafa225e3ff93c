"""What ``DistributedDataParallel`` has in C++, on fake tensors: its buckets, and when they are written.

The rest of DDP is torch's own Python code. Counted: each bucket, as one flat tensor, from the construction on; the new
buckets after the first step, in the order in which gradients came; gradients that become views of their bucket; the
two maps of the parameters that a step uses; the flat copy of the buffers before each forward. Not counted: the copies
of 250 MiB with which the first rank sends its parameters at construction, and what the communication library allocates
for itself.
"""

# [Note: DDP's reducer]
# The source is torch/csrc/distributed/c10d/reducer.cpp:
# - `initialize_buckets`: one `at::empty` for each bucket, as long as its parameters together, without padding;
# - `mark_variable_ready_dense`: a gradient is copied into its bucket; with `gradient_as_bucket_view` the parameter's
#   `.grad` is then the view, so what backward had made is freed;
# - `rebuild_buckets`: once, before the second forward, unless `find_unused_parameters`; the old buckets are freed
#   first; `compute_bucket_assignment_by_size` (which is used here too) gets the parameters in the order in which their
#   gradients came, and the limits of the first bucket and of the others;
# - `initialize_local_used_map`: with `find_unused_parameters` or a static graph two tensors of 4 bytes for each
#   parameter: one on the device, and one in the host's memory (here both are counted on the device);
# - `delay_all_reduce`: in the first step of a static graph a hook only counts; all gradients are copied into their
#   buckets at the end of backward. So the order for the new buckets is that of the second step, and they are made
#   before the third one;
# - `finalize_backward`: without views the reduced bucket is copied back into the gradients, which takes no memory.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from disthooks.errors import UsageError

_assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]


class FakeReducer:
    """Stands in for ``torch.distributed.Reducer``. The arguments are those of the C++ class.

    ``buckets`` are the flat tensors, in the order in which backward fills them, and ``bucket_indices`` the positions of
    their parameters. ``used_maps`` are there with `find_unused_parameters` or a static graph.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: Any,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = 25 << 20,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: Any = None,
        first_bucket_bytes_cap: int = 1 << 20,
        *newer: Any,
    ) -> None:
        if any(expect_sparse_gradients):
            raise UsageError("DDP with sparse gradients has no buckets for them, and is not explained")
        self.params = list(params)
        self.limits = [first_bucket_bytes_cap, bucket_bytes_cap]
        # After `skip_all_reduce_unused_params` and `use_python_reducer` torch 2.13 has the limits of a user.
        if len(newer) > 2 and newer[2]:
            self.limits = list(newer[2])
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.is_static = False
        self._has_rebuilt = self._is_delayed = False
        self._unused: list[int] = []  # of a static graph
        self._expects_gradients = False
        self._order: list[int] = []
        self._fill(bucket_indices)
        self.used_maps: tuple[torch.Tensor, ...] = ()
        if find_unused_parameters:
            self._map_used()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.params)
        ]

    def _fill(self, bucket_indices: Sequence[Sequence[int]]) -> None:
        self.buckets: list[torch.Tensor] = []
        self._views: dict[int, torch.Tensor] = {}
        self.bucket_indices = [list(indices) for indices in bucket_indices]
        for indices in self.bucket_indices:
            parameters = [self.params[index] for index in indices]
            with torch.no_grad():
                flat = parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))
                sizes = [parameter.numel() for parameter in parameters]
                for index, view in zip(indices, torch.split(flat, sizes), strict=True):
                    self._views[index] = view.view(self.params[index].shape)
            self.buckets.append(flat)

    def _hook(self, index: int) -> Any:
        def on_gradient(parameter: torch.Tensor) -> None:
            if not self._expects_gradients:
                return
            if self._is_delayed:
                return
            self._order.append(index)
            self._copy(index)

        return on_gradient

    def _copy(self, index: int) -> None:
        parameter, view = self.params[index], self._views[index]
        gradient = parameter.grad
        assert gradient is not None
        with torch.no_grad():
            if gradient is not view:
                view.copy_(gradient)
            if self.gradient_as_bucket_view:
                parameter.grad = view

    def _map_used(self) -> None:
        with torch.no_grad():
            self.used_maps = tuple(torch.zeros(len(self.params), dtype=torch.int32) for _ in range(2))

    def _delay_all_reduce(self) -> None:
        """End the backward of the first step of a static graph. DDP's own code calls this."""
        self._is_delayed = False
        for index, parameter in enumerate(self.params):
            if parameter.grad is None:
                self._unused.append(index)
            else:
                self._copy(index)

    def prepare_for_forward(self) -> None:
        """Do nothing; torch's reducer takes the time here."""

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        self._expects_gradients = True
        if not self._has_rebuilt:
            self._order.clear()

    def _rebuild_buckets(self) -> bool:
        self._expects_gradients = False
        should_rebuild = self.is_static or not self.find_unused_parameters
        order = list(dict.fromkeys([*self._order, *self._unused]))
        if self._has_rebuilt or not should_rebuild or len(order) != len(self.params):
            return False
        self._has_rebuilt = True
        self.buckets.clear()
        self._views.clear()
        parameters = [self.params[index] for index in order]
        self._fill(_assign(parameters, self.limits, [False] * len(order), order)[0])
        return True

    def _set_static_graph(self) -> None:
        self.is_static = self._is_delayed = True
        self._map_used()

    def _remove_autograd_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __getattr__(self, name: str) -> Any:
        if name in ("set_logger", "_set_ddp_runtime_logging_sample_rate", "_check_reducer_finalized"):
            return lambda *args: None
        raise AttributeError(f"the reducer of a fake run has no {name!r}: this use of DDP is not explained")


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
