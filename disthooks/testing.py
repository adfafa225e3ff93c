"""Conformance tests for your own store, backend, codec, rule, statistic or sink.

Subclass one of the classes in a test file of yours, and give it the fixture that makes your object::

    class TestHalves(disthooks.testing.CodecTests):
        @pytest.fixture
        def codec(self):
            return Halves()

pytest then runs every test of the class on your object. The name of a test has the number of the law of disthooks that
it checks. The tests of rules and statistics start two processes with gloo once, and use them until pytest ends.
disthooks runs the same tests on its own kinds. Nothing else in disthooks imports pytest.
"""

# [Note: two ranks for the tests]
#
# Rules and statistics must give on several ranks what they give in one process. The two ranks are spawned, not forked:
# the process of pytest may have started threads of autograd, and torch refuses a backward in a fork of such a process.
# Spawned processes import your modules, so your classes must be importable by name, which the tests of pickling ask
# for anyway. The ranks stay up for the whole run, because importing torch takes seconds and a test takes milliseconds.
#
# [Note: a test that proves nothing]
#
# A comparison of two trainings also passes when the hooks did nothing. So a test of a store or a codec first checks
# that tensors were stored, unless the store leaves tensors in the memory in which they are. And a codec that writes
# into its argument would pass a comparison with this argument. So the tests compare with copies made before.

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import gc
import io
import json
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from disthooks.config import Plan, from_config
from disthooks.errors import ConfigError
from disthooks.grads.attach import gradients
from disthooks.grads.rules.base import Rule
from disthooks.grads.sinks.base import RecordWriter
from disthooks.grads.stats.base import Stat
from disthooks.grads.stats.norms import Norm
from disthooks.saved.attach import saving
from disthooks.saved.codecs.base import Codec, relative_error
from disthooks.saved.pipeline import Pipeline, pipeline
from disthooks.saved.stores.base import Store
from disthooks.saved.stores.tiers import OnDevice

__all__ = ["CodecTests", "RuleTests", "SinkTests", "StatTests", "StoreTests"]

MOST = 120.0  # seconds after which a rank, a thread or a fork counts as hung


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Run ``work`` in several threads at once. An error in one of them is raised here."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, number) for number in range(count)]:
            done.result(MOST)


