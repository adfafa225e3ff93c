"""The page of a run in a real browser: what a reader sees, points at and types; and logs that mean harm."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from typer.testing import CliRunner

from disthooks.run.cli.app import app
from tests.end_to_end.conftest import Text
from tests.support.browser import Browser
from tests.support.logs import EVIL, log

pytestmark = pytest.mark.full_tier  # two tests of it belong to the second tier


def page_of(path: pathlib.Path, *options: object) -> pathlib.Path:
    """The page that the command writes of a log."""
    page = path.with_suffix(".html")
    result = CliRunner().invoke(app, ["report", str(path), "-o", str(page), *map(str, options)])
    assert result.exit_code == 0, (result.output, result.exception)
    assert f"wrote {page}" in result.output
    return page


def show(chromium: Browser, page: pathlib.Path) -> None:
    chromium.open(page)
    chromium.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    chromium.wait_for(
        lambda: chromium.run(
            "!document.querySelector('#layers:not([hidden])') || !!document.querySelector('#heat canvas')"
        )
    )


def is_quiet(chromium: Browser, page: pathlib.Path) -> None:
    """No complaint, no request but the file, no script but the page's own."""
    assert chromium.problems() == []
    asked = [address for address in chromium.requests() if not address.startswith(("data:", "blob:"))]
    assert asked == [page.as_uri()]
    assert chromium.run("document.images.length") == 0


@pytest.fixture
def shown(chromium: Browser, tmp_path: pathlib.Path) -> Browser:
    page = page_of(log(tmp_path / "run.jsonl", steps=200, layers=24))
    show(chromium, page)
    is_quiet(chromium, page)
    return chromium


@pytest.mark.second_tier
def test_the_page_begins_with_the_verdict_and_what_to_do(text: Text, shown: Browser) -> None:
    said = text("#verdict")
    assert said.startswith("Step 150 on rank 1: the output of blocks.3.a jumped to ")
    assert "What to do: Run the step again from a checkpoint." in text("#head")
    assert "activation_max of blocks.3.a" in text("#head .evidence")
    assert "Step 198 on rank 1: an element of the output of blocks.0.a became infinite or NaN" in text("#head")
    assert shown.run("[...document.querySelectorAll('.tile h2')].map((each) => each.textContent)")[0] == "Last loss"
    assert "Restart number 1." in text("#events")


def test_every_chart_is_drawn_and_says_its_numbers_and_all_cursors_follow(text: Text, shown: Browser) -> None:
    titles = shown.run("[...document.querySelectorAll('.chart b')].map((each) => each.textContent)")
    wanted = ["Loss", "Gradient norm", "Clip factor", "Gradient norm of each rank", "note"]
    assert titles == wanted
    constant = "Update over weight: 0.001 in each logged step. Learning rate: 0.001 in each logged step."
    assert constant in text("#norms")
    lines = (
        "[...document.querySelectorAll('#ranks figure:first-child .line')].map((each) => each.getAttribute('stroke'))"
    )
    assert shown.run(lines) == ["var(--faint)", "var(--bad)"], "rank 1 was named, and is drawn last"
    captions = (
        "[...document.querySelectorAll('#ranks figure:first-child figcaption span')].map((each) => each.textContent)"
    )
    assert shown.run(captions) == ["rank 1", "rank 0"]
    lengths = shown.run("[...document.querySelectorAll('.chart .line')].map((each) => each.getTotalLength())")
    assert min(lengths) > 100
    assert shown.run("document.querySelectorAll('.chart .mark').length") >= len(wanted)
    assert shown.run("document.querySelectorAll('#norms .not-finite').length") == 1, "the norm that was NaN"
    shown.point_at("#norms .chart svg", 0.5)
    assert "step " in text("#hint")
    assert "mean of the ranks" in text("#hint")
    assert shown.run("document.querySelectorAll('.chart .cross[visibility=visible]').length") == len(wanted)


