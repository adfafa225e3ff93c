"""What one attachment knows of its saved tensors: which are packed already, and how many bytes went where."""

from __future__ import annotations

import collections
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from disthooks import memory
from disthooks._fork_safe import Order, shared
from disthooks._streams import on_accelerator
from disthooks.saved.dedup import ContentIndex
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
#: Reasons to go without hooks that the user can do something about, and what.
_MENDABLE = {
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


class _ModuleCounts:
    """The counts of one module, those of a :class:`SiteReport`."""

    __slots__ = tuple(SiteReport.__dataclass_fields__)

    def __init__(self) -> None:
        self.tensors = self.saved = self.stored = self.moved = self.shared = self.kept = 0
        self.recast = self.recomputed = self.loaded = 0
        self.pack_seconds = self.unpack_seconds = self.codec_seconds = self.copy_seconds = 0.0


class Counters:
    """Finds what is packed already and counts bytes; shared by every thread of an attachment."""

    def __init__(self) -> None:
        self.lock = shared(Order.COUNTERS)
        self.index = ContentIndex()
        self.saved_bytes = 0  # bytes of what was packed so far; changed under the lock
        # Those whose contents may be dropped once the device has said so.
        self.undecided: collections.deque[weakref.ref[Any]] = collections.deque()
        self.proofs: Any = None  # what was proven of what is computed again; see recompute/places.py
        self.places: dict[Any, Any] = {}  # of them, the places that came up in this attachment
        #: Those whose contents were taken last, and are in memory for who saves them again at once.
        self.recent: collections.deque[weakref.ref[Any]] = collections.deque()
        self.recomputes = False  # whether the pipeline asks for that
        self._calls = self._inner = 0
        self._sites: collections.defaultdict[str, _ModuleCounts] = collections.defaultdict(
            _ModuleCounts
        )  # by the module's name
        self._kept: collections.Counter[str] = collections.Counter()
        self._recomputed: collections.Counter[str] = collections.Counter()
        self._differed: collections.Counter[str] = collections.Counter()
        self._passed: collections.Counter[str] = collections.Counter()
        self._lossy: collections.Counter[int] = collections.Counter()
        self._errors: dict[str, float] = {}
        self._unread: list[tuple[str, torch.Tensor]] = []
        self._held = 0
        self._changes: collections.deque[int] = collections.deque()
        #: So many bytes more are held, or fewer; called from destructors. A C function: nothing interrupts it.
        self.change_held: Callable[[int], None] = self._changes.append
        self._told: dict[str, str] = {}  # what is said once, and how
        self._called: set[str] = set()  # modules

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()  # a copy of a module has saved nothing yet

    def count_put(
        self, stored: int, moved: int, seconds: float, module_name: str = "", saved: int | None = None
    ) -> None:
        """Add to ``stored`` and ``moved``, and the time that the store took for it.

        ``saved``: its bytes before codecs, if there are any.
        """
        with self.lock:
            site = self._sites[module_name]
            site.tensors += 1
            site.saved += stored if saved is None else saved
            site.stored += stored
            site.moved += moved
            site.pack_seconds += seconds
            self._settle()

    def count_got(self, loaded: int, seconds: float, module_name: str = "", copied: float = 0.0) -> None:
        """Add to ``loaded``, the time that the store took for it, and ``copied``, that of its copies beside that."""
        with self.lock:
            site = self._sites[module_name]
            site.loaded += loaded
            site.unpack_seconds += seconds
            site.copy_seconds += copied

    def count_codecs(self, seconds: float, module_name: str = "") -> None:
        """Add the time that codecs took."""
        with self.lock:
            self._sites[module_name].codec_seconds += seconds

    def count_shared(self, nbytes: int, module_name: str = "") -> None:
        """Add to ``shared``."""
        with self.lock:
            self._sites[module_name].shared += nbytes

    def count_recast(self, nbytes: int, module_name: str = "") -> None:
        """Add to ``recast``."""
        with self.lock:
            self._sites[module_name].recast += nbytes

    def count_recomputed(self, how: str, nbytes: int, module_name: str = "") -> None:
        """Add to ``recomputed``."""
        with self.lock:
            self._recomputed[how] += nbytes
            self._sites[module_name].recomputed += nbytes

    def count_differed(self, place: str, nbytes: int) -> None:
        """Add to ``differed``."""
        with self.lock:
            self._differed[place] += nbytes

    def is_sampled(self, position: int) -> bool:
        """Whether to measure the error of the codec at ``position`` now: the 1st, 2nd, 4th, 8th, ... time."""
        with self.lock:
            self._lossy[position] += 1
            return self._lossy[position].bit_count() == 1

    def count_error(self, codec: str, error: torch.Tensor) -> None:
        """Keep the larger ``error``, a scalar, of ``codec``; it is not read before the report is."""
        with self.lock:
            self._unread.append((codec, error))

    def count_call(self, module_name: str = "") -> None:
        """One more call with the hooks on."""
        with self.lock:
            self._calls += 1
            self._called.add(module_name)

    def count_inner(self) -> None:
        """One more call inside that another attachment takes."""
        with self.lock:
            self._inner += 1

    def count_kept(self, reason: str, nbytes: int, module_name: str = "") -> None:
        """Add to ``kept``."""
        with self.lock:
            self._kept[reason] += nbytes
            self._sites[module_name].kept += nbytes

    def count_pass(self, reason: str, module_name: str) -> None:
        """One more call that went through without hooks; the user is told once if that can be mended."""
        with self.lock:
            self._passed[reason] += 1
            self._called.add(module_name)
        if reason in _MENDABLE:
            self.say_once(reason, _MENDABLE[reason].format(where=repr(module_name or "this block")))

    def say_graphs(self, module_name: str) -> None:
        """Tell the user once that tensors in memory of CUDA graphs stay there."""
        self.say_once("CUDA graph", _GRAPHS.format(where=repr(module_name) if module_name else "a saving(...) block"))

    def say_in_place(self, module_name: str, store: Store) -> None:
        """Tell the user once that the store is where the tensors are, when nothing at all has been stored."""
        with self.lock:
            has_stored = "in place" in self._told or any(site.stored for site in self._sites.values())
        if not has_stored:
            self.say_once(
                "in place",
                _IN_PLACE.format(store=store, where=repr(module_name) if module_name else "this block"),
            )

    def say_elsewhere(self, module_name: str) -> None:
        """Tell the user once that a module's forward seems to run in other threads."""
        self.say_once("threads", _ELSEWHERE.format(where=repr(module_name)))

    def has_said(self, what: str) -> bool:
        """Whether this attachment has said it."""
        return what in self._told

    def say_once(self, what: str, text: str) -> None:
        """Warn of ``text``, unless this attachment has said ``what`` before."""
        with self.lock:
            tell = what not in self._told
            self._told.setdefault(what, text)
        if tell:
            warnings.warn(text, stacklevel=5)

    def report(self, store: Store | None = None, names: Sequence[str] = ()) -> SavedReport:
        """The figures as they stand, with those of the ``store`` and of the attached ``names`` if they are given."""
        # See [Note: the order of locks]. The store and the device may take a while to answer, and no thread that trains
        # is to wait for the counters meanwhile.
        tiers = () if store is None else store.report()
        self._read_errors()
        unreturned = memory.unreturned()
        with self.lock:
            self._settle()
            sites = {
                name: SiteReport(*(getattr(site, field) for field in _ModuleCounts.__slots__))
                for name, site in self._sites.items()
            }
            every = sum(sites.values(), SiteReport())
            return SavedReport(
                calls=self._calls,
                stored=every.stored,
                moved=every.moved,
                shared=every.shared,
                kept=every.kept,
                kept_by=dict(self._kept),
                recast=every.recast,
                recomputed=every.recomputed,
                recomputed_by=dict(self._recomputed),
                differed=dict(self._differed),
                recompute_idle=int(self.recomputes and not self.places and not self._recomputed),
                loaded=every.loaded,
                held=self._held,
                passed=dict(self._passed),
                inner=self._inner,
                pack_seconds=every.pack_seconds,
                unpack_seconds=every.unpack_seconds,
                tensors=every.tensors,
                unreturned=unreturned,
                tiers=tiers,
                errors=dict(self._errors),
                sites=shared_out(sites, tiers),
                told=tuple(self._told.values()),
                uncalled=self._uncalled(names),
            )

    def _uncalled(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of the attached ``names`` that nobody has called; none before the first call, which may be to come."""
        return tuple(name for name in names if name and name not in self._called) if self._called else ()

    def _read_errors(self) -> None:
        with self.lock:
            unread, self._unread = self._unread, []
        for device in {error.device for _, error in unread if on_accelerator(error)}:
            torch.accelerator.synchronize(device)  # each was computed on the stream of its tensor
        read = [(codec, float(error)) for codec, error in unread]
        with self.lock:
            for codec, error in read:
                self._errors[codec] = max(self._errors.get(codec, 0.0), error)

    def _settle(self) -> None:
        while self._changes:
            self._held += self._changes[0]
            self._changes.popleft()  # in a line of its own: what a call returns, an interrupt may take away
