"""What the watchers of a job say."""

from __future__ import annotations

import sys

import pytest

from disthooks.report.watch import watchers


def test_lines_of_one_message_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two writes another rank could write a line of its own."""
    written: list[str] = []

    class Stream:
        def write(self, text: str) -> None:
            written.append(text)

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Stream())
    monkeypatch.setenv("RANK", "1")
    watchers.say("one\ntwo")
    assert written == ["disthooks: rank 1: one\ntwo\n"]