def drag(chromium: Browser, selector: str, begin: float, end: float) -> None:
    middle = (begin + end) / 2
    for kind, part in (("Pressed", begin), ("Moved", middle), ("Moved", end), ("Released", end)):
        x, y = chromium.point_at(selector, part)
        if kind != "Moved":
            chromium.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button="left", clickCount=1)


def seen_steps(chromium: Browser) -> list[int]:
    """The first and the last step that the charts show."""
    return [
        int(each.removeprefix("step "))
        for each in chromium.run("[...document.querySelectorAll('#heat .steps span')].map((each) => each.textContent)")
    ]


def test_dragging_zooms_all_charts_and_a_button_goes_back(shown: Browser) -> None:
    assert seen_steps(shown) == [0, 199]
    drag(shown, "#norms .chart svg", 0.5, 0.8)
    first, last = seen_steps(shown)
    assert 60 < first < last < 180
    before = shown.run("document.querySelectorAll('.chart .mark').length")
    drag(shown, "#heat canvas", 0.25, 0.5)
    assert last - first > seen_steps(shown)[1] - seen_steps(shown)[0]
    shown.click("#norms .whole-run")
    assert seen_steps(shown) == [0, 199]
    assert shown.run("document.querySelectorAll('.chart .mark').length") >= before
    shown.click("#events tr:nth-of-type(2) .go")
    assert seen_steps(shown) == [130, 170], "a step in the table of what happened is looked at"


def test_the_heat_map_says_layer_step_and_number(text: Text, shown: Browser) -> None:
    shown.point_at("#heat canvas", 0.3, 0.5 / 24)
    assert "blocks.0.a.weight" in text("#hint")
    assert "about " in text("#hint")
    labels = shown.run("[...document.querySelectorAll('#statistic label')].map((each) => each.textContent)")
    wanted = ["Gradient norm", "Update over weight", "Activation, root mean square", "Activation, largest"]
    assert labels == [*wanted, "Zeros in activations", "Activations not finite"]
    colours = (  # how many the picture has
        "(() => { const canvas = document.querySelector('#heat canvas'); const { width, height } = canvas;"
        " const data = canvas.getContext('2d').getImageData(0, 0, width, height).data;"
        " return new Set(new Uint32Array(data.buffer)).size; })()"
    )
    for number in range(len(labels)):
        shown.click(f"#statistic label:nth-of-type({number + 1})")
        shown.run("new Promise((resolve) => setTimeout(resolve, 50))")
        assert shown.run(colours) > 1, labels[number]
    shown.click("#statistic label:nth-of-type(1)")
    shown.run("new Promise((resolve) => setTimeout(resolve, 50))")
    shown.point_at("#heat canvas", 198.5 / 200, 0.5 / 24)
    assert "not finite" in text("#hint")
    assert "infinite or NaN" in text("#scale")
    assert shown.run("document.querySelectorAll('.heat-mark').length") == 2


def test_a_layer_is_searched_and_its_curve_shown(text: Text, shown: Browser) -> None:
    shown.click("#layer")
    shown.type("blocks.3")
    shown.run("new Promise((resolve) => setTimeout(resolve, 50))")
    assert shown.run("document.querySelectorAll('.row-name').length") == 4
    shown.click(".row-name")
    assert text("#row .chart b") == "Gradient norm of blocks.3.a.weight"


def test_two_runs_are_compared(text: Text, chromium: Browser, tmp_path: pathlib.Path) -> None:
    one, other = log(tmp_path / "one.jsonl", 60, 8), log(tmp_path / "other.jsonl", 60, 8, ranks=4)
    page = page_of(one, "--compare", other)
    show(chromium, page)
    is_quiet(chromium, page)
    assert chromium.run("document.querySelectorAll('.chart .line[stroke-dasharray]').length") == 7
    assert "the other run" in text("#about")


