"""What to do with a saved tensor: a gate, what to compute again, codecs, then exactly one store."""

from __future__ import annotations

from dataclasses import dataclass

from disthooks._tensors import format_bytes, parse_bytes
from disthooks.errors import UsageError
from disthooks.saved.codecs import Codec
from disthooks.saved.recompute.verify import Recompute
from disthooks.saved.stores.base import Functions, Store


@dataclass(frozen=True)
class AtLeast:
    """Gate: tensors of fewer bytes are kept where they are.

    Args:
        size: bytes, an int or text such as ``"1 MiB"``; 0 sends every tensor to the store.

    Raises:
        UsageError: when ``size`` is not a size.

    >>> AtLeast("4 KiB").nbytes
    4096
    """

    size: int | str

    def __post_init__(self) -> None:
        parse_bytes(self.size, "at_least")

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return parse_bytes(self.size, "at_least")


@dataclass(frozen=True)
class Pipeline:
    """A gate, codecs and a store, checked; made by :func:`pipeline`.

    Attributes:
        at_least: bytes under which a tensor is kept.
        codecs: applied in order on the way in, in reverse on the way back.
        store: where the result goes.
        recompute: what is computed again instead, if asked for.
    """

    at_least: int
    codecs: tuple[Codec, ...]
    store: Store
    recompute: Recompute | None = None

    def __str__(self) -> str:
        stages = [f"AtLeast({format_bytes(self.at_least)!r})"]
        stages += [] if self.recompute is None else [repr(self.recompute)]
        stages += [*map(repr, self.codecs), repr(self.store)]
        return ", ".join(stages)


_ORDER = "the order is AtLeast, Recompute, codecs, one store"
Stage = AtLeast | Recompute | Codec | Store


def pipeline(*stages: Stage | Pipeline) -> Pipeline:
    """Chain ``AtLeast`` and ``Recompute`` (at most one each), codecs (any number) and exactly one store, in this order.

    Without ``AtLeast``, tensors of fewer than ``store.min_bytes`` bytes are kept where they are: under 64 KiB for
    ``OnDisk``, under 4 KiB for others, none for ``Functions``.

    Raises:
        UsageError: when the order is another, a store is missing, or a codec or ``Recompute`` stands before
            ``Functions``, whose ``pack`` takes tensors as autograd gives them.

    >>> from disthooks import OnCpu
    >>> print(pipeline(AtLeast("1 MiB"), OnCpu()))
    AtLeast('1.0 MiB'), OnCpu(limit=None, pin_memory='auto', in_flight='512 MiB')
    """
    if len(stages) == 1 and isinstance(stages[0], Pipeline):
        return stages[0]
    if hint := _misread(stages):
        raise UsageError(f"pipeline{_shown(stages)}: {hint}")
    rest = list(stages)
    gate = rest.pop(0) if rest and isinstance(rest[0], AtLeast) else None
    store = rest.pop() if rest and isinstance(rest[-1], Store) else None
    again = rest.pop(0) if rest and isinstance(rest[0], Recompute) else None
    if not isinstance(store, Store):
        raise UsageError(
            f"pipeline{_shown(stages)} does not end in a store, OnCpu() or OnDisk(directory) say; {_ORDER}"
        )
    codecs = tuple(stage for stage in rest if isinstance(stage, Codec))
    if len(codecs) < len(rest):
        odd = next(stage for stage in rest if not isinstance(stage, Codec))
        raise UsageError(f"pipeline{_shown(stages)}: {odd!r} is out of place; {_ORDER}")
    if codecs and isinstance(store, Functions):
        raise UsageError(f"pipeline{_shown(stages)}: put the codec into the pack and unpack of Functions")
    if again is not None and isinstance(store, Functions):
        raise UsageError(
            f"pipeline{_shown(stages)}: Functions takes each tensor as it is; give Recompute another store"
        )
    least = gate.nbytes if isinstance(gate, AtLeast) else store.min_bytes
    return Pipeline(least, codecs, store, again if isinstance(again, Recompute) else None)


def _misread(stages: tuple[object, ...]) -> str | None:
    """What to write instead, where something stands for a stage that looks like one."""
    for stage in stages:
        if isinstance(stage, type):
            return f"{stage.__name__} is a class; write {stage.__name__}(...)"
        if type(stage) in (list, tuple):
            return "give the stages one by one, not as a list"
        if isinstance(stage, Pipeline):
            return "a pipeline has its store already; put the stages before it into the same pipeline(...)"
    return None


def _shown(stages: tuple[object, ...]) -> str:
    return f"({', '.join(map(repr, stages))})"
