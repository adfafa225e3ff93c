"""torch's own databases of operators and modules: what each entry gives with hooks and without, and the count of it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import disthooks as dh
from disthooks.saved.pipeline import Pipeline, pipeline
from disthooks.saved.report import SavedReport
from tests.support.stores.copies import Copies
from tests.support.stores.faulty import left
from tests.support.switch import KIND

pytest.importorskip("expecttest", reason="torch's databases need expecttest")

#: Everything, as `make test-full` asks for; otherwise a part that no chance picks.
FULL = bool(os.environ.get("DISTHOOKS_FULL"))
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bfloat16)
STORES = ("cpu", "disk", "copies", "recompute", "functions")
TURNS = (("disk",), ("copies", "recompute"), ("disk", "cpu"), ("copies", "functions"))
COPYING = ("disk", "copies", "recompute") if KIND == "cpu" else ("cpu", "disk", "copies", "recompute")
MUTATED = "a saved tensor was changed in place"
TWICE = ("double backward", "in place, double backward", "wrapped, double backward")

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def pipelines(folder: object) -> dict[str, Pipeline]:
    """One for each of STORES; every tensor goes to the store, however small."""
    again = dh.Recompute(), Copies()
    functions = dh.Functions(torch.Tensor.detach, lambda tensor: tensor)
    lines: tuple[tuple[Any, ...], ...] = ((dh.OnCpu(),), (dh.OnDisk(folder),), (Copies(),), again, (functions,))
    return {name: pipeline(*line, at_least=0) for name, line in zip(STORES, lines, strict=True)}


def share(
    entries: Sequence[Any], dtypes_of: Callable[[Any], Any], dtype: torch.dtype
) -> Iterator[tuple[Any, Sequence[str]]]:
    """The entries to test in ``dtype`` and the stores to test them with.

    A full run takes all; otherwise every entry has one dtype in turn, and a store that copies, some also one that
    does not.
    """
    for index, entry in enumerate(entries):
        dtypes = [one for one in DTYPES if one in dtypes_of(entry)]
        turns = [(one, stores) for one in dtypes for stores in TURNS]
        random.seed(0)  # its samples are the same whichever entries came before it
        torch.default_generator.manual_seed(0)
        if FULL and dtype in dtypes:
            yield entry, STORES
        elif turns and turns[index % len(turns)][0] is dtype:
            yield entry, turns[index % len(turns)][1]


def some(samples: Iterator[Any]) -> list[Any]:
    """All of the samples in a full run; at most three otherwise, first to last."""
    found = list(samples)
    return found if FULL else found[:: 1 + len(found) // 3]


@dataclasses.dataclass
class Outcome:
    """What a forward and its gradients gave, or the error; two are equal by bits."""

    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[torch.Tensor | None] = dataclasses.field(default_factory=list)
    error: str = ""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        mine, theirs = [*self.outputs, *self.gradients], [*other.outputs, *other.gradients]
        return self.error == other.error and len(mine) == len(theirs) and all(map(identical, mine, theirs))

    def near(self, other: Outcome) -> bool:
        """Outputs and gradients that are equal but for rounding: of kernels of a GPU that add in any order."""
        with contextlib.suppress(AssertionError):
            mine, theirs = [*self.outputs, *self.gradients], [*other.outputs, *other.gradients]
            torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-3, atol=1e-4)
            return self.error == other.error
        return False

    def close(self, other: Outcome) -> bool:
        """Outputs that are equal but for rounding, and gradients that are equal by bits."""
        with contextlib.suppress(AssertionError):
            torch.testing.assert_close(self.outputs, other.outputs, equal_nan=True)
            return Outcome([], self.gradients, self.error) == Outcome([], other.gradients, other.error)
        return False


def identical(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Bit for bit, signs of zeros and NaNs too, with dtype, shape, strides and layout."""
    if left is None or right is None:
        return left is right
    if (left.dtype, left.shape, left.layout) != (right.dtype, right.shape, right.layout):
        return False
    if left.layout is torch.strided:
        return left.stride() == right.stride() and torch.equal(_bits(left), _bits(right))
    return torch.equal(_bits(left.to_dense()), _bits(right.to_dense()))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8)


def tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def differentiable(tree: object) -> list[torch.Tensor]:
    return [tensor for tensor in tensors(tree) if tensor.requires_grad]


def outcome(run: Callable[[Outcome], None]) -> Outcome:
    """What ``run`` notes down, from a fixed seed; an error is an outcome as well."""
    noted = Outcome()
    torch.default_generator.manual_seed(0)
    if KIND != "cpu":
        torch.get_device_module(KIND).manual_seed(0)
    try:
        run(noted)
    except Exception as error:
        changed = "modified by an inplace operation" in str(error)
        noted.error = MUTATED if changed else f"{type(error).__name__}: {error}"
    return noted


