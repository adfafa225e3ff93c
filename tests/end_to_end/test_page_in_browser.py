"""The page of an explanation in a real browser: what a reader sees, clicks and types."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from disthooks._tensors import format_bytes
from disthooks.report.page.page import page
from tests.end_to_end.conftest import Text
from tests.support.browser import Browser
from tests.support.pages import full_document, plain_document

pytestmark = pytest.mark.full_tier  # two tests of it belong to the second tier
EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    return full_document()


def show(chromium: Browser, document: dict[str, Any], folder: pathlib.Path) -> None:
    """Open the page of the document, as a file."""
    file = folder / "page.html"
    file.write_text(page("explain", document), encoding="utf-8")
    chromium.open(file)
    # What moves would have to be waited for.
    chromium.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])


@pytest.fixture
def shown(chromium: Browser, full: dict[str, Any], tmp_path: pathlib.Path) -> Browser:
    show(chromium, full, tmp_path)
    return chromium


def drawn(chromium: Browser) -> dict[str, int]:
    """How many modules each rectangle stands for, by the name of the first of them."""
    found: dict[str, int] = chromium.run(
        "Object.fromEntries([...document.querySelectorAll('.cell:not(.itself)')]"
        ".map((cell) => [cell.dataset.module, Number(cell.dataset.times)]))"
    )
    return found


def cell(module: str) -> str:
    return f'.cell[data-module="{module}"]'


def visible(chromium: Browser, document: dict[str, Any]) -> set[str]:
    """The modules whose share of the picture is at least 1.2 pixels wide."""
    width = chromium.run("document.querySelector('#icicle').clientWidth")
    return {row["module"] for row in document["modules"] if row["whole"] * width >= 1.2 * document["saved"]}


@pytest.mark.second_tier
def test_the_page_loads_one_file_and_complains_about_nothing(shown: Browser) -> None:
    assert shown.problems() == []
    assert [address.rsplit("/", 1)[1] for address in shown.requests() if not address.startswith("data:")] == [
        "page.html"
    ]


def test_the_page_says_what_the_document_says(text: Text, shown: Browser, full: dict[str, Any]) -> None:
    head, plan, fits = text("#head"), full["plan"], full["fits"]
    assert "With the plan, one training step" in head, "the page begins with what was asked for"
    assert format_bytes(plan["held"]) in head
    assert format_bytes(plan["peak"]["nbytes"]) in head
    assert all(format_bytes(each) in head for each in plan["peak"]["range"])
    assert f"It does not fit in {format_bytes(fits['limit'])}" in head
    assert "The loss is the output." in head
    missing = f"{format_bytes(fits['nbytes'] - fits['limit'])} are missing"
    for said in ("Too large", missing, "Largest batch that fits3", "4 would need", "Cheapest changeHalve it"):
        assert said in head
    assert "Longest sequence" not in head, "its size cannot be set"
    for said in ("Half is enough.", "Send the blocks away", "saves 1.0 MiB"):
        assert said in text("#advice")
    (row,) = plan["modules"]
    for said in (row["to"], format_bytes(row["recomputed"]), format_bytes(row["stored"])):
        assert said in text("#plan table")
    assert "apex::norm" in text("#unknown")
    assert "The CUDA context" in text("#unknown")
    assert next(iter(full["operators"])) in text("#operators")
    shown.click("#plans label:nth-of-type(1)")
    assert format_bytes(full["saved"]) in text("#head")
    assert format_bytes(full["peak"]["nbytes"]) in text("#head")


def test_the_icicle_has_a_rectangle_for_each_module(text: Text, shown: Browser, full: dict[str, Any]) -> None:
    """A rectangle stands for its equals until it is unfolded; each is as wide as what its module saves."""
    folded, every = drawn(shown), dict.fromkeys(visible(shown, full), 1)
    assert sum(folded.values()) == len(every)
    assert max(folded.values()) >= 4
    assert len(folded) < len(every)
    for now in (every, folded):
        shown.click("#crumbs .unfold")
        assert drawn(shown) == now
    shown.click("#fold")
    assert drawn(shown) == every
    thin = {row["module"] for row in full["modules"] if row["whole"]} - every.keys()
    assert f"{len(thin)} {'is' if len(thin) == 1 else 'are'} too thin to be drawn" in text("#modules-lead")
    width = shown.run(
        "Object.fromEntries([...document.querySelectorAll('.cell:not(.itself)')]"
        ".map((cell) => [cell.dataset.module, cell.getBoundingClientRect().width]))"
    )
    for row in full["modules"]:
        if row["module"] in width:
            expected = width[""] * row["whole"] / full["saved"]
            assert width[row["module"]] == pytest.approx(expected, abs=0.5), row["module"]


def test_a_click_zooms_and_a_crumb_goes_back(text: Text, shown: Browser) -> None:
    assert text("#crumbs [aria-current]") == "small"
    shown.click(cell("head"))
    assert text("#crumbs [aria-current]") == "head"
    assert list(drawn(shown)) == ["head"]
    shown.click("#crumbs button")
    assert text("#crumbs [aria-current]") == "small"
    assert "blocks" in drawn(shown)
    shown.click(cell("blocks"))
    assert next(iter(drawn(shown))) == "blocks"
    shown.click(cell("blocks"))  # the top rectangle
    assert text("#crumbs [aria-current]") == "small"


def test_a_rectangle_says_its_bytes_and_operators(text: Text, shown: Browser, full: dict[str, Any]) -> None:
    row = next(row for row in full["modules"] if row["module"] == "head")
    shown.point_at(cell("head"))
    said = text("#hint")
    assert "head" in said
    assert "Linear" in said
    assert format_bytes(row["own"]) in said
    assert next(iter(row["operators"])) in said


def test_the_curve_says_the_module_and_the_bytes(text: Text, shown: Browser, full: dict[str, Any]) -> None:
    points, categories = full["plan"]["curve"]["points"], full["plan"]["curve"]["categories"]
    for part in (0.1, 0.4, 0.6):
        x, _ = shown.point_at("#curve svg", part)
        moment = int(shown.run("document.querySelector('#curve svg').getAttribute('aria-valuenow')"))
        point = next(each for each in points if each[0] == moment)
        said = text("#hint")
        assert (full["modules"][point[2]]["module"] or "small") in said
        assert full["plan"]["curve"]["phases"][point[1]] in said
        assert format_bytes(sum(point[3:])) in said
        for name, count in zip(categories, point[3:], strict=True):
            assert (f"{name}{format_bytes(count)}" in said) == bool(count), name
        cross = shown.run("document.querySelector('#curve .cross').getBoundingClientRect().x")
        assert cross == pytest.approx(x, abs=40), "the crosshair stands at the point that is nearest"
    assert shown.run("document.querySelector('#curve .cross').getAttribute('visibility')") == "visible"


def test_a_plan_changes_the_head_and_the_curve_and_its_yaml_is_copied(
    text: Text, shown: Browser, full: dict[str, Any]
) -> None:
    plan = full["what_if"][0]
    area = "[...document.querySelectorAll('#curve .area')].map((area) => area.getAttribute('d')).join()"
    before = shown.run(area)
    shown.click("#plans label:nth-of-type(3)")
    head = text("#head")
    for said in (format_bytes(plan["saved"]), format_bytes(plan["peak"]["nbytes"]), "Half to the host"):
        assert said in head
    assert "less than without" in head
    assert shown.run(area) != before
    assert text("#plan code") == plan["yaml"]
    # The clipboard belongs to the whole machine, so the test sees what the page gives to it.
    shown.run("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    shown.click("#plan button")
    assert shown.run("window.copied") == plan["yaml"]
    shown.wait_for(lambda: text("#plan button") == "Copied")
    shown.click("#plans label:nth-of-type(2)")
    assert shown.run(area) == before
    assert "Half to the host" not in text("#head")


def test_search_highlights_what_matches(text: Text, shown: Browser, full: dict[str, Any]) -> None:
    shown.run("document.querySelector('#search').focus()")
    shown.type("blocks.*.up")
    hits = shown.run("[...document.querySelectorAll('.cell.hit')].map((cell) => cell.dataset.module)")
    matching = [row for row in full["modules"] if row["module"].endswith(".up")]
    assert hits
    assert all(name.endswith(".up") for name in hits)
    assert shown.run("document.querySelectorAll('.cell:not(.hit):not(.dim)').length") == 0
    found = text("#found")
    assert f"{len(matching)} modules match" in found
    assert format_bytes(sum(row["whole"] for row in matching)) in found
    shown.run("document.querySelector('#search').select()")
    shown.type("no such module")
    assert "No module" in text("#found")


def test_each_key_is_optional(chromium: Browser, full: dict[str, Any], tmp_path: pathlib.Path) -> None:
    for document in (
        {},
        *({name: value for name, value in full.items() if name != key} for key in full),
        plain_document(),
    ):
        show(chromium, document, tmp_path)
        assert chromium.problems() == [], sorted(set(full) - set(document))
        assert chromium.run("document.querySelector('h1') !== null")


@pytest.mark.second_tier
def test_a_name_runs_nothing(text: Text, chromium: Browser, full: dict[str, Any], tmp_path: pathlib.Path) -> None:
    rows = [{**row, "module": row["module"] + EVIL, "class": EVIL} for row in full["modules"]]
    show(chromium, {**full, "model": EVIL, "modules": rows, "warnings": [EVIL]}, tmp_path)
    assert chromium.problems() == []
    assert chromium.run("document.querySelectorAll('img').length") == 0
    assert text("h1") == EVIL
    chromium.point_at(".cell")
    assert EVIL in text("#hint")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 820, 1280])
def test_nothing_is_wider_than_the_window(shown: Browser, width: int, scheme: str) -> None:
    shown.prefer(scheme)
    shown.resize(width, 900)
    try:
        shown.run("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
        assert shown.run("document.documentElement.scrollWidth <= innerWidth")
        back = shown.run("getComputedStyle(document.body).backgroundColor")
        bright = sum(int(part) for part in back.strip("rgb()").split(",")) > 384
        assert bright == (scheme == "light")
    finally:
        shown.resize(1280, 900)