WORLD, STEPS = 2, 4  # ranks; steps of a training
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64)


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Pairs of a name and a tensor: many dtypes and layouts, with infinities, NaNs, zeros and denormal numbers.

    >>> sum(1 for _ in tensors()) > 40
    True
    """
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        square = (torch.randn(64, 33, generator=generator) * 9).to(dtype)
        several = {"square": square, "one": square[0, 0], "none": square[:0], "transposed": square.t()}
        several |= {"a column": square[:, 3], "zeros": torch.zeros_like(square), "many zeros": square * (square == 1)}
        if dtype.is_floating_point:
            special = [math.inf, -math.inf, math.nan, 0.0, -0.0, torch.finfo(dtype).tiny / 4, torch.finfo(dtype).max]
            several["not finite"] = torch.tensor(special * 40, dtype=dtype)
        yield from ((f"{name} {dtype}", tensor) for name, tensor in several.items())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype, device and bits. Two NaNs with the same bits are the same.

    >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0])), same_bits(torch.tensor(math.nan), torch.tensor(math.nan))
    (False, True)
    """
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    first, second = (each.detach().reshape(-1).contiguous().view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def _training(stages: Pipeline | None, twice: bool = False) -> tuple[list[torch.Tensor], Any]:
    """Gradients of first and second order of a small model, ``twice`` of the first, and the report of saved tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.3), nn.Linear(64, 4), nn.Tanh())
    x = torch.randn(48, 16, requires_grad=True)
    attached: Any = contextlib.nullcontext() if stages is None else saving(stages)
    with attached:
        loss = model(x).square().sum()
    wanted = [x, *model.parameters()]
    found = list(torch.autograd.grad(loss, wanted, create_graph=True))
    penalty = torch.stack([grad.square().sum() for grad in found]).sum()
    found += torch.autograd.grad(penalty, wanted, retain_graph=True, materialize_grads=True)
    if twice:
        found += torch.autograd.grad(loss, wanted, retain_graph=True)
    # The graph dies here, and with it all that was stored, so that the report is complete.
    del loss, penalty
    found = [grad.detach() for grad in found]
    gc.collect()
    return found, attached.report() if stages is not None else None


def _check_training(stages: Pipeline) -> None:
    truth, _ = _training(None)
    with warnings.catch_warnings():
        # A store in CPU memory says that it moves nothing of a model that is there already.
        warnings.filterwarnings("ignore", message=".*stores nothing of this block")
        found, report = _training(stages, twice=True)
    # See [Note: a test that proves nothing].
    moves = bool(stages.codecs) or stages.store.leaves_memory(torch.ones(64, 64))
    assert report.stored > 0 or not moves, "nothing was stored: the test would prove nothing"
    for wanted, got in zip(truth, found, strict=False):
        assert same_bits(got, wanted), "law 1, exact: a gradient is not what it is without hooks"
    count = len(truth) // 2
    for wanted, got in zip(truth[:count], found[2 * count :], strict=True):
        assert same_bits(got, wanted), "law 4, any backward: the second backward of one graph differs from the first"


def _check_frozen(value: Any, use: Callable[[], object]) -> None:
    assert dataclasses.is_dataclass(value), f"write {type(value).__name__} as a dataclass: @dataclass(frozen=True)"
    before = repr(value), hash(value)
    use()
    assert (repr(value), hash(value)) == before, "law 17, frozen: use changed the object"
    for field in dataclasses.fields(value)[:1]:  # one field is enough: a dataclass is frozen as a whole
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)
    assert pickle.loads(pickle.dumps(value)) == value == copy.deepcopy(value)


def _check_file(key: str, value: Any) -> None:
    """Write a plan with ``value`` as JSON, read it again, and check that it has an object of the same class."""
    if key in ("store", "codec"):
        stages = pipeline(value) if key == "store" else pipeline(value, OnDevice(), at_least=0)
        plan = Plan(saves=[("*", stages)])
    else:
        watches: dict[str, Any] = {"stats": [value]} if key == "stats" else {"stats": [Norm()], key: [value]}
        plan = Plan(watches=watches)
    try:
        document = json.loads(json.dumps(plan.to_dict()))
    except ConfigError as error:
        pytest.fail(f"a configuration cannot have it: {error}")
    again = from_config(document)
    assert again.to_dict() == document
    made = again.watches[key][0]() if key in again.watches else again.saves[0][1]
    assert type(made) is (Pipeline if key in ("store", "codec") else type(value))


class CodecTests:
    """Tests of a :class:`disthooks.saved.codecs.Codec`. The subclass gives the fixture ``codec``.

    Attributes:
        most_error: the largest relative error, in the L2 norm, that a lossy codec may make with random numbers.
    """

    most_error: ClassVar[float] = 0.2

    def test_law_1_what_comes_back(self, codec: Codec) -> None:
        """A decoded tensor has the shape, dtype and device of the original; with a lossless codec also its bits."""
        for name, tensor in tensors():
            # See [Note: a test that proves nothing].
            before = tensor.clone(memory_format=torch.preserve_format)
            encoded, spec = codec.encode(tensor)
            assert isinstance(encoded, tuple), "encode returns a tuple of tensors, and what decode needs besides"
            assert same_bits(tensor, before), f"{name}: encode changed its argument"
            kept = tuple(each.clone() for each in encoded)
            decoded = codec.decode(encoded, spec)
            assert (decoded.shape, decoded.dtype, decoded.device) == (tensor.shape, tensor.dtype, tensor.device), name
            if not codec.lossy or not (tensor.is_floating_point() or tensor.is_complex()):
                assert same_bits(decoded, tensor), f"{name}: other bits, and the codec does not say that it is lossy"
            elif name.startswith(("square", "transposed", "zeros")):
                assert float(relative_error(decoded, tensor)) <= self.most_error, name
            # A store may call decode several times, with other memory of the same contents.
            assert all(map(same_bits, encoded, kept)), f"{name}: decode changed what it got"
            assert same_bits(codec.decode(kept, spec), decoded), f"law 4: {name}: decoded again, it is something else"

    def test_law_1_gradients(self, codec: Codec) -> None:
        """Gradients have the bits of a training without hooks: first and second order, and two backwards of a graph.

        With a lossy codec they are finite.
        """
        stages = pipeline(codec, OnDevice(), at_least=0)
        if not codec.lossy:
            _check_training(stages)
            return
        found, report = _training(stages)
        assert report.stored > 0
        assert all(bool(torch.isfinite(grad).all()) for grad in found)

    def test_law_7_threads(self, codec: Codec) -> None:
        """Several threads encode and decode at once."""

        def work(number: int) -> None:
            several = [torch.full((64, 64), 10.0 * number + other) for other in range(5)]
            for tensor, (encoded, spec) in zip(several, [codec.encode(tensor) for tensor in several], strict=True):
                decoded = codec.decode(encoded, spec)
                assert codec.lossy or same_bits(decoded, tensor), "law 7: what several threads encode gets mixed up"

        in_threads(work)

    def test_law_17_frozen(self, codec: Codec) -> None:
        """The codec is frozen, can be pickled, and using it changes nothing of it."""
        _check_frozen(codec, lambda: codec.encode(torch.randn(64)))

    def test_configuration(self, codec: Codec) -> None:
        """The codec can be written to a configuration file and read from it."""
        _check_file("codec", codec)


class StoreTests:
    """Tests of a :class:`disthooks.saved.stores.base.Store`. The subclass gives the fixture ``store``."""

    def test_law_1_what_comes_back(self, store: Store) -> None:
        """``get`` returns the shape, dtype, device and bits of the tensor that was put, each time it is called."""
        for name, tensor in tensors():
            own = store.own(tensor)  # disthooks puts only tensors whose memory no other tensor uses
            ticket = store.put(own)
            first = store.get(ticket)
            assert same_bits(first, tensor), name
            if first.data_ptr() != own.data_ptr() and first.numel():
                first.zero_()  # the caller of `get` owns the memory and may write into it
            again = store.get(ticket)
            assert same_bits(again, tensor), f"law 4: {name}: it shares memory with what came back before"
            store.drop(ticket)

    def test_law_4_two_readers(self, store: Store) -> None:
        """Two calls of ``get`` share no memory, unless both return the tensor that was put; in flight too."""
        tensor = torch.arange(200_000.0).view(400, 500).t()  # not contiguous
        wanted = tensor.clone()
        ticket = store.put(tensor)
        found = [store.get(ticket) for _ in range(3)]
        for number, each in enumerate(found):
            if each.data_ptr() != tensor.data_ptr():
                each.fill_(number)
        for number, each in enumerate(found):
            truth = wanted if each.data_ptr() == tensor.data_ptr() else torch.full_like(wanted, number)
            assert same_bits(each, truth), "law 4: two readers of a tensor got the same memory"
        store.drop(ticket)

    def test_law_1_gradients(self, store: Store) -> None:
        """Gradients have the bits of a training without hooks: first and second order, and two backwards of a graph."""
        _check_training(pipeline(store, at_least=0))

    def test_law_4_any_order(self, store: Store) -> None:
        """Tensors can be read in any order, also after other tensors were dropped."""
        wanted = [torch.randn(50 + number) for number in range(20)]
        tickets = [store.put(tensor) for tensor in wanted]
        for number in range(0, 20, 3):
            store.drop(tickets[number])
        for number in reversed([number for number in range(20) if number % 3]):
            assert same_bits(store.get(tickets[number]), wanted[number])
            store.drop(tickets[number])

    def test_law_6_nothing_left(self, store: Store) -> None:
        """After ``drop`` nothing of the tensor is held: the report has the bytes that it had before."""
        held = [report.held for report in store.report()]
        for tensor in (torch.randn(4096), torch.randn(0), torch.ones(33, 7)):
            store.drop(store.put(tensor))
            ticket = store.put(tensor)
            store.get(ticket)
            store.drop(ticket)
        store.wait()
        assert [report.held for report in store.report()] == held

    def test_law_6_a_graph_that_dies(self, store: Store) -> None:
        """Nothing is held after the graph is gone, whether there was a backward or not."""
        held = [report.held for report in store.report()]
        with warnings.catch_warnings(), saving(pipeline(store, at_least=0)):
            warnings.filterwarnings("ignore", message=".*stores nothing of this block")
            for backward in (True, False):
                x = torch.randn(64, 64, requires_grad=True)
                loss = x.exp().sin().sum()
                if backward:
                    torch.autograd.backward(loss)
                del x, loss
        gc.collect()
        assert [report.held for report in store.report()] == held

    def test_law_7_threads(self, store: Store) -> None:
        """Several threads put, get and drop at once; one thread drops tensors that another thread has put."""
        shared = [(tensor, store.put(tensor)) for tensor in (torch.full((256,), float(number)) for number in range(8))]

        def work(number: int) -> None:
            for step in range(20):
                tensor = torch.full((128,), float(100 * number + step))
                ticket = store.put(tensor)
                assert same_bits(store.get(ticket), tensor), "law 7: threads disturb each other"
                store.drop(ticket)
            for tensor, ticket in shared[number::4]:
                assert same_bits(store.get(ticket), tensor)
                store.drop(ticket)

        in_threads(work)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    def test_law_9_forks(self, store: Store) -> None:
        """A forked child can use the store, and the tensors that the parent has put stay as they are."""
        tensor = torch.arange(4096.0)
        ticket = store.put(tensor)
        store.wait()
        with warnings.catch_warnings():
            # Python warns of a fork in a process with threads, whose locks the child may find taken for ever. Those of
            # disthooks are free in a child; see [Note: interrupts and forks].
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            code = 1
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(MOST))  # it kills a child that hangs
            try:
                own = torch.full((4096,), 7.0)
                mine = store.put(own)
                code = 0 if same_bits(store.get(mine), own) else 2
                store.drop(mine)
            finally:
                os._exit(code)  # the child must not run pytest's own end
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, "1: the child raised; 2: what it got is not what it put; -14: it hung"
        assert same_bits(store.get(ticket), tensor), "the child changed what its parent has put"
        store.drop(ticket)

    def test_law_17_frozen(self, store: Store) -> None:
        """The store is frozen, can be pickled, and using it changes nothing of it."""
        _check_frozen(store, lambda: store.drop(store.put(torch.randn(64))))

    def test_configuration(self, store: Store) -> None:
        """The store can be written to a configuration file and read from it."""
        _check_file("store", store)


class RuleTests:
    """Tests of a :class:`disthooks.grads.rules.Rule`. The subclass gives the fixture ``rule``."""

    def test_law_11_truth_on_two_ranks(self, rule: Rule) -> None:
        """Two ranks under DistributedDataParallel train as one process does on the same global batch."""
        alone = _trained(0, 1, {"rules": [rule]})
        both = _on_ranks(_trained, {"rules": [rule]})
        for one, other in zip(both[0]["parameters"], both[1]["parameters"], strict=True):
            assert same_bits(one, other), "law 16, one decision: the ranks have different parameters"
        for one, wanted in zip(both[0]["parameters"], alone["parameters"], strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-12, msg="law 11, truth: not as in one process")
        _check_logs(both[0]["records"], alone["records"])

    def test_law_16_state(self, rule: Rule) -> None:
        """A training that continues from a checkpoint ends with the same bits as one without an interruption."""
        _check_state({"rules": [rule]})

    def test_law_17_frozen(self, rule: Rule) -> None:
        """The rule is frozen, can be pickled, and using it changes nothing of it."""
        _check_frozen(rule, lambda: _trained(0, 1, {"rules": [rule]}))

    def test_configuration(self, rule: Rule) -> None:
        """The rule can be written to a configuration file and read from it."""
        _check_file("rules", rule)


class StatTests:
    """Tests of a :class:`disthooks.stats.Stat`. The subclass gives the fixture ``stat``.

    Attributes:
        of_ranks: True for a statistic that compares ranks: its numbers depend on the number of ranks, so the test on
            two ranks does not compare them with those of one process.
    """

    of_ranks: ClassVar[bool] = False

    def test_law_11_truth_on_two_ranks(self, stat: Stat) -> None:
        """Two ranks under DistributedDataParallel log the numbers of one process with the same global batch."""
        alone = _trained(0, 1, {"stats": [stat]})
        both = _on_ranks(_trained, {"stats": [stat]})
        assert len(both[0]["records"]) == STEPS
        assert both[1]["records"] == [], "the first rank alone writes"
        _check_logs(both[0]["records"], [] if self.of_ranks else alone["records"])

    def test_watching_changes_nothing(self, stat: Stat) -> None:
        """The parameters have the same bits with the statistic and without it."""
        truth = _trained(0, 1, None)
        found = _trained(0, 1, {"stats": [stat]})
        for one, wanted in zip(found["parameters"], truth["parameters"], strict=True):
            assert same_bits(one, wanted), "a statistic changed a gradient"

    def test_law_20_records(self, stat: Stat) -> None:
        """A record is plain JSON, and every record has the same names."""
        records = _trained(0, 1, {"stats": [stat]})["records"]
        assert json.loads(json.dumps(records)) == records or any("NaN" in json.dumps(record) for record in records)
        assert len({frozenset(record) for record in records}) == 1
        assert set(records[0]) - {"step", "time", "run", "restart"}, "nothing is logged"

    def test_law_12_measures(self, stat: Stat) -> None:
        """The measures are frozen, and equal at each call, so that statistics which need the same one share it."""
        assert set(stat.measures()) == set(stat.measures()) >= set(stat.always())

    def test_law_16_state(self, stat: Stat) -> None:
        """A training that continues from a checkpoint logs the same numbers as one without an interruption."""
        _check_state({"stats": [stat]})

    def test_law_17_frozen(self, stat: Stat) -> None:
        """The statistic is frozen, can be pickled, and using it changes nothing of it."""
        _check_frozen(stat, lambda: _trained(0, 1, {"stats": [stat]}))

    def test_configuration(self, stat: Stat) -> None:
        """The statistic can be written to a configuration file and read from it."""
        _check_file("stats", stat)


class SinkTests:
    """Tests of a sink. The subclass gives the fixture ``sink``.

    Attributes:
        in_files: whether a configuration file can have the sink. It is False for a function, and for a sink that holds
            objects.
    """

    in_files: ClassVar[bool] = True

    def written(self, sink: Any) -> Sequence[object] | None:
        """The names of all values that ``sink`` has written, if its output can be read; None otherwise."""
        return None

    @contextlib.contextmanager
    def opened(self, sink: Any) -> Iterator[Any]:
        """The function that takes the records while the sink is open. The sink is closed at the end."""
        writer = RecordWriter()
        with warnings.catch_warnings(), contextlib.closing(writer):
            warnings.simplefilter("error")
            writer.open([sink])
            yield writer.sinks[0]

    def test_it_takes_what_is_logged(self, sink: Any) -> None:
        """The sink takes NaN, infinities, texts, lists and histograms, and does not change the record."""
        record: dict[str, Any] = {"step": 0, "grad_norm": 0.5, "grad_max_abs": math.nan, "clip_ratio": math.inf}
        record |= {"nonfinite_at": [{"param": "w", "rank": 1}], "phase": "warm-up", "clipped": True, "none": None}
        record |= {"grad_histogram": {"edges": [0.0, 1.0, math.inf], "counts": [3, 1]}}
        kept = copy.deepcopy(record)
        with self.opened(sink) as taking:
            for step in range(3):
                taking(record | {"step": step})
            taking(record | {"step": 3, "appears_later": 1.0})
        names = self.written(sink)
        assert names is None or "appears_later" in names, "the sink drops names that are not in its first record"
        assert repr(record) == repr(kept), "the sink changed the record"

    def test_it_is_opened_again(self, sink: Any) -> None:
        """One sink serves one attachment after another."""
        for step in range(2):
            with self.opened(sink) as taking:
                taking({"step": step})

    def test_it_never_fails_in_training(self, sink: Any) -> None:
        """A sink that raises an error in training is left out with a warning; this sink never is."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*left out.*|.*could not be closed.*")
            _trained(0, 1, {"stats": [Norm()], "sinks": [sink]})

    def test_configuration(self, sink: Any) -> None:
        """The sink can be written to a configuration file and read from it, if ``in_files`` is true."""
        if self.in_files:
            _check_file("sinks", sink)


