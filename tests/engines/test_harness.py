"""The harness itself: it computes over ranks, relays errors, and survives a hang and a death."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks.harness import RankError, Ranks

pytestmark = pytest.mark.dist


def _total(rank: int, factor: int) -> float:
    tensor = torch.tensor(float(rank + 1) * factor)
    dist.all_reduce(tensor)
    return tensor.item()


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("only rank 1")
    dist.barrier()


def _hang(rank: int) -> None:
    time.sleep(1000)


def _die(rank: int) -> None:
    os._exit(7)


@pytest.mark.parametrize(("function", "says"), [(_fail_on_one, "only rank 1"), (_hang, "_hang"), (_die, "exit code 7")])
def test_a_bad_rank_is_reported_and_replaced(function: object, says: str) -> None:
    pool = Ranks(timeout=120.0)  # on a busy machine new processes take long to import torch
    pool(_total, 1)
    with pytest.raises(RankError, match=says):
        pool(function, timeout=2.0 if function is _hang else None)
    assert pool(_total, 1) == [3.0, 3.0]
    pool.stop()
