"""The stage of a pipeline that asks for it.

What was proven of each place: a program there gives the bits of the original, or it does not.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from disthooks._fork_safe import Order, shared
from disthooks._registry import register
from disthooks._streams import current_stream, event_on, is_capturing, on_accelerator
from disthooks.errors import DisthooksError, StoreError, UsageError


@register("recompute")
@dataclass(frozen=True)
class Recompute:
    """Stage: drop a saved tensor that is a cheap function of other saved ones, and compute it again in backward.

    Lossless, and found from the graph, the model stays as it is: the output of a ReLU behind a batch norm is computed
    from the input of the batch norm, which is saved anyway. The functions known are in
    ``disthooks/saved/recompute/formulas.py``. The first time at each place of a module the value is computed at once
    and compared with the original bit for bit; where it differs the original is stored as if this stage was not
    there, and ``report().differed`` names the place. On a GPU the host waits for this, until a place is trusted; what
    was proven is kept as long as the model (of a ``saving`` block: as long as the code that made it).

    Args:
        steps: most operators that are run for one tensor, from what is stored; views are free.
        check: ``"sampled"`` compares the 1st, 2nd, 4th, 8th, ... tensor of each place, and raises a ``StoreError``
            where it differs only later: something that the graph does not show had a hand in it. On a GPU nobody waits
            for these comparisons, and the error comes in backward or in a later step. ``"always"``
            compares each before it is dropped, for the price of computing everything twice and of waiting for the
            device: what differs is stored, whenever that is.

    Raises:
        UsageError: when ``steps`` is no positive int, or ``check`` none of the two.

    >>> import torch
    >>> from disthooks import OnDisk, pipeline, saving
    >>> x = torch.ones(256, 256, requires_grad=True)
    >>> with saving(pipeline(Recompute(), OnDisk("/tmp"))) as saved:
    ...     y = torch.nn.functional.silu(x * 2).square().sum()
    >>> y.backward()
    >>> saved.report().stored, saved.report().recomputed_by
    (262144, {'silu': 262144})
    """

    steps: int = 6
    check: Literal["sampled", "always"] = "sampled"

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise UsageError(f"Recompute: steps must be a positive int, got {self.steps!r}")
        if self.check not in ("sampled", "always"):
            raise UsageError(f"Recompute: check must be 'sampled' or 'always', got {self.check!r}")


# [Note: how a proof outlives its attachment]
# A place is proven by comparing what is computed with the original, which on a device takes a wait of the host. That
# wait is worth it once: the comparisons before a place is trusted are waited for, and all later ones are not. So
# proofs are kept by model (`proofs_of`), and a loop that attaches in each step, or opens a `saving(...)` block in each
# step (`proofs_here`), goes on where it was. A place that is trusted drops its original even in the steps in which it
# is compared again: memory must not rise in steps 2, 4, 8, ... The answer is read when the place comes up next, in
# forward or in backward, and a difference raises there. A place that was never proven drops nothing.


#: What computes a tensor in the way of that number; None when it cannot now.
Try = Callable[[int], "torch.Tensor | None"]


#: Different numbers that have to be compared, out of at most so many of a tensor, before a place is trusted. Zeros of a
#: dry run tell nothing: any eps gives them, and any order of operations.
_ENOUGH, _SAMPLE = 256, 4096
_WAITED = 8  # comparisons of a place that is not trusted that the host waits for
MOST = 1 << 14  # places: sizes that change all the time make ever new ones


class _Asked(NamedTuple):
    ways: list[int]
    answer: torch.Tensor  # a number for each way, whether it is right, and how many numbers are different
    done: torch.Event


class Place:
    """A program at a place of a module, whose key has all that selects its kernels.

    Args:
        where: for the error.
        always: whether to compare each time, and wait for the answer.
        lock: for its decisions, which are rare: replicas in threads share places.
    """

    __slots__ = ("_always", "_asked", "_due", "_lock", "_seen", "_ways", "broken", "differs", "proven", "where")

    def __init__(self, where: str, always: bool, lock: Any = None) -> None:
        self._lock = shared(Order.PLACE) if lock is None else lock
        self.where, self._always = where, always
        self.proven = self.differs = False
        self.broken = False  # it was trusted, and differed: what was dropped before may be wrong
        self._ways: list[int] | None = None  # those that have been right so far; None before the first comparison
        self._seen = 0  # different numbers that were compared
        self._due = 0  # times
        self._asked: _Asked | None = None  # on a device: a comparison whose answer nobody waits for

    @property
    def settled(self) -> bool:
        """Whether it is known what it is, or has been asked so often that it may never be."""
        return self.proven or self.differs or self._due >= 64

    def way(self, attempt: Try, variants: int, original: torch.Tensor) -> int | None:
        """Which way gives what may take the place of ``original``, of the same layout, now; None if none does.

        Raises:
            StoreError: when it differs although it was trusted and has not been compared each time.
        """
        capturing = is_capturing(original.device)
        if not capturing:
            self._read()
        if self.differs:
            return None
        self._due += 1
        trusted = self.proven and not self._always
        # In a capture, or while there is no answer to the last question, nothing can be asked.
        silent = capturing or self._asked is not None
        if silent or (trusted and self._due.bit_count() != 1):
            return self._first() if trusted else None
        return self._compared(attempt, variants, original, trusted)

    def check(self, device: torch.device) -> None:
        """Something that was dropped here, on ``device``, is to be computed again.

        Raises:
            StoreError: when a comparison has told meanwhile that it may be wrong.
        """
        if self._asked is not None and not is_capturing(device):
            self._read()
        if self.broken:
            raise self._error()

    def _compared(self, attempt: Try, variants: int, original: torch.Tensor, trusted: bool) -> int | None:
        ways = list(range(variants)) if self._ways is None else self._ways[: 1 if self.proven else None]
        same = []
        for way in ways:
            computed = _attempted(attempt, way)
            if computed is None:  # the exact inputs are gone, this time
                return self._first() if self.proven else None
            same.append(_same(computed, original))
        same.append(_different(original))
        if not on_accelerator(original):
            return self._decide(ways, [int(each) for each in same])
        numbers = torch.stack([each.to(torch.int64) for each in same])
        if self._always or (not trusted and self._due <= _WAITED):
            return self._decide(ways, numbers.tolist())
        answer = torch.empty(len(same), dtype=torch.int64, device="cpu", pin_memory=True)
        answer.copy_(numbers, non_blocking=True)
        self._asked = _Asked(ways, answer, event_on(current_stream(original.device)))
        return self._first() if trusted else None

    def _first(self) -> int | None:
        ways = self._ways  # another thread may change it
        return ways[0] if ways else None

    def _read(self) -> None:
        asked = self._asked  # another thread may be here too
        if asked is not None and asked.done.query():
            self._asked = None
            self._decide(asked.ways, asked.answer.tolist())

    def _decide(self, asked: list[int], answer: list[int]) -> int | None:
        """What a comparison said of the ways that were ``asked``: the first of them that is right."""
        *same, seen = answer
        right = [way for way, each in zip(asked, same, strict=True) if each]
        with self._lock:
            wrong = set(asked) - set(right)
            # Another thread may have trusted one of several ways while these were asked.
            failed = self.proven and self._first() in wrong
            left = [way for way in (asked if self._ways is None else self._ways) if way not in wrong]
            self._ways = [] if failed else left
            self._seen += seen
            self.differs = not self._ways
            self.proven = not self.differs and self._seen >= _ENOUGH
            self.broken = self.broken or (failed and not self._always)
        if failed and not self._always:
            raise self._error()
        return right[0] if right else None

    def _error(self) -> StoreError:
        return StoreError(
            f"Recompute: what is computed again at {self.where} was the same as the original before, and is not "
            "now. Something that the graph does not show takes part, such as an in-place change under no_grad: "
            "gradients since then may be wrong. Leave that module out, or use Recompute(check='always')"
        )


class Proofs:
    """The places of a model, or of a piece of code; see [Note: how a proof outlives its attachment]."""

    def __init__(self) -> None:
        self._places: dict[Any, Place] = {}
        self._lock = shared(Order.PLACE)

    def place(self, key: tuple[Any, ...], where: str, always: bool) -> Place:
        """The place of ``key``, which is made when it is new."""
        found = self._places.get((always, key))
        if found is None:
            if len(self._places) >= MOST:
                self._places.clear()
            found = self._places.setdefault((always, key), Place(where, always, self._lock))
        return found


_of_models: Any = WeakIdKeyDictionary()
_of_code: weakref.WeakKeyDictionary[types.CodeType, dict[int, Proofs]] = weakref.WeakKeyDictionary()


def proofs_of(model: nn.Module) -> Proofs:
    """What was proven of ``model`` so far, by any attachment; it goes with the model, and does not hold it."""
    found = _of_models.get(model)
    if found is None:
        found = _of_models.setdefault(model, Proofs())
    return found  # type: ignore[no-any-return]


def proofs_here() -> Proofs:
    """What was proven so far at the line of the user's code that calls now; it goes with that code."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    if frame is None:
        return Proofs()
    return _of_code.setdefault(frame.f_code, {}).setdefault(frame.f_lineno, Proofs())


