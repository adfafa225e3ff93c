"""One call with hooks on: what autograd saves goes through ``pack`` here, and comes back through ``unpack``."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch
from torch import nn

from disthooks import _events
from disthooks._tensors import Layout, exotic
from disthooks._torch import hooks_allowed, sequence_number, top_hooks
from disthooks.saved.kept import Kept, Recast
from disthooks.saved.ledger import Ledger
from disthooks.saved.packed import Handle, Packed, region_of
from disthooks.saved.pipeline import Pipeline
from disthooks.saved.stores.base import Functions

_NARROW = (torch.bfloat16, torch.float16)  # what autocast makes; it is off while an operator saves, so not asked


def why_not() -> str | None:
    """Why hooks must not be entered now, or None when they may; asked at every call."""
    if not torch.is_grad_enabled():
        return "no_grad"
    if torch.compiler.is_compiling():
        return "compiling"
    if not hooks_allowed():
        return "hooks disabled"  # torch.func's transforms forbid them
    top = top_hooks(True)
    # Non-reentrant checkpointing works by hooks of its own: on top of them ours would defeat it.
    return "checkpoint" if top is not None and top[0].__module__ == "torch.utils.checkpoint" else None


def replica_weights(module: nn.Module | None) -> frozenset[int]:
    """Addresses of the storages of a DataParallel replica's weights, which are not Parameters there."""
    if module is None or not getattr(module, "_is_replica", False):
        return frozenset()
    copies = (copy for part in module.modules() for copy in getattr(part, "_former_parameters", {}).values())
    return frozenset(copy.untyped_storage()._cdata for copy in copies)


def autocast_source(tensor: torch.Tensor) -> nn.Parameter | None:
    """The weight that ``tensor`` is an autocast copy of (or the transpose of one), if it is."""
    node = tensor.grad_fn
    if node is not None and node.name() == "TBackward0":
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None
    source = getattr(node.next_functions[0][0], "variable", None)
    return source if isinstance(source, nn.Parameter) else None


class Frame:
    """The pair of hooks of one call, active in this thread from ``__enter__`` to ``__exit__``.

    Args:
        pipeline: what to do with a saved tensor.
        ledger: the attachment's, shared with other calls.
        where: name of the module, for errors.
        module: the module whose forward this is, if there is one.
    """

    def __init__(self, pipeline: Pipeline, ledger: Ledger, where: str = "", module: nn.Module | None = None) -> None:
        self._at_least, self._codecs, self._store = pipeline.at_least, pipeline.codecs, pipeline.store
        self._ledger, self._where = ledger, where
        self._weights = replica_weights(module)
        self._thread = threading.get_ident()
        self._sequence = -1
        self._pending: list[Packed] = []
        functions = isinstance(pipeline.store, Functions)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._call if functions else self._pack, unpack)

    def __enter__(self) -> Frame:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        if kind is None:
            self._flush()
        self._pending = []  # after an error the graph is as good as gone; what it holds stays in memory

    # -- pack

    def _pack(self, tensor: torch.Tensor) -> Kept | Handle:
        # An operator may save a tensor first and fill it afterwards (pytorch#193671), so contents are taken once
        # the next operator begins. Backward inside the context may pack from another thread, whose numbers differ.
        if threading.get_ident() == self._thread:
            sequence = sequence_number()
            if sequence != self._sequence:
                self._sequence = sequence
                self._flush()
        kept = self._keep(tensor)
        if kept is not None:
            return kept
        storage = tensor.untyped_storage()
        layout = Layout.of(tensor)
        region = region_of(layout, storage.nbytes())
        dtype = layout.dtype if self._codecs and region is None else None
        key = (storage._cdata, tensor._version, region or dtype)
        fate = "shared"
        with self._ledger.lock:
            packed = self._ledger.packed.get(key)
            if packed is None:
                fate = "stored"
                packed = Packed(tensor.detach(), region, self._codecs, self._store, self._ledger, self._where)
                self._ledger.packed[key] = packed
                self._pending.append(packed)
            handle = Handle(packed, layout)
        if fate == "shared":
            self._ledger.count("shared", _nbytes(tensor))
        if _events.listeners:
            _events.tell("pack", self._where, tensor, fate)
        return handle

    def _keep(self, tensor: torch.Tensor) -> Kept | None:
        """The packed value of a tensor that stays where it is; None for one that goes to the store."""
        if isinstance(tensor, nn.Parameter):  # itself: ZeRO-3 gathers and frees it, an alias would hold it
            return self._kept(tensor, tensor, "parameter")
        reason = exotic(tensor) or self._reason(tensor)
        if reason is not None:
            return self._kept(tensor, tensor.detach(), reason)
        if tensor.dtype in _NARROW and (weight := autocast_source(tensor)) is not None:
            self._told(tensor, "autocast weight")
            return Recast(weight, tensor, self._where)
        return None

    def _reason(self, tensor: torch.Tensor) -> str | None:
        """Why a plain tensor stays, if it does."""
        if tensor._is_view() and isinstance(tensor._base, nn.Parameter):
            return "parameter"
        if _nbytes(tensor) < self._at_least or tensor.numel() == 0:
            return "small"
        if self._weights and tensor.untyped_storage()._cdata in self._weights:
            return "parameter"
        return "in place" if not self._codecs and not self._store.moves(tensor) else None

    def _kept(self, tensor: torch.Tensor, alias: torch.Tensor, reason: str) -> Kept:
        self._told(tensor, reason)
        return Kept(alias, self._where)

    def _told(self, tensor: torch.Tensor, reason: str) -> None:
        self._ledger.count_kept(reason, _nbytes(tensor))
        if _events.listeners:
            _events.tell("pack", self._where, tensor, "kept")

    def _call(self, tensor: torch.Tensor) -> Kept | Called:
        """Pack by the user's own function, under torch's contract."""
        if _nbytes(tensor) < self._at_least:
            return self._kept(tensor, tensor.detach() if not tensor.is_leaf else tensor, "small")
        self._ledger.count("stored", _nbytes(tensor))
        if _events.listeners:
            _events.tell("pack", self._where, tensor, "stored")
        return Called(self._store.put(tensor), self._store, self._ledger, _nbytes(tensor))

    def _flush(self) -> None:
        while self._pending:
            self._pending[0].store()  # one that fails stays pending, in memory
            self._pending.pop(0)


class Called:
    """What autograd holds for a tensor that the user's own ``pack`` took."""

    __slots__ = ("ledger", "nbytes", "packed", "store", "where")

    def __init__(self, packed: Any, store: Any, ledger: Ledger, nbytes: int) -> None:
        self.packed, self.store, self.ledger, self.nbytes, self.where = packed, store, ledger, nbytes, ""

    def __del__(self) -> None:
        self.ledger.release(self.nbytes)

    def unpack(self) -> torch.Tensor:
        """What the user's ``unpack`` makes of it."""
        self.ledger.count("loaded", self.nbytes)
        tensor: torch.Tensor = self.store.get(self.packed)
        return tensor


def unpack(packed: Handle | Kept | Called) -> torch.Tensor:
    """The saved tensor; a function of the module, so that a graph does not keep its frame alive."""
    tensor = packed.unpack()
    if _events.listeners:
        where = packed.packed.where if isinstance(packed, Handle) else packed.where
        _events.tell("unpack", where, tensor, "kept" if isinstance(packed, Kept) else "stored")
    return tensor


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
