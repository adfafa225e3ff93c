"""Fifty wrong configurations and more: one error, with its line, on both ranks, before training; nothing hangs."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from disthooks.config.schema import FILE
from tests.support import ROOT
from tests.support.jobs.wrong import ON_THE_FIRST, ON_THE_SECOND, WRONG, Wrong

JOBS = ROOT / "tests" / "support" / "jobs"
CLASSES = "class Raises:\n    def __init__(self): raise RuntimeError('not today')\n    def __call__(self, *a): pass\n"
pytestmark = pytest.mark.dist
Outcome = list[tuple[int, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("wrong")
    (made / "plain.txt").touch()
    (made / "rank0").mkdir()
    (made / "wrong_classes.py").write_text(CLASSES)
    (made / "wrong_module.py").write_text("raise RuntimeError('not today')\n")
    return made


@pytest.fixture(scope="module")
def fork(folder: pathlib.Path) -> Iterator[Callable[..., Outcome]]:
    """Two ranks, forked from one process that has imported torch: what each wrote, and its exit code."""
    call = [sys.executable, str(JOBS / "wrong_ranks.py")]
    known = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "DISTHOOKS_CONFIG")
    }
    environment = known | {"SCRATCH": "/tmp", "EMPTY": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(**job: Any) -> Outcome:
            process.stdin.write(json.dumps({"folder": str(folder)} | job) + "\n")
            process.stdin.flush()
            return [(code, text) for code, text in json.loads(process.stdout.readline())]

        yield run
        process.stdin.close()


def _write(folder: pathlib.Path, wrong: Wrong) -> str:
    file = folder / "hooks.yaml"
    text = wrong.text
    file.write_bytes(text if isinstance(text, bytes) else text.replace("{folder}", str(folder)).encode())
    return str(file)


def _error(code: int, text: str) -> str:
    """The one error that a rank ended with."""
    assert code == 1, f"exit code {code}: {text}"
    assert "trained" not in text
    found = re.findall(r"^(disthooks\.errors\.\w+: .*)", text, re.MULTILINE)
    assert len(found) == 1, text
    assert len(text.strip().splitlines()[-1]) < 700
    assert text.strip().splitlines()[-1] == found[-1], "one line"
    return found[-1].removeprefix("disthooks.errors.")


def _check(error: str, wrong: Wrong, file: str) -> None:
    where = f"{file}:{wrong.line}: " if wrong.line is not None else ""
    assert error.startswith(f"{wrong.error}: {where}"), error
    assert re.search(re.sub(r"\?$", r"\\?", wrong.says).replace("{", r"\{"), error), error


@pytest.mark.parametrize("name", WRONG)
def test_both_ranks_say_what_is_wrong(name: str, folder: pathlib.Path, fork: Callable[..., Outcome]) -> None:
    file = _write(folder, WRONG[name])
    for code, text in fork(file=file):
        _check(_error(code, text), WRONG[name], file)


@pytest.mark.parametrize("name", ON_THE_FIRST | ON_THE_SECOND)
def test_what_one_rank_finds_ends_both(name: str, folder: pathlib.Path, fork: Callable[..., Outcome]) -> None:
    wrong = (ON_THE_FIRST | ON_THE_SECOND)[name]
    file = _write(folder, wrong)
    errors = [_error(*outcome) for outcome in fork(file=file)]
    finder = int(name in ON_THE_SECOND)
    _check(errors[finder], wrong._replace(error=errors[finder].partition(":")[0]), file)
    assert errors[1 - finder].startswith(f"AttachError: {file}")
    assert "its error says why" in errors[1 - finder]


# What an editor cannot know: other lines, directories, modules, the environment, the model.
BEYOND = ("a key twice", "an argument twice", "a negative norm", "one tier", "two entries", "one inside")
BEYOND += ("own ", "a variable", "an unknown placeholder", "a directory that", "a run that", "a pattern", "a parameter")
BEYOND += ("a budget below", "a budget beside", "a group", "a lossy", "a tracker", "a log in", "a directory of")
BEYOND += ("an octal", "minutes and")


def test_an_editor_sees_most_of_it() -> None:
    validator = jsonschema.Draft7Validator(json.loads(FILE.read_text()))
    validator.check_schema(validator.schema)
    seen = 0
    for name, wrong in (WRONG | ON_THE_FIRST | ON_THE_SECOND).items():
        try:
            document = yaml.safe_load(
                wrong.text.replace("{folder}", "/x") if isinstance(wrong.text, str) else wrong.text
            )
        except (yaml.YAMLError, UnicodeDecodeError):
            continue  # no YAML, which it sees too
        good = validator.is_valid(document)
        assert good == name.startswith(BEYOND), name
        seen += not good
    assert seen >= 35


def test_a_right_file_trains(folder: pathlib.Path, fork: Callable[..., Outcome]) -> None:
    file = _write(
        folder, Wrong("save:\n- modules: net.0\n  store: {kind: OnCpu}\nwatch: {stats: standard}\n", None, "")
    )
    first, second = fork(file=file)
    assert first[0] == 0
    assert first[1].endswith("logged every 50 steps\ntrained\n")
    assert (
        f"disthooks: {file}: attached to Model on 2 ranks: save 'net.0': 1 module to OnCpu; watch 6 parameters"
        in first[1]
    )
    assert second == (0, "trained\n")


def test_ranks_with_different_files(folder: pathlib.Path, fork: Callable[..., Outcome]) -> None:
    first, second = folder / "first.yaml", folder / "second.yaml"
    first.write_text("watch: {stats: standard}\n")
    second.write_text("save: [{modules: net.0, store: {kind: OnCpu}}]\n")  # it would not take part in any collective
    for outcome in fork(file=str(first), second=str(second)):
        assert re.match(r"AttachError: .*yaml: the ranks \[0, 1\] have different configurations", _error(*outcome))


def test_processes_that_each_believe_to_be_alone(folder: pathlib.Path, fork: Callable[..., Outcome]) -> None:
    file = _write(folder, Wrong("watch: {stats: standard}\n", None, ""))
    for outcome in fork(file=file, alone="yes"):
        assert re.match(r"AttachError: a launcher started 2 processes .* was not initialised", _error(*outcome))
    for code, said in fork(file=file, alone="yes", environment={"WORLD_SIZE": "1"}):
        assert code == 0
        assert said.endswith("trained\n")


def test_a_file_that_is_not_there(folder: pathlib.Path, fork: Callable[..., Outcome]) -> None:
    for variable, says in (("gone.yaml", "No such file"), (".", "Is a directory")):
        for outcome in fork(environment={"DISTHOOKS_CONFIG": variable}):
            expected = rf"ConfigError: {re.escape(variable)}: cannot be read: {says}.* \(DISTHOOKS_CONFIG names it\)"
            assert re.match(expected, _error(*outcome))
    for name in ("hooks.yaml", "disthooks.yaml"):  # which are found without being named
        (folder / name).unlink(missing_ok=True)
    for outcome in fork():
        assert _error(*outcome).startswith("ConfigError: there is no configuration: give the path of one")
