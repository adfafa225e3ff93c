"""The stages that a saved tensor goes through: ``Recompute``, codecs, then exactly one store.

A ``Pipeline`` is frozen and can be shared. An ``OpenPipeline`` is one at work, with the state of one attachment.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from disthooks._tensors import format_bytes, parse_bytes
from disthooks.errors import UsageError
from disthooks.saved.codecs import Codec
from disthooks.saved.contents import ContentIndex
from disthooks.saved.counters import Counters
from disthooks.saved.recompute.verify import Proofs, Recompute, Verification
from disthooks.saved.report import SavedReport
from disthooks.saved.stopwatch import Stopwatch
from disthooks.saved.stores.base import Functions, Store


@dataclass(frozen=True)
class Pipeline:
    """Codecs and a store, checked; made by :func:`pipeline`.

    Attributes:
        at_least: tensors of fewer bytes stay in memory.
        codecs: applied in order on the way in, in reverse on the way back.
        store: the store that the result goes to.
        recompute: the stage that drops tensors that it can compute again; None without it.
        selective_checkpoints: whether the tensors that a selective checkpoint keeps go to the store, too.
    """

    at_least: int
    codecs: tuple[Codec, ...]
    store: Store
    recompute: Recompute | None = None
    selective_checkpoints: bool = True

    def __str__(self) -> str:
        stages = [] if self.recompute is None else [repr(self.recompute)]
        stages += [*map(repr, self.codecs), repr(self.store), f"at_least={format_bytes(self.at_least)!r}"]
        stages += [] if self.selective_checkpoints else ["selective_checkpoints=False"]
        return ", ".join(stages)


@dataclass
class Droppable:
    """What ``Recompute`` may drop. A place is a module and the operators that compute a tensor of it.

    Attributes:
        left: the bytes of each place that may still be dropped; None for all of all places.
        dropped: the bytes of each place that were dropped since this was cleared.
        watch: measures how long it takes to compute them again; None for nothing.
    """

    left: dict[str, float] | None = None
    dropped: collections.Counter[str] = field(default_factory=collections.Counter)
    watch: Stopwatch | None = None

    def take(self, place: str, nbytes: int) -> None:
        """Count a tensor of ``place`` that is dropped."""
        self.dropped[place] += nbytes
        left = self.left  # read once: another thread may be here, and the next round sets another dict
        if left is not None:
            left[place] = left.get(place, 0.0) - nbytes
            if left[place] <= 0:
                left.pop(place, None)

    def may(self, place: str | None = None) -> bool:
        """Whether a tensor of ``place``, or of any place, may be dropped."""
        left = self.left
        return left is None or (bool(left) if place is None else place in left)


class OpenPipeline:
    """A pipeline at work: its stages, and the counts, contents and proofs of one attachment.

    All modules and threads of the attachment use the same one. A copy or a pickle of it starts anew.

    Attributes:
        counters: of the attachment.
        contents: finds contents that are packed already.
        droppable: what Recompute may drop; others may share it.
        is_lossless: whether no codec loses anything.
        verifications: those of the ``proofs`` that came up in this attachment, by identity, as long as these keep them.
    """

    __slots__ = (
        "at_least",
        "codecs",
        "contents",
        "counters",
        "droppable",
        "is_lossless",
        "proofs",
        "recompute",
        "stages",
        "store",
        "verifications",
    )

    def __init__(self, stages: Pipeline, proofs: Proofs | None = None) -> None:
        self.stages, self.recompute = stages, stages.recompute
        self.at_least, self.codecs, self.store = stages.at_least, stages.codecs, stages.store
        self.is_lossless = not any(codec.lossy for codec in stages.codecs)
        self.counters, self.contents = Counters(), ContentIndex(stages.at_least, is_typed=bool(stages.codecs))
        self.droppable = Droppable()
        self.proofs = Proofs() if proofs is None and stages.recompute is not None else proofs
        self.verifications: weakref.WeakValueDictionary[int, Verification] = weakref.WeakValueDictionary()

    def __reduce__(self) -> tuple[type[OpenPipeline], tuple[Pipeline]]:
        return OpenPipeline, (self.stages,)  # a copy of a module has saved nothing yet

    def report(self, names: Sequence[str] = ()) -> SavedReport:
        """The counts of the attachment so far, with its store's own reports; ``names`` are the attached modules."""
        is_idle = self.recompute is not None and not self.verifications
        return self.counters.report(self.store, self.contents.held_bytes(), names, is_idle)


_ORDER = "the order is Recompute, codecs, one store"
Stage = Recompute | Codec | Store


def pipeline(
    *stages: Stage | Pipeline, at_least: int | str | None = None, selective_checkpoints: bool = True
) -> Pipeline:
    """Chain ``Recompute`` (at most one), codecs (any number) and exactly one store, in this order.

    Args:
        stages: the stages.
        at_least: tensors of fewer bytes stay in memory: an int or text such as ``"1 MiB"``; 0 sends every tensor to the
            store. None for ``store.min_bytes``: 64 KiB for ``OnDisk`` and ``OnCpu``, 4 KiB for others, 0 for
            ``Functions``.
        selective_checkpoints: whether the tensors that a selective checkpoint keeps for backward go to the store, too.

    Raises:
        UsageError: when ``at_least`` is no size, the order is another, a store is missing, or a codec or ``Recompute``
            stands before ``Functions``, whose ``pack`` takes tensors as autograd gives them.

    >>> from disthooks import OnCpu
    >>> print(pipeline(OnCpu(), at_least="1 MiB"))
    OnCpu(limit=None, pin_memory='auto', in_flight='512 MiB'), at_least='1.0 MiB'
    """
    least = None if at_least is None else parse_bytes(at_least, "at_least")
    if len(stages) == 1 and isinstance(stages[0], Pipeline):
        made = stages[0] if selective_checkpoints else replace(stages[0], selective_checkpoints=False)
        return made if least is None else replace(made, at_least=least)
    rest = list(stages)
    store = rest.pop() if rest and isinstance(rest[-1], Store) else None
    recompute = rest.pop(0) if rest and isinstance(rest[0], Recompute) else None
    if not isinstance(store, Store):
        raise _error(stages, f" do not end in a store, OnCpu() or OnDisk(directory) say; {_ORDER}")
    codecs: list[Codec] = []
    for stage in rest:
        if not isinstance(stage, Codec):
            raise _error(stages, f": {stage!r} is out of place; {_ORDER}")
        codecs.append(stage)
    if codecs and isinstance(store, Functions):
        raise _error(stages, ": put the codec into the pack and unpack of Functions")
    if recompute is not None and isinstance(store, Functions):
        raise _error(stages, ": Functions takes each tensor as it is; give Recompute another store")
    least = store.min_bytes if least is None else least
    drops = recompute if isinstance(recompute, Recompute) else None
    return Pipeline(least, tuple(codecs), store, drops, selective_checkpoints)


def _error(stages: tuple[object, ...], fault: str) -> UsageError:
    """The error for ``stages`` that make no pipeline: advice if one of them looks like a stage, otherwise ``fault``."""
    for stage in stages:
        if isinstance(stage, type):
            fault = f": {stage.__name__} is a class; write {stage.__name__}(...)"
        elif type(stage) in (list, tuple):
            fault = ": give the stages one by one, not as a list"
        elif isinstance(stage, Pipeline):
            fault = ": a pipeline has its store already; put the stages before it into the same one"
        else:
            continue
        break
    return UsageError(f"the stages ({', '.join(map(repr, stages))}){fault}")