def gradients(ends: Sequence[torch.Tensor], by: Sequence[torch.Tensor], create_graph: bool = False) -> Any:
    """Gradients of ``ends`` along random directions, and the directions, by which a graph can be differentiated too."""
    if not ends or not by:
        return [], []
    with torch.no_grad():
        along = [torch.randn_like(end) if end.layout is torch.strided else torch.ones_like(end) for end in ends]
    for direction in along if create_graph else ():
        direction.requires_grad_()
    return list(torch.autograd.grad(ends, by, along, create_graph=create_graph, allow_unused=True)), along


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """One thread, since with more the order of sums may change with the load of the machine; and no warnings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


class Tally:
    """The counts of one dtype, store by store, and the names of what is wrong.

    ``varying`` are names of entries whose outputs torch itself rounds differently from call to call, with the reason.
    """

    def __init__(self, dtype: torch.dtype, varying: Mapping[str, str]) -> None:
        self.dtype = str(dtype).removeprefix("torch.")
        self.varying = varying
        self.wrong: dict[str, str] = {}
        self.varied: set[str] = set()
        self.raised: dict[str, set[str]] = {}
        self.tested: set[str] = set()
        self.compared: set[str] = set()
        self.counts: dict[str, collections.Counter[str]] = {store: collections.Counter() for store in STORES}

    def check(self, name: str, kind: str, stores: Sequence[str], run: Callable[[str], Outcome]) -> None:
        """Compare ``run`` with each store to ``run("")``, which has no hooks and must repeat itself."""
        truth, varies = run(""), False
        if (again := run("")) != truth:
            self.varied.add(name)
            varies = KIND != "cpu" and again.near(truth)
            if name not in self.varying and not varies:
                self._fail(f"{name}, {kind}", "varies without hooks: name it and the reason, if torch is the reason")
                return
        if truth.error:
            self.raised.setdefault(truth.error.splitlines()[0][:90], set()).add(f"{name}, {kind}")
        for store in stores:
            if store == "functions" and truth.error == MUTATED:
                continue  # torch's contract for hooks, which is to look for no change
            got = run(store)
            if not (varies and got.near(truth)):
                self._compare(f"{name}, {kind}, {store}", got, truth, name in self.varying)
            if any(gradient is not None for gradient in truth.gradients) or truth.error == MUTATED:
                self.compared.add(name)
                self.counts[store][kind] += 1
            self.counts[store]["raised alike"] += bool(truth.error)

    def _compare(self, title: str, got: Outcome, expected: Outcome, varies: bool) -> None:
        if got == expected or (varies and got.close(expected)):
            return
        told = "other bits" if got.error == expected.error else f"{got.error or 'no error'}"
        self._fail(title, f"{told}; without hooks: {expected.error or 'no error'}")

    def _fail(self, title: str, what: str) -> None:
        print(f"\n{self.dtype}: {title}: {what}", flush=True)  # a full run takes long
        self.wrong[title] = what

    def add(self, name: str, store: str, samples: int, report: Callable[[], SavedReport]) -> None:
        """Count the samples and bytes of one entry, none of which may be held any more."""
        if report().held:
            gc.collect()
            left(lambda: report().held)
        # torch keeps a graph, without hooks too, whose gradients could not be differentiated.
        if report().held and not any(f"{name}, {kind}" in names for names in self.raised.values() for kind in TWICE):
            self._fail(f"{name}, {store}", f"{report().held} bytes held")
        self.tested.add(name)
        counts = self.counts[store]
        counts["entries"] += name in self.compared
        counts["samples"] += samples
        for what in ("stored", "moved", "kept"):
            counts[what] += getattr(report(), what)

    def finish(self) -> None:
        """Print the counts; nothing may be wrong or without a gradient, and every store must have had its bytes."""
        for store, counts in self.counts.items():
            told = ", ".join(f"{what} {counts[what]:,}" for what in sorted(counts))
            print(f"\n{self.dtype} {store}: {told}", end="")
        print(f"\n{self.dtype}, other bits from call to call without hooks: {sorted(self.varied)}")
        for error, names in sorted(self.raised.items()) if FULL else ():
            print(f"{self.dtype}, {len(names)} raise with and without hooks: {error}: {sorted(names)}")
        assert not self.wrong, "\n".join(f"{title}: {what}" for title, what in self.wrong.items())
        assert self.tested - self.compared == set(), "no sample of these had a gradient"
        for store, counts in self.counts.items():
            assert counts["moved"] == (counts["stored"] if store in COPYING else 0)
            assert counts["kept" if store == "cpu" == KIND else "stored"] > 0 or not counts["entries"]
