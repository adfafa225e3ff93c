"""The hooks of one call: the tensors that autograd saves go through ``pack`` here and come back through ``unpack``.

A ``HookSite`` is a place where hooks open around calls: a module, a function, an autograd Function.
"""

# [Note: hooks step back]
# Where hooks would do harm or no good, a call runs without them and is counted with the reason
# (`when_to_hook.reason_not_to_hook`). Inside a non-reentrant checkpoint they would defeat it: its own hooks have
# to be on top. Inside a backward (a reentrant checkpoint, a reversible block) the saved tensors are used at once
# (decision 20). In a transform of torch.func the tensors have no memory that could be copied. If two attachments are
# open, the inner one gets the saved tensors.

from __future__ import annotations

import collections
import functools
import time
import types
import weakref
from collections.abc import Callable, Generator, Hashable
from sys import getrefcount
from threading import get_ident
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from disthooks._tensors import Layout, bytes_of, exotic, is_most_of, is_plain, local_part, region_of
from disthooks._torch import StorageRef, fresh_count, sequence_number, top_hooks, uncompiled
from disthooks.errors import AttachError
from disthooks.saved.checkpoints import AroundCheckpoints
from disthooks.saved.contents import SmallCopy, StoredContent
from disthooks.saved.decide import NO_WEIGHTS, SMALL_COPY, Decides
from disthooks.saved.packed import (
    Decision,
    DTensorHandle,
    FunctionsHandle,
    Handle,
    InPlace,
    Nature,
    Packed,
    SavedTensor,
    unpack,
)
from disthooks.saved.pipeline import OpenPipeline
from disthooks.saved.recompute.context import RecomputeContext, Recomputed
from disthooks.saved.recompute.graph import annotate
from disthooks.saved.stores.base import Functions
from disthooks.saved.weights import AutocastCopy, ModuleWeights
from disthooks.saved.when_to_hook import BREAK, reason_not_to_hook, refuse_capture

_new_tuple = tuple.__new__  # it takes half the time of `SavedTensor(...)`, and every saved tensor pays for it