def _trained(
    rank: int, world: int, watched: dict[str, Any] | None, steps: int = STEPS, state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train a small model in float64; return its parameters, the records, and the state in the middle.

    Each of ``world`` ranks trains on its own part of a batch, so that the global batch is the same for every ``world``.
    The arguments of ``gradients()`` are ``watched``; the training continues from ``state``, an earlier ``at_half``.
    """
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    batches = torch.randn(STEPS, 8, 8, dtype=torch.float64) * 3
    inner = model
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    records: list[dict[str, Any]] = []
    attached: Any = contextlib.nullcontext()
    if watched is not None:
        sinks = [*watched.get("sinks", ()), lambda record: records.append(_without_loop(record))]
        attached = gradients(model, optimizer, **{"stats": [Norm()], **watched, "sinks": sinks}, every=1)
    if state is not None:
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        attached.load_state_dict(state["watched"])
    at_half: dict[str, Any] = {}
    with attached:
        for number in range(0 if state is None else STEPS // 2, steps):
            batch = batches[number].chunk(world)[rank]
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == STEPS // 2 - 1 and watched is not None:
                at_half = {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}
                at_half = copy.deepcopy(at_half | {"watched": attached.state_dict()})
    return {"parameters": [p.detach() for p in inner.parameters()], "records": records, "at_half": at_half}


def _check_state(watched: dict[str, Any]) -> None:
    whole = _trained(0, 1, watched)
    # The state goes through a file, as in a checkpoint: `weights_only` allows tensors and plain values alone.
    file = io.BytesIO()
    torch.save(whole["at_half"], file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed = _trained(0, 1, watched, state=state)
    for one, wanted in zip(resumed["parameters"], whole["parameters"], strict=True):
        assert same_bits(one, wanted), "law 16: a training that goes on from a checkpoint is another one"
    _check_logs(resumed["records"], whole["records"][STEPS // 2 :])


def _without_loop(record: dict[str, Any]) -> dict[str, Any]:
    """The record without what the loop set: only some records have it, and ranks have other batches."""
    return {name: value for name, value in record.items() if not name.startswith("loop/")}


def _check_logs(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Check that the records have the same names, and nearly the same numbers; times and runs may differ."""
    for one, other in zip(found, wanted, strict=True) if wanted else ():
        assert set(one) == set(other)
        for name in sorted(set(one) - {"time", "run", "restart"}):
            if isinstance(other[name], (int, float)) and not name.endswith("_rank"):
                assert one[name] == pytest.approx(other[name], rel=1e-9, abs=1e-12, nan_ok=True), f"law 11: {name}"


def _on_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of ``function(rank, world, *arguments)`` on two ranks. See [Note: two ranks for the tests]."""
    pool, _ = _ranks()
    calls = [pool.apply_async(_call, (function, arguments)) for _ in range(WORLD)]
    try:
        return [found for _, found in sorted((call.get(MOST) for call in calls), key=lambda answer: answer[0])]
    except BaseException as error:
        # One rank may still wait for the other in a collective, so the next call gets new processes.
        pool.terminate()
        _ranks.cache_clear()
        if isinstance(error, multiprocessing.TimeoutError):
            pytest.fail("a rank hangs, or has died")
        raise


@functools.cache
def _ranks() -> tuple[Any, tempfile.TemporaryDirectory[str]]:
    """The processes, and the folder in which they find each other."""
    context, folder = multiprocessing.get_context("spawn"), tempfile.TemporaryDirectory(prefix="disthooks-ranks-")
    pool = context.Pool(WORLD, _join, (context.Value("i", 0), os.path.join(folder.name, "store")))
    atexit.register(pool.terminate)  # when the interpreter ends, the pool's own destructor is too late
    return pool, folder


def _join(count: Any, store: str) -> None:
    torch.set_num_threads(1)
    with count.get_lock():
        rank, count.value = count.value, count.value + 1
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[int, Any]:
    torch.distributed.barrier()  # so that each process takes one of the two calls
    rank = torch.distributed.get_rank()
    return rank, function(rank, WORLD, *arguments)
