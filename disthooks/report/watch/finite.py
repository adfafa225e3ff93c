"""Finds on the device whether tensors are finite. The host waits for the answer only when it reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from disthooks._locks import new_lock
from disthooks._tensors import elements_of
from disthooks.report.watch.features import version_of

# [Note: masks]
# A mask of `-inf` is an input that somebody made on purpose. If it counted as an input that is not finite, a module
# that gets a mask could never be named as the one that made a NaN, and a module inside it would be named, which only
# got the NaN first. So of inputs only NaN and `+inf` count. `+inf` counts although a mask might have it: an overflow in
# code between two modules gives it, and the second of them must not be named for that. A module that was given `-inf`
# and returns `-inf` has passed it on.
#
# [Note: flags that add up]
# A tensor's flag is 0, `-inf` or NaN, a tensor without dimensions on the device of the tensor. The sum of several flags
# is the flag of all their tensors together: NaN and anything is NaN, and 0 and `-inf` is `-inf`. So the outputs of a
# call need one number on the device. A flag is made of the smallest and the largest element of a tensor (decision 50):
# they take one pass over its memory and no temporary of its size, and both are NaN if an element is NaN.
#
# [Note: calls are compared on the device]
# Reading a flag would make the host wait for the device, in each call of each module. So the flags of 256 calls are put
# together on the device, with the numbers that say which call it was, and of these calls only the first one in question
# stays. Neither the memory nor the waiting grows with the number of calls, and nothing depends on the end of a forward
# (decision 51).

_FEW = 256  # calls whose flags are put together at a time; see [Note: calls are compared on the device]


@torch.no_grad()
def zero_or_nan(tensor: torch.Tensor, only_nan: bool = False) -> torch.Tensor | None:
    """Zero if all elements are finite, NaN if any is NaN or ``+inf``, else ``-inf``; see [Note: flags that add up].

    None if ``tensor`` has no elements in memory.

    >>> [float(zero_or_nan(torch.tensor([1.0, other]))) for other in (torch.inf, -torch.inf, 1.0)]
    [nan, -inf, 0.0]
    """
    dense = elements_of(tensor.detach())
    # FSDP frees the storage of a gathered parameter, and leaves its shape.
    if dense.numel() == 0 or dense.is_meta or dense.untyped_storage().nbytes() == 0:
        return None
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    if dense.dtype.itemsize == 1:  # torch has no extremes of 8-bit floats: these tensors are copied
        dense = dense.to(torch.float32)
    low, high = torch.aminmax(dense)
    if only_nan:
        return low.clamp(0, 0)  # infinities become 0, and NaN stays
    # The first term is `-inf` if `low` is, else 0, as the largest value that `clamp` leaves is the least finite number.
    # The second is NaN if `high` is `+inf`, since inf - inf is NaN, else 0. Either is NaN if an element is.
    least, high = torch.finfo(dense.dtype).min, high.clamp(min=0)
    return (low.clamp(max=least) - least) + (high - high)


class FiniteFlags:
    """Flags of tensors. The flag of each tensor is found once, as the output of one module is the input of the next."""

    def __init__(self, only_nan: bool, unknown: set[str]) -> None:
        self._only_nan, self._unknown = only_nan, unknown
        self._flags: Any = WeakIdKeyDictionary()  # by tensor: its version, and its flag at that version

    def __call__(self, tensors: Iterable[torch.Tensor], known: bool = True) -> torch.Tensor | None:
        """:func:`zero_or_nan` of all tensors together, on the device of the first; None if no tensor has a flag.

        ``known`` must be False for weights, because engines write into their memory without counting up the version.
        """
        total: torch.Tensor | None = None
        for tensor in tensors:
            version = version_of(tensor) if known else None
            before = None if version is None else self._flags.get(tensor)
            if before is not None and before[0] == version:
                flag = before[1]
            else:
                flag = self._look(tensor)
                if version is not None:
                    self._flags[tensor] = (version, flag)
            if total is None:
                total = flag
            elif flag is not None:
                total = total + flag.to(total.device, non_blocking=True)
        return total

    def _look(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if type(tensor).__name__ != "FakeTensor":
            try:
                return zero_or_nan(tensor, self._only_nan)
            except Exception:  # a user's subclass of tensors may raise anything
                pass
        layout = "" if tensor.layout is torch.strided else f" in the layout {tensor.layout}"
        self._unknown.add(f"{type(tensor).__name__} of {tensor.dtype}{layout}")
        return None


class ModuleCall(NamedTuple):
    """One call of a module that has returned: three flags (:func:`zero_or_nan`), and two numbers.

    ``when`` has the number of the forward in its upper 32 bits, and the order in which calls returned in its lower
    ones; ``where`` has the number of the module, and of its call, in the same way.
    """

    outputs: torch.Tensor
    inputs: torch.Tensor | None
    weights: torch.Tensor | None
    when: int
    where: int


def made_or_passed_on(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Whether a call made something that is not finite, or passed on NaN or ``+inf``; both arguments are flags.

    See [Note: masks].
    """
    return outputs.isnan() | (outputs.isneginf() & inputs.isfinite())


class FirstNonFinite:
    """On one device: the first call with a non-finite output, and the first such call whose inputs were finite.

    Calls are added in the order in which they returned. See [Note: calls are compared on the device].
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = new_lock()
        self._pending: list[ModuleCall] = []
        self._found: torch.Tensor | None = None

    def add(self, call: ModuleCall) -> None:
        """Remember a call. This does not wait for the device."""
        with self._lock:
            self._pending.append(call)
            if len(self._pending) >= _FEW:
                self._flush()

    def read(self) -> list[list[int]]:
        """For each of the two calls ``[when, where, inputs, weights]``; ``when`` is -1 if there was no such call.

        ``inputs`` is 2 if the inputs were finite except for ``-inf``. This waits for the device.
        """
        with self._lock:
            if self._pending:
                self._flush()
        return [[-1, 0, 1, 1]] * 2 if self._found is None else self._found.tolist()

    @torch.no_grad()
    def _flush(self) -> None:
        """Reduce the calls that wait to the first two in question, on the device."""
        calls, self._pending = self._pending, []
        # Pinned memory is copied without waiting for the device.
        numbers = torch.tensor([[call.when, call.where] for call in calls], pin_memory=self._device.type == "cuda")
        # The flags as three vectors on the device; a call without a flag counts as finite.
        zero = torch.zeros((), dtype=torch.float32, device=self._device)
        columns = []
        for flags in zip(*((call.outputs, call.inputs, call.weights) for call in calls), strict=True):
            there = [zero if flag is None else flag.to(zero, non_blocking=True) for flag in flags]
            columns.append(torch.stack(there))
        outputs, inputs, weights = columns
        given = (~inputs.isnan()).to(torch.int64) + inputs.isneginf()
        facts = torch.stack((given, weights.isfinite().to(torch.int64)), 1)
        rows = torch.cat((numbers.to(self._device, non_blocking=True), facts), 1)
        wrong = made_or_passed_on(outputs, inputs)
        now = torch.stack([_first(rows, wrong), _first(rows, wrong & (given > 0))])
        before = self._found
        # A call that was found earlier stays: only a row without a call (-1) is replaced.
        self._found = now if before is None else torch.where(before[:, :1] < 0, now, before)


def _first(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    # `rows[chosen]` would wait for the device, because its result has a shape that depends on values.
    row = rows.index_select(0, chosen.to(torch.uint8).argmax().view(1))[0]
    return torch.cat((torch.where(chosen.any(), row[:1], -1), row[1:]))
