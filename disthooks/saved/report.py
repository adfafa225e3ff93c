"""``Counters`` count what one attachment does with saved tensors; a ``SavedReport`` shows the counts, with advice.

Bytes and times are counted for each module. The errors of codecs and the warnings are kept beside them.
"""

# [Note: counts take no lock]
# Several counts are made for each saved tensor, and a lock for each would cost more than the count. CPython changes the
# thread only where it checks for interrupts: when a Python function begins, when a loop jumps back, and after a call.
# `module.kept += nbytes` and `counts[name] += nbytes` have none of these between reading and writing, so no other
# thread's count is lost. `name` has to be a str, and `counts` a dict whose factory is a C function.

from __future__ import annotations

import collections
import itertools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from disthooks import memory
from disthooks._fork_safe import Order, shared_lock
from disthooks._streams import on_accelerator
from disthooks._tensors import format_bytes
from disthooks._torch import in_transform
from disthooks.saved.stores.base import Store, StoreReport

_WORTH = 64 << 10  # bytes; below this a tensor costs the same time whatever its size (benchmarks/threshold.py)
_FEW = 3  # how many modules or steps a text names
_STEPS = 16  # how many steps a report has figures of
_MUCH = 0.1  # seconds; shorter waits get no advice


@dataclass(frozen=True)
class SiteReport:
    """The bytes and seconds of one module's saved tensors: one entry of :attr:`SavedReport.sites`.

    All bytes that the module saved are ``saved + shared + kept + recast + recomputed``.

    Attributes:
        tensors: how many contents the store got. A content that is saved several times counts once.
        saved: bytes of these contents, as the module saved them.
        stored: bytes of these contents, as the store got them from the codecs.
        moved: the bytes of ``stored`` that left the memory they were in.
        shared: bytes of tensors that are views of contents that were packed already.
        kept: bytes that stayed in memory.
        recast: bytes of autocast's copies of weights that were dropped.
        recomputed: bytes that :class:`~disthooks.Recompute` dropped.
        loaded: bytes that the store gave back.
        pack_seconds: time that the host spent in the store during forward.
        unpack_seconds: time that the host spent in the store during backward.
        codec_seconds: time that the host spent in codecs, both ways.
        copy_seconds: time for which the bytes were copied, written and read beside the computation. ``OnDisk``
            measures it for each tensor. For other stores it is a part of the store's whole time, in proportion to the
            bytes.
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
        """Each figure of both, added.

        >>> (SiteReport(tensors=1, saved=8) + SiteReport(tensors=2, kept=4)).tensors
        3
        """
        return SiteReport(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def shared_out(sites: Mapping[str, SiteReport], tiers: Sequence[StoreReport]) -> dict[str, SiteReport]:
    """Fill in ``copy_seconds`` of ``sites``: the time of the store, in proportion to the bytes of each module.

    If the store has measured it for each tensor, ``sites`` stay as they are.

    Args:
        sites: the figures of each module, by its name.
        tiers: the reports of the store.

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
    """The saved tensors of one attachment on this rank, since it was made. Figures are bytes if nothing else is said.

    Attributes:
        calls: how many forwards, or blocks of code, ran with the hooks on.
        stored: bytes that the store got from the codecs, each content once.
        moved: the bytes of ``stored`` that left the memory they were in. With a :class:`~disthooks.Tiered` these are
            bytes that may have left it; its reports in ``tiers`` have the bytes that did.
        shared: bytes of tensors that are views of contents that were packed already. They are not stored twice.
        kept: bytes that stayed in memory.
        kept_by: ``kept`` by reason: "parameter", "small", "in place" (the store is where the tensors are), ...
        recast: bytes of autocast's copies of weights that were dropped; backward casts the weights again.
        recomputed: bytes that :class:`~disthooks.Recompute` dropped; backward computes them again.
        recomputed_by: ``recomputed`` by the operators that compute them: "batch_norm > relu", "cast", ...
        recomputed_in_steps: ``recomputed`` in each of the last 16 steps. A step begins with the first call after a
            tensor came back.
        rerun: how many operators ran again in backward; views do not count.
        rerun_flops: the floating-point operations of the matrix products among them.
        proof_waits: how many times forward waited for a device, to prove that a tensor can be computed again.
        differed: bytes that are stored because computing them again gave other bits, by module and operators.
        recompute_idle: how many attachments have a :class:`~disthooks.Recompute` that has found no operator it knows.
        loaded: bytes that the store gave back.
        held: bytes in the store now; 0 when all graphs are gone.
        passed: how many calls ran without hooks, by reason: "no_grad", "checkpoint", ...
        inner: how many calls had another attachment inside of this one. The inner attachment takes the saved tensors.
        pack_seconds: seconds for which forward waited for the store.
        unpack_seconds: seconds for which backward waited for the store.
        errors: the largest relative error of each lossy codec, by the codec's ``repr``:
            ``||decode(encode(x)) - x|| / ||x||`` over the finite elements of a tensor. It is measured for the 1st, 2nd,
            4th, 8th, ... tensor that the codec changed, so that its cost goes to zero in the long run. Making the
            report waits for the device once if errors were measured since the last report.
        tensors: how many contents the store got.
        unreturned: bytes that this process has freed and that its C library keeps, so that they stay resident.
        tiers: the reports of the store, one for each place. Other attachments may use the same store.
        sites: the figures of each module that saved a tensor, by the module's name ("" for a block of code).
        told: the warnings that this attachment gave, each once.
        uncalled: names of attached modules that were never called, if others were.
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
    recomputed_in_steps: tuple[int, ...] = ()
    rerun: int = 0
    rerun_flops: int = 0
    proof_waits: int = 0
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
    unreturned: int = field(default=0, compare=False)  # of the whole process, now
    tiers: tuple[StoreReport, ...] = ()
    sites: dict[str, SiteReport] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()

    def __add__(self, other: SavedReport) -> SavedReport:
        """Each figure of both, added; of ``errors`` and ``unreturned`` the larger."""
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
            elif name == "recomputed_in_steps":
                both = itertools.zip_longest(reversed(mine), reversed(theirs), fillvalue=0)
                summed[name] = tuple(map(sum, both))[::-1]
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
            products = f", products of {self.rerun_flops:.3g} flops among them" if self.rerun_flops else ""
            each = ", ".join(map(format_bytes, self.recomputed_in_steps[-_FEW:]))
            lines.append(f"  in the last steps: {each}; {self.rerun} operators ran again{products}")
        if self.errors:
            worst = ", ".join(f"{codec} {error:.2g}" for codec, error in sorted(self.errors.items()))
            lines.append(f"largest relative error in a sample of tensors: {worst}")
        if len(self.sites) > 1:
            # The modules from which the most bytes were moved, or else those that saved the most.
            order = sorted(
                self.sites.items(), key=lambda item: (-item[1].moved, -item[1].saved - item[1].kept, item[0])
            )
            most = [f"{name or 'outside of modules'} {format_bytes(each.saved + each.kept)}" for name, each in order]
            rest = f", and {len(most) - _FEW} more" if len(most) > _FEW else ""
            lines.append(f"most in {', '.join(most[:_FEW])}{rest}")
        if calls:
            lines.append(f"calls without hooks: {calls}")
        if self.inner:
            lines.append(f"calls inside that another attachment took: {self.inner}")
        lines += [str(tier) for tier in self.tiers]
        lines += [f"* {line}" for line in self.advice()]
        return "\n".join(lines)

    @property
    def hidden_seconds(self) -> float:
        """Seconds for which the store worked and no computation waited, for all attachments that use the store."""
        took = sum(tier.write_seconds + tier.read_seconds for tier in self.tiers)
        return max(0.0, took - self.pack_seconds - self.unpack_seconds)

    def advice(self) -> list[str]:
        """Sentences that say what to change; an empty list if there is nothing to change."""
        found = list(self.told)
        if self.uncalled:
            found.append(
                f"attached and never called so far: {', '.join(self.uncalled[:_FEW])}"
                + (f" and {len(self.uncalled) - _FEW} more" if len(self.uncalled) > _FEW else "")
                + ". Something else uses their weights, or module.forward(x) runs them, which opens no hooks, or they "
                "had no turn: attach to the module that does the work"
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
            only_host = all(tier.name.startswith(("OnCpu", "OnDevice")) for tier in self.tiers)
            last = (
                "let more stay on the device, OnCpu(keep=...)"
                if only_host
                else "give it a faster or a second directory"
            )
            found.append(
                f"forward and backward waited {waited:.1f} s for what took {waited + self.hidden_seconds:.1f} s: the "
                f"store is the bottleneck. Save fewer modules, store less of each tensor (Cast, Quantize), or {last}"
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

        The values are totals over all steps so far. ``gradients(also=[saving])`` writes them into each record, and adds
        differences such as ``saved/moved_per_step``.

        Args:
            prefix: put in front of each name.
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
    """The ``most`` largest of ``counts``, and one entry with the sum of the others."""
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
_DISABLED = (
    "{where} is called where torch.autograd.graph.disable_saved_tensors_hooks forbids hooks: it goes without "
    "hooks. Call it outside of that block to store what it saves. report().passed counts these calls; this is said "
    "once"
)
# The warning for each reason why a call ran without hooks. The other reasons need no action of the user.
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

_told: dict[str, str] = {}  # the warnings of blocks that this process has given


class WarnedOnce:
    """The warnings of one attachment. Each is given once, and every report after that contains it.

    Attributes:
        texts: the warnings so far, by topic.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def warn(self, topic: str, text: str) -> None:
        """Give the warning ``text``, unless this attachment has warned of ``topic`` before."""
        # One call of C decides between two threads that arrive together, so no lock is needed.
        if self.texts.setdefault(topic, text) is text:
            warnings.warn(text, stacklevel=5)


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
        """Remember ``error``, a scalar. It stays on its device, because the host would have to wait to read it."""
        with self._lock:
            self._unread.append((codec, error))

    def read(self) -> dict[str, float]:
        """The largest errors by codec. Waits for the devices of the errors that were not read before."""
        with self._lock:
            unread, self._unread = self._unread, []
        for device in {error.device for _, error in unread if on_accelerator(error)}:
            torch.accelerator.synchronize(device)  # each error was computed on the stream of its tensor
        read = [(codec, float(error)) for codec, error in unread]
        with self._lock:
            for codec, error in read:
                self._largest[codec] = max(self._largest.get(codec, 0.0), error)
            return dict(self._largest)


