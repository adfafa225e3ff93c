"""``fit`` on engines: each rank keeps a budget of resident memory of its own, and gradients are the same bits."""

from __future__ import annotations

import contextlib
import gc
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

import disthooks as dh
from disthooks import memory
from disthooks.saved.cost import Rates
from disthooks.saved.fit import Fitted
from tests.support import needs
from tests.support.engines import flat
from tests.support.ranks.harness import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")]
WIDTH, ROWS, STEPS = 64, 8192, 8
# Of what a step needs without a budget, by rank.
SHARES = (0.75, 0.6, 0.9, 0.7)


class Joined(nn.Sequential):
    """Adds up its output over the ranks, as a layer of tensor parallelism does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed.nn.functional as functional

        return functional.all_reduce(super().forward(x)) / torch.distributed.get_world_size()


class Wide(nn.Module):
    """Its saved tensors are more than 100 MB, its parameters 1 MB, so that a step takes little time."""

    def __init__(self, is_checkpointed: bool = False, joined: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds = [nn.Sequential] * (8 - joined) + [Joined] * joined
        blocks = [
            kind(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for kind in kinds
        ]
        self.blocks = nn.ModuleList(map(CheckpointWrapper, blocks) if is_checkpointed else blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _wrapped(engine: str, is_checkpointed: bool) -> Any:
    model = Wide(is_checkpointed, joined=4 if engine == "ddp, joined" else 0)
    if engine.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(model)
    if engine == "fsdp1":
        return flat(model, engine, [f"blocks.{i}" for i in range(8)])
    if engine.startswith("fsdp2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for i, block in enumerate(model.blocks):
            if engine == "fsdp2 inside" and i > 3:
                fully_shard(block[1], mesh=mesh)
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from tests.support.zero import engine_of

    return engine_of(int(engine[-1]), model=model, accumulate=1)


def _trained(
    rank: int,
    engine: str,
    share: float | None,
    folder: str,
    free: int,
    is_checkpointed: bool = False,
    steps: int = STEPS,
    by: str = "bytes",
) -> dict[str, Any]:
    """Some steps under a budget that leaves ``share`` of the ``free`` bytes that a step needs without one.

    What is computed again is chosen ``by`` "bytes" alone, or by "seconds" of which moving takes none: no clock decides.
    """
    measured = Fitted._rates

    def rates(*args: Any) -> Rates | None:
        found = measured(*args) if by == "seconds" else None
        return None if found is None else replace(found, out=0.0, back=0.0)

    model = _wrapped(engine, is_checkpointed)
    step = (lambda loss: (model.backward(loss), model.step())) if engine.startswith("zero") else None
    optimizer = None if step else torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    gc.collect()
    begin = memory.resident()
    fitted: Any = contextlib.nullcontext()
    budget = begin + int((share or 1) * free)
    if share is not None:
        fitted = dh.fit(model, budget, dh.OnDisk(folder, in_flight="8 MiB"))
    peaks, losses, off, layers = [], [], [], (0, 0)
    with fitted, patch.object(Fitted, "_rates", rates), patch("disthooks.saved.computed_again._WORTH", 0.0):
        for _ in range(steps):
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
            off.append(fitted.report().checkpoints_off if share is not None else 0)
            del loss
        if share is not None:
            layers = (fitted.report().checkpoints, fitted.report().checkpoints_off)
    return {"begin": begin, "budget": budget, "peaks": peaks, "losses": losses, "layers": layers, "off": off}


def _both(
    rank: int,
    engine: str,
    folder: str,
    shares: Sequence[float] = SHARES,
    is_checkpointed: bool = False,
    steps: int = STEPS,
    by: str = "bytes",
) -> tuple[dict[str, Any], dict[str, Any]]:
    memory.release_promptly()
    _trained(rank, engine, None, folder, 0, steps=2)  # what a process allocates once
    plain = _trained(rank, engine, None, folder, 0, steps=steps)
    free = max(plain["peaks"]) - plain["begin"]
    return plain, _trained(rank, engine, shares[rank], folder, free, is_checkpointed, steps, by)


@pytest.mark.full_tier(engine=("fsdp1", "zero2", "zero3"))
@pytest.mark.parametrize(
    "engine", ["ddp", "fsdp1", "fsdp2", *(pytest.param(f"zero{stage}", marks=needs("deepspeed")) for stage in (2, 3))]
)
def test_each_rank_keeps_its_budget(engine: str, ranks: Ranks, tmp_path: pathlib.Path) -> None:
    _assert_kept(ranks(_both, engine, str(tmp_path)))


@pytest.mark.full_tier
def test_four_ranks(four: Ranks, tmp_path: pathlib.Path) -> None:
    _assert_kept(four(_both, "fsdp2", str(tmp_path)))


@pytest.mark.full_tier(engine=("ddp", "fsdp1", "zero2", "zero3"))
@pytest.mark.full_tier(by=("seconds",))
@pytest.mark.parametrize(
    ("engine", "layers", "by"),
    [
        ("ddp", 8, "bytes"),
        ("ddp, joined", 4, "bytes"),  # the second computation of the others is a collective
        ("fsdp1", 8, "bytes"),
        ("fsdp2 inside", 4, "bytes"),  # of the others the second computation gathers weights
        *(pytest.param(f"zero{stage}", 0 if stage == 3 else 8, "bytes", marks=needs("deepspeed")) for stage in (2, 3)),
        *((engine, layers, "seconds") for engine, layers in (("ddp", 8), ("ddp, joined", 4), ("fsdp2 inside", 4))),
    ],
)
def test_each_rank_switches_checkpoints_off_by_itself(
    engine: str, layers: int, by: str, ranks: Ranks, tmp_path: pathlib.Path
) -> None:
    """By seconds where moving costs nothing, no checkpoint is on that can be off, whatever room a rank has."""
    found = ranks(_both, engine, str(tmp_path), (0.7, 1.3), True, STEPS * (2 if by == "seconds" else 1), by)
    for plain, fitted in found:
        assert fitted["losses"] == plain["losses"]
        assert max(fitted["peaks"]) <= fitted["budget"]
        assert fitted["layers"][0] == layers
        assert by != "seconds" or layers in fitted["off"]
    if by == "seconds":
        return
    tight, wide = (fitted["layers"][1] for _, fitted in found)
    assert (0 < tight < wide) or not layers
    assert wide == layers


def _assert_kept(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for rank, (plain, fitted) in enumerate(found):
        free = max(plain["peaks"]) - plain["begin"]
        assert free > 100 << 20
        assert fitted["losses"] == plain["losses"]
        used = [(peak - fitted["begin"]) / (fitted["budget"] - fitted["begin"]) for peak in fitted["peaks"]]
        assert max(fitted["peaks"]) <= fitted["budget"], (rank, used)
        assert used[0] < 0.8, used
        assert max(used) > 0.8, used
