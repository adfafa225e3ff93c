"""Law 17, shared objects are frozen.

"Mutable state lives in the packed value, the attachment or a thread-local."

This file shows it for every object that a user may share between attachments, models and threads: stores, codecs,
pipelines, rules, statistics and sinks. None takes an assignment, none is another one after it was used, and what two
attachments learn with one rule stays apart. A store has no other fields than those that the user asked for: what works
for it in this process is held elsewhere.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import pathlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import sinks, stats
from disthooks.saved.pipeline import pipeline
from tests.support.models import Tiny, identical, step, tokens
from tests.support.stores.faulty import soon

STORES: dict[str, Callable[[pathlib.Path], Any]] = {
    "OnCpu": lambda folder: dh.OnCpu("1 GiB"),
    "OnDevice": lambda folder: dh.OnDevice("1 GiB"),
    "OnDisk": lambda folder: dh.OnDisk(folder, "1 GiB"),
    "Tiered": lambda folder: dh.Tiered(dh.OnDevice("64 KiB"), dh.OnDisk(folder)),
    "Functions": lambda folder: dh.Functions(torch.clone, torch.clone),
}
STAGES: dict[str, Callable[[], Any]] = {
    "Cast": lambda: dh.Cast(torch.bfloat16),
    "Compact": lambda: dh.Compact(),
    "Quantize": lambda: dh.Quantize(8),
    "Recompute": lambda: dh.Recompute(),
}
RULES: dict[str, Callable[[], Any]] = {
    "AdaGC": lambda: dh.AdaGC(warmup_steps=1),
    "ClipAdaptive": lambda: dh.ClipAdaptive(),
    "ClipNorm": lambda: dh.ClipNorm(1.0),
    "ClipPercentile": lambda: dh.ClipPercentile(window=3),
    "ClipValue": lambda: dh.ClipValue(0.1),
    "ClipZScore": lambda: dh.ClipZScore(warmup_steps=2),
    "Sanitize": lambda: dh.Sanitize(),
    "Scale": lambda: dh.Scale(0.5),
    "SkipNonFinite": lambda: dh.SkipNonFinite(),
    "SkipSpike": lambda: dh.SkipSpike(loss=False, least=2),
    "only": lambda: dh.only("*.bias", dh.ClipNorm(0.5)),
}
STATS: dict[str, Callable[[], Any]] = {
    name: getattr(stats, name) for name in stats.__all__ if name not in ("Found", "Stat", "standard")
} | {"NoiseScale": lambda: stats.NoiseScale(4)}


def _asked_for(spec: Any) -> dict[str, Any]:
    """What the user asked for: the fields that are given when such an object is made."""
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}


def _assert_takes_no_assignment(spec: Any) -> None:
    for name in [*_asked_for(spec), "anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(spec, name, None)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(spec, name)


@pytest.mark.parametrize("kind", [*STAGES, *RULES, *STATS])
def test_stages_rules_and_statistics_take_no_assignment(kind: str) -> None:
    _assert_takes_no_assignment({**STAGES, **RULES, **STATS}[kind]())


@pytest.mark.parametrize("kind", STORES)
def test_stores_and_pipelines_take_no_assignment(kind: str, tmp_path: pathlib.Path) -> None:
    store = STORES[kind](tmp_path)
    _assert_takes_no_assignment(store)
    _assert_takes_no_assignment(pipeline(store, at_least=0))


def test_sinks_take_no_assignment(tmp_path: pathlib.Path) -> None:
    for sink in (sinks.Jsonl(tmp_path / "a.jsonl"), sinks.Console()):
        _assert_takes_no_assignment(sink)


def test_reports_take_no_assignment(tmp_path: pathlib.Path) -> None:
    model = dh.SaveWith(nn.Linear(64, 64), dh.OnDisk(tmp_path), at_least=4096)
    model(torch.randn(64, 64)).sum().backward()
    report = model.report()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.stored = 0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.tiers[0].held = 0  # type: ignore[misc]


def _fields(store: Any) -> dict[str, Any]:
    """All that the object holds, also that of the stores of a ``Tiered``."""
    inner = [_fields(each) for each in getattr(store, "stores", ())]
    return dict(vars(store)) | {f"store {number}": fields for number, fields in enumerate(inner)}


def _same_fields(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether both have the same names and the same objects, not only equal ones."""
    if now.keys() != before.keys():
        return False
    pairs = [(now[name], before[name]) for name in now]
    return all(_same_fields(*pair) if isinstance(pair[0], dict) else pair[0] is pair[1] for pair in pairs)


@pytest.mark.parametrize("kind", STORES)
def test_no_field_of_a_store_changes_by_use(kind: str, tmp_path: pathlib.Path) -> None:
    store = STORES[kind](tmp_path)
    before = _fields(store)
    assert before.keys() - {"store 0", "store 1"} == _asked_for(store).keys()
    ticket = store.put(torch.ones(5000))
    store.get(ticket)
    store.wait()
    store.report()
    store.drop(ticket)
    model = Tiny()
    truth = step(model, tokens())
    with dh.save_activations(model, "blocks.*", pipeline(store, at_least=0)):
        assert identical(step(model, tokens()), truth)
    store.release_idle()
    assert _same_fields(_fields(store), before)
    if kind != "Functions":  # equal by its functions, and a fresh one has the same
        assert store == STORES[kind](tmp_path)
        assert pickle.loads(pickle.dumps(store)) == store


