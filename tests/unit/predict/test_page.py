"""The page of an explanation, as text: its document, what it loads, and names that try to be HTML.

How it looks and works in a browser is in tests/end_to_end/test_page_in_browser.py.
"""

from __future__ import annotations

import html.parser
import json
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from disthooks import explain
from disthooks.report.page.page import page
from tests.support.pages import document_of

EVIL = "</script><img src=x onerror=alert(1)><!--<script>"


class Parsed(html.parser.HTMLParser):
    """The tags of a page with their attributes, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in self.texts and self.texts[self.tags[-1][0]]:
            self.texts[self.tags[-1][0]][-1] += data


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 1))
    return explain(model, torch.empty(32, 64), device="cpu", optimizer="adamw").to_dict()


def test_the_page_holds_the_document(document: dict[str, Any]) -> None:
    assert document_of(page("explain", document)) == json.loads(json.dumps(document))


def test_a_name_cannot_become_html(document: dict[str, Any]) -> None:
    rows = [{**row, "module": row["module"] + EVIL, "class": EVIL} for row in document["modules"]]
    changed = {**document, "model": EVIL, "modules": rows, "warnings": [EVIL, "@@script@@ \\u003c \u2028"]}
    text = page("explain", changed)
    plain, evil = Parsed(page("explain", document)), Parsed(text)
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in plain.tags]
    assert evil.texts["script"][1:] == plain.texts["script"][1:]
    assert len(evil.texts["script"]) == 2
    assert EVIL in evil.texts["title"][0]
    assert document_of(text) == changed


def test_the_page_loads_nothing(document: dict[str, Any]) -> None:
    text = page("explain", document)
    for tag, attributes in Parsed(text).tags:
        assert not {"src", "srcset", "action", "data", "poster", "ping"} & set(attributes), tag
        assert tag != "link" or attributes["href"] == "data:,"
        assert not any(name.startswith("on") for name in attributes), "the policy forbids scripts in attributes"
    assert not re.search(r"url\(|@import|\bimport\b\s*\(|fetch\(|XMLHttpRequest|WebSocket|innerHTML", text)
    assert "default-src 'none'" in text


def test_numbers_that_json_cannot_hold_become_null() -> None:
    read = document_of(
        page("explain", {"seconds": {"forward": math.inf, "backward": math.nan, "optimizer": -math.inf}, "saved": 1})
    )
    assert read == {"seconds": {"forward": None, "backward": None, "optimizer": None}, "saved": 1}


def test_each_key_is_optional(document: dict[str, Any]) -> None:
    assert document_of(page("explain", {})) == {}
    for key in document:
        rest = {name: value for name, value in document.items() if name != key}
        assert document_of(page("explain", rest)) == json.loads(json.dumps(rest))


def test_the_page_without_its_document_is_small() -> None:
    assert len(page("explain", {}).encode()) < 80_000
