"""Every law has tests that ``make test`` runs, and every engine has a test of the truth that ``make test-all`` runs."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import pkgutil
from typing import Any

import pytest

import disthooks.engines
from disthooks.engines.base import Engine
from tests.support import tiers

HERE = pathlib.Path(__file__).parent
#: A file of a law begins with ``test_``, the number and the name.
LAWS = {
    1: "exact",
    2: "weights_stay",
    3: "once",
    4: "any_backward",
    5: "mutation_is_caught",
    6: "nothing_left",
    7: "thread_local",
    8: "same_names",
    9: "never_wrong",
    10: "bounded",
    11: "truth",
    12: "two_collectives",
    13: "no_host_sync",
    14: "moments_have_names",
    15: "no_silent_no_op",
    16: "one_decision",
    17: "frozen",
    18: "optional",
    19: "predicted_is_measured",
    20: "true_records",
}
#: The test of law 11 on each engine, and the parameter that names the engine in it, by the name of the engine's class.
TRUTHS: dict[str, tuple[str, str, object]] = {
    "Plain": ("tests.laws.test_11_truth.test_clip_norm_equals_torch", "engine", "plain"),
    "DataParallel": ("tests.laws.test_11_truth.test_clip_norm_equals_torch", "engine", "dp"),
    "Ddp": ("tests.engines.test_truth.test_two_ranks", "engine", "ddp"),
    "Fsdp1": ("tests.engines.test_truth.test_two_ranks", "engine", "fsdp1"),
    "Fsdp2": ("tests.engines.test_truth.test_two_ranks", "engine", "fsdp2"),
    "DeepSpeed": ("tests.engines.test_deepspeed.test_every_stage_equals_one_process", "stage", 3),
    "Joined": ("tests.engines.test_one_step.test_two_stages_with_two_copies", "engine", "ddp"),
}


def _marks(function: Any) -> list[pytest.Mark]:
    """The marks of a test and of its file, the nearest first."""
    of_file = getattr(inspect.getmodule(function), "pytestmark", [])
    return [*getattr(function, "pytestmark", []), *(of_file if isinstance(of_file, list) else [of_file])]


def _tests(path: pathlib.Path) -> list[Any]:
    module = importlib.import_module(f"tests.laws.{path.stem}")
    return [value for name, value in vars(module).items() if name.startswith("test_") and callable(value)]


def _is_skipped(function: Any) -> bool:
    return any(mark.name in ("skip", "skipif", "gpu") for mark in _marks(function))


@pytest.mark.parametrize("number", LAWS)
def test_the_law_has_tests_in_the_first_tier(number: int) -> None:
    files = sorted(HERE.glob(f"test_{number:02}_{LAWS[number]}*.py"))
    found = [(path, function) for path in files for function in _tests(path) if not _is_skipped(function)]
    assert any(tiers.is_first(path, _marks(function), {}) for path, function in found), f"law {number}, {LAWS[number]}"


def test_a_file_of_laws_names_its_law() -> None:
    names = tuple(f"test_{number:02}_{name}" for number, name in LAWS.items())
    assert [path.name for path in HERE.glob("test_*.py") if not path.stem.startswith((*names, "test_index"))] == []


def _engines(base: type[Engine] = Engine) -> set[type[Engine]]:
    found = set(base.__subclasses__())
    return found.union(*(_engines(each) for each in found))


def _values(function: Any, parameter: str) -> set[object]:
    """The values that the marks of a test give to ``parameter``."""
    found: set[object] = set()
    for mark in _marks(function):
        if mark.name != "parametrize":
            continue
        names, rows = mark.args
        names = names.split(",") if isinstance(names, str) else list(names)
        if parameter in names:
            at = names.index(parameter)
            found |= {row[at] if len(names) > 1 else row for row in rows}
    return found


def test_every_engine_has_a_test_of_the_truth() -> None:
    for module in pkgutil.iter_modules(disthooks.engines.__path__):
        importlib.import_module(f"disthooks.engines.{module.name}")
    ours = {each.__name__ for each in _engines() if each.__module__.startswith("disthooks.")}
    assert ours == set(TRUTHS)
    for name, (test, parameter, value) in TRUTHS.items():
        module, _, function = test.rpartition(".")
        assert value in _values(getattr(importlib.import_module(module), function), parameter), name