@pytest.mark.parametrize("kind", ["OnCpu", "OnDevice", "OnDisk", "Tiered"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
def test_a_copy_of_a_used_store_is_a_store_of_its_own(
    kind: str, copied: Callable[[Any], Any], tmp_path: pathlib.Path
) -> None:
    """What works in this process belongs to the object: a copy counts its own bytes."""
    store = STORES[kind](tmp_path)
    ticket = store.put(torch.ones(5000))
    other = copied(store)
    assert other == store
    assert [report.limit for report in other.report()] == [report.limit for report in store.report()]
    # A shallow copy of a Tiered has the same stores, and these are shared.
    own = kind != "Tiered" or other.stores[0] is not store.stores[0]
    assert sum(report.held for report in other.report()) == (0 if own else sum(r.held for r in store.report()))
    assert sum(report.held for report in store.report()) >= 20_000
    again = other.put(torch.full((5000,), 2.0))
    assert other.get(again).sum() == 10_000
    assert store.get(ticket).sum() == 5000
    other.drop(again)
    store.drop(ticket)


def test_what_works_for_a_store_is_one_thing_a_process(tmp_path: pathlib.Path) -> None:
    """Two attachments of one object share its limit and its file; it is gone with the object and its last ticket."""
    store = dh.OnDisk(tmp_path, "1 GiB")
    opened = store.open()
    assert store.open() is opened
    assert dh.OnDisk(tmp_path, "1 GiB").open() is not opened
    ticket = store.put(torch.arange(5000.0))
    store.wait()
    gone = weakref.ref(opened)
    file = weakref.ref(opened.file)
    del opened
    assert gone() is not None
    found = store.get(ticket)
    del store
    assert file() is not None  # the ticket reads from it
    del ticket
    gc.collect()
    assert gone() is None
    assert soon(lambda: gc.collect() >= 0 and file() is None)  # a thread that wrote to it ends after a second
    assert torch.equal(found, torch.arange(5000.0))


@pytest.mark.parametrize("kind", STAGES)
def test_a_stage_is_the_same_one_after_use(kind: str, tmp_path: pathlib.Path) -> None:
    stage, model = STAGES[kind](), Tiny()
    before = repr(stage), dict(vars(stage))
    line = pipeline(stage, dh.OnDisk(tmp_path))
    with dh.save_activations(model, "blocks.*", line) as saving:
        step(model, tokens())
    assert saving.report().stored > 0
    assert (repr(stage), dict(vars(stage))) == before
    assert line == pipeline(STAGES[kind](), dh.OnDisk(tmp_path))


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"norm": nn.LayerNorm(8), "out": nn.Linear(8, 2)})
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, scale: float) -> None:
    """A step of two micro-batches, whose gradients grow with its number."""
    optimizer.zero_grad()
    for micro in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * number + micro))
        (scale * (1 + number) * model["out"](model["norm"](x)).square().sum()).backward()
    optimizer.step()


def _trained(rules: list[Any], watched: list[Any], scale: float = 1.0) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The last gradients and the last record of five steps."""
    model, optimizer = _made()
    with dh.gradients(model, optimizer, rules=rules, stats=watched, every=1) as watch:
        for number in range(5):
            _step(model, optimizer, number, scale)
    return [parameter.grad.clone() for parameter in model.parameters()], watch.latest


@pytest.mark.parametrize("kind", [*RULES, *STATS])
def test_a_rule_or_a_statistic_is_the_same_one_after_use(kind: str) -> None:
    """Training twice with one object gives the same results: the object remembered nothing."""
    spec = {**RULES, **STATS}[kind]()
    before = repr(spec), dict(vars(spec))
    found = []
    for _ in range(2):
        found.append(_trained([spec], []) if kind in RULES else _trained([], [spec]))
    assert (repr(spec), dict(vars(spec))) == before
    assert identical(found[0][0], found[1][0])
    assert repr(found[0][1]) == repr(found[1][1])  # NaN is NaN


@pytest.mark.parametrize("rule", [dh.ClipPercentile(window=3), dh.ClipZScore(warmup_steps=2), dh.SkipNonFinite()])
def test_two_attachments_of_one_rule_learn_apart(rule: Any) -> None:
    """Two models train in turns with one rule; each has the record that it has alone."""
    alone = {scale: _trained([rule], [], scale)[1] for scale in (1.0, 100.0)}
    made = {scale: _made() for scale in alone}
    watches = {scale: dh.gradients(*made[scale], rules=[rule], every=1) for scale in alone}
    for number in range(5):
        for scale in alone:
            _step(*made[scale], number, scale)
    for scale, watch in watches.items():
        watch.remove()
        assert repr(watch.latest) == repr(alone[scale])
