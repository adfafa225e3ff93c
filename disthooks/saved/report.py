"""A ``SavedReport`` shows what one attachment did with saved tensors, in bytes and seconds, with advice."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disthooks._tensors import format_bytes
from disthooks.saved.stores.base import StoreReport

_WORTH = 64 << 10  # bytes; below this a tensor costs the same time whatever its size (benchmarks/threshold.py)
_FEW = 3  # how many modules or steps a text names
_MODULES = 64  # with more modules a record has no figures of single ones
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

    def __sub__(self, before: SiteReport) -> SiteReport:
        """Each figure, since ``before``."""
        return SiteReport(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


def shared_out(sites: Mapping[str, SiteReport], tiers: Sequence[StoreReport]) -> dict[str, SiteReport]:
    """Fill in ``copy_seconds`` of ``sites``: the time of the store, in proportion to the bytes of each module.

    If the store has measured it for each tensor, ``sites`` stay as they are.

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
class BudgetReport:
    """Whether the budget of :func:`disthooks.fit` was kept so far, on this rank: :attr:`SavedReport.budget`.

    Attributes:
        nbytes: the budget.
        peak: the most bytes that were in use.
        recent: the most bytes that were in use since the record before; it is ``saved/peak`` in a log.
        rounds: how many rounds are over: a step, or one of several backwards of a step.
        steps: how many steps of an optimizer there were.
        over: how many rounds needed more than the budget.

    >>> print(BudgetReport(650 << 20, 611 << 20, rounds=80, steps=40))
    budget 650.0 MiB, peak 611.0 MiB, all 40 steps within
    >>> print(BudgetReport(600 << 20, 611 << 20, rounds=80, steps=40, over=1))
    budget 600.0 MiB, peak 611.0 MiB, 1 of 80 rounds over
    """

    nbytes: int
    peak: int = 0
    recent: int = 0
    rounds: int = 0
    steps: int = 0
    over: int = 0

    def __str__(self) -> str:
        kept = f"all {self.steps} steps within" if self.steps else f"all {self.rounds} rounds within"
        if self.over or not self.rounds:
            kept = f"{self.over} of {self.rounds} rounds over" if self.over else "no step is over yet"
        return f"budget {format_bytes(self.nbytes)}, peak {format_bytes(self.peak)}, {kept}"


@dataclass(frozen=True)
class SavedReport:
    """The saved tensors of one attachment on this rank, since it was made. Figures are bytes if nothing else is said.

    Attributes:
        calls: how many forwards, or blocks of code, ran with the hooks on.
        stored: bytes that the store got from the codecs, each content once.
        moved: the bytes of ``stored`` that left the memory they were in. What stays in the ``OnDevice`` of a
            :class:`~disthooks.Tiered` is none of them.
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
        told: the warnings that this attachment gave, each once, and that a block saw no saved tensor.
        uncalled: names of attached modules that were never called, if others were.
        budget: whether the budget was kept, with :func:`disthooks.fit`; None without.
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
    budget: BudgetReport | None = None

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
            elif name == "budget":
                summed[name] = mine or theirs
            elif name == "unreturned":
                summed[name] = max(mine, theirs)
            elif isinstance(mine, dict):
                summed[name] = dict(collections.Counter(mine) + collections.Counter(theirs))
            else:
                summed[name] = mine + theirs
        return SavedReport(**summed)

    def sites_since(self, before: SavedReport) -> dict[str, SiteReport]:
        """The figures of each module since ``before``, a report of the same attachments."""
        return {name: site - before.sites.get(name, SiteReport()) for name, site in self.sites.items()}

    def __str__(self) -> str:
        why = ", ".join(f"{reason} {format_bytes(count)}" for reason, count in sorted(self.kept_by.items()))
        calls = ", ".join(f"{reason} {count}" for reason, count in sorted(self.passed.items()))
        if not self.calls:
            return "no call ran with the hooks on" + (f"; calls without: {calls}" if calls else "")
        lines = [str(self.budget)] if self.budget else []
        lines += [
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
        if self.tiers:
            lines.append("the store, by all that uses it in this process:")
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
                "at_least=0 stores them all the same"
            )
        waited = self.pack_seconds + self.unpack_seconds
        if 0 < self.moved < self.tensors * _WORTH and any(tier.written for tier in self.tiers):
            found.append(
                f"the tensors that are moved have {format_bytes(self.moved / self.tensors)} on average, less than is "
                f"worth moving: keep the small ones, at_least={format_bytes(_WORTH)!r}"
            )
        elif self.moved and waited > _MUCH and waited > self.hidden_seconds:
            only_host = all(tier.name.startswith(("OnCpu", "OnDevice")) for tier in self.tiers)
            last = (
                "let more stay on the device, Tiered(OnDevice(...), OnCpu())"
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
        differences such as ``saved/moved_per_step``. ``peak_held`` of a place is the most since the last record. If
        several modules save, but not more than 64, the parts of their bytes that moved, and that are computed again,
        follow. With :func:`disthooks.fit` there are ``budget``, and ``peak``: the most in use since the last record.

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
            flat[f"{prefix}{tier.name}/peak_held"] = max(tier.held, tier.peak_held)
            for name in ("held", "in_flight", "written", "read", "write_seconds", "read_seconds"):
                flat[f"{prefix}{tier.name}/{name}"] = getattr(tier, name)
        if self.budget:
            flat |= {prefix + "budget": self.budget.nbytes, prefix + "peak": self.budget.recent}
        if 1 < len(self.sites) <= _MODULES and (self.moved or self.recomputed):
            for module, site in self.sites.items():
                whole = max(1, site.stored + site.recomputed)
                flat[f"{prefix}moved_share/module/{module}"] = site.moved / whole
                flat[f"{prefix}recomputed_share/module/{module}"] = site.recomputed / whole
        return flat


def _largest(counts: dict[str, int], most: int = 5) -> list[tuple[str, int]]:
    found = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    rest = found[most:]
    return found[:most] + ([(f"{len(rest)} others", sum(count for _, count in rest))] if rest else [])
