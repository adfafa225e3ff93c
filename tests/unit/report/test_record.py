"""What is no record is said and left out, and what is a record breaks no reader; files that are packed are read."""

from __future__ import annotations

import copy
import gzip
import json
import pathlib
import random
from typing import Any

import pytest
from typer.testing import CliRunner

from disthooks.errors import UsageError
from disthooks.report.log import Tail, read
from disthooks.run.cli.app import app
from tests.support.logs import log

COMMANDS = (
    ["report", "{file}"],
    ["report", "{file}", "--json"],
    ["report", "{file}", "-o", "{file}.html"],
    ["watch", "{file}", "--once"],
    ["diff", "{file}", "{file}"],
)
DIGITS = 10**400


def lines_of(file: pathlib.Path) -> list[dict[str, Any]]:
    """Forty lines with every field that a reader uses."""
    lines = [json.loads(line) for line in log(file, steps=40, layers=4).read_text().splitlines()]
    lines[0]["names"]["called"] = [2, 0, 1, 3]
    for at, line in enumerate(lines):
        line |= {"grad_norm/peak": 2.0, "grad_norm/peak_step": max(0, at - 1), "grad_norm/peak_rank": 0, "skipped": 0.0}
        line |= {"nonfinite_params": 1, "nonfinite_steps": at // 38, "skipped_total": 0.0, "spike": 0.0, "optimizer": 0}
        line |= {"saved/moved_per_step": 1 << 20, "saved/OnCpu()/peak_held": 5, "saved/pack_seconds_per_step": 0.1}
        line |= {"replicas/compared": 8, "replicas/differ": at // 39, "replicas/steps": at + 1}
        line |= {"input_seconds": 0.1, "input_seconds/max_rank": 0.2, "input_seconds/argmax_rank": 1}
        line |= {"input_norm": 1.0, "forward_seconds": 0.1, "forward_seconds/max_rank": 0.2, "clip_ratio/group/a": 0.5}
        line |= {"backward_seconds": 0.1, "backward_seconds/max_rank": 0.2, "h": {"bins": [1], "counts": [2]}}
        line["param"] |= {"fingerprint/grad": [f"{at:016x}"] * 4, "update_norm/lead_rank": [0] * 4}
        line["module"]["fingerprint/input"] = [f"{at:048x}"] * 4
    lines[-1] |= {"replicas/names": ["a: exp_avg"], "replicas/ranks": [0, 1], "replicas/at": ["a"], "blame": ["b"]}
    lines[-2]["nonfinite_at"][0] |= {"before": "c.weight", "count": 3}
    return lines


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a record."""
    keys = value if isinstance(value, dict) else range(min(len(value), 2)) if isinstance(value, list) else ()
    return [path, *(each for key in keys for each in places(value[key], (*path, key)))]


def write(file: pathlib.Path, lines: list[Any]) -> pathlib.Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def ends(file: pathlib.Path, *commands: list[str]) -> list[Any]:
    """How commands end; none with a traceback."""
    found = []
    for command in commands:
        result = CliRunner().invoke(app, [word.format(file=file) for word in command])
        assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exc_info)
        found.append(result)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_no_value_of_a_field_breaks_a_reader(seed: int, tmp_path: pathlib.Path) -> None:
    spoil(seed, tmp_path, 70, 1)


def spoil(seed: int, folder: pathlib.Path, many: int, commands: int) -> None:
    """Read ``many`` logs, in each of which one field of one line is gone or has another value, by some commands."""
    whole = lines_of(folder / "whole.jsonl")
    hostile: tuple[Any, ...] = (
        *(None, True, -1, 0, 10**15, 2**70, DIGITS, -DIGITS, 1e300, -1e300, 5e-324, -0.5, float("nan"), float("inf")),
        *("", "nan", "-inf", "text", "\ud800", "\x1b[2J", [], [None], [[1]], ["a", 1], {}, {"a": 1}, {"edges": 3}),
    )
    chance = random.Random(seed)
    paths = [(at, path) for at in (0, 1, 20, 38, 39) for path in places(whole[at]) if path]
    for number in range(many):
        lines = copy.deepcopy(whole)
        at, path = chance.choice(paths)
        inner: Any = lines[at]
        for key in path[:-1]:
            inner = inner[key]
        if chance.random() < 0.1:
            del inner[path[-1]]
        else:
            inner[path[-1]] = chance.choice(hostile)
        ends(write(folder / f"{number}.jsonl", lines), *chance.sample(COMMANDS, commands))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"about": {"engine": "DDP"}}, ""),
        ({"about": {"ranks": "2"}}, "about.ranks is no whole number"),
        ({"a": DIGITS}, "a is out of range"),
        ({"loss": DIGITS}, "loss is out of range"),
        ({"param": {"a": [DIGITS]}}, "param.a is out of range"),
        ({"param": {"a": 1}}, "param.a is no list"),
        ({"module": [1]}, "module is no object"),
        ({"module": {"fingerprint/input": ["x"]}}, "module.fingerprint/input is no list of fingerprints"),
        ({"time": 1e300}, "time is out of range"),
        ({"restart": float("nan")}, "restart is no whole number"),
        ({"names": {"param": 1}}, "names.param is no list"),
        ({"names": {"called": ["a"]}}, "names.called.0 is no whole number"),
        ({"nonfinite_at": 1}, "nonfinite_at is no list"),
        ({"nonfinite_at": [{"param": "a", "rank": "b"}]}, "nonfinite_at.0.rank is no whole number"),
        ({"blame": 1}, "blame is no list"),
        ({"grad_norm/peak": 1.0}, "grad_norm/peak_step is missing"),
        ({"grad_norm/peak": 1.0, "grad_norm/peak_step": None}, "grad_norm/peak_step is missing"),
        ({"grad_norm/argmax_rank": float("nan")}, "grad_norm/argmax_rank is no whole number"),
        ({"grad_norm": "large"}, "grad_norm is no number"),
        ({"loss/of_ranks": [1.0]}, "loss/of_ranks is no object"),
        ({"loss/of_ranks": {"0": 1.0, "1": "nan"}}, ""),
        ({"loss/of_ranks": {"0": "large"}}, "loss/of_ranks.0 is no number of a rank"),
        ({"loss/of_ranks": {"0": [1.0]}}, "loss/of_ranks.0 is no number of a rank"),
        ({"loss/of_ranks": {"first": 1.0}}, "loss/of_ranks.first is no number of a rank"),
        ({"note": "\ud800"}, "it is no JSON"),
        ({"step": 2.5}, "step is no whole number"),
        ({"step": None}, "step is no whole number"),
    ],
)
def test_a_line_with_a_bad_field_is_no_record_and_the_report_says_why(
    change: dict[str, Any], says: str, tmp_path: pathlib.Path
) -> None:
    lines = [{"step": step, "grad_norm": 1.0} for step in range(20)]
    file = write(tmp_path / "a.jsonl", [*lines[:16], lines[16] | change, *lines[17:]])
    plain, as_json, *_ = ends(file, *COMMANDS)
    assert (f"line 17 is no record: {says}\n1 line is no record and was left out" in plain.stdout) == bool(says)
    found = json.loads(as_json.stdout)
    assert found["broken"] == ([17] if says else [])
    assert found["runs"][0]["steps"] == 20 - bool(says)
    assert ("1 lines of" in ends(file, COMMANDS[3])[0].stdout) == bool(says)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "gzip"])
def test_a_file_that_is_packed_is_read(encoding: str, tmp_path: pathlib.Path) -> None:
    plain = log(tmp_path / "plain.jsonl", steps=40, layers=50)
    file, text = tmp_path / "a.jsonl", plain.read_text()
    if encoding == "gzip":  # of two parts, as if a second run went on in it
        half = text.index("\n", len(text) // 2) + 1
        file.write_bytes(gzip.compress(text[:half].encode()) + gzip.compress(text[half:].encode("utf-8-sig")[3:]))
    else:
        file.write_bytes((("\ufeff" if encoding[-3:] in ("-le", "-be") else "") + text).encode(encoding))
    log_of, truth, tail = read(file), read(plain), Tail(file).read()
    assert (log_of.broken, log_of.half) == ({}, False)
    assert log_of.runs[0].records[-1] == truth.runs[0].records[-1]
    assert tail.steps == log_of.runs[0].steps == list(range(40))


def test_text_in_utf_16_is_followed_at_any_byte(tmp_path: pathlib.Path) -> None:
    whole = log(tmp_path / "plain.jsonl", steps=10, layers=2).read_text().encode("utf-16")
    file, tail = tmp_path / "a.jsonl", Tail(tmp_path / "a.jsonl")
    for end in (*range(2, len(whole), 333), len(whole)):
        file.write_bytes(whole[:end])
        found = tail.read()
    assert (found.steps, tail.broken) == (list(range(10)), 0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b'{"step": 0}\n' * 99, mtime=0)[:-9], "is a gzip file that is cut off or damaged"),
        (gzip.compress(b'{"step": 0}\n', mtime=0)[:20] + b"\xff" * 30, "is a gzip file that is cut off or damaged"),
        (b"PK\x03\x04\x14\0" + b"\x14" * 99, "is a binary file"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a binary file"),
        ('{"step": 0}\n'.encode("utf-16-le"), "text without a byte order mark that is not UTF-8"),
    ],
)
def test_what_a_file_is_that_holds_no_text(content: bytes, says: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    for made in (Tail(file).read, lambda: read(file)):
        with pytest.raises(UsageError, match=says):
            made()
    assert all(result.exit_code and says in result.stderr for result in ends(file, *COMMANDS))
