"""A state that is none of an attachment's is an error that says so, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.saved.fit import Fitted

GIVEN = [None, 3, [], {}, {"steps": 3}, "state.pt"]


@pytest.mark.parametrize("given", GIVEN, ids=repr)
def test_gradients(given: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.ClipPercentile()]) as watch:
        with pytest.raises(UsageError, match=r"load_state_dict\(.*give what state_dict\(\) returned"):
            watch.load_state_dict(given)
        assert watch.steps == 0


@pytest.mark.parametrize("given", [None, 3, []], ids=repr)
def test_what_a_configuration_attached(given: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = dh.prepare(model, optimizer, {"watch": {"stats": [{"kind": "Norm"}]}})
    with prepared, pytest.raises(UsageError, match="give what state_dict"):
        prepared.load_state_dict(given)


PARTS: dict[str, Any] = {"needs": {}, "least": {}, "again": {}, "layers": {}}
WRONG: list[dict[str, Any]] = [
    {"needs": 3},
    {"needs": {8: 3}},
    {"needs": {(8, True): 3}},
    {"needs": {(8, True): {"4": 3}}},
    {"least": []},
    {"least": {(8, True): None}},
    {"again": {8: 3}},
    {"again": {8: (1, 2)}},
    {"layers": {"0": "off"}},
]
OF_FIT = [(each, "'needs', 'least', 'again', 'layers'") for each in GIVEN]
OF_FIT += [(PARTS | each, f"{next(iter(each))!r} is .*give what state_dict") for each in WRONG]


@pytest.mark.parametrize(("given", "says"), OF_FIT, ids=repr)
def test_fit(given: Any, says: str) -> None:
    model, tiers = nn.Linear(1, 1), dh.Tiered(dh.OnDevice(0), dh.OnCpu())
    saving = dh.save_activations(model, "*", tiers)
    fitted = Fitted(model, [saving], [tiers], 1 << 30, torch.device("cpu"))
    before = fitted.state_dict()
    with saving, fitted, pytest.raises(UsageError, match=says):
        fitted.load_state_dict(given)
    assert fitted.state_dict() == before