def _is_ours(name: str) -> bool:
    """Whether the module of that ``name`` only calls for the user."""
    return name.partition(".")[0] in ("disthooks", "contextlib", "copy") or name.startswith("torch._dynamo")


def _different(original: torch.Tensor) -> torch.Tensor:
    """How many numbers of ``original`` are different, out of a few; nobody waits for it."""
    dtype = {1: torch.int8, 2: torch.int16}.get(original.itemsize, torch.int32)
    numbers = torch.empty(0, dtype=dtype, device=original.device).set_(
        original.untyped_storage(), 0, (original.nbytes // dtype.itemsize,), (1,)
    )
    some = numbers[:: max(1, numbers.numel() // _SAMPLE)].sort().values
    return (some[1:] != some[:-1]).sum() + 1


def _attempted(attempt: Try, way: int) -> torch.Tensor | None:
    """What a way gives, an empty tensor where it fails; None when it cannot be tried now."""
    try:
        return attempt(way)
    except DisthooksError:
        raise
    except torch.OutOfMemoryError:
        return None
    except (ValueError, TypeError, IndexError, NotImplementedError, RuntimeError):
        return torch.empty(0)  # a formula that does not fit its node, or an operator that this device does not have


def _same(computed: torch.Tensor, original: torch.Tensor) -> Any:
    """Whether the bits are the same: minus zero is not zero, and a NaN is itself."""
    one, two = _bits(computed), _bits(original)
    if one.shape != two.shape:
        return torch.zeros((), dtype=torch.bool, device=original.device)
    return torch.equal(one, two) if original.is_cpu else (one == two).all()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.uint8 if tensor.nbytes % 8 else torch.int64  # a store's memory may go on behind it
    bits = torch.empty(0, dtype=dtype, device=tensor.device)
    return bits.set_(tensor.untyped_storage(), 0, (tensor.nbytes // dtype.itemsize,), (1,))
