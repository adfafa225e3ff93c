"""Read gradients on a GPU once for all facts and for the histogram, by the Triton kernels in ``kernels.py``.

They run on a CUDA or ROCm device with Triton, which comes with torch there. Everywhere else, and for gradients of other
dtypes, ``scan.py`` and ``magnitudes.py`` find the same numbers by torch operations. The first use compiles the kernels,
for about a second, and compares them with known numbers; nothing is tuned at run time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from disthooks.grads.stats.base import CountRows, Fact, moved
from disthooks.grads.stats.magnitudes import BINS, MagnitudeCounter, first_code

#: The facts in the order in which the kernels write them.
FACTS: tuple[Fact, ...] = ("sum", "m2", "squares", "abs", "zeros", "nonfinite", "high", "low")

_LANES, _PER_THREAD = 128, 16  # threads of a program, and elements of a tile that each of them has
_TILES = 16
_CHUNK = _LANES * _PER_THREAD * _TILES  # elements that a program reads
_COPIES = 64  # of the counts, so that few programs add to the same number at a time
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class RowFacts(NamedTuple):
    """The facts of gradients, a row for each of ``FACTS``; and the counts of each row, or None. Both are float64."""

    facts: torch.Tensor
    counts: torch.Tensor | None


def usable(grad: torch.Tensor) -> bool:
    """Whether the kernels take ``grad`` by its dtype and its device."""
    return grad.is_cuda and grad.dtype in _DTYPES and _works(grad.device, grad.dtype)


def read(grads: Sequence[torch.Tensor], counting: CountRows | None = None) -> RowFacts:
    """Read ``grads``, which have elements and are on one device. The host does not wait for the device."""
    device = grads[0].device
    facts = torch.empty(len(FACTS), len(grads), dtype=torch.float64, device=device)
    counts = None
    if counting:
        copies = max(1, _COPIES // max(counting.many, 1))
        counts = torch.zeros(copies, counting.many, BINS, dtype=torch.int64, device=device)
    # A launch reads gradients of one dtype whose addresses are alike multiples of 16, so that loads are wide.
    alike: dict[tuple[torch.dtype, bool], list[int]] = {}
    flat = [grad.contiguous() for grad in grads]
    for i, grad in enumerate(flat):
        alike.setdefault((grad.dtype, grad.data_ptr() % 16 == 0), []).append(i)
    for (dtype, is_aligned), members in alike.items():
        found = facts if len(alike) == 1 else torch.empty(len(FACTS), len(members), dtype=torch.float64, device=device)
        entries, chunks = [], 0
        for i in members:
            entries.append((flat[i].data_ptr(), flat[i].numel(), chunks, counting.of[i] if counting else 0))
            chunks += -(-flat[i].numel() // _CHUNK)
        _launch(moved(torch.tensor(entries), device), chunks, (dtype, is_aligned), found, counts)
        if found is not facts:
            facts.index_copy_(1, moved(torch.tensor(members), device), found)
    return RowFacts(facts, None if counts is None else counts.sum(0).double())


def _launch(
    table: torch.Tensor,
    chunks: int,
    kind: tuple[torch.dtype, bool],
    facts: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:
    """Fill ``facts`` and add to ``counts``, for the gradients in ``table``: address, size, first chunk and row."""
    dtype, is_aligned = kind
    # Which gradient each chunk belongs to. The size of the result is known, so the host need not wait for it.
    owners = torch.repeat_interleave((table[:, 1] + (_CHUNK - 1)) // _CHUNK, output_size=chunks)
    partials = torch.empty(chunks, len(FACTS), dtype=torch.float64, device=table.device)
    wide = 16 // dtype.itemsize
    kernels = _kernels()
    # Triton launches a kernel on the current stream of the current device.
    with torch.cuda.device(table.device) if table.is_cuda else contextlib.nullcontext():
        kernels.read[(chunks,)](
            table,
            owners,
            partials,
            table if counts is None else counts,
            0 if counts is None else counts.shape[0],
            0 if counts is None else counts.shape[1],
            DTYPE=getattr(kernels.tl, _DTYPES[dtype]),
            ALIGNED=is_aligned,
            COUNTED=counts is not None,
            DEEP=_PER_THREAD // wide,
            LANES=_LANES,
            WIDE=wide,
            TILES=_TILES,
            FIRST=first_code(torch.float32),
            BINS=BINS,
            num_warps=_LANES // 32,
        )
        kernels.merge[(len(table),)](table, partials, facts, len(table), CHUNK=_CHUNK, LANES=256, num_warps=4)


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("disthooks.grads.stats.kernels")


@functools.cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        with torch.no_grad(), _waiting_allowed(device):
            check(device, dtype)
    except Exception as error:  # no Triton, no C compiler for its launcher, an unknown device, or wrong numbers
        warnings.warn(
            f"disthooks: statistics run in many torch operations instead of one kernel on {device}, because Triton "
            f"does not work: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False
    return True


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernels with known numbers, once for a device and a dtype, when they are compiled anyway.

    A compiler for a device that nobody tried may be wrong, and wrong statistics look like right ones.

    Raises:
        RuntimeError: when the kernels give other numbers.
    """
    places = torch.arange(_CHUNK + 2345)
    octaves = 7 if dtype == torch.float16 else 40  # so many that some magnitudes are outside of the 128 bins
    host = (places % 11 - 5.0) * 2.0 ** ((places % 3 - 1) * octaves - octaves // 2)
    host = torch.where(places % 1000 == 7, 0.0, host).to(dtype)
    counter = MagnitudeCounter()
    counter.add(0, host.float())
    exact = host.double()
    facts = [exact.sum(), (exact - exact.mean()).square().sum(), exact.square().sum(), exact.abs().sum()]
    facts += [(exact == 0).sum(), (~exact.isfinite()).sum(), exact.max(), -exact.min()]
    found = read([host.to(device)], CountRows([0], 1))
    if found.counts is None or not torch.equal(found.counts.cpu(), counter.counts(1, torch.device("cpu"))):
        raise RuntimeError("the kernel counts other magnitudes than torch")
    if not torch.allclose(found.facts[:, 0].cpu(), torch.stack([fact.double() for fact in facts]), rtol=1e-9):
        raise RuntimeError("the kernel finds other facts than torch")


@contextlib.contextmanager
def _waiting_allowed(device: torch.device) -> Iterator[None]:
    """Inside the host may wait for the device, also if torch was told to refuse it."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
