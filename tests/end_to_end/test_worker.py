"""``disthooks.run`` when something goes wrong: exit codes, the launcher's error file, and nothing started in vain."""

from __future__ import annotations

import json
import pathlib

import pytest

from disthooks.run.worker import Command, configuration
from tests.support.jobs.started import RUN, SCRIPTS, TORCHRUN, job

pytestmark = pytest.mark.dist
FAILS = SCRIPTS / "fails.py"
HOOKS = "watch: {stats: [{kind: Norm}]}"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "disthooks.yaml").write_text(HOOKS)
    return tmp_path


def test_torchruns_report_has_the_error_of_the_rank_that_failed(folder: pathlib.Path) -> None:
    done = job([*TORCHRUN, "--nproc-per-node", 2, "-m", "disthooks.run", FAILS, "raises"], folder)
    assert done.code == 1
    report = done.err[done.err.index("Root Cause") :]
    assert "rank      : 1 (local_rank: 1)" in report
    assert "KeyError: 'the batch of this rank'" in report


def test_an_error_is_in_the_launchers_file_with_the_scripts_own_lines(folder: pathlib.Path) -> None:
    file = folder / "error.json"
    done = job([*RUN, FAILS, "raises"], folder, TORCHELASTIC_ERROR_FILE=str(file))
    assert done.code == 1
    message = json.loads(file.read_text())["message"]  # as torch's @record writes it
    assert message["message"] == "KeyError: 'the batch of this rank'"
    for lines in (
        message["extraInfo"]["py_callstack"].splitlines(),
        done.err[done.err.index("Traceback") :].split("\n"),
    ):
        assert lines[0].startswith("Traceback")
        assert str(FAILS) in lines[1], "nothing of disthooks in it"
        assert lines[1].endswith("in <module>")


def test_the_exit_code_is_the_scripts(folder: pathlib.Path) -> None:
    file = folder / "error.json"
    done = job([*RUN, FAILS, "exits"], folder, TORCHELASTIC_ERROR_FILE=str(file))
    assert (done.code, file.exists()) == (3, False)


def test_a_faulty_configuration_starts_nothing(folder: pathlib.Path) -> None:
    (folder / "disthooks.yaml").write_text("watch: {stats: [{kind: Nurm}]}")
    done = job([*RUN, FAILS, "waits"], folder)
    assert done.code == 2
    assert done.err.startswith("disthooks: error: ")
    assert len(done.err.splitlines()) == 1
    assert "did you mean 'Norm'" in done.err
    assert not list(folder.glob("ready.*"))


def test_a_missing_script_is_said_before_a_missing_configuration(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").touch()
    done = job([*RUN, "trian.py"], tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"disthooks: error: there is no script 'trian.py' in {tmp_path}; did you mean 'train.py'?\n"
    done = job([*RUN, "-m", "trian.py"], tmp_path)
    assert "there is no module 'trian.py'" in done.err
    done = job([*RUN, "train.py"], tmp_path)
    assert "there is no configuration" in done.err


def test_the_configuration_of_deepspeed_is_found_among_the_arguments(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"train_batch_size": 8, "disthooks": {"watch": {"stats": [{"kind": "Norm"}]}}}))
    for args in (["--deepspeed", str(file)], [f"--deepspeed_config={file}"]):
        found = configuration(Command("train.py", args=tuple(args)))
        assert found.source == {"watch": {"stats": [{"kind": "Norm"}]}}
    assert configuration(Command("train.py", args=(str(file),), hooks="mine.yaml")).source == "mine.yaml"
