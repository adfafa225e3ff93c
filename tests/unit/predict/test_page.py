"""The page of an explanation, as text: its document, what it loads, and names that try to be HTML.

How it looks and works in a browser is in tests/end_to_end/test_page_in_browser.py.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from disthooks import explain
from disthooks.report.page.page import page
from tests.support.pages import document_of


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 1))
    return explain(model, torch.empty(32, 64), device="cpu", optimizer="adamw").to_dict()


def test_the_page_holds_the_document(document: dict[str, Any]) -> None:
    assert document_of(page("explain", document)) == json.loads(json.dumps(document))


def test_numbers_that_json_cannot_hold_become_null() -> None:
    read = document_of(
        page("explain", {"seconds": {"forward": math.inf, "backward": math.nan, "optimizer": -math.inf}, "saved": 1})
    )
    assert read == {"seconds": {"forward": None, "backward": None, "optimizer": None}, "saved": 1}


def test_the_page_without_its_document_is_small() -> None:
    assert len(page("explain", {}).encode()) < 80_000
