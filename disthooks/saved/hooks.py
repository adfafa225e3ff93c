"""One call with hooks on: what autograd saves goes through ``pack`` here, and comes back through ``unpack``.

A place where hooks open around calls: a module, a function, an autograd Function.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Generator, Hashable
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from disthooks import _handles
from disthooks._tensors import Layout, StorageRegion, exotic, local_part, region_of
from disthooks._torch import fresh_count, in_graph_memory, sequence_number, top_hooks, uncompiled
from disthooks.errors import AttachError
from disthooks.saved.contents import SmallCopy, StorageParts, StoredContent
from disthooks.saved.counters import Counters
from disthooks.saved.dedup import Key, is_written_uncounted
from disthooks.saved.eligibility import BREAK, reason_not_to_hook, refuse_capture
from disthooks.saved.in_place import InPlace, ModuleWeights, is_constant
from disthooks.saved.packed import FunctionsHandle, Handle, Packed
from disthooks.saved.pipeline import Pipeline
from disthooks.saved.rebuild import AutocastCopy, DTensorHandle, stored_part
from disthooks.saved.recompute.context import Again, Recomputed
from disthooks.saved.recompute.graph import note
from disthooks.saved.stores.base import Functions

_numbers = itertools.count(1)  # of calls
_NO_WEIGHTS = ModuleWeights(None)
_WEIGHTS = ("parameter", "buffer", "autocast weight")  # reasons to keep what no function returns as a gradient


class SavedTensorHooks:
    """The pair of hooks of one call, active in this thread from ``__enter__`` to ``__exit__``.

    Args:
        pipeline: what to do with a saved tensor.
        counters: the attachment's, shared with other calls.
        module_name: name of the module, for errors.
        module: the module whose forward this is, if there is one.
    """

    @uncompiled(BREAK)
    def __init__(
        self, pipeline: Pipeline, counters: Counters, module_name: str = "", module: nn.Module | None = None
    ) -> None:
        self._at_least, self._codecs, self._store = pipeline.at_least, pipeline.codecs, pipeline.store
        self._counters, self._module_name = counters, module_name
        self._weights = ModuleWeights(module)
        stage = pipeline.recompute
        self._again = None if stage is None else Again(stage, counters, module_name, module, _is_lossless(pipeline))
        self._number = next(_numbers)
        self._thread = threading.get_ident()
        self._sequence = -1
        self._is_outer = False  # whether another attachment took what was saved in a part of the call
        self._in_place = False  # whether something is where the store would put it
        self._pending: collections.deque[weakref.ref[Packed]] = collections.deque()
        self._parts = StorageParts()  # among those that are pending
        pack = self._call if isinstance(pipeline.store, Functions) else self._pack
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @uncompiled(BREAK)
    def __enter__(self) -> SavedTensorHooks:
        refuse_capture(self._module_name)
        self._counters.count_call(self._module_name)
        outer = top_hooks(True)
        outer_frame = getattr(outer[0], "__self__", None) if outer is not None else None
        if isinstance(outer_frame, SavedTensorHooks) and outer_frame._counters is not self._counters:
            outer_frame._counters.count_inner()  # the inner one wins
            outer_frame._is_outer = True
        self._hooks.__enter__()
        return self

    @uncompiled(BREAK)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        try:
            if kind is None:
                self._flush()
                if self._in_place:
                    self._counters.say_in_place(self._module_name, self._store)
        finally:
            # After an error the graph is as good as gone: what it holds stays in memory, for itself alone.
            for reference in self._pending:
                packed = reference()
                if packed is not None:
                    self._forget(packed)
            self._pending.clear()
            self._again = None
            self._hooks = None  # they hold this frame: no cycle may stay
            self._weights = _NO_WEIGHTS  # a graph keeps its pack, and so this frame: not its module, too
        if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
            raise AttachError(
                f"{self._module_name or 'this block'!r} calls torch.func.grad, vjp, jacrev or hessian inside, "
                "and torch allows no saved-tensor hooks there: attach to other modules, or to the parts outside of "
                "that call"
            ) from error

    @property
    def has_seen_nothing(self) -> bool:
        """Whether nothing was saved in this thread during the call, by any attachment."""
        return self._sequence == -1 and not self._is_outer

    # -- pack

    @uncompiled(BREAK)
    def _pack(self, tensor: torch.Tensor) -> InPlace | Handle | DTensorHandle:
        # See [Note: contents are of one moment].
        late = not tensor.requires_grad and sys.getrefcount(tensor) <= fresh_count()
        if tensor.is_cuda:
            refuse_capture(self._module_name)  # it began inside
        # An operator may save a tensor first and fill it afterwards (pytorch#193671), so contents are taken once
        # the next operator begins. Backward inside the context may pack from another thread, whose numbers differ.
        if sequence_number() != self._sequence and threading.get_ident() == self._thread:
            self._sequence = sequence_number()
            if self._pending or self._counters.undecided:
                self._flush()
        # Views of one tensor count their changes together; other aliases (unsafe_chunk's, .data) may not.
        owner: Any = tensor._base if tensor._is_view() else tensor
        seen = self._counters.index.lookup_view(tensor, owner, self._at_least)
        if seen is None or not self._is_same(seen[0], tensor, seen[1]):
            return self._pack_new(tensor, owner, late)
        if self._again is not None:
            note(tensor, *seen)
        return self._shared(tensor, tensor, *seen)

    def _is_same(self, packed: Packed, part: torch.Tensor, layout: Layout) -> bool:
        """Whether ``part`` still is what it was ``packed`` as; see [Note: contents are of one moment]."""
        moment = threading.get_ident(), sequence_number()
        if packed.saved_at == moment:
            return True
        same = packed.has_contents_of(part, layout) if part.is_cpu else not (packed.is_volatile or packed.is_constant)
        if same:
            packed.saved_at = moment
        return same

    def _pack_new(self, tensor: torch.Tensor, owner: torch.Tensor, late: bool) -> InPlace | Handle | DTensorHandle:
        if type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter):
            # Itself: ZeRO-3 gathers and frees it, an alias would hold it.
            return self._kept(tensor, tensor, "parameter")
        part = stored_part(tensor)
        if part is None:
            return self._kept(tensor, None, exotic(tensor) or "local part")
        reason = self._reason(owner, part)
        if reason is not None and not (reason == "small" and self._pins_much(part)):
            return self._kept(tensor, None, reason)
        weight = self._weights.cast_from(tensor) if reason is None else None
        if weight is not None and (weight.itself is None or part is not tensor):
            return self._kept(tensor, None, "autocast weight")
        handle = self._share(tensor, part, owner, weight and weight.itself, reason is not None, late)
        return handle if part is tensor else DTensorHandle(handle, tensor)

    def _reason(self, owner: torch.Tensor, part: torch.Tensor) -> str | None:
        """Why a tensor of which ``part`` would be stored, stays in memory, if it does."""
        if type(owner) is not torch.Tensor and isinstance(owner, nn.Parameter):
            return "parameter"
        nbytes = part.nbytes
        if nbytes < self._at_least or nbytes == 0:
            return "small"
        owned = self._weights.kind_of(part)
        if owned is not None:
            return owned
        if not part.is_cpu and in_graph_memory(part):
            self._counters.say_graphs(self._module_name)
            return "CUDA graph"
        if self._codecs or self._store.leaves_memory(part):
            return None
        if self._again is not None:
            return None if owner.grad_fn is not None else "in place"
        self._in_place = self._in_place or part.is_cpu
        return "in place"

    def _pins_much(self, part: torch.Tensor) -> bool:
        """Whether keeping a small ``part`` would keep in memory what would otherwise go to the store."""
        nbytes = part.untyped_storage().nbytes()
        if nbytes < self._at_least or _nbytes(part) == 0 or not self._store.leaves_memory(part):
            return False
        return region_of(Layout.of(part), nbytes) is not None and self._weights.kind_of(part) is None

    def _share(
        self,
        tensor: torch.Tensor,
        part: torch.Tensor,
        owner: torch.Tensor,
        weight: nn.Parameter | None,
        small: bool,
        late: bool,
    ) -> Handle:
        """A handle on the one packed value of what ``part``, all of ``tensor`` or its local part, lies over."""
        storage = part.untyped_storage()
        layout = Layout.of(part)
        region = None if weight is not None else region_of(layout, storage.nbytes())
        typed = self._codecs and not small  # a codec wants to know what the bytes mean
        if region is not None and not typed:
            region = region.raw()
        dtype = layout.dtype if typed and region is None else None
        key = storage._cdata, tensor._version, region or dtype, id(owner)
        # Batch norm does not count what it writes into its running statistics: such vectors stand alone.
        alone = owner.dim() < 2 and is_constant(owner)
        looks_whole = region is not None and not (small or alone)
        packed = self._found(key, part, owner, region if looks_whole else None, layout.dtype if typed else None)
        known = packed is not None and packed.owner() is owner and not alone
        known = known and self._is_same(cast(Packed, packed), part, layout)
        if packed is None or not known:
            whole_of = owner if part is tensor and not small and region is None and weight is None else None
            packed = self._made(part.detach(), storage, weight, region, layout, small, whole_of)
            packed.owner, packed.is_constant = weakref.ref(owner), is_constant(owner)
            packed.is_volatile = alone or is_written_uncounted(tensor, owner)
            packed.saved_at, packed.is_never_shared = (threading.get_ident(), sequence_number()), alone
            self._add(packed, key, part, None if alone or part is not tensor else owner)
            self._parts.add((*key[:2], layout.dtype if typed else None, key[3]), packed)
        self._note(tensor, part, owner, packed, layout)
        if known:
            return self._shared(tensor, part, packed, layout)
        packed.prepare()
        if part.is_cpu and not (late or packed.is_never_shared):
            packed.copy_now()
        handle = packed.handle(layout)
        if small:
            self._counters.count_kept("small", _nbytes(part), self._module_name)
        if _handles.listeners:
            _handles.notify("pack", self._module_name, tensor, "kept" if small or weight is not None else "stored")
        return handle

    def _add(self, packed: Packed, key: Key, part: torch.Tensor, owner: torch.Tensor | None) -> None:
        """Have ``packed`` found for ``part``, and quickly for ``owner`` and its views."""
        with self._counters.lock:
            self._counters.index.add(key, packed)
            self._counters.saved_bytes += part.nbytes
            if owner is not None and packed.region is None and isinstance(packed, StoredContent):
                self._counters.index.remember(owner, packed)
        self._pending.append(weakref.ref(packed))

    def _found(
        self, key: Key, part: torch.Tensor, owner: torch.Tensor, region: StorageRegion | None, dtype: torch.dtype | None
    ) -> Packed | None:
        """What is packed under ``key``; for a ``region`` also what all of the storage of ``part`` is packed as.

        Queries, keys and values are thirds of one storage, mostly: each alone would be copied out of it, and spread
        again to its strides, which reach over nearly all of it. Those of them that one operator saves are packed
        together, as all of their storage, of which the first one's packed value is the beginning.
        """
        # A reader of a packed value holds its lock and counts in the counters: see [Note: the order of locks]. So no
        # packed value is asked for anything under the lock of the counters.
        whole = (*key[:2], dtype, key[3])
        with self._counters.lock:
            packed = self._counters.index.find(key)
            if packed is not None or region is None:
                return packed
            packed = self._counters.index.find(whole)
            if packed is not None or threading.get_ident() != self._thread:
                return packed
            packed = self._parts.to_widen(whole, owner, region, part.untyped_storage().nbytes())
            if packed is not None:
                packed.region = None
                self._counters.index.add(whole, packed)
        if packed is not None:
            packed.copy_again()
        return packed

    def _shared(self, tensor: torch.Tensor, part: torch.Tensor, packed: Packed, layout: Layout) -> Handle:
        """A further handle on what is packed already."""
        handle = packed.handle(layout)
        self._counters.count_shared(part.nbytes, self._module_name)
        if _handles.listeners:
            _handles.notify("pack", self._module_name, tensor, "shared")
        return handle

    def _made(
        self,
        alias: torch.Tensor,
        storage: torch.UntypedStorage,
        weight: nn.Parameter | None,
        region: StorageRegion | None,
        layout: Layout,
        small: bool,
        owner: torch.Tensor | None,
    ) -> Packed:
        """The packed value of what ``alias`` lies over, of all of ``owner`` perhaps."""
        if small:
            return SmallCopy(alias, storage, region, layout, self._counters, self._module_name)
        if weight is not None:
            return AutocastCopy(alias, storage, layout, weight, self._counters, self._module_name)
        arguments = alias, storage, region, layout, self._codecs, self._store, self._counters, self._module_name
        origin = None if self._again is None or owner is None else self._again.origin(owner)
        return StoredContent(*arguments) if origin is None else Recomputed(origin, *arguments)

    def _note(self, tensor: torch.Tensor, part: torch.Tensor, owner: torch.Tensor, packed: Packed, of: Layout) -> None:
        """Have it found from the graph."""
        if self._again is None or part is not tensor:
            return
        note(tensor, packed, of)
        self._again.remember(tensor)
        if owner is not tensor and packed.region is None and type(owner) is torch.Tensor:
            note(owner, packed, Layout.of(owner))

    def _kept(self, tensor: torch.Tensor, alias: torch.Tensor | None, reason: str) -> InPlace:
        """``tensor`` as ``alias``: by default itself, as without hooks, or an alias where itself would be a cycle."""
        self._told(tensor, reason)
        if alias is None:
            alias = tensor if is_constant(tensor) else tensor.detach()
        shares = alias is not tensor and reason not in _WEIGHTS and exotic(alias) is None
        kept = InPlace(alias, self._module_name, reason, shares)
        if self._again is not None and exotic(alias) is None:
            note(tensor, kept, Layout.of(alias))
        return kept

    def _told(self, tensor: torch.Tensor, reason: str) -> None:
        self._counters.count_kept(reason, _nbytes(tensor), self._module_name)
        if _handles.listeners:
            _handles.notify("pack", self._module_name, tensor, "kept")

    @uncompiled(BREAK)
    def _call(self, tensor: torch.Tensor) -> InPlace | FunctionsHandle:
        """Pack by the user's own function, under torch's contract."""
        self._sequence = sequence_number()
        if _nbytes(tensor) < self._at_least:
            return self._kept(tensor, tensor.detach() if not tensor.is_leaf else tensor, "small")
        begin = time.perf_counter()
        packed = FunctionsHandle(
            self._store.put(tensor), self._store, self._counters, _nbytes(tensor), self._module_name
        )
        self._counters.count_put(packed.nbytes, 0, time.perf_counter() - begin, self._module_name)
        if _handles.listeners:
            _handles.notify("pack", self._module_name, tensor, "stored")
        return packed

    def _flush(self) -> None:
        self._parts.clear()
        for _ in range(len(self._counters.recent)):
            with contextlib.suppress(IndexError):  # another thread was faster
                packed = self._counters.recent.popleft()()
                if packed is not None:
                    packed.release_copy()
        while self._pending:
            packed = self._pending.popleft()()
            if packed is None:
                continue  # its graph is gone already
            try:
                packed.offload()
            except BaseException:
                self._forget(packed)  # it stays in memory, for its own graph alone
                raise
            self._counters.recent.append(weakref.ref(packed))
            if packed.is_undecided:
                self._counters.undecided.append(weakref.ref(packed))
        if self._counters.undecided:
            self._settle()

    def _forget(self, packed: Packed) -> None:
        packed.stay_in_memory()
        self._counters.index.withdraw(packed)

    def _settle(self) -> None:
        """Ask those again that could not say at once, the oldest first, up to one that still cannot."""
        for _ in range(len(self._counters.undecided)):
            try:
                reference = self._counters.undecided.popleft()
            except IndexError:
                return  # another thread was faster
            packed = reference()
            if packed is None:
                continue
            packed.offload()
            if packed.is_undecided:
                self._counters.undecided.appendleft(reference)
                return


@uncompiled(
    "compiled autograd unpacks a tensor that disthooks packed, and its graph breaks at each of them: leave compiled "
    "autograd off for this backward"
)
def unpack(packed: Handle | DTensorHandle | InPlace | FunctionsHandle) -> torch.Tensor:
    """The saved tensor; a function of the module, so that a graph does not keep its frame alive."""
    tensor = packed.unpack()
    if _handles.listeners:
        _handles.notify("unpack", packed.module_name, tensor, "kept" if isinstance(packed, InPlace) else "stored")
    return tensor


def _is_lossless(pipeline: Pipeline) -> bool:
    return not any(codec.lossy for codec in pipeline.codecs)


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes on this rank."""
    if type(tensor) is not torch.Tensor:
        tensor = local_part(tensor)
    return tensor.numel() * tensor.element_size()


