"""Decides about each saved tensor: it is kept in memory, cast or computed again later, or stored; and why."""

from __future__ import annotations

import functools

import torch
from torch import nn

from disthooks._tensors import Layout, exotic, region_of
from disthooks._torch import in_graph_memory
from disthooks.saved.counters import Counters
from disthooks.saved.packed import Decision
from disthooks.saved.pipeline import OpenPipeline
from disthooks.saved.recompute.context import RecomputeContext
from disthooks.saved.weights import NARROW, ModuleWeights

NO_WEIGHTS = ModuleWeights(None)
_WEIGHTS = ("parameter", "buffer", "autocast weight")  # reasons to keep what no function returns as a gradient


@functools.cache  # most saved tensors are kept, for few reasons
def keep_because(reason: str, is_plain: bool = True) -> Decision:
    return Decision("keep", reason, is_activation=is_plain and reason not in _WEIGHTS)


_STORE, SMALL_COPY, _RECOMPUTE = Decision("store"), Decision("store", "small"), Decision("recompute")


class Decides:
    """The part of the hooks of one call that decides.

    Attributes:
        _pipeline: the stages that a saved tensor goes through.
        _has_in_place: whether something is where the store would put it.
    """

    _pipeline: OpenPipeline
    _counters: Counters
    _module_name: str
    _weights: ModuleWeights
    _recompute: RecomputeContext | None
    _has_in_place: bool

    def _decide(self, tensor: torch.Tensor, part: torch.Tensor, owner: torch.Tensor) -> Decision:
        """The decision about ``tensor``, which is not known yet."""
        if type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter):
            return keep_because("parameter")
        not_plain = exotic(part)
        if not_plain is not None:
            return keep_because("subclass" if part is not tensor else not_plain, False)
        reason, pipeline = self._reason_to_keep(owner, part), self._pipeline
        if reason == "small" and part.nbytes:
            # A small view may keep a storage in memory that would otherwise go to the store. Its elements are copied.
            whole = part.untyped_storage().nbytes()
            would_go = whole >= pipeline.at_least and pipeline.store.leaves_memory(part)
            if would_go and region_of(Layout.of(part), whole) is not None and self._weights.kind_of(part) is None:
                return SMALL_COPY
        if reason is not None:
            return keep_because(reason, part is tensor)
        if tensor.dtype in NARROW:
            source = self._weights.cast_from(tensor)
            if source is not None:
                if source.weight is None or part is not tensor:
                    return keep_because("autocast weight")
                return Decision("recast", "", source.weight)
        return _STORE if self._recompute is None or part is not tensor else _RECOMPUTE

    def _reason_to_keep(self, owner: torch.Tensor, part: torch.Tensor) -> str | None:
        """Why a tensor, of which ``part`` would be packed, stays in memory; None if it does not."""
        if type(owner) is not torch.Tensor and isinstance(owner, nn.Parameter):
            return "parameter"
        nbytes = part.nbytes
        if nbytes < self._pipeline.at_least or nbytes == 0:
            return "small"
        kind = None if self._weights is NO_WEIGHTS else self._weights.kind_of(part)
        if kind is not None:
            return kind
        if not part.is_cpu and in_graph_memory(part):
            self._counters.warn_of_graphs(self._module_name)
            return "CUDA graph"
        if self._pipeline.codecs or self._pipeline.store.leaves_memory(part):
            return None
        if self._recompute is not None and owner.grad_fn is not None:
            return None
        self._has_in_place = self._has_in_place or (part.is_cpu and self._recompute is None)
        return "in place"
