"""The command line: its errors are one line each, and colours are for terminals."""

from __future__ import annotations

import configparser
import io
import json
import pathlib
import re
import subprocess
import sys

import pytest

import disthooks as dh
from disthooks.run.cli import app as cli_app
from disthooks.run.cli import output
from tests.support import ROOT
from tests.support.command_line import ENV, hooks, process, run

COMMANDS = ("check", "diff", "explain", "report", "watch")


def test_help_does_not_wait_for_torch() -> None:
    call = "import sys; sys.argv = ['disthooks', '--help']\nfrom disthooks.run.cli import main\n"
    call += "try:\n    main()\nfinally:\n    print(sorted({'torch', 'rich', 'yaml', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True, env=ENV)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_errors_are_one_line_and_exit_codes_are_told(tmp_path: pathlib.Path) -> None:
    done = process("report", tmp_path / "nothing")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "nothing: there is no such file or directory" in done.stderr
    for words, says in (([], "Missing argument"), (["x", "--jsn"], "No such option: --jsn")):
        done = process("check", *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"disthooks: error: {says}")
        assert "disthooks check -h" in done.stderr


def test_every_command_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("", *COMMANDS):
        for flag in ("--help", "-h"):
            assert cli_app.run([name, flag] if name else [flag]) == 0
            assert "-h, --help" in (said := capsys.readouterr().out)
            assert name != "explain" or "nothing runs" in said
    assert cli_app.run([]) == 2
    assert "Commands:" in capsys.readouterr().out
    assert dh.__version__ in run("--version").stdout


def test_completion_knows_the_commands() -> None:
    asked = {"_DISTHOOKS_COMPLETE": "complete_bash", "COMP_WORDS": "disthooks e", "COMP_CWORD": "1"}
    done = process(env={**ENV, **asked})
    assert done.stdout.split() == ["explain"]


def test_the_extra_of_the_command_line_reads_yaml() -> None:
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    wanted = extras["options.extras_require"]
    assert "disthooks[config]" in wanted["cli"].split()
    assert {line.partition(">")[0] for line in wanted["config"].split()} == {"pydantic", "pyyaml"}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colours_and_bars_are_for_terminals(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = hooks(tmp_path, "save: [{modules: x, store: {kind: OnCpu}}]")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("save: [{modules: x}]")
    seen: dict[bool, list[str]] = {}
    for terminal in (True, False):
        streams = [Terminal() if terminal else io.StringIO() for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert [cli_app.run(["check", str(each)]) for each in (file, wrong)] == [0, 1]
        seen[terminal] = [stream.getvalue() for stream in streams]
    monkeypatch.undo()
    out, err = seen[True]
    assert f"\x1b[32m{file}: ok" in out
    assert "\x1b[31mdisthooks: error: " in err
    assert "saving random tensors through each pipeline" in err  # the bar
    assert not any("\x1b" in text or "saving random" in text for text in seen[False])


def test_a_long_command_says_in_a_pipe_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "EVERY", 0.001)
    told = ""
    with output.progress(2) as begin:
        begin("predicting one step")
        begin("batch 16: 3.0 GiB, fits", is_step=False)
        while "fits" not in told:
            err = capsys.readouterr()
            assert err.out == ""
            told += err.err
    assert re.search(r"^disthooks: \d+ s: batch 16: 3.0 GiB, fits$", told, re.MULTILINE)


def test_names_are_whole_when_piped(tmp_path: pathlib.Path) -> None:
    """They are looked for by grep, whatever COLUMNS says."""
    name = f"grad_norm/group/{'a_long_name_' * 20}"
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"step": 0, name: 1.5}))
    done = process("report", file, env={**ENV, "COLUMNS": "40"})
    assert [line.split()[1] for line in done.stdout.splitlines() if "grad_norm" in line] == [name]


def test_without_typer_it_says_how_to_get_it() -> None:
    call = "import sys; sys.modules['typer'] = None\nfrom disthooks.run.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=False, env=ENV)
    assert done.returncode == 1
    assert done.stderr == "disthooks: error: the command line needs typer and rich: pip install 'disthooks[cli]'\n"


def test_docs_have_every_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for name in COMMANDS:
        assert f"disthooks {name}" in page
