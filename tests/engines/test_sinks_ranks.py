"""Sinks where there are several ranks: the first opens them, and what it cannot open stops all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks import stats
from disthooks.errors import DisthooksError
from tests.support.engines import loss_of, make
from tests.support.logs import Said
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist


def _lives(rank: int) -> tuple[list[Any], list[Any]]:
    model = make("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    whole, early = Said(), Said()
    with dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[whole], every=1):
        loss_of(model, 0, "ddp", rank).backward()
        optimizer.step()
    try:
        dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[early, Said(fails="open")])
    except (OSError, dh.errors.AttachError) as error:
        early.said += [type(error).__name__, str(error)]
    try:
        dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[early], every=rank + 1)
    except dh.errors.AttachError as error:
        early.said.append(type(error).__name__)
    return whole.said, early.said


def test_the_first_rank_alone_opens_and_closes(ranks: Ranks) -> None:
    first, second = ranks(_lives)
    assert first == (
        ["open", 0, "close"],
        ["open", "close", "OSError", "open: disk full", "open", "close", "AttachError"],
    )
    whole, (kind, told, last) = second
    assert (whole, kind, last) == ([], "AttachError", "AttachError")
    assert "rank 0 could not open its sinks" in told


def _sink(rank: int) -> str:
    def full(record: dict[str, Any]) -> None:
        raise OSError("disk full")

    model = make("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = dh.gradients(model, optimizer, stats=[stats.Norm()], sinks=[full], every=1)
    said = "fine"
    try:
        for step in range(3):
            loss_of(model, step, "ddp", rank).backward()
            optimizer.step()
    except (OSError, DisthooksError) as error:  # a rank that handles its error
        said = str(error)
    watch._records._pending = None
    watch.remove()
    return said


def test_a_sink_that_fails_on_the_first_rank_stops_no_other(ranks: Ranks) -> None:
    ranks(_sink, timeout=300)
