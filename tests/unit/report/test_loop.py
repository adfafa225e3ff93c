"""What the loop changed, as a report tells it."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import pytest

from disthooks.report.log import read
from disthooks.report.loop import changes
from disthooks.report.summary import summary


def told(folder: pathlib.Path, records: list[dict[str, Any]]) -> list[str]:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps({"step": 10 * at} | record) + "\n" for at, record in enumerate(records)))
    (run,) = read(file).runs
    assert len(run.records) == len(records)
    found = [change.text for change in changes(run)]
    assert summary(run)["verdict"][1 : 1 + len(found)][:3] == found[:3]
    assert summary(run)["culprits"] == []
    return found


def _rates(*rates: float) -> list[dict[str, Any]]:
    return [{"loop/lr": [rate]} for rate in rates]


@pytest.mark.parametrize(
    "rates",
    [
        [0.1 * at for at in range(12)],  # a warm-up from 0
        [0.5 * (1 + math.cos(math.pi * at / 20)) for at in range(21)],
        [0.5**at for at in range(12)],
        [0.1] * 5 + [0.11] * 5,
    ],
)
def test_a_schedule_is_no_event(rates: list[float], tmp_path: pathlib.Path) -> None:
    assert told(tmp_path, _rates(*rates)) == []


def test_jumps_of_a_setting(tmp_path: pathlib.Path) -> None:
    assert told(tmp_path, _rates(0.1, 0.1, 10.0, 10.0)) == ["Steps 11 to 20: the learning rate went from 0.1 to 10."]
    assert told(tmp_path, _rates(0.0, 0.0, 1.0, 0.99, 0.97)) == ["Steps 11 to 20: the learning rate went from 0 to 1."]
    records = [{"loop/weight_decay": [0.0, 0.1, 0.0] if at < 3 else [0.1, 0.1, 0.1]} for at in range(6)]
    assert told(tmp_path, records) == [
        "Steps 21 to 30: the weight decay of group 0 went from 0 to 0.1, and 1 more group changed."
    ]
    assert told(tmp_path, [{"loop/lr": [None]}, {"loop/lr": [0.1]}, {}, {"loop/lr": [0.1, 0.2]}]) == []


def test_parameters_modes_scales_and_micro_batches(tmp_path: pathlib.Path) -> None:
    names = [f"{i}.weight" for i in range(10)]
    records: list[dict[str, Any]] = [{"loop/trained": 40, "loop/training": True, "loop/scale": 8.0} for _ in range(5)]
    records[1] |= {"loop/trained": 60, "loop/began": names}
    records[2] |= {"loop/trained": 59, "loop/ended": ["a"]}
    records[3] |= {"loop/trained": 59, "loop/training": False}
    records[4] |= {"loop/trained": 59, "loop/scale": 4.0}
    assert told(tmp_path, records) == [
        f"Steps 1 to 10: 20 parameters began to train: {', '.join(names)} and 10 more.",
        "Steps 11 to 20: 1 parameter stopped training: a.",
        "Steps 21 to 30: the model is in evaluation mode from here on.",
        "Steps 31 to 40: the model is in training mode from here on.",
        "Steps 31 to 40: the loss scale went from 8 to 4.",
    ]
    counts = [4, 4, 2, 4, 4, 4, 8, 8, 8, 2]  # the last step of an epoch has fewer
    assert told(tmp_path, [{"loop/micro_batches": count} for count in counts]) == [
        "Steps 51 to 60: a step has 8 micro-batches, 4 before."
    ]
