"""What one attachment counts: bytes and times by module, errors of codecs, and the warnings that it gave."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from disthooks import memory
from disthooks._fork_safe import DeferredSum, Order, shared_lock
from disthooks._streams import on_accelerator
from disthooks.saved.report import SavedReport, SiteReport, shared_out
from disthooks.saved.stores.base import Store

_STEPPED_BACK = (
    "disthooks stepped back in {where}, which runs inside {what}: what it saves is computed again anyway. To save the "
    "checkpoint's inputs instead, attach to the module around the checkpoint, or wrap it: SaveWith(checkpointed, ...). "
    "report().passed counts these calls; this is said once"
)
_RECORDED = (
    "{what} records the forward of {where} without the hooks of disthooks, so nothing that the recorded module saves "
    "goes to the store. Train the Python module, compiled by torch.compile where you want speed, or wrap what is "
    "recorded: SaveWith(recorded, ...). report().passed counts it; this is said once"
)
_TRANSFORMED = (
    "{where} is called inside a transform of torch.func (vmap, grad, ...), whose tensors belong to the transform: it "
    "goes without hooks. Around a vmap hooks work: attach to the module whose forward calls vmap, or put the call into "
    "saving(...). report().passed counts these calls; this is said once"
)
# What to tell the user, by the reason why a call ran without hooks. The other reasons need no action.
_ADVICE = {
    "torch.jit.trace": _RECORDED.replace("{what}", "torch.jit.trace"),
    "torch.jit.script": _RECORDED.replace("{what}", "torch.jit.script"),
    "hooks disabled": _TRANSFORMED,
    "checkpoint": _STEPPED_BACK.replace("{what}", "an activation checkpoint"),
    "backward": _STEPPED_BACK.replace("{what}", "a backward (a reentrant checkpoint, most likely)"),
}
_GRAPHS = (
    "what {where} saves lies in memory of the CUDA graphs that torch.compile(mode='reduce-overhead') made: it stays "
    "there, as without disthooks, because the graph of its backward reads it there. To have it stored, compile this "
    "module in another mode ('default', 'max-autotune-no-cudagraphs'). report().kept_by['CUDA graph'] has the bytes; "
    "this is said once"
)
_IN_PLACE = (
    "{store} stores nothing of {where}: what it saves is in CPU memory, where this store would put it. To take it out "
    "of memory give OnDisk(directory); to make it smaller put a codec in front of the store, Compact() or "
    "Cast(torch.bfloat16). With the model on a GPU this store does its work"
)
_ELSEWHERE = (
    "{where} saved nothing in the thread that called it, though gradients flow to its weights. If its forward runs its "
    "layers in threads of its own, they run without hooks, because hooks are those of one thread: attach to the "
    "layers themselves, by a pattern or a class, and their hooks open in the thread that calls them"
)


class WarnedOnce:
    """The warnings of one attachment. Each is given once and stands in the report from then on."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # by topic

    def warn(self, topic: str, text: str) -> None:
        """Warn of ``text``, unless this attachment has warned of ``topic`` before."""
        # One call of C decides between two threads that arrive together, so no lock is needed.
        if self._texts.setdefault(topic, text) is text:
            warnings.warn(text, stacklevel=5)

    def has_warned_of(self, topic: str) -> bool:
        """Whether this attachment has warned of ``topic``."""
        return topic in self._texts

    @property
    def texts(self) -> tuple[str, ...]:
        """All warnings so far."""
        return tuple(self._texts.values())


