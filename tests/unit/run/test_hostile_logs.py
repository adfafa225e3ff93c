"""What the commands that read a log do with one that nobody should trust."""

from __future__ import annotations

import json
import os
import pathlib
import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from disthooks.run.cli.app import app
from tests.support.logs import log

#: Clears the screen, sets the title, the same as one character, turns the direction, ends the line, a half of a pair.
EVIL = "\x1b[2J\x1b]0;t\x07\x9b31m\u202e\n\rx[red]"


def run(*words: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def is_plain(text: str) -> bool:
    return all(each.isprintable() for each in text.split("\n"))


def test_no_escape_sequence_of_a_log_reaches_the_terminal(tmp_path: pathlib.Path) -> None:
    """Names of the engine, of rules, parameters, modules, statistics and runs, and texts of blame."""
    for evil in ("", EVIL):
        file = log(tmp_path / f"{len(evil)}.jsonl", steps=40, layers=6, evil=evil)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line |= {f"saved/{evil}/peak_held": 1 << 20, f"a{evil}": 1.5, "run": f"r{evil}"}
            line["param"]["fingerprint/grad"] = [f"{line['step']:016x}"] * 6
        lines[-2]["blame"] = [f"0{evil}"]
        lines.append({"step": 0, "run": f"2{evil}", "grad_norm": 1.0})
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / f"{len(evil)}.other.jsonl").write_text(file.read_text().replace("0000000000000005", "f" * 16))
    for words in (["report"], ["watch", "--once"], ["diff", "--exit-code"]):
        told = {}
        for evil in ("", EVIL):
            name = str(tmp_path / f"{len(evil)}")
            more = [f"{name}.other.jsonl"] if words[0] == "diff" else []
            told[evil] = run(words[0], f"{name}.jsonl", *more, *words[1:], code=len(more)).stdout
            assert is_plain(told[evil])
        assert told[EVIL].count("\n") == told[""].count("\n")
        if words[0] != "watch":  # which ends with a run that has no names
            assert "\\x1b[2J\\x1b]0;t\\x07\\x9b31m\\u202e\\n\\rx[red]" in told[EVIL]


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device"])
def test_what_is_no_file_is_not_waited_for(kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes into the pipe."""
    file, sound = tmp_path / "run" / "gradients.jsonl", log(tmp_path / "sound.jsonl", steps=3, layers=2)
    file.parent.mkdir()
    if kind == "a named pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    else:
        monkeypatch.chdir(file.parent)  # the path of a socket may have 108 characters
        socket.socket(socket.AF_UNIX).bind(file.name)
    for words in (
        ["report", file],
        ["report", file.parent],
        ["report", sound, "--compare", file, "-o", tmp_path / "x.html"],
        ["watch", file.parent, "--once"],
        ["diff", sound, file],
    ):
        assert "gradients.jsonl is no regular file" in run(*words, code=1 + (words[0] == "diff")).stderr
