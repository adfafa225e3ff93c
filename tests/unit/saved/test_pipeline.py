"""Pipelines are checked when they are built."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import MatchError, UsageError
from disthooks.saved.pipeline import pipeline


def test_the_order_is_codecs_store(tmp_path: pathlib.Path) -> None:
    line = pipeline(dh.Cast(torch.bfloat16), dh.OnDisk(tmp_path), at_least="1 MiB")
    assert line.at_least == 1 << 20
    assert pipeline(line) is line
    assert pipeline(dh.OnCpu()).at_least == 4096
    assert pipeline(dh.Functions(abs, abs)).at_least == 0


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ((), "do not end in a store"),
        (("disk",), "do not end in a store"),
        ((dh.Cast(torch.bfloat16), dh.Functions(abs, abs)), "put the codec into"),
        ((dh.OnDevice(), dh.Compact()), "do not end in a store.*the order is Recompute, codecs, one store"),
        ((dh.Recompute, dh.OnCpu()), r"Recompute is a class; write Recompute\("),
        ((dh.Recompute(), dh.OnCpu), r"OnCpu is a class; write OnCpu\("),
        (([dh.Recompute(), dh.OnCpu()],), "one by one"),
        ((dh.Recompute(), pipeline(dh.OnCpu())), "has its store already"),
    ],
)
def test_anything_else_is_an_error(stages: tuple, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        pipeline(*stages)


@pytest.mark.parametrize("bad", ["12 potatoes", "-4 KiB", -1, 1.5, "KiB"])
def test_a_threshold_that_is_no_size(bad: object, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"at_least=.* is not a number of bytes"):
        dh.SaveWith(nn.Linear(2, 2), dh.OnDisk(tmp_path), at_least=bad)


def test_the_threshold_decides(tmp_path: pathlib.Path) -> None:
    small, large = (torch.randn(n, requires_grad=True) for n in (1000, 1001))
    with dh.saving(pipeline(dh.OnDisk(tmp_path), at_least=4004)) as saved:
        y = small.exp().sum() + large.exp().sum()
    y.backward()
    assert saved.report().moved == 4004
    assert saved.report().kept_by == {"small": 4000}


def test_a_pattern_that_matches_nothing_lists_near_names() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    with pytest.raises(MatchError, match=r"'layer\.0' matches no module of 4; near names: layers\.0"):
        dh.save_activations(model, "layer.0", dh.OnCpu())
    with pytest.raises(MatchError, match="Conv2d matches no module"):
        dh.save_activations(model, nn.Conv2d, dh.OnCpu())
    with pytest.raises(MatchError):  # one of two is enough to be an error
        dh.save_activations(model, ["head", "tail"], dh.OnCpu())


def test_patterns_of_each_kind_and_the_outermost_wins() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    for patterns, names in [
        ("*", ("",)),
        (nn.Linear, ("0.0", "0.1", "1")),
        (["0", "0.*"], ("0",)),
        (lambda name, module: name.endswith("1"), ("0.1", "1")),
    ]:
        with dh.save_activations(model, patterns, dh.OnCpu()) as saving:
            assert saving.names == names


@pytest.mark.parametrize("attach", [dh.save_activations, dh.on_gradient, dh.features])
def test_what_is_no_pattern_and_what_is_no_model(attach: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    more = {dh.save_activations: (dh.OnCpu(),), dh.on_gradient: (torch.zeros_like,), dh.features: ()}[attach]
    for wrong in (3, None, model[0], [model[0]]):
        with pytest.raises(UsageError, match="a pattern is a glob over names, a class, or a predicate"):
            attach(model, wrong, *more)
    with pytest.raises(UsageError, match=r"expected a torch\.nn\.Module, got str"):
        attach("*", "*", *more)
    if attach is not dh.features:  # it takes any number of them
        with pytest.raises(UsageError, match="give at least one pattern"):
            attach(model, [], *more)


def test_the_report_reads_well(tmp_path: pathlib.Path) -> None:
    model = dh.SaveWith(nn.Linear(64, 64), dh.OnDisk(tmp_path), at_least=4096)
    model(torch.ones(64, 64)).sum().backward()
    with torch.no_grad():
        model(torch.ones(1, 64))
    text = str(model.report())
    assert "stored 16.0 KiB (moved 16.0 KiB), shared 0 B" in text
    assert "calls without hooks: no_grad 1" in text
    assert "at_least='4.0 KiB'" in repr(model)