class SavedTensorHooks(Decides, AroundCheckpoints):
    """The pair of hooks of one call, active in this thread from ``__enter__`` to ``__exit__``.

    A :class:`HookSite` may make hooks of a subclass, with other contents.
    """

    takes_arguments = True
    stored, recomputed, small = StoredContent, Recomputed, SmallCopy

    @uncompiled(BREAK)
    def __init__(self, pipeline: OpenPipeline, module_name: str = "", module: nn.Module | None = None) -> None:
        self._pipeline, self._contents, self._module_name = pipeline, pipeline.contents, module_name
        self._counters, self._module_counts = pipeline.counters, pipeline.counters.of_module(module_name)
        self._weights = NO_WEIGHTS if module is None else ModuleWeights(module)
        self._recompute = None if pipeline.recompute is None else RecomputeContext(pipeline, module_name, module)
        self._by_owner = self._contents.by_owner
        self._thread = get_ident()
        self._sequence = -1  # number of the operator that saved something last
        self.takes_selective = pipeline.stages.selective_checkpoints
        self._has_inner = False  # whether another attachment took the tensors that a part of the call saved
        self._has_in_place = False  # whether something is where the store would put it
        self._pending: collections.deque[weakref.ref[Packed]] = collections.deque()  # to be offloaded
        self._fresh_count = fresh_count()
        pack = self._pack_by_function if isinstance(pipeline.store, Functions) else self._pack
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @uncompiled(BREAK)
    def __enter__(self) -> SavedTensorHooks:
        refuse_capture(self._module_name)
        self._counters.count_call(self._module_name)
        # Our own hooks may be on already: a module inside an attached module, of the same attachment or of another.
        outer = top_hooks(True)
        outer_hooks = getattr(outer[0], "__self__", None) if outer is not None else None
        if isinstance(outer_hooks, SavedTensorHooks) and outer_hooks._pipeline is not self._pipeline:
            outer_hooks._pipeline.counters.count_inner()
            outer_hooks._has_inner = True
        # The pair is entered last: if anything above is interrupted, no hook stays on in this thread.
        self._hooks.__enter__()
        return self

    @uncompiled(BREAK)
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        try:
            if kind is None:
                self._offload_pending()
                if self._has_in_place:
                    self._counters.warn_of_in_place(self._module_name, self._pipeline.store)
        finally:
            # After an error nobody will use the graph. The contents that it holds stay in memory, for itself alone.
            for reference in self._pending:
                packed = reference()
                if packed is not None:
                    packed.withdraw()
            self._pending.clear()
            # The graph holds `pack`, and so this object, until its backward: no cycle may stay, and no module.
            self._recompute = self._hooks = None
            self._weights = NO_WEIGHTS
        if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
            raise AttachError(
                f"{self._module_name or 'this block'!r} calls torch.func.grad, vjp, jacrev or hessian inside, "
                "and torch allows no saved-tensor hooks there: attach to other modules, or to the parts outside of "
                "that call"
            ) from error

    @property
    @uncompiled(BREAK)
    def saw_nothing(self) -> bool:
        """Whether nothing was saved in this thread during the call, by any attachment."""
        return self._sequence == -1 and not self._has_inner

    # -- pack: find, decide, make

    @uncompiled(BREAK)
    def _pack(self, tensor: torch.Tensor) -> InPlace | Handle | DTensorHandle:
        # This is the first line, because each further name for the tensor counts: see [Note: contents are taken late].
        is_fresh = not tensor.requires_grad and getrefcount(tensor) <= self._fresh_count
        if tensor.is_cuda:
            refuse_capture(self._module_name)  # a capture may have begun inside the call
        # When the next operator saves something, the one before it is done, and its contents can be taken. Backward
        # inside the block may pack from another thread, whose operators have numbers of their own.
        thread, number = get_ident(), sequence_number()
        if number != self._sequence and thread == self._thread:
            self._sequence = number
            if self._pending or self._contents.undecided:
                self._offload_pending()
        saved_at = thread << 64 | number
        owner: Any = tensor._base  # see [Note: storage and version]
        if owner is None:
            owner = tensor
        owner_id = id(owner)
        if owner_id in self._by_owner:
            found = self._contents.find(tensor, owner, owner_id, saved_at)
            if found is not None:
                packed, layout = found
                if self._recompute is not None:
                    annotate(tensor, packed, layout)
                self._module_counts.shared += tensor.nbytes
                return packed.handle(layout)
        return self._pack_unknown(tensor, owner, saved_at, is_fresh)

    def _pack_unknown(
        self, tensor: torch.Tensor, owner: torch.Tensor, saved_at: int, is_fresh: bool
    ) -> InPlace | Handle | DTensorHandle:
        """Keep the tensor, or hand out a handle on its content."""
        part = tensor if type(tensor) is torch.Tensor else _plain_part(tensor)
        decision = self._decide(tensor, part, owner)
        if decision.fate == "keep":
            return self._keep(tensor, decision)
        saved = self._described(tensor, part, owner, decision, saved_at, is_fresh)
        packed, handle, is_new = self._contents.find_or_add(saved, decision, self)
        if self._recompute is not None and part is tensor:  # Recompute does not look into distributed tensors
            self._annotate(self._recompute, tensor, owner, packed, saved.layout)
        if not is_new:
            self._module_counts.shared += part.nbytes
        else:
            if self._recompute is not None:
                packed.prepare()
            if decision.reason:
                self._module_counts.count_kept(decision.reason, part.nbytes)
            self._pending.append(weakref.ref(packed))
        return handle if part is tensor else DTensorHandle(handle, tensor)

    def _keep(self, tensor: torch.Tensor, decision: Decision) -> InPlace:
        # A tensor with a history is kept as an alias: itself would hold its node, and the node holds what is kept here.
        # A Parameter is kept as itself, because ZeRO-3 gathers and frees it, and an alias would hold the gathered
        # memory.
        is_plain_tensor = type(tensor) is torch.Tensor
        is_itself = not tensor.requires_grad or (not is_plain_tensor and isinstance(tensor, nn.Parameter))
        alias = tensor if is_itself else tensor.detach()
        kept = InPlace(alias, self._module_name, decision.reason, decision.is_activation and not is_itself)
        if self._recompute is not None and exotic(alias) is None:
            annotate(tensor, kept, Layout.of(alias))
        nbytes = tensor.nbytes if is_plain_tensor and decision.is_activation else bytes_of(tensor)
        self._module_counts.count_kept(decision.reason, nbytes)
        return kept

    def _described(
        self,
        tensor: torch.Tensor,
        part: torch.Tensor,
        owner: torch.Tensor,
        decision: Decision,
        saved_at: int,
        is_fresh: bool,
    ) -> SavedTensor:
        storage, layout, is_small = part.untyped_storage(), Layout.of(part), decision is SMALL_COPY
        nbytes, covered = storage.nbytes(), part.nbytes
        is_all = layout.is_copied and covered == nbytes
        is_whole = is_all or decision.weight is not None or is_most_of(layout, covered, nbytes)
        region = None if is_whole else region_of(layout, nbytes)
        if region is not None and (is_small or not self._pipeline.codecs):
            region = region.raw()  # a codec needs to know the dtype
        if not owner.requires_grad:
            nature: Nature = "constant"
        elif owner.is_leaf or (tensor.requires_grad and tensor.is_leaf):
            nature = "leaf"
        else:
            nature = "result"
        what = part, owner, id(owner), tensor._version, storage, nbytes, layout, region
        return _new_tuple(SavedTensor, (*what, saved_at, nature, is_small, is_fresh))

    def make(self, saved: SavedTensor, decision: Decision) -> Packed:
        """The packed value of ``saved``, whose content is not known yet; the index of contents asks for it."""
        pipeline, recompute = self._pipeline, self._recompute
        if saved.is_small:
            return self.small(saved, StorageRef(saved.storage), self._module_counts)
        if decision.weight is not None:
            return AutocastCopy(saved, decision.weight, self._module_counts)
        rest = pipeline.codecs, pipeline.store, self._module_counts
        if recompute is None:
            return self.stored(saved, *rest)
        is_wanted = decision.fate == "recompute" and saved.region is None
        return self.recomputed(recompute.origin(saved.owner) if is_wanted else None, saved, *rest)

    @staticmethod
    def _annotate(
        recompute: RecomputeContext, tensor: torch.Tensor, owner: torch.Tensor, packed: Packed, layout: Layout
    ) -> None:
        """Let Recompute find ``packed`` by the nodes that produced ``tensor`` and its base."""
        annotate(tensor, packed, layout)
        recompute.remember(tensor)
        if owner is not tensor and packed.region is None and is_plain(owner):
            annotate(owner, packed, Layout.of(owner))

    @uncompiled(BREAK)
    def _pack_by_function(self, tensor: torch.Tensor) -> InPlace | FunctionsHandle:
        """Pack by the user's own function: for each saved tensor once, at once, and nothing is shared."""
        self._sequence = sequence_number()
        store, counts, nbytes = self._pipeline.store, self._module_counts, bytes_of(tensor)
        if nbytes < self._pipeline.at_least:
            alias = tensor if tensor.is_leaf else tensor.detach()
            counts.count_kept("small", nbytes)
            return InPlace(alias, self._module_name, "small", alias is not tensor and exotic(alias) is None)
        begin = time.perf_counter()
        handle = FunctionsHandle(store.put(tensor), store, counts, nbytes)
        self._contents.hold(handle)
        counts.count_put(nbytes, 0, time.perf_counter() - begin, nbytes)
        return handle

    def leave(self, tensors: list[torch.Tensor], is_chosen: bool) -> None:
        """Count the tensors that a checkpoint inside keeps in memory. See [Note: arguments of a checkpoint]."""
        plain = [part for part in map(local_part, tensors) if exotic(part) is None]
        nbytes = sum({part.untyped_storage()._cdata: part.nbytes for part in plain}.values())
        if nbytes:
            reason = "selective checkpoint" if is_chosen else "held by a checkpoint"
            self._module_counts.count_kept(reason, nbytes)
        if nbytes >= max(1, self._pipeline.at_least) and not is_chosen:
            self._counters.warn_of_held(self._module_name, nbytes)

    # -- offload

    def _offload_pending(self) -> None:
        recent, undecided = self._contents.recent, self._contents.undecided
        while recent:
            try:
                packed = recent.popleft()()
            except IndexError:
                break  # another thread was faster
            if packed is not None:
                packed.release_copy()
        while self._pending:
            packed = self._pending.popleft()()
            if packed is None:
                continue  # its graph is gone already
            try:
                packed.offload()
            except BaseException:
                packed.withdraw()
                raise
            recent.append(weakref.ref(packed))
            if packed.place == "undecided":
                undecided.append(weakref.ref(packed))
        if undecided:
            self._offload_undecided(undecided)

    def _offload_undecided(self, undecided: collections.deque[weakref.ref[Packed]]) -> None:
        """Offload the packed values whose devices have answered by now, the oldest first, up to one that waits."""
        for _ in range(len(undecided)):
            try:
                reference = undecided.popleft()
            except IndexError:
                return  # another thread was faster
            packed = reference()
            if packed is None:
                continue
            packed.offload()
            if packed.place == "undecided":
                undecided.appendleft(reference)
                return