def test_what_was_predicted_stands_beside_what_was_measured(
    text: Text, chromium: Browser, tmp_path: pathlib.Path
) -> None:
    """A real plan, explained and then run; the prediction is to the byte."""
    import torch
    from torch import nn

    import disthooks as dh
    from disthooks.saved.pipeline import pipeline

    def build() -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), torch.randn(256, 64)

    to_disk = pipeline(dh.OnDisk(tmp_path), at_least=0)
    plan = [("0", to_disk), ("1", to_disk)]
    (tmp_path / "explain.json").write_text(json.dumps(dh.explain(build, plan=plan, device="cpu").to_dict()))
    model, x = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    file = tmp_path / "run.jsonl"
    sinks = [dh.sinks.Jsonl(file)]
    with (
        dh.save_activations(model, ["0", "1"], to_disk) as saving,
        dh.gradients(model, optimizer, stats=dh.stats.full(), sinks=sinks, every=1, also=[saving]),
    ):
        for rows in (64, 256, 256, 256):
            model(x[:rows].clone().requires_grad_()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    page = page_of(file)
    show(chromium, page)
    is_quiet(chromium, page)
    measured, predicted = text("#saved .wide tr td:nth-of-type(2)").removesuffix(" were predicted").split(", and ")
    assert measured == predicted != "0 B"
    titles = chromium.run("[...document.querySelectorAll('#saved .chart b')].map((each) => each.textContent)")
    assert titles == ["Saved tensors moved in a step", "Saved tensors held at most, by place"]
    ticks = chromium.run(
        "[...document.querySelectorAll('#saved .chart text[text-anchor=end]')].map((each) => each.textContent)"
    )
    assert ticks == ["0 B", "32 KiB", "64 KiB", "96 KiB", "128 KiB", "3"] * 2
    assert not chromium.run("document.querySelector('#saved details').open"), "the totals are folded"
    totals = chromium.run(
        "[...document.querySelectorAll('#saved details td:first-child')].map((each) => each.textContent)"
    )
    held = f"OnDisk('{tmp_path}') held at most since the record before"
    assert {"stored", "brought back", "forward waited", held} <= set(totals)


@pytest.mark.second_tier
@pytest.mark.full_tier(layers=(10_000, 1))
@pytest.mark.parametrize(
    ("steps", "layers", "evil"),
    [(60, 24, EVIL), (60, 24, "\"'&<b>漢字\u202e"), (6, 10_000, ""), (1, 3, "")],
    ids=["script", "quotes", "10,000 layers", "one step"],
)
def test_names_that_mean_harm_do_none(
    text: Text, steps: int, layers: int, evil: str, chromium: Browser, tmp_path: pathlib.Path
) -> None:
    page = page_of(log(tmp_path / "run.jsonl", steps, layers, evil=evil))
    show(chromium, page)
    is_quiet(chromium, page)
    if evil:
        assert f"blocks.0.a{evil}.weight" in chromium.run("document.querySelector('.row-name').title")
        assert evil in text("#about")


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": i, "grad_norm": "nan", "loss": "inf"} for i in range(20)],
        [{"step": i, "loss": 0.0, "grad_norm": 0} for i in range(20)],
        [{"step": 0, "loss": "x", "names": 3, "about": 4, "time": "t", "run": [1]}, {"step": 1, "loss": 1.0}],
        [{"step": 2**40, "loss": 1e308, "names": {"param": ["a", EVIL]}, "param": {"grad_norm": [None, {}], "x": [7]}}],
        [{"step": i, f"grad_norm/param/{EVIL}": 1.0 + i} for i in range(30)],
    ],
    ids=["empty", "NaN everywhere", "zeros", "wrong kinds", "wrong columns", "an old log"],
)
def test_logs_that_are_no_logs_do_no_harm(
    text: Text, lines: list[Any], chromium: Browser, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(file)
    show(chromium, page)
    is_quiet(chromium, page)
    assert text("#head .file").endswith("run.jsonl")


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_into_the_window(width: int, shown: Browser) -> None:
    shown.resize(width, 900)
    shown.run("new Promise((resolve) => setTimeout(resolve, 100))")
    assert shown.run("document.documentElement.scrollWidth") <= width
    shown.resize(1280, 900)
