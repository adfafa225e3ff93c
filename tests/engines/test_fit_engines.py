"""``fit`` on engines: each rank keeps a budget of resident memory of its own, and gradients are the same bits."""

from __future__ import annotations

import contextlib
import gc
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import memory
from tests.support import needs
from tests.support.engines import flat
from tests.support.ranks.harness import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")]
WIDTH, ROWS, STEPS = 256, 2048, 8
# Of what a step needs without a budget, by rank.
SHARES = (0.75, 0.6, 0.9, 0.7)


class Wide(nn.Module):
    """Its saved tensors are more than 100 MB, its parameters 17 MB."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _wrapped(engine: str) -> Any:
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(Wide())
    if engine == "fsdp1":
        return flat(Wide(), engine, [f"blocks.{i}" for i in range(8)])
    if engine == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, mesh = Wide(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from tests.support.zero import engine_of

    return engine_of(int(engine[-1]), model=Wide(), accumulate=1)


def _trained(rank: int, engine: str, share: float | None, folder: str, free: int) -> dict[str, Any]:
    """Eight steps under a budget that leaves ``share`` of the ``free`` bytes that a step needs without one."""
    model = _wrapped(engine)
    step = (lambda loss: (model.backward(loss), model.step())) if engine.startswith("zero") else None
    optimizer = None if step else torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    gc.collect()
    begin = memory.resident()
    fitted: Any = contextlib.nullcontext()
    budget = begin + int((share or 1) * free)
    if share is not None:
        fitted = dh.fit(model, budget, dh.OnDisk(folder, in_flight="8 MiB"))
    peaks, losses = [], []
    with fitted:
        for _ in range(STEPS):
            memory.reset_peak_resident()
            loss = model(x).square().mean()
            if step is not None:
                step(loss)
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(memory.peak_resident())
            losses.append(loss.item())
            del loss
    return {"begin": begin, "budget": budget, "peaks": peaks, "losses": losses}


def _both(rank: int, engine: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    memory.release_promptly()
    _trained(rank, engine, None, folder, 0)  # what a process allocates once
    plain = _trained(rank, engine, None, folder, 0)
    return plain, _trained(rank, engine, SHARES[rank], folder, max(plain["peaks"]) - plain["begin"])


@pytest.mark.first_tier(engine=("ddp", "fsdp2"))
@pytest.mark.parametrize(
    "engine", ["ddp", "fsdp1", "fsdp2", *(pytest.param(f"zero{stage}", marks=needs("deepspeed")) for stage in (2, 3))]
)
def test_each_rank_keeps_its_budget(engine: str, ranks: Ranks, tmp_path: pathlib.Path) -> None:
    _assert_kept(ranks(_both, engine, str(tmp_path)))


def test_four_ranks(four: Ranks, tmp_path: pathlib.Path) -> None:
    _assert_kept(four(_both, "fsdp2", str(tmp_path)))


def _assert_kept(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for rank, (plain, fitted) in enumerate(found):
        free = max(plain["peaks"]) - plain["begin"]
        assert free > 100 << 20
        assert fitted["losses"] == plain["losses"]
        used = [(peak - fitted["begin"]) / (fitted["budget"] - fitted["begin"]) for peak in fitted["peaks"]]
        assert max(fitted["peaks"]) <= fitted["budget"], (rank, used)
        assert used[0] < 0.8, used
        assert max(used) > 0.8, used
