"""One call with hooks on: what autograd saves goes through ``pack`` here, and comes back through ``unpack``."""

from __future__ import annotations

import collections
import inspect
import threading
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdRef

from disthooks import _events
from disthooks._tensors import Layout, exotic, storages_of
from disthooks._torch import hooks_allowed, sequence_number, top_hooks
from disthooks.saved.kept import Kept
from disthooks.saved.ledger import Ledger
from disthooks.saved.packed import Handle, Packed
from disthooks.saved.pipeline import Pipeline
from disthooks.saved.region import region_of
from disthooks.saved.stores.base import Functions

_NARROW = (torch.bfloat16, torch.float16)  # what autocast makes; it is off while an operator saves, so not asked


def why_not() -> str | None:
    """Why hooks must not be entered now, or None when they may; asked at every call."""
    if not torch.is_grad_enabled():
        return "no_grad"
    if torch.compiler.is_compiling():
        return "compiling"
    if torch._C._is_tracing():
        return "tracing"  # sizes are tensors there
    if not hooks_allowed():
        return "hooks disabled"  # torch.func's transforms forbid them
    top = top_hooks(True)
    # Non-reentrant checkpointing works by hooks of its own: on top of them ours would defeat it.
    theirs = top is not None and getattr(top[0], "__module__", None) == "torch.utils.checkpoint"
    return "checkpoint" if theirs else None


def never_runs(module: nn.Module) -> str | None:
    """Why no forward of ``module`` itself could run with hooks on, or None when one can."""
    if isinstance(module, torch.jit.ScriptModule):
        return None  # refused elsewhere; its class has no forward to look at
    if type(module).forward is nn.Module.forward:
        return "it is a container without a forward, which nobody calls; take the modules inside it"
    if inspect.isgeneratorfunction(type(module).forward):
        return "its forward is a generator, whose body runs after the call; take the modules that it calls"
    return None


def is_weight_copy(tensor: torch.Tensor) -> bool:
    """Whether a narrow ``tensor`` is a cast of a parameter, as autocast makes them, or the transpose of one."""
    node = tensor.grad_fn
    if node is not None and node.name() == "TBackward0":
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


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
        self._module = module
        # A replica's weights have a history; those of any other module are told by type, or looked up when in doubt.
        replica = module is not None and getattr(module, "_is_replica", False)
        self._own = storages_of(module) if replica and module is not None else None
        self._is_replica = replica
        self._thread = threading.get_ident()
        self._sequence = -1
        self._pending: collections.deque[Packed] = collections.deque()
        pack = self._call if isinstance(pipeline.store, Functions) else self._pack
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> Frame:
        self._ledger.count_call()
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        try:
            if kind is None:
                self._flush()
        finally:
            # After an error the graph is as good as gone: what it holds stays in memory, for itself alone.
            for packed in self._pending:
                self._ledger.forget(packed.key)
            self._pending.clear()
            self._hooks = self._module = None  # the hooks hold this frame: no cycle may stay

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
        # Views of one tensor count their changes together; other aliases (unsafe_chunk's, .data) may not.
        owner: Any = tensor._base if tensor._is_view() else tensor
        # Batch norm does not count what it writes into its running statistics: such vectors stand alone.
        alone = owner.dim() < 2 and _is_constant(owner)
        fate = "shared"
        with self._ledger.lock:
            packed = self._ledger.packed.get(key)
            if packed is None or packed.owner() is not owner or alone:
                fate = "stored"
                packed = Packed(tensor.detach(), region, self._codecs, self._store, self._ledger, self._where)
                packed.key, packed.owner = key, WeakIdRef(owner)
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
        return None if reason is None else self._kept(tensor, tensor.detach(), reason)

    def _reason(self, tensor: torch.Tensor) -> str | None:
        """Why a plain tensor stays, if it does."""
        if tensor._is_view() and isinstance(tensor._base, nn.Parameter):
            return "parameter"
        nbytes = _nbytes(tensor)
        if nbytes < self._at_least or nbytes == 0:
            return "small"
        if self._is_replica or _is_constant(tensor):
            owned = self._owned().get(tensor.untyped_storage()._cdata)
            if owned is not None:
                return owned
        if tensor.dtype in _NARROW and is_weight_copy(tensor):
            return "autocast weight"
        return "in place" if not self._codecs and not self._store.moves(tensor) else None

    def _owned(self) -> dict[int, str]:
        if self._own is None:
            self._own = {} if self._module is None else storages_of(self._module)
        return self._own

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
        packed = Called(self._store.put(tensor), self._store, self._ledger, _nbytes(tensor))
        self._ledger.count("stored", packed.nbytes)
        if _events.listeners:
            _events.tell("pack", self._where, tensor, "stored")
        return packed

    def _flush(self) -> None:
        while self._pending:
            packed = self._pending.popleft()
            if not packed.live:
                continue  # its graph is gone already
            try:
                packed.store()
            except BaseException:
                self._ledger.forget(packed.key)  # it stays in memory, for its own graph alone
                raise


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


def _is_constant(tensor: torch.Tensor) -> bool:
    """No gradient flows to it: a batch, a mask, a buffer, a detached weight."""
    return tensor.grad_fn is None and not tensor.requires_grad


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
