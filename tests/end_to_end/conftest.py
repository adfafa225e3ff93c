"""A browser for the tests of pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.support.browser import Browser, browser

Text = Callable[[str], str]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def text(chromium: Browser) -> Text:
    """The text of the first element that a selector matches."""

    def read(selector: str) -> str:
        found: str = chromium.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")
        return found

    return read
