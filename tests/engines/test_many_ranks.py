"""Law 12 on thousands of ranks: as many collectives and bytes in a step as on two.

torch's fake process group stands in for the others: it takes part in every collective and moves nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.dist

COUNT = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import disthooks as dh
from disthooks import stats

world = int(sys.argv[1])
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)

def alone(state, bucket):  # DDP's own reduction reads an answer that the fake group does not give
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done

def made(engine):
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    if engine in ("ddp", "two optimizers"):
        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, alone)
    elif engine == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    return model

def count(engine):
    model, options, rules = made(engine), {}, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if engine == "two optimizers":  # of a stage of a pipeline
        parameters = list(model.parameters())
        optimizer = [torch.optim.SGD(parameters[::2], lr=0.1), torch.optim.AdamW(parameters[1::2])]
        options, rules = {"process_group": "world"}, [dh.SkipSpike()]
    watched = [stats.Norm(per_parameter=True), stats.MaxAbs(), stats.NonFinite()]
    start = time.process_time()
    rules += [dh.ClipValue(1.0), dh.AdaGC(), dh.only("*", dh.Scale(1.0))]
    watch = dh.gradients(model, optimizer, rules=rules, stats=watched, every=1, **options)
    seconds = time.process_time() - start
    true = dist.all_reduce

    def counted(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if group is not None and group is watch._runner.group:
            calls.append([str(op).split(".")[-1], tensor.numel() * tensor.element_size()])
        return true(tensor, op, group=group, async_op=async_op)

    for _ in range(2):
        calls = []
        model(torch.ones(2, 16)).sum().backward()
        watch.note_loss(1.0)
        dist.all_reduce = counted
        for each in watch.optimizers:
            each.step()
        dist.all_reduce = true
    report = watch.report()
    return {"calls": calls, "ranks": len(report.ranks), "bytes": report.bytes[1], "seconds": seconds}

print(json.dumps({engine: count(engine) for engine in ("ddp", "fsdp2", "hsdp", "two optimizers")}))
"""


def test_a_step_costs_the_same_on_16384_ranks() -> None:
    worlds = (2, 4096, 16384)
    running = [
        subprocess.Popen([sys.executable, "-c", COUNT, str(world)], stdout=subprocess.PIPE, text=True)
        for world in worlds
    ]
    two, *many = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in running]
    for engine, found in two.items():
        assert [op for op, _ in found["calls"]] == ["SUM", "MAX", "SUM"]
        assert sum(size for _, size in found["calls"]) == found["bytes"] > 0
        for world, other in zip(worlds[1:], (other[engine] for other in many), strict=True):
            assert other["ranks"] == world
            assert other["calls"] == found["calls"]
            assert other["seconds"] < 30  # of computing, to attach
