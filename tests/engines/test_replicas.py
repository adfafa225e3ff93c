"""check_replicas() on real ranks: one bit on one of them is found and named, in one collective when all is well."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.report.watch.replicas import ReplicaReport
from tests.support.engines import all_reduces, loss_of, make
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    """Change the lowest bit of the first element here."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    local.view(-1)[:1].view(torch.uint8)[0] ^= 1 << bit


def trained(rank: int, engine: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, engine if engine != "hsdp22" else "fsdp2", rank % 2).backward()
        optimizer.step()
    return model, optimizer


def _found(report: ReplicaReport) -> tuple[Any, ...]:
    return report.ok, report.compared, [(d.name, d.ranks, d.copies) for d in report.differs]


def _three_steps(rank: int, engine: str) -> list[Any]:
    """Before anything, after one bit of a parameter, and after one bit of a moment; on rank 1."""
    model, optimizer = trained(rank, engine)
    calls: list[tuple[str, int]] = []
    found: list[Any] = []
    with mock.patch.object(dist, "all_reduce", all_reduces(calls)):
        found.append(_found(dh.check_replicas(model, optimizer)))
    weight = dict(model.named_parameters())["module.mid.1.weight" if engine == "ddp" else "mid.1.weight"]
    for tensor in (weight, optimizer.state[weight]["exp_avg"]):
        if rank == 1:
            flip(tensor)
        found.append(_found(dh.check_replicas(model, optimizer)))
        if rank == 1:
            flip(tensor)
    optimizer.state[weight]["step"] += rank
    found.append(_found(dh.check_replicas(model, optimizer)))
    return [*found, calls]


@pytest.mark.parametrize("engine", ["ddp", "hsdp"])
def test_one_bit_on_one_rank_is_named(ranks: Ranks, engine: str) -> None:
    for equal, weight, moment, step, calls in ranks(_three_steps, engine):
        assert equal == (True, 32, [])  # 8 parameters, with step and two moments each
        assert weight == (False, 32, [("mid.1.weight", (0, 1), 2)])
        assert moment == (False, 32, [("mid.1.weight: exp_avg", (0, 1), 2)])
        assert step == (False, 32, [("mid.1.weight: step", (0, 1), 2)])
        assert calls == [("SUM", 2 * 513)]  # int64: 8 KiB


def _apart(rank: int) -> list[Any]:
    """FSDP2 was told to leave a parameter alone."""
    from torch.distributed.fsdp import fully_shard

    model = make("plain")
    fully_shard(model, ignored_params={model.scale})
    found = [_found(dh.check_replicas(model))]
    if rank == 1:
        flip(model.scale)
    return [*found, _found(dh.check_replicas(model))]


def test_a_plain_parameter_beside_sharded_ones(ranks: Ranks) -> None:
    assert ranks(_apart) == [[(True, 1, []), (False, 1, [("scale", (0, 1), 2)])]] * 2


