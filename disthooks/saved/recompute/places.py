"""What was proven of each place: a program there gives the bits of the original, or it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from disthooks._device import current_stream, event_on, is_capturing, on_accelerator
from disthooks.errors import DisthooksError, StoreError

#: What computes a tensor in the way of that number; None when it cannot now.
Try = Callable[[int], "torch.Tensor | None"]


class Place:
    """A program at a place of a module, whose key has all that selects its kernels.

    On a device the answer of a comparison is not waited for: until it is there the originals are stored.

    Args:
        where: for the error.
        always: whether to compare each time.
    """

    __slots__ = ("_always", "_answer", "_due", "differs", "proven", "variant", "where")

    def __init__(self, where: str, always: bool) -> None:
        self.where, self._always = where, always
        self.proven = self.differs = False
        self.variant = 0
        self._due = 0  # times
        self._answer: tuple[torch.Tensor, torch.Event] | None = None

    def is_right(self, attempt: Try, variants: int, original: torch.Tensor) -> bool:
        """Whether what ``attempt`` computes may take the place of ``original``, of the same layout, now.

        Raises:
            StoreError: when it differs although it has been right so far.
        """
        capturing = is_capturing(original.device)
        if self._answer is not None and not capturing:
            self._read()
        if self.differs:
            return False
        self._due += 1
        if self.proven and not (self._always or self._due.bit_count() == 1):
            return True
        if capturing or self._answer is not None:
            return False  # nothing can be asked now
        ways = [self.variant] if self.proven else range(variants)
        if not on_accelerator(original):
            return self._ask(attempt, ways, original)
        same = []
        for way in ways:
            computed = _attempted(attempt, way)
            if computed is None:
                return False
            same.append(_same(computed, original))
        answer = torch.empty(len(same), dtype=torch.bool, device="cpu", pin_memory=True)
        answer.copy_(torch.stack(same), non_blocking=True)
        self._answer = answer, event_on(current_stream(original.device))
        return False

    def _ask(self, attempt: Try, ways: Iterable[int], original: torch.Tensor) -> bool:
        """The same at once, on a CPU."""
        same = []
        for way in ways:
            computed = _attempted(attempt, way)
            if computed is None:
                return self.proven  # the exact inputs are gone, this time
            same.append(bool(_same(computed, original)))
            if same[-1]:
                break
        self._decide(same)
        return True in same

    def _read(self) -> None:
        asked = self._answer  # another thread may be here too
        if asked is not None and asked[1].query():
            self._answer = None
            self._decide(asked[0].tolist())

    def _decide(self, same: list[bool]) -> None:
        """What the comparisons said: of all ways, or of the one that is taken."""
        if not self.proven:
            self.differs = True not in same
            self.proven, self.variant = not self.differs, same.index(True) if True in same else 0
        elif not same[0]:
            self.proven, self.differs = False, True
            raise StoreError(
                f"Recompute: what is computed again at {self.where} was the same as the original before, and is not "
                "now. Something that the graph does not show takes part, such as an in-place change under no_grad: "
                "gradients since then may be wrong. Leave that module out, or use Recompute(check='always')"
            )


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
