"""``Recompute``, a stage of a pipeline, and the verifications that decide where it may drop a tensor.

A *place* is a position in a module where tensors are saved that one program can compute. A :class:`Verification`
compares what the program computes there with the original, bit for bit.
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

from disthooks._locks import new_lock
from disthooks._registry import register
from disthooks._streams import current_stream, event_on, is_capturing, on_accelerator
from disthooks._tensors import words_of
from disthooks.errors import DisthooksError, StoreError, UsageError
from disthooks.saved.stores.placed import NoRoom, for_comparison


@register("recompute")
@dataclass(frozen=True)
class Recompute:
    """Stage: drop a saved tensor that is a cheap function of other saved tensors, and compute it again in backward.

    This stage is lossless. It finds the function in the autograd graph, so the model does not change: the output of a
    ReLU behind a batch norm is computed from the input of the batch norm, which is saved anyway. The known functions
    are in ``disthooks/saved/recompute/formulas.py``.

    The first tensors of each place in a module are computed at once and compared with the original, bit for bit. If a
    tensor differs, the original is stored as if this stage was not there, and ``report().differed`` names the place.
    On a GPU the host waits for these comparisons until the place is trusted. The result of the comparisons is kept as
    long as the model lives (for a ``saving`` block: as long as the code that made the block).

    Args:
        steps: the largest number of operators that may run to compute one tensor from stored ones. Views are free.
        products: how many of these operators may be matrix products (``nn.Linear``, ``x @ y``). A product takes as long
            as it took in forward: ``report().rerun_flops`` counts it. With 1 a decoder drops the outputs of its linear
            layers, also those whose inputs are computed again. Attach it to the modules where it is worth it, such as
            ``"*.mlp"``. The weights have to be in memory and unchanged in backward, else backward raises an error.
        check: ``"sampled"`` compares the 1st, 2nd, 4th, 8th, ... tensor of each place. If a trusted place differs
            later, it raises a ``StoreError``: then something that the graph does not show changes the result. On a GPU
            the host does not wait for these later comparisons, so the error comes in backward or in a later step. If a
            lossy codec has the inputs when a comparison is due, the next forward holds them until it is made.
            ``"always"`` compares every tensor before it is dropped and stores those that differ. It computes
            everything twice, and on a GPU the host waits for each comparison. With a lossy codec the last 8 saved
            tensors stay in memory for it.

    Raises:
        UsageError: if ``steps`` is not a positive int, or ``check`` is neither of the two words.

    >>> import torch
    >>> from disthooks import OnDisk, saving
    >>> x = torch.ones(256, 256, requires_grad=True)
    >>> with saving(Recompute(), OnDisk("/tmp")) as saved:
    ...     y = torch.nn.functional.silu(x * 2).square().sum()
    >>> y.backward()
    >>> saved.report().stored, saved.report().recomputed_by
    (262144, {'silu': 262144})
    """

    steps: int = 6
    check: Literal["sampled", "always"] = "sampled"
    products: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise UsageError(f"Recompute: steps must be a positive int, got {self.steps!r}")
        if not isinstance(self.products, int) or self.products < 0:
            raise UsageError(f"Recompute: products must be an int that is not negative, got {self.products!r}")
        if self.check not in ("sampled", "always"):
            raise UsageError(f"Recompute: check must be 'sampled' or 'always', got {self.check!r}")


# [Note: how recompute is proven]
# A formula is a guess about the kernel that made a tensor. No tensor is dropped because of a guess: the program of a
# place runs on the exact inputs, and its result is compared with the original, bit for bit. There may be several
# variants (fused or not, with one eps or another); a variant that differs once is never tried again. A place is trusted
# when some variant is left and at least `_ENOUGH` different numbers were compared: zeros, as in a dry run, are the
# result of any eps and any order of operations, so they prove nothing. After that the 2nd, 4th, 8th, ... tensor is
# compared, and a difference is an error: something that the graph does not show changes the result, and gradients since
# the last comparison may be wrong (decision 87).

# [Note: how a proof outlives its attachment]
# On a device the host waits for the answer of a comparison until the place is trusted, and never afterwards (unless
# every tensor is compared). So that it waits only once for a place, verifications are kept by model (`proofs_of`) and,
# for `saving` blocks, by line of code (`proofs_here`): a loop that attaches in each step goes on where it was. If a
# comparison of a trusted place is due, the original is dropped all the same, because memory must not rise in steps 2,
# 4, 8, ... The answer of such a comparison is read when the place is used next, in forward or in backward, and a
# difference raises an error there. A place that was never proven drops nothing (decision 97).

#: Computes a tensor by the variant with that number; gives None if an input is gone.
Attempt = Callable[[int], "torch.Tensor | None"]

#: A place is trusted after this many different numbers were compared. They are counted in a sample of each tensor.
_ENOUGH, _SAMPLE = 256, 4096
#: The number of tensors of an untrusted place for whose comparisons the host waits.
_WAITED = 8
#: The largest number of verifications that are kept, and how many more for each module beside the first. A model whose
#: sizes change in each step makes ever new places. A place that was forgotten is proven again when it is used again.
MOST_PLACES, MOST_OF_A_MODULE = 256, 64


#: The result of an attempt for which there is no memory.
_NO_MEMORY = torch.empty(0)


class _PendingComparison(NamedTuple):
    """A comparison on a device whose answer the host has not read.

    Attributes:
        variants: the variants that were compared.
        answer: int64 in pinned memory: for each variant 1 if it is right, then the count of different numbers.
        done: the event after which ``answer`` can be read.
    """

    variants: list[int]
    answer: torch.Tensor
    done: torch.Event


class Verification:
    """The comparisons of one program, at one place of a module, with the originals.

    See [Note: how recompute is proven].

    Attributes:
        is_proven: whether some variant was always right, and enough numbers were compared.
        is_different: whether no variant is right; then the tensors of this place are stored.
        is_broken: whether a trusted place differed, so that tensors dropped before may come back wrong.
        is_due: whether a comparison was due, and could not be made because a lossy codec had the inputs.
        reach: how many tensors ago the inputs were saved, at most. So many have to be in memory for a comparison.
        waits: how many times the host waited for a device's answer.
    """

    __slots__ = (
        "__weakref__",
        "_always",
        "_candidates",
        "_lock",
        "_numbers",
        "_pending",
        "_tensors",
        "is_broken",
        "is_different",
        "is_due",
        "is_proven",
        "reach",
        "waits",
        "where",
    )

    def __init__(self, where: str, always: bool, lock: Any = None) -> None:
        self._lock = new_lock() if lock is None else lock
        self.where, self._always = where, always
        self.is_proven = self.is_different = self.is_broken = self.is_due = False
        self.reach = 1
        self._candidates: list[int] | None = None  # variants that were always right; None before the first comparison
        self._numbers = 0  # the count of different numbers that were compared
        self.waits = 0
        self._tensors = 0  # the count of tensors of this place
        self._pending: _PendingComparison | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the place is proven or different, or 64 tensors have decided neither."""
        return self.is_proven or self.is_different or self._tensors >= 64

    def choose_variant(self, attempt: Attempt, variants: int, original: torch.Tensor) -> int | None:
        """The variant whose result may replace ``original`` now; None if ``original`` has to be stored.

        Raises:
            StoreError: if the result differs although the place was trusted, unless every tensor is compared.
        """
        is_captured = is_capturing(original.device)
        if not is_captured:
            self._read_pending()
        if self.is_different:
            return None
        self._tensors += 1
        is_trusted = self.is_proven and not self._always
        # No comparison can run while a graph is captured, and a place has at most one comparison under way.
        cannot_compare = is_captured or self._pending is not None
        if cannot_compare or (is_trusted and not self.is_due and self._tensors.bit_count() != 1):
            return self._first_candidate() if is_trusted else None
        return self._compare(attempt, variants, original, is_trusted)

    def raise_if_broken(self, device: torch.device) -> None:
        """Raise an error if a tensor of this place may be wrong. Call it before the tensor is computed on ``device``.

        Raises:
            StoreError: if a later comparison of this place has failed.
        """
        if self._pending is not None and not is_capturing(device):
            self._read_pending()
        if self.is_broken:
            raise self._error()

    def _compare(self, attempt: Attempt, variants: int, original: torch.Tensor, is_trusted: bool) -> int | None:
        if self._candidates is None:
            compared = list(range(variants))
        else:
            compared = self._candidates[: 1 if self.is_proven else None]  # a proven place uses only the first one
        answers = []
        for variant in compared:
            computed = _attempted(attempt, variant, is_trusted)
            if computed is None or computed is _NO_MEMORY:
                self.is_due = self.is_due or computed is None  # the exact inputs are gone this time
                return self._first_candidate() if is_trusted else None
            answers.append(_has_bits_of(original, computed))
            del computed  # before the next variant needs memory
        self.is_due = False
        answers.append(self._different_numbers(original))
        if not on_accelerator(original):
            return self._decide(compared, [int(each) for each in answers])
        numbers = torch.stack([each.to(torch.int64) for each in answers])
        if self._always or (not is_trusted and self._tensors <= _WAITED):
            self.waits += 1
            return self._decide(compared, numbers.tolist())
        self._read_later(compared, numbers)
        return self._first_candidate() if is_trusted else None

    def compare_later(self, variant: int, is_same: torch.Tensor) -> None:
        """Take the answer of a device, a bool, whether what ``variant`` needs is the same as in forward.

        Raises:
            StoreError: if it is not, and every tensor is compared. Otherwise the error comes later.
        """
        if self._always and not is_same:
            raise self._error()
        if not self._always and self._pending is None:
            self._read_later(
                [variant], torch.stack([is_same.to(torch.int64), torch.zeros_like(is_same, dtype=torch.int64)])
            )

    def _read_later(self, compared: list[int], numbers: torch.Tensor) -> None:
        answer = torch.empty(len(numbers), dtype=torch.int64, device="cpu", pin_memory=True)
        answer.copy_(numbers, non_blocking=True)
        self._pending = _PendingComparison(compared, answer, event_on(current_stream(numbers.device)))

    @staticmethod
    def _different_numbers(original: torch.Tensor) -> torch.Tensor:
        """The count of different numbers in a sample of ``original``: a scalar on its device, which runs ahead."""
        dtype = {1: torch.int8, 2: torch.int16}.get(original.itemsize, torch.int32)
        numbers = torch.empty(0, dtype=dtype, device=original.device).set_(
            original.untyped_storage(), 0, (original.nbytes // dtype.itemsize,), (1,)
        )
        sample = numbers[:: max(1, numbers.numel() // _SAMPLE)].sort().values
        return (sample[1:] != sample[:-1]).sum() + 1

    def _first_candidate(self) -> int | None:
        candidates = self._candidates  # read once: another thread may change the attribute
        return candidates[0] if candidates else None

    def _read_pending(self) -> None:
        pending = self._pending  # read once: another thread may be in this method too
        if pending is not None and pending.done.query():
            self._pending = None
            self._decide(pending.variants, pending.answer.tolist())

    def _decide(self, compared: list[int], answer: list[int]) -> int | None:
        """Apply the answer of a comparison. Returns the first of the ``compared`` variants that was right, or None."""
        *same, numbers = answer
        right = [variant for variant, is_same in zip(compared, same, strict=True) if is_same]
        wrong = set(compared) - set(right)
        with self._lock:
            # Another thread may have trusted the place, with one of these variants, during the comparison.
            failed = self.is_proven and self._first_candidate() in wrong
            before = compared if self._candidates is None else self._candidates
            self._candidates = [] if failed else [variant for variant in before if variant not in wrong]
            self._numbers += numbers
            self.is_different = not self._candidates
            self.is_proven = not self.is_different and self._numbers >= _ENOUGH
            self.is_broken = self.is_broken or (failed and not self._always)
        if failed and not self._always:
            raise self._error()
        return right[0] if right else None

    def _error(self) -> StoreError:
        return StoreError(
            f"Recompute: the tensor that is computed again at {self.where} was the same as the original before, and "
            "is not the same now. Something that the graph does not show changes it, such as an in-place change under "
            "no_grad. Gradients since then may be wrong. Leave that module out, or use Recompute(check='always')"
        )


class Proofs:
    """The verifications of a model, or of a line of code. See [Note: how a proof outlives its attachment].

    Those that were used least recently are forgotten when there are too many.
    """

    _kind = Verification

    def __init__(self) -> None:
        self._places: dict[Any, Verification] = {}  # the one that was used last is the last
        self._modules: set[str] = set()
        self._lock = new_lock()

    def verification(self, key: tuple[str, Any], where: str, always: bool) -> Verification:
        """The verification of the place ``key``, a module's name and a program; a new one if there is none."""
        with self._lock:
            found = self._places.pop((always, key), None) or self._kind(where, always, self._lock)
            self._places[always, key] = found
            self._modules.add(key[0])
            if len(self._places) > MOST_PLACES + MOST_OF_A_MODULE * (len(self._modules) - 1):
                del self._places[next(iter(self._places))]
        return found


_of_models: Any = WeakIdKeyDictionary()
_of_code: weakref.WeakKeyDictionary[types.CodeType, dict[int, Proofs]] = weakref.WeakKeyDictionary()


def proofs_of(model: nn.Module) -> Proofs:
    """The verifications of ``model`` by all attachments so far. They are freed with the model and do not hold it."""
    found = _of_models.get(model)
    if found is None:
        found = _of_models.setdefault(model, Proofs())
    return found  # type: ignore[no-any-return]


def proofs_here() -> Proofs:
    """The verifications of the line of the user's code that is calling disthooks. They are freed with that code."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        # Frames of these modules may be between the user's line and this function.
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("disthooks", "contextlib", "copy") and not module.startswith(
            "torch._dynamo"
        ):
            return _of_code.setdefault(frame.f_code, {}).setdefault(frame.f_lineno, Proofs())
        frame = frame.f_back
    return Proofs()


def _attempted(attempt: Attempt, variant: int, can_wait: bool) -> torch.Tensor | None:
    """The result of a variant; None if an input is missing; ``_NO_MEMORY``; an empty tensor if the variant fails."""
    try:
        with for_comparison(can_wait):
            return attempt(variant)
    except DisthooksError:
        raise
    except (torch.OutOfMemoryError, NoRoom):
        return _NO_MEMORY
    except (ValueError, TypeError, IndexError, NotImplementedError, RuntimeError):
        return torch.empty(0)  # the formula does not fit the node, or the device does not have the operator


def _has_bits_of(original: torch.Tensor, computed: torch.Tensor) -> Any:
    """Whether two tensors have the same bits: -0.0 differs from 0.0, and a NaN equals itself."""
    if computed.nbytes != original.nbytes:
        return torch.zeros((), dtype=torch.bool, device=original.device)
    # The memory of a store may be longer than the tensor.
    one, two = (words_of(each.untyped_storage(), each.nbytes) for each in (computed, original))
    return torch.equal(one, two) if original.is_cpu else (one == two).all()
