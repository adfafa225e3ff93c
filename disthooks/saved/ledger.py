"""What one attachment knows of its saved tensors: which are stored already, and how many bytes went where."""

from __future__ import annotations

import collections
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

from disthooks._tensors import format_bytes
from disthooks.saved.index import Index

_STEPPED_BACK = (
    "disthooks stepped back in {where}, which runs inside {what}: what it saves is computed again anyway. To save the "
    "checkpoint's inputs instead, attach to the module around the checkpoint, or wrap it: SaveWith(checkpointed, ...). "
    "report().passed counts these calls; this is said once"
)
#: Reasons to go without hooks that the user can do something about, and what.
_MENDABLE = {
    "checkpoint": _STEPPED_BACK.replace("{what}", "an activation checkpoint"),
    "backward": _STEPPED_BACK.replace("{what}", "a backward (a reentrant checkpoint, most likely)"),
}


@dataclass(frozen=True)
class SavedReport:
    """Bytes of saved tensors by what became of them, since the attachment was made, on this rank.

    Attributes:
        calls: forwards, or blocks of code, that ran with the hooks on.
        stored: handed to the store (after codecs), each content once.
        moved: of those, bytes that left the memory they were in.
        shared: saved again as another view of what was packed already, so neither stored nor kept twice.
        kept: left where they were.
        kept_by: ``kept`` by reason: "parameter", "small", "in place" (the store is where they are), ...
        recast: autocast's copies of weights that were dropped, to be cast again in backward.
        loaded: brought back from the store.
        held: in the store now; zero once every graph is gone.
        passed: calls that went through without hooks, by reason: "no_grad", "checkpoint", ...
        inner: calls inside whose saved tensors another attachment, further in, took; the inner one wins.
        pack_seconds: time that forward waited for the store.
        unpack_seconds: time that backward waited for the store.
    """

    calls: int = 0
    stored: int = 0
    moved: int = 0
    shared: int = 0
    kept: int = 0
    kept_by: dict[str, int] = field(default_factory=dict)
    recast: int = 0
    loaded: int = 0
    held: int = 0
    passed: dict[str, int] = field(default_factory=dict)
    inner: int = 0
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0

    def __add__(self, other: SavedReport) -> SavedReport:
        """The figures of both, summed."""
        summed: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
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
            f"stored {format_bytes(self.stored)} (moved {format_bytes(self.moved)}), "
            f"shared {format_bytes(self.shared)}, kept {format_bytes(self.kept)}" + (f" ({why})" if why else ""),
            f"held now {format_bytes(self.held)}, brought back {format_bytes(self.loaded)}",
            f"forward waited {self.pack_seconds:.3f} s, backward {self.unpack_seconds:.3f} s",
        ]
        if self.recast:
            lines.append(f"copies of weights dropped, to be cast again: {format_bytes(self.recast)}")
        if calls:
            lines.append(f"calls without hooks: {calls}")
        if self.inner:
            lines.append(f"calls inside that another attachment took: {self.inner}")
        return "\n".join(lines)


class Ledger:
    """Finds what is packed already and counts bytes; shared by every thread of an attachment."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a collection may begin inside, and end a generator whose hooks count
        self.index = Index()
        # Those whose contents may be dropped once the device has said so.
        self.undecided: collections.deque[weakref.ref[Any]] = collections.deque()
        self._calls = self._inner = 0
        self._stored = self._moved = self._shared = self._recast = self._loaded = 0  # bytes
        self._pack_seconds = self._unpack_seconds = 0.0
        self._kept: collections.Counter[str] = collections.Counter()
        self._passed: collections.Counter[str] = collections.Counter()
        self._held = 0
        self._released: collections.deque[int] = collections.deque()
        self._told = False

    def __reduce__(self) -> tuple[type[Ledger], tuple[()]]:
        return Ledger, ()  # a copy of a module has saved nothing yet

    def count_put(self, stored: int, moved: int, seconds: float) -> None:
        """Add to ``stored`` and ``moved``, and the time that the store took for it."""
        with self.lock:
            self._stored += stored
            self._moved += moved
            self._held += stored
            self._pack_seconds += seconds
            self._settle()

    def count_got(self, loaded: int, seconds: float) -> None:
        """Add to ``loaded``, and the time that the store took for it."""
        with self.lock:
            self._loaded += loaded
            self._unpack_seconds += seconds

    def count_shared(self, nbytes: int) -> None:
        """Add to ``shared``."""
        with self.lock:
            self._shared += nbytes

    def count_recast(self, nbytes: int) -> None:
        """Add to ``recast``."""
        with self.lock:
            self._recast += nbytes

    def count_call(self) -> None:
        """One more call with the hooks on."""
        with self.lock:
            self._calls += 1

    def count_inner(self) -> None:
        """One more call inside that another attachment takes."""
        with self.lock:
            self._inner += 1

    def count_kept(self, reason: str, nbytes: int) -> None:
        """Add to ``kept``."""
        with self.lock:
            self._kept[reason] += nbytes

    def count_pass(self, reason: str, where: str) -> None:
        """One more call of ``where`` that went through without hooks; the user is told once if that can be mended."""
        with self.lock:
            self._passed[reason] += 1
            tell, self._told = reason in _MENDABLE and not self._told, self._told or reason in _MENDABLE
        if tell:
            warnings.warn(_MENDABLE[reason].format(where=repr(where or "this block")), stacklevel=4)

    def release(self, nbytes: int) -> None:
        """``nbytes`` are no longer held; called from destructors, so it takes no lock."""
        self._released.append(nbytes)

    def report(self) -> SavedReport:
        """The figures as they stand."""
        with self.lock:
            self._settle()
            return SavedReport(
                calls=self._calls,
                stored=self._stored,
                moved=self._moved,
                shared=self._shared,
                kept=sum(self._kept.values()),
                kept_by=dict(self._kept),
                recast=self._recast,
                loaded=self._loaded,
                held=self._held,
                passed=dict(self._passed),
                inner=self._inner,
                pack_seconds=self._pack_seconds,
                unpack_seconds=self._unpack_seconds,
            )

    def _settle(self) -> None:
        while self._released:
            self._held -= self._released.popleft()