def _plain_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, which is plain memory; any other ``tensor`` itself."""
    # Nobody knows what other subclasses of Tensor are made of. Nobody can have a DTensor without importing
    # torch.distributed, so it is not imported for this.
    kind: Any = type(tensor)
    is_dtensor = kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")
    return tensor._local_tensor if is_dtensor else tensor  # type: ignore[attr-defined]


class HookSite(NamedTuple):
    """A place where hooks open around calls.

    Attributes:
        pipeline: the open pipeline of the attachment.
        name: the name of the module or function, for errors and reports.
        openers: for an attached module, the openers of the classes whose ``__call__`` opens the hooks. See
            [Note: the class's own call].
        make_hooks: makes the hooks of a call, from the pipeline, the name and the module.
    """

    pipeline: OpenPipeline
    name: str = ""
    openers: tuple[Any, ...] = ()
    make_hooks: Callable[[OpenPipeline, str, nn.Module | None], SavedTensorHooks] = SavedTensorHooks

    @uncompiled(BREAK, callees=False)
    def call(self, module: nn.Module | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` with the hooks on. If hooks cannot be on here, call it without them, and count that.

        The body of a generator runs after the call, so it is wrapped: hooks open each time that it goes on.
        """
        result = self._call_once(module, function, *args, **kwargs)
        return self._resumed(module, result) if type(result) is types.GeneratorType else result

    @uncompiled(BREAK, callees=False)
    def _call_once(self, module: nn.Module | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = _caller_for(cast(Hashable, type(module)))
        reason = reason_not_to_hook()  # see [Note: hooks step back]
        if reason is not None:
            self.pipeline.counters.count_pass(reason, self.name)
            return run(function, *args, **kwargs)
        # New hooks for each call: replicas in threads, and calls inside calls, share the pipeline and no other state.
        hooks = self.make_hooks(self.pipeline, self.name, module)
        with hooks:
            if type(function) is types.MethodType:
                # A bound method is a new object in each call, and torch may compile `run` anew for each new object.
                result = run(function.__func__, function.__self__, *args, **kwargs)
            else:
                result = run(function, *args, **kwargs)
        if hooks.saw_nothing and module is not None and function is not _next_of:
            self._warn_of_threads(module, result, args)
        return result

    @uncompiled(BREAK)
    def _warn_of_threads(self, module: nn.Module, result: Any, args: tuple[Any, ...]) -> None:
        """Warn if the layers of ``module``, in whose call nothing was saved, seem to have run in other threads.

        The graph tells: the outputs of the module have a history that its inputs do not have, and the module has
        weights that train.
        """
        counters = self.pipeline.counters
        if "threads" in counters.warned.texts or next(module.children(), None) is None:
            return
        if not any(p.requires_grad for p in module.parameters()):
            return
        before = {id(tensor.grad_fn) for tensor in tensors_in(args)}
        if any(tensor.grad_fn is not None and id(tensor.grad_fn) not in before for tensor in tensors_in(result)):
            counters.warn_of_threads(self.name)

    @uncompiled(BREAK, callees=False)
    def _resumed(self, module: nn.Module | None, body: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """``body`` with the hooks on while its own code runs, and off while its consumer's code runs."""
        go_on: Callable[[], Any] = functools.partial(next, body)
        while True:
            has_ended, value = self._call_once(module, _next_of, go_on)
            if has_ended:
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
def _caller_for(kind: Hashable) -> Callable[..., Any]:
    """A function that calls another one, in a frame of ours that can be compiled.

    The compiler inlines or skips the frames of torch. It finds compiled code, and limits its number, by code object:
    so each ``kind`` of module gets a function with a code object of its own.
    """

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace()
    return run


def _next_of(go_on: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether the generator has ended, and the value that it gave. Its end is no error, so what it saved is stored."""
    try:
        return False, go_on()
    except StopIteration as stop:
        return True, stop.value


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]