def _plain(rank: int) -> list[Any]:
    """Each rank has a model of its own; somebody forgot DDP, and rank 1 made another step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    found = [_found(dh.check_replicas(model))]
    model(torch.full((4, 3), float(rank)))
    found += [_found(dh.check_replicas(model)), _found(dh.check_replicas(model, buffers=True))]
    alone = dh.check_replicas(model, ranks=[rank])
    return [*found, alone.compared, alone.ranks]


def test_plain_modules_are_compared_over_the_world(ranks: Ranks) -> None:
    for rank, (before, parameters, buffers, compared, alone) in enumerate(ranks(_plain)):
        assert before == (True, 4, [])
        assert parameters == (True, 4, [])
        assert buffers == (False, 7, [("1.running_mean", (0, 1), 2)])
        assert (compared, alone) == (0, (rank,))


def _other_models(rank: int, what: str) -> str:
    model: nn.Module = nn.Linear(2, 3 if what == "shape" and rank else 2)
    if what == "dtype" and rank:
        model = model.bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    if what == "state" and rank:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    if what == "count" and rank:
        model = nn.Sequential(model, *(nn.Linear(1, 1) for _ in range(600)))
    try:
        dh.check_replicas(model, optimizer if what == "state" else None)
    except UsageError as error:
        return str(error)
    return "compared"


@pytest.mark.parametrize("what", ["shape", "dtype", "state", "count"])
def test_ranks_with_other_tensors_get_an_error_and_do_not_hang(ranks: Ranks, what: str) -> None:
    one, other = ranks(_other_models, what)
    assert one == other
    assert "ranks 0 and 1 hold tensors of different names, shapes or dtypes" in one


def test_arguments_that_cannot_work(ranks: Ranks) -> None:
    assert all("ranks= is for plain modules: DDP knows" in told for told in ranks(_refused, "ddp"))
    with pytest.raises(UsageError, match=r"ranks=\[0, 5\]: this is rank 0 of 1"):
        dh.check_replicas(nn.Linear(1, 1), ranks=[0, 5])
    with pytest.raises(UsageError, match=r"'scale' cannot be compared: its Tensor is sparse"):
        dh.check_replicas(Sparse(), buffers=True)


class Sparse(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.eye(2).to_sparse())


def _refused(rank: int, engine: str) -> str:
    try:
        return str(dh.check_replicas(make(engine), ranks=[0, 1]))
    except UsageError as error:
        return str(error)


# --- four ranks


def _four(rank: int) -> list[Any]:
    """HSDP of two by two: ranks 0 and 2 have the same, and so have 1 and 3. Under DDP, all four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make("plain")
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    found = [_found(dh.check_replicas(model))]
    if rank == 3:
        flip(model.embed.weight)
    found.append(_found(dh.check_replicas(model)))
    copied = make("ddp")
    if rank < 2:
        flip(copied.module.scale, bit=rank)
        flip(copied.module.head.weight)
    if rank == 2:
        flip(copied.module.embed.bias)
    report = dh.check_replicas(copied)
    return [*found, _found(report)[-1], str(report)]


def test_four_ranks_in_a_grid_and_in_a_row(four: Ranks) -> None:
    for equal, spoilt, copied, text in four(_four):
        assert equal == (True, 8, [])
        assert spoilt == (False, 8, [("embed.weight", (1, 3), 2)])
        # What most ranks have counts as right; of a tie nothing does.
        assert copied == [("scale", (0, 1), 4), ("embed.bias", (2,), 4), ("head.weight", (0, 1, 2, 3), 4)]
        assert "DDP, 4 ranks: 3 of 8 tensors differ" in text
        assert "  embed.bias differs on rank 2 (float32, 7; 3 of 4 copies are the same)" in text
        assert "  scale differs on ranks 0, 1 (float32, 1 x 5; no majority: 2 of 4 copies are the same)" in text
        tie = "ranks 0, 1, 2 and 3 differ, and nothing says which is right (float32, 3 x 5; 2 of 4 copies are the same)"
        assert f"  head.weight: {tie}" in text


# --- 4,096 ranks, of which one is real


def test_as_many_collectives_and_bytes_on_4096_ranks() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    calls: list[tuple[str, int]] = []
    counted = all_reduces(calls)

    def equal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        counted(tensor, *args, **kwargs)
        tensor.zero_()  # what the sum over ranks that agree comes to; the fake group leaves this rank's own

    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=4096)
    try:
        model = make("ddp")
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with (
            mock.patch.object(dist, "all_reduce", equal),
            mock.patch.object(dist, "all_gather", side_effect=AssertionError),
        ):
            report = dh.check_replicas(model, optimizer)
    finally:
        dist.destroy_process_group()
    assert report.ok
    assert len(report.ranks) == 4096
    assert calls == [("SUM", 2 * 513)]


# --- engines whose parts are ranges of flat parameters


def _flat(rank: int, engine: str) -> list[Any]:
    """Before and after an element of a moment changes on rank 1; and what is said."""
    model = make(engine)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, 0, engine, rank).backward()
    optimizer.step()
    before = dh.check_replicas(model, optimizer)
    if rank == 1:
        getattr(moment := next(iter(optimizer.state.values()))["exp_avg"], "_local_tensor", moment).view(-1)[:1] += 1
    return [_found(before), _found(dh.check_replicas(model, optimizer)), str(before)]


@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat"))
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "fsdp1flat"])
def test_what_has_no_copies_is_never_silently_ok(ranks: Ranks, engine: str) -> None:
    for *found, said in ranks(_flat, engine):
        assert found == [(False, 0, [])] * 2
        assert said.endswith("2 ranks: 0 tensors are replicated; nothing to compare")