class HookSite(NamedTuple):
    """What to do with the tensors saved in a call, who counts them, and the name for errors."""

    pipeline: Pipeline
    counters: Counters
    name: str = ""
    openers: tuple[Any, ...] = ()  # of an attached module: those whose ``__call__`` opens it; see classes.py

    @uncompiled(BREAK, callees=False)
    def call(self, module: nn.Module | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``function`` returns, run with the hooks on, or without and counted where they cannot be.

        The body of a generator runs after the call: it gets one that opens the hooks each time it goes on.
        """
        result = self._once(module, function, *args, **kwargs)
        return self._resumed(module, result) if type(result) is types.GeneratorType else result

    @uncompiled(BREAK, callees=False)
    def _once(self, module: nn.Module | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = _calls(cast(Hashable, type(module)))
        reason = reason_not_to_hook()
        if reason is not None:
            self.counters.count_pass(reason, self.name)
            return run(function, *args, **kwargs)
        frame = SavedTensorHooks(self.pipeline, self.counters, self.name, module)
        with frame:
            result = run(function, *args, **kwargs)
        if frame.has_seen_nothing and module is not None and function is not _until_it_ends:
            self._look_elsewhere(module, result, args)
        return result

    @uncompiled(BREAK)
    def _look_elsewhere(self, module: nn.Module, result: Any, args: tuple[Any, ...]) -> None:
        """Say so if the layers of ``module``, in whose call nothing was saved, seem to have run in other threads.

        The graph tells: what came out has a history that what went in has not, and weights that train.
        """
        if self.counters.has_said("threads") or next(module.children(), None) is None:
            return
        if not any(p.requires_grad for p in module.parameters()):
            return
        before = {id(tensor.grad_fn) for tensor in _tensors(args)}
        if any(tensor.grad_fn is not None and id(tensor.grad_fn) not in before for tensor in _tensors(result)):
            self.counters.say_elsewhere(self.name)

    @uncompiled(BREAK, callees=False)
    def _resumed(self, module: nn.Module | None, body: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """``body`` with the hooks on while its own code runs and off while its consumer's does."""
        go_on: Callable[[], Any] = functools.partial(next, body)
        while True:
            ended, value = self._once(module, _until_it_ends, go_on)
            if ended:
                return value
            try:
                go_on = functools.partial(body.send, (yield value))
            except GeneratorExit:
                body.close()  # without hooks: a collection may have ended it, in the middle of anything
                raise
            except BaseException as error:
                go_on = functools.partial(body.throw, error)


@functools.lru_cache(maxsize=256)
@uncompiled()
def _calls(kind: Hashable) -> Callable[..., Any]:
    """What calls a function, in a frame that can be compiled: the compiler inlines those of torch, or skips them.

    Compiled code is found, and its number limited, by code object: each ``kind`` of module gets one.
    """

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace()
    return run


def _until_it_ends(go_on: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether the generator has ended, and what it gave; its end is no error, after which nothing is stored."""
    try:
        return False, go_on()
    except StopIteration as stop:
        return True, stop.value


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` and in the tuples, lists and dicts in it."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
