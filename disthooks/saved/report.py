"""``Counters`` count what one attachment does with saved tensors; ``SavedReport`` says it, with advice.

Bytes and times are counted by module. The errors of codecs and the warnings that were given are kept beside them.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from disthooks import memory
from disthooks._fork_safe import DeferredSum, Order, shared_lock
from disthooks._streams import on_accelerator
from disthooks._tensors import format_bytes
from disthooks.saved.stores.base import Store, StoreReport

_WORTH = 64 << 10  # bytes; the time of smaller tensors does not go to their bytes (benchmarks/threshold.py)
_FEW = 3  # modules to name in a text
_MUCH = 0.1  # seconds of waiting that are worth a word


@dataclass(frozen=True)
class SiteReport:
    """What became of one module's saved tensors: one entry of :attr:`SavedReport.sites`. Bytes, or seconds.

    Attributes:
        tensors: contents that were given to the store, each once.
        saved: their bytes, as the module saved them.
        stored: their bytes as the store got them, after codecs.
        moved: of those, bytes that left the memory they were in.
        shared: saved again as views of what was packed already.
        kept: stayed in memory.
        recast: autocast's copies of weights that were dropped.
        recomputed: dropped by :class:`~disthooks.Recompute`. All that the module saved is this, and ``saved``,
            ``shared``, ``kept`` and ``recast``.
        loaded: brought back from the store.
        pack_seconds: of the host, in the store, in forward.
        unpack_seconds: of the host, in the store, in backward.
        codec_seconds: of the host, in codecs, both ways.
        copy_seconds: during which their bytes were copied, written and read beside the computation. ``OnDisk`` knows it
            of each tensor; of other stores it is the part of the store's own time that these bytes are of all.
    """

    tensors: int = 0
    saved: int = 0
    stored: int = 0
    moved: int = 0
    shared: int = 0
    kept: int = 0
    recast: int = 0
    recomputed: int = 0
    loaded: int = 0
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0
    codec_seconds: float = 0.0
    copy_seconds: float = 0.0

    def __add__(self, other: SiteReport) -> SiteReport:
        """The figures of both, summed.

        >>> (SiteReport(tensors=1, saved=8) + SiteReport(tensors=2, kept=4)).tensors
        3
        """
        return SiteReport(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def shared_out(sites: Mapping[str, SiteReport], tiers: Sequence[StoreReport]) -> dict[str, SiteReport]:
    """``sites`` with their parts of the time that ``tiers`` took, unless the store told it for each tensor.

    The parts are those of the bytes.

    >>> sites = {"a": SiteReport(moved=30, loaded=10), "b": SiteReport(moved=10, loaded=10)}
    >>> found = shared_out(sites, [StoreReport("OnCpu()", write_seconds=4.0, read_seconds=2.0)])
    >>> found["a"].copy_seconds, found["b"].copy_seconds
    (4.0, 2.0)
    """
    every = sum(sites.values(), SiteReport())
    if every.copy_seconds:
        return dict(sites)
    out = sum(tier.write_seconds for tier in tiers) / max(1, every.moved)
    back = sum(tier.read_seconds for tier in tiers) / max(1, every.loaded)
    return {
        name: replace(site, copy_seconds=out * site.moved + back * site.loaded if site.moved else 0.0)
        for name, site in sites.items()
    }


@dataclass(frozen=True)
class SavedReport:
    """Bytes of saved tensors by what became of them, since the attachment was made, on this rank.

    Attributes:
        calls: forwards, or blocks of code, that ran with the hooks on.
        stored: handed to the store (after codecs), each content once.
        moved: of those, bytes that left the memory they were in; in a :class:`~disthooks.Tiered`, those that may have:
            its ``tiers`` have what did.
        shared: saved again as another view of what was packed already, so neither stored nor kept twice.
        kept: stayed in memory.
        kept_by: ``kept`` by reason: "parameter", "small", "in place" (the store is where they are), ...
        recast: autocast's copies of weights that were dropped, to be cast again in backward.
        recomputed: dropped by :class:`~disthooks.Recompute`, to be computed again in backward.
        recomputed_by: ``recomputed`` by the operators that do it: "batch_norm > relu", "cast", ...
        differed: bytes stored because computing them again gave other bits, by module and operators.
        recompute_idle: attachments with :class:`~disthooks.Recompute` that found nothing it knows how to compute.
        loaded: brought back from the store.
        held: in the store now; zero once every graph is gone.
        passed: calls that went through without hooks, by reason: "no_grad", "checkpoint", ...
        inner: calls inside whose saved tensors another attachment, further in, took; the inner one wins.
        pack_seconds: time that forward waited for the store.
        unpack_seconds: time that backward waited for the store.
        errors: for each lossy codec, by its ``repr``, the largest relative error seen,
            ``||decode(encode(x)) - x|| / ||x||`` of the finite elements of a tensor. It is measured for the 1st, 2nd,
            4th, 8th, ... tensor that the codec changed, so it costs nothing in the long run. Reading the report waits
            for the device once if there are new ones.
        tensors: how many were handed to the store.
        unreturned: bytes that this process has freed and its C library keeps: they stay resident.
        tiers: a report of each place of the store, which other attachments may use too.
        sites: the same for each module that saved something, by its name ("" for a block of code).
        told: the warnings that this attachment gave, each once.
        uncalled: attached modules that nobody has called while others were.
    """

    calls: int = 0
    stored: int = 0
    moved: int = 0
    shared: int = 0
    kept: int = 0
    kept_by: dict[str, int] = field(default_factory=dict)
    recast: int = 0
    recomputed: int = 0
    recomputed_by: dict[str, int] = field(default_factory=dict)
    differed: dict[str, int] = field(default_factory=dict)
    recompute_idle: int = 0
    loaded: int = 0
    held: int = 0
    passed: dict[str, int] = field(default_factory=dict)
    inner: int = 0
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    tensors: int = 0
    unreturned: int = field(default=0, compare=False)  # of the process, in this moment
    tiers: tuple[StoreReport, ...] = ()
    sites: dict[str, SiteReport] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()

    def __add__(self, other: SavedReport) -> SavedReport:
        """The figures of both, summed; of ``errors`` and ``unreturned`` the larger."""
        summed: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "tiers":
                summed[name] = tuple({tier.name: tier for tier in (*mine, *theirs)}.values())
            elif name == "errors":
                summed[name] = {codec: max(mine.get(codec, 0.0), theirs.get(codec, 0.0)) for codec in mine | theirs}
            elif name == "sites":
                summed[name] = {
                    site: mine.get(site, SiteReport()) + theirs.get(site, SiteReport()) for site in mine | theirs
                }
            elif name == "unreturned":
                summed[name] = max(mine, theirs)
            elif isinstance(mine, dict):
                summed[name] = dict(collections.Counter(mine) + collections.Counter(theirs))
            else:
                summed[name] = mine + theirs
        return SavedReport(**summed)

    def __str__(self) -> str:
        why = ", ".join(f"{reason} {format_bytes(count)}" for reason, count in sorted(self.kept_by.items()))
        calls = ", ".join(f"{reason} {count}" for reason, count in sorted(self.passed.items()))
        if not self.calls:
            return "no call ran with the hooks on" + (f"; calls without: {calls}" if calls else "")
        lines = [
            f"in all, since it was attached: stored {format_bytes(self.stored)} (moved {format_bytes(self.moved)}), "
            f"shared {format_bytes(self.shared)}, kept {format_bytes(self.kept)}" + (f" ({why})" if why else ""),
            f"held now {format_bytes(self.held)}, brought back {format_bytes(self.loaded)}",
            f"forward waited {self.pack_seconds:.3f} s, backward {self.unpack_seconds:.3f} s",
        ]
        if self.recast:
            lines.append(f"copies of weights dropped, to be cast again: {format_bytes(self.recast)}")
        if self.recomputed or self.differed:
            how = ", ".join(f"{name} {format_bytes(count)}" for name, count in _largest(self.recomputed_by))
            dropped = f"dropped, to be computed again: {format_bytes(self.recomputed)}"
            lines.append(dropped + (f" ({how})" if how else ""))
        if self.errors:
            worst = ", ".join(f"{codec} {error:.2g}" for codec, error in sorted(self.errors.items()))
            lines.append(f"largest relative error in a sample of tensors: {worst}")
        if len(self.sites) > 1:
            lines.append(self._largest())
        if calls:
            lines.append(f"calls without hooks: {calls}")
        if self.inner:
            lines.append(f"calls inside that another attachment took: {self.inner}")
        lines += [str(tier) for tier in self.tiers]
        lines += [f"* {line}" for line in self.advice()]
        return "\n".join(lines)

    def _largest(self) -> str:
        """One line with the modules from which most was moved, or which saved most."""
        order = sorted(self.sites.items(), key=lambda item: (-item[1].moved, -item[1].saved - item[1].kept, item[0]))
        most = ", ".join(
            f"{name or 'outside of modules'} {format_bytes(site.saved + site.kept)}" for name, site in order[:_FEW]
        )
        rest = len(order) - _FEW
        return f"most in {most}" + (f", and {rest} more" if rest > 0 else "")

    @property
    def hidden_seconds(self) -> float:
        """Time that the store took while nobody waited for it, for all attachments that use it."""
        took = sum(tier.write_seconds + tier.read_seconds for tier in self.tiers)
        return max(0.0, took - self.pack_seconds - self.unpack_seconds)

    def advice(self) -> list[str]:
        """What to change, in plain words; empty when there is nothing to say."""
        found = list(self.told)
        if self.uncalled:
            found.append(
                f"attached and never called so far: {', '.join(self.uncalled[:_FEW])}"
                + (f" and {len(self.uncalled) - _FEW} more" if len(self.uncalled) > _FEW else "")
                + ". Something else uses their weights, or they had no turn: attach to the module that does the work"
            )
        if self.calls and not self.stored and self.kept_by.get("small") and not self.kept_by.get("in place"):
            found.append(
                f"nothing was stored: {format_bytes(self.kept_by['small'])} are in tensors too small to be worth it; "
                "AtLeast(0) stores them all the same"
            )
        waited = self.pack_seconds + self.unpack_seconds
        if 0 < self.moved < self.tensors * _WORTH and any(tier.written for tier in self.tiers):
            found.append(
                f"the tensors that are moved have {format_bytes(self.moved / self.tensors)} on average, less than is "
                f"worth moving: keep the small ones, AtLeast({format_bytes(_WORTH)!r})"
            )
        elif self.moved and waited > _MUCH and waited > self.hidden_seconds:
            found.append(
                f"forward and backward waited {waited:.1f} s for what took {waited + self.hidden_seconds:.1f} s: the "
                "store is the bottleneck. Save fewer modules, store less of each tensor (Cast, Quantize), or give it a "
                "faster or a second directory"
            )
        if self.differed:
            where = ", ".join(place for place, _ in _largest(self.differed))
            found.append(
                f"{format_bytes(sum(self.differed.values()))} were stored because computing them again gave other "
                f"bits: {where}. Nothing is wrong, and the comparison is not repeated"
            )
        if self.recompute_idle and (self.stored or self.kept_by.get("in place")):
            found.append(
                "Recompute found nothing that it can compute again: attach to whole blocks, not to single layers, and "
                "know that what torch.compile made is one operator to it"
            )
        if self.moved and self.unreturned > max(64 << 20, self.moved // 16):
            found.append(
                f"{format_bytes(self.unreturned)} were freed but stay resident, because the C library keeps them: call "
                "disthooks.memory.release_promptly() before the first step"
            )
        return found

    def record(self, prefix: str = "saved/") -> dict[str, float]:
        """The figures as one flat dict for a sink: ``sink({"step": step} | saving.report().record())``.

        They are totals of all steps so far; ``gradients(also=[saving])`` adds ``saved/moved_per_step`` and its like.
        """
        flat: dict[str, float] = {}
        for name in ("stored", "moved", "shared", "kept", "recast", "recomputed", "loaded", "held"):
            flat[prefix + name] = getattr(self, name)
        for name in ("pack_seconds", "unpack_seconds"):
            flat[prefix + name] = getattr(self, name)
        flat[prefix + "hidden_seconds"] = self.hidden_seconds
        flat.update({f"{prefix}kept/{reason}": count for reason, count in self.kept_by.items()})
        for tier in self.tiers:
            for name in ("held", "in_flight", "written", "read", "write_seconds", "read_seconds"):
                flat[f"{prefix}{tier.name}/{name}"] = getattr(tier, name)
        return flat


def _largest(counts: dict[str, int], most: int = 5) -> list[tuple[str, int]]:
    """The largest of ``counts``, and what the others are together."""
    found = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    rest = found[most:]
    return found[:most] + ([(f"{len(rest)} others", sum(count for _, count in rest))] if rest else [])


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
