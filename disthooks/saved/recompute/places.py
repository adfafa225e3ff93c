"""What was proven of each place: a program there gives the bits of the original, or it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from disthooks._device import current_stream, event_on, is_capturing, on_accelerator
from disthooks._locks import Order, own
from disthooks.errors import DisthooksError, StoreError

#: What computes a tensor in the way of that number; None when it cannot now.
Try = Callable[[int], "torch.Tensor | None"]


#: Different numbers that have to be compared, out of at most so many of a tensor, before a place is trusted. Zeros of a
#: dry run tell nothing: any eps gives them, and any order of operations.
_ENOUGH, _SAMPLE = 256, 4096


class _Asked(NamedTuple):
    ways: list[int]
    trusted: bool  # whether the place was proven when it was asked
    answer: torch.Tensor  # a number for each way, whether it is right, and how many numbers are different
    done: torch.Event


class Place:
    """A program at a place of a module, whose key has all that selects its kernels.

    On a device the answer of a comparison is not waited for: until it is there the originals are stored.

    Args:
        where: for the error.
        always: whether to compare each time, and wait for the answer.
    """

    __slots__ = ("_always", "_asked", "_due", "_lock", "_seen", "_ways", "differs", "proven", "where")

    def __init__(self, where: str, always: bool) -> None:
        self.where, self._always = where, always
        self.proven = self.differs = False
        self._ways: list[int] | None = None  # those that have been right so far; None before the first comparison
        self._seen = 0  # different numbers that were compared
        self._due = 0  # times
        self._asked: _Asked | None = None
        self._lock = own(Order.PLACE)  # replicas in threads share places

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
        if self._asked is not None and not capturing:
            self._read()
        if self.differs:
            return None
        self._due += 1
        trusted = self.proven
        if trusted and not (self._always or self._due.bit_count() == 1):
            return self._first()
        if capturing or self._asked is not None:
            return None  # nothing can be asked now
        ways = list(range(variants)) if self._ways is None else self._ways[: 1 if trusted else None]
        same = []
        for way in ways:
            computed = _attempted(attempt, way)
            if computed is None:  # the exact inputs are gone, this time
                return self._first() if trusted and original.is_cpu else None
            same.append(_same(computed, original))
        if self._always or not on_accelerator(original):
            right = [way for way, each in zip(ways, same, strict=True) if each]
            self._decide(ways, right, trusted, int(_different(original)))
            return right[0] if right else None
        same.append(_different(original))
        answer = torch.empty(len(same), dtype=torch.int64, device="cpu", pin_memory=True)
        answer.copy_(torch.stack([each.to(torch.int64) for each in same]), non_blocking=True)
        self._asked = _Asked(ways, trusted, answer, event_on(current_stream(original.device)))
        return None

    def _first(self) -> int | None:
        ways = self._ways  # another thread may change it
        return ways[0] if ways else None

    def _read(self) -> None:
        asked = self._asked  # another thread may be here too
        if asked is not None and asked.done.query():
            self._asked = None
            *same, seen = asked.answer.tolist()
            right = [way for way, each in zip(asked.ways, same, strict=True) if each]
            self._decide(asked.ways, right, asked.trusted, seen)

    def _decide(self, asked: list[int], right: list[int], trusted: bool, seen: int) -> None:
        """What a comparison of ``seen`` numbers said: of the ways that were ``asked`` these are ``right``."""
        with self._lock:
            wrong = set(asked) - set(right)
            left = [way for way in (asked if self._ways is None else self._ways) if way not in wrong]
            self._ways = [] if trusted and wrong else left
            self._seen += seen
            self.differs = not self._ways
            self.proven = not self.differs and self._seen >= _ENOUGH
        if self.differs and trusted and not self._always:
            raise StoreError(
                f"Recompute: what is computed again at {self.where} was the same as the original before, and is not "
                "now. Something that the graph does not show takes part, such as an in-place change under no_grad: "
                "gradients since then may be wrong. Leave that module out, or use Recompute(check='always')"
            )


def _different(original: torch.Tensor) -> torch.Tensor:
    """How many numbers of ``original`` are different, out of a few; nobody waits for it."""
    dtype = {1: torch.int8, 2: torch.int16}.get(original.itemsize, torch.int32)
    numbers = torch.empty(0, dtype=dtype, device=original.device).set_(original.untyped_storage())
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
    storage = tensor.untyped_storage()
    dtype = torch.uint8 if storage.nbytes() % 8 else torch.int64
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage)