class CodecErrors:
    """The largest relative error of each lossy codec, in a sample of the tensors that it changed (decision 33)."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._changed: collections.Counter[int] = collections.Counter()  # tensors, by the codec's position
        self._unread: list[tuple[str, torch.Tensor]] = []
        self._largest: dict[str, float] = {}

    def is_due(self, position: int) -> bool:
        """Whether to measure the codec at ``position`` on this tensor: the 1st, 2nd, 4th, 8th, ... that it changed."""
        with self._lock:
            self._changed[position] += 1
            return self._changed[position].bit_count() == 1

    def add(self, codec: str, error: torch.Tensor) -> None:
        """Remember ``error``, a scalar. It stays on its device, because to read it would wait for the device."""
        with self._lock:
            self._unread.append((codec, error))

    def read(self) -> dict[str, float]:
        """The largest errors, with those that were not read before; this waits for the devices on which they are."""
        with self._lock:
            unread, self._unread = self._unread, []
        for device in {error.device for _, error in unread if on_accelerator(error)}:
            torch.accelerator.synchronize(device)  # each error was computed on the stream of its tensor
        read = [(codec, float(error)) for codec, error in unread]
        with self._lock:
            for codec, error in read:
                self._largest[codec] = max(self._largest.get(codec, 0.0), error)
            return dict(self._largest)


class _ModuleCounts:
    """The counts of one module: the fields of a :class:`SiteReport`, which can be added to."""

    __slots__ = tuple(SiteReport.__dataclass_fields__)

    def __init__(self) -> None:
        self.tensors = self.saved = self.stored = self.moved = self.shared = self.kept = 0
        self.recast = self.recomputed = self.loaded = 0
        self.pack_seconds = self.unpack_seconds = self.codec_seconds = self.copy_seconds = 0.0


class Counters:
    """The counts of one attachment, for all of its threads.

    Attributes:
        lock: guards the counts, and the attachment's :class:`~disthooks.saved.contents.ContentIndex` too.
        saved_bytes: bytes of all contents that were packed so far; changed under the lock.
        warned: the warnings of the attachment.
        codec_errors: what lossy codecs lost.
        change_held: adds to the bytes that are held. Destructors call it: see [Note: destructors].
    """

    def __init__(self) -> None:
        self.lock = shared_lock(Order.COUNTERS)
        self.saved_bytes = 0
        self.warned, self.codec_errors = WarnedOnce(), CodecErrors(self.lock)
        # Sums over modules are made when the report is: to count costs one lock and one look-up.
        self._calls = self._inner = 0
        self._held = DeferredSum()
        self._modules: dict[str, _ModuleCounts] = collections.defaultdict(_ModuleCounts)
        self._kept: collections.Counter[str] = collections.Counter()
        self._recomputed: collections.Counter[str] = collections.Counter()
        self._differed: collections.Counter[str] = collections.Counter()
        self._passed: collections.Counter[str] = collections.Counter()
        self._called: set[str] = set()  # names of modules
        self.change_held: Callable[[int], None] = self._held.change

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()  # a copy of a module has saved nothing yet

    def count_put(
        self, stored: int, moved: int, seconds: float, module_name: str = "", saved: int | None = None
    ) -> None:
        """Count one content that the store took in ``seconds``; ``saved`` are its bytes before codecs."""
        with self.lock:
            module = self._modules[module_name]
            module.tensors += 1
            module.saved += stored if saved is None else saved
            module.stored += stored
            module.moved += moved
            module.pack_seconds += seconds
            self._held.total()  # so that changes do not pile up

    def count_got(self, loaded: int, seconds: float, module_name: str = "", copied: float = 0.0) -> None:
        """Count bytes that the store gave back in ``seconds``, and the seconds of its copies beside that."""
        with self.lock:
            module = self._modules[module_name]
            module.loaded += loaded
            module.unpack_seconds += seconds
            module.copy_seconds += copied

    def count_codecs(self, seconds: float, module_name: str = "") -> None:
        """Count the time that codecs took."""
        with self.lock:
            self._modules[module_name].codec_seconds += seconds

    def count_shared(self, nbytes: int, module_name: str = "") -> None:
        """Count a saved tensor whose content was packed before."""
        with self.lock:
            self._modules[module_name].shared += nbytes

    def count_kept(self, reason: str, nbytes: int, module_name: str = "") -> None:
        """Count a saved tensor that stays in memory."""
        with self.lock:
            self._kept[reason] += nbytes
            self._modules[module_name].kept += nbytes

    def count_recast(self, nbytes: int, module_name: str = "") -> None:
        """Count autocast's copy of a weight that was dropped."""
        with self.lock:
            self._modules[module_name].recast += nbytes

    def count_recomputed(self, how: str, nbytes: int, module_name: str = "") -> None:
        """Count bytes that were dropped, and are computed again by the operators ``how``."""
        with self.lock:
            self._recomputed[how] += nbytes
            self._modules[module_name].recomputed += nbytes

    def count_differed(self, place: str, nbytes: int) -> None:
        """Count bytes that are stored, because computing them again gave other bits at ``place``."""
        with self.lock:
            self._differed[place] += nbytes

    def count_call(self, module_name: str = "") -> None:
        """Count a call with the hooks on."""
        with self.lock:
            self._calls += 1
            self._called.add(module_name)

    def count_inner(self) -> None:
        """Count a call inside of ours whose saved tensors another attachment takes."""
        with self.lock:
            self._inner += 1

    def count_pass(self, reason: str, module_name: str) -> None:
        """Count a call that ran without hooks, and tell the user once if something can be done about it."""
        with self.lock:
            self._passed[reason] += 1
            self._called.add(module_name)
        if reason in _ADVICE:
            self.warned.warn(reason, _ADVICE[reason].format(where=repr(module_name or "this block")))

    def warn_of_graphs(self, module_name: str) -> None:
        """Tell the user once that tensors in memory of CUDA graphs stay there."""
        where = repr(module_name) if module_name else "a saving(...) block"
        self.warned.warn("CUDA graph", _GRAPHS.format(where=where))

    def warn_of_in_place(self, module_name: str, store: Store) -> None:
        """Tell the user once, if nothing at all was stored, that the store is where the tensors are already."""
        with self.lock:
            has_stored = any(module.stored for module in self._modules.values())
        if not has_stored:
            where = repr(module_name) if module_name else "this block"
            self.warned.warn("in place", _IN_PLACE.format(store=store, where=where))

    def warn_of_threads(self, module_name: str) -> None:
        """Tell the user once that the layers of a module seem to run in other threads."""
        self.warned.warn("threads", _ELSEWHERE.format(where=repr(module_name)))

    def report(self, store: Store, names: Sequence[str] = (), is_recompute_idle: bool = False) -> SavedReport:
        """All counts as they stand.

        Args:
            store: whose own reports to add.
            names: the attached modules; those of them that nobody has called are reported.
            is_recompute_idle: whether the pipeline has Recompute, which has met nothing that it can compute.
        """
        # The store and the device may take a while to answer. No thread that trains is to wait for the counters
        # meanwhile, so these are asked before the lock is taken. See [Note: the order of locks].
        tiers, errors, unreturned = store.report(), self.codec_errors.read(), memory.unreturned()
        with self.lock:
            modules = {
                name: SiteReport(*(getattr(module, field) for field in _ModuleCounts.__slots__))
                for name, module in self._modules.items()
            }
            total = sum(modules.values(), SiteReport())
            # Before the first call all of them may still be called.
            uncalled = [name for name in names if name and name not in self._called] if self._called else []
            return SavedReport(
                calls=self._calls,
                stored=total.stored,
                moved=total.moved,
                shared=total.shared,
                kept=total.kept,
                kept_by=dict(self._kept),
                recast=total.recast,
                recomputed=total.recomputed,
                recomputed_by=dict(self._recomputed),
                differed=dict(self._differed),
                recompute_idle=int(is_recompute_idle and not self._recomputed),
                loaded=total.loaded,
                held=self._held.total(),
                passed=dict(self._passed),
                inner=self._inner,
                pack_seconds=total.pack_seconds,
                unpack_seconds=total.unpack_seconds,
                tensors=total.tensors,
                unreturned=unreturned,
                tiers=tiers,
                errors=errors,
                sites=shared_out(modules, tiers),
                told=self.warned.texts,
                uncalled=tuple(uncalled),
            )
