"""What is found about the first non-finite output, as people read it and as numbers that ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disthooks.watch._modules import shown

_BYTES = 128  # of each text that is sent


@dataclass(frozen=True)
class Blamed:
    """The first module call with a non-finite output, on one rank.

    If code in a module made it, between calls of its children, children saw it first: then the module counts,
    since it was given finite inputs, and ``seen`` is the child.

    Attributes:
        rank: the global rank.
        forward: which forward of the model since attaching, from 0.
        module: canonical name; ``""`` is the model itself.
        kind: its class.
        call: which call of it in that forward, from 0.
        inputs_finite: whether its inputs were finite, but for ``-inf``, which masks have. False: it passed on what came
            into the model.
        weights_finite: whether its own parameters and buffers were.
        seen: name of the module whose output was the first to be non-finite.
        masked: whether its inputs had ``-inf`` in them.

    >>> print(Blamed(3, 0, "block.fc", "Linear", 0, True, False, "block.fc"))
    rank 3, forward 0: block.fc (Linear), call 0: its inputs were finite, its weights were not
    """

    rank: int
    forward: int
    module: str
    kind: str
    call: int
    inputs_finite: bool
    weights_finite: bool
    seen: str
    masked: bool = False

    def __str__(self) -> str:
        head = f"rank {self.rank}, forward {self.forward}: {shown(self.module)} ({self.kind}), call {self.call}: "
        if not self.inputs_finite:
            return f"{head}its inputs were not finite, and no module before it made them so"
        weights = "and its weights were finite" if self.weights_finite else "its weights were not"
        where = "" if self.seen == self.module else f"; first seen in the output of {shown(self.seen)}, inside it"
        comma = " " if self.weights_finite else ", "
        mask = " but for -inf, as in a mask," if self.masked else ""
        return f"{head}its inputs were finite{mask}{' ' if mask else comma}{weights}{where}"

    def numbers(self) -> list[int]:
        """As int64, always as many."""
        inputs = int(self.inputs_finite) + int(self.masked)
        flags = [1, self.rank, self.forward, self.call, inputs, int(self.weights_finite)]
        return flags + [number for text in (self.module, self.kind, self.seen) for number in _packed(text)]

    @staticmethod
    def of(numbers: Sequence[int]) -> Blamed | None:
        """What :meth:`numbers` gave; None of :func:`nobody`.

        >>> one = Blamed(3, 0, "block.fc", "Linear", 0, True, False, "block.fc")
        >>> Blamed.of(one.numbers()) == one, Blamed.of(nobody()), len(nobody()) == len(one.numbers())
        (True, None, True)
        """
        found, rank, forward, call, inputs, weights, *rest = numbers
        if not found:
            return None
        size = _BYTES // 8
        module, kind, seen = (_unpacked(rest[i : i + size]) for i in (0, size, 2 * size))
        return Blamed(rank, forward, module, kind, call, bool(inputs), bool(weights), seen, inputs == 2)


def nobody() -> list[int]:
    """What a rank sends that has found nothing."""
    return [0] * (6 + 3 * _BYTES // 8)


@dataclass(frozen=True)
class BlameReport:
    """What ``blame(model).report()`` returns.

    Attributes:
        found: one entry for this rank, or for each rank that has one; empty when every output was finite.
        forwards: forwards of the model on this rank since attaching.
        calls: module calls that were looked at on this rank.
        notes: what was not looked at, and why.

    >>> print(BlameReport((), forwards=2, calls=10, notes=()))
    2 forwards, 10 module calls: every output was finite
    """

    found: tuple[Blamed, ...]
    forwards: int
    calls: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = ["first non-finite output:", *(f"  {each}" for each in self.found)] if self.found else []
        if not self.found and self.calls:
            lines = [f"{self.forwards} forwards, {self.calls} module calls: every output was finite"]
        return "\n".join([*lines, *(f"not looked at: {note}" for note in self.notes)])


def _packed(text: str) -> list[int]:
    """The last bytes of ``text`` as int64."""
    content = text.encode()[-_BYTES:].ljust(_BYTES, b"\0")
    return [int.from_bytes(content[i : i + 8], "little", signed=True) for i in range(0, _BYTES, 8)]


def _unpacked(numbers: Sequence[int]) -> str:
    content = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return content.rstrip(b"\0").decode(errors="replace")