class ModuleCounts:
    """The counts of one module: the fields of a :class:`SiteReport`, which can be added to."""

    __slots__ = tuple(SiteReport.__dataclass_fields__)

    def __init__(self) -> None:
        self.tensors = self.saved = self.stored = self.moved = self.shared = self.kept = 0
        self.recast = self.recomputed = self.loaded = 0
        self.pack_seconds = self.unpack_seconds = self.codec_seconds = self.copy_seconds = 0.0


class Counters:
    """The counts of one attachment, for all of its threads. See [Note: counts take no lock].

    Attributes:
        lock: under which a report is made.
        saved_bytes: bytes of all contents that were packed so far.
        warned: the warnings of the attachment.
        codec_errors: the errors of the lossy codecs.
        alive: the objects that hold bytes of the store, each as many as its ``nbytes``, by their identity. A sum that
            destructors change would stay wrong after the handler of a signal has raised an error in one of them.
    """

    def __init__(self) -> None:
        self.lock = shared_lock(Order.COUNTERS)
        self.saved_bytes = 0
        self.warned, self.codec_errors = WarnedOnce(), CodecErrors(self.lock)
        # A count costs one look-up: sums over modules are made when a report is (decision 86).
        self._calls = self._inner = 0
        self.alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._modules: dict[str, ModuleCounts] = {}
        self._kept: dict[str, int] = collections.defaultdict(int)
        self._recomputed: dict[str, int] = collections.defaultdict(int)
        self._recomputed_in_steps: collections.deque[int] = collections.deque([0], maxlen=_STEPS)
        self._has_returned = False  # whether a tensor came back since the step began
        self._rerun = self._rerun_flops = self._proof_waits = 0
        self._differed: dict[str, int] = collections.defaultdict(int)
        self._passed: dict[str, int] = collections.defaultdict(int)
        self._called: set[str] = set()  # names of modules

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()  # a copy of a module begins with empty counts: it has saved nothing yet

    @property
    def has_calls(self) -> bool:
        """Whether a call was seen, with hooks or without."""
        return bool(self._called)

    def of_module(self, name: str) -> ModuleCounts:
        """The counts of the module ``name``; "" for a block of code."""
        found = self._modules.get(name)
        return self._modules.setdefault(name, ModuleCounts()) if found is None else found

    def count_put(
        self, stored: int, moved: int, seconds: float, module_name: str = "", saved: int | None = None
    ) -> None:
        """Count one content that the store took.

        Args:
            stored: its bytes as the store got them.
            moved: those of them that left the memory they were in.
            seconds: how long the host waited for the store.
            module_name: the module that saved it; "" for a block of code.
            saved: its bytes before codecs, by default ``stored``.
        """
        module = self._modules.get(module_name) or self.of_module(module_name)
        module.tensors += 1
        module.saved += stored if saved is None else saved
        module.stored += stored
        module.moved += moved
        module.pack_seconds += seconds

    def count_got(self, loaded: int, seconds: float, module_name: str = "", copied: float = 0.0) -> None:
        """Count bytes that the store gave back, the seconds that backward waited, and the seconds of the copies."""
        module = self._modules.get(module_name) or self.of_module(module_name)
        module.loaded += loaded
        module.unpack_seconds += seconds
        module.copy_seconds += copied
        self._has_returned = True

    def count_codecs(self, seconds: float, module_name: str = "") -> None:
        """Count the seconds that codecs took."""
        module = self.of_module(module_name)
        module.codec_seconds += seconds

    def count_kept(self, reason: str, nbytes: int, module_name: str = "") -> None:
        """Count a saved tensor that stays in memory, for ``reason``."""
        module = self._modules.get(module_name) or self.of_module(module_name)
        module.kept += nbytes
        self._kept[reason] += nbytes

    def count_recast(self, nbytes: int, module_name: str = "") -> None:
        """Count autocast's copy of a weight that was dropped."""
        module = self.of_module(module_name)
        module.recast += nbytes

    def count_recomputed(self, how: str, nbytes: int, module_name: str = "") -> None:
        """Count bytes that are dropped because the operators ``how`` compute them again."""
        module = self.of_module(module_name)
        module.recomputed += nbytes
        self._recomputed[how] += nbytes
        self._recomputed_in_steps[-1] += nbytes

    def count_rerun(self, operators: int, flops: int) -> None:
        """Count the operators that computed one tensor again."""
        self._rerun += operators
        self._rerun_flops += flops
        self._has_returned = True

    def count_proof_wait(self) -> None:
        """Count that the host waited for a device, to prove a place of Recompute."""
        self._proof_waits += 1

    def count_differed(self, place: str, nbytes: int) -> None:
        """Count bytes that are stored because computing them again gave other bits; ``place`` says where."""
        self._differed[place] += nbytes

    def count_call(self, module_name: str = "") -> None:
        """Count a call that ran with the hooks on."""
        with self.lock:
            self._calls += 1
            self._called.add(module_name)
            if self._has_returned:
                self._has_returned = False
                self._recomputed_in_steps.append(0)

    def count_inner(self) -> None:
        """Count a call whose saved tensors another attachment inside of this one takes (the inner one wins)."""
        self._inner += 1

    def count_pass(self, reason: str, module_name: str) -> None:
        """Count a call that ran without hooks, and warn once if the user can change that."""
        self._passed[reason] += 1
        self._called.add(module_name)
        if reason in _ADVICE:
            is_forbidden = reason == "hooks disabled" and not in_transform()
            advice = _DISABLED if is_forbidden else _ADVICE[reason]
            key = "hooks forbidden" if is_forbidden else reason
            self.warned.warn(key, advice.format(where=repr(module_name or "this block")))

    def warn_of_graphs(self, module_name: str) -> None:
        """Warn once that tensors in the memory of CUDA graphs stay there."""
        where = repr(module_name) if module_name else "a saving(...) block"
        self.warned.warn("CUDA graph", _GRAPHS.format(where=where))

    def warn_of_in_place(self, module_name: str, store: Store) -> None:
        """Warn once that the tensors are already where the store would put them, if nothing at all was stored."""
        has_stored = any(self._modules[name].stored for name in list(self._modules))
        if not has_stored:
            text = _IN_PLACE.format(store=store, where=repr(module_name) if module_name else "this block")
            if module_name or _told.setdefault(text, text) is text:
                self.warned.warn("in place", text)
            self.warned.texts.setdefault("in place", text)  # each run of a block is an attachment with a report

    def warn_of_threads(self, module_name: str) -> None:
        """Warn once that the layers of a module seem to run in other threads."""
        self.warned.warn("threads", _ELSEWHERE.format(where=repr(module_name)))

    def report(self, store: Store, names: Sequence[str] = (), is_recompute_idle: bool = False) -> SavedReport:
        """All counts as they stand.

        Args:
            store: the store, whose own reports are added.
            names: the attached modules; the report names those that were never called.
            is_recompute_idle: whether the pipeline has a Recompute that has met no operator it knows.
        """
        # The store and the device may take a while to answer. The lock is taken after that, so that no thread that
        # trains waits for the counters meanwhile. See [Note: the order of locks].
        tiers, errors, unreturned = store.report(), self.codec_errors.read(), memory.unreturned()
        with self.lock:
            modules = {
                name: SiteReport(*(getattr(self._modules[name], field) for field in ModuleCounts.__slots__))
                for name in list(self._modules)
            }
            total = sum(modules.values(), SiteReport())
            # Before the first call no module is named: all of them may still be called.
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
                recomputed_in_steps=tuple(self._recomputed_in_steps) if self._recomputed else (),
                rerun=self._rerun,
                rerun_flops=self._rerun_flops,
                proof_waits=self._proof_waits,
                differed=dict(self._differed),
                recompute_idle=int(is_recompute_idle and not self._recomputed),
                loaded=total.loaded,
                held=sum(each.nbytes for ref in self.alive.valuerefs() if (each := ref()) is not None),
                passed=dict(self._passed),
                inner=self._inner,
                pack_seconds=total.pack_seconds,
                unpack_seconds=total.unpack_seconds,
                tensors=total.tensors,
                unreturned=unreturned,
                tiers=tiers,
                errors=errors,
                sites=shared_out(modules, tiers),
                told=tuple(self.warned.texts.values()),
                uncalled=tuple(uncalled),
            )
