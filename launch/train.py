"""An example for the launchers: trains a small model on any engine, and goes on from its checkpoint when restarted.

    launch/local.sh launch/train.py --engine fsdp2 --run runs/example

No line of it knows of disthooks: HOOKS=launch/hooks.yaml attaches it.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
from typing import Any

import torch
import torch.distributed as dist
from model import Block, Model, batch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["ddp", "fsdp1", "fsdp2", "deepspeed"], default="ddp")
    parser.add_argument("--deepspeed_config", default="launch/deepspeed/zero2.json", help="for --engine deepspeed")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--run", type=pathlib.Path, default=pathlib.Path("runs/example"))
    parser.add_argument(
        "--die", type=int, metavar="STEP", help="the last rank kills itself there, unless it was restarted"
    )
    parser.add_argument("--local_rank", type=int, help="what the deepspeed launcher says; LOCAL_RANK says it too")
    return parser.parse_args()


def take(engine: str, model: nn.Module, config: str) -> tuple[nn.Module, Any]:
    """The model as the engine runs it, and its optimizer."""
    if engine == "deepspeed":
        import deepspeed

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        taken, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return taken, optimizer
    taken = TAKE[engine](model)
    return taken, torch.optim.SGD(taken.parameters(), lr=0.1, momentum=0.9)


def fsdp1(model: nn.Module) -> nn.Module:
    """Each block in a unit of its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    device = next(model.parameters()).device
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, use_orig_params=True
    )


def fsdp2(model: nn.Module) -> nn.Module:
    """Each block in a unit of its own; the model stays the same object."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


TAKE = {"ddp": nn.parallel.DistributedDataParallel, "fsdp1": fsdp1, "fsdp2": fsdp2}
# DeepSpeed has checkpoints of its own (save_checkpoint); FSDP1's whole state crashes on the CPU (torch 2.13).
RESUMES = ("ddp", "fsdp2")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(path: pathlib.Path, step: int, model: nn.Module, optimizer: Any) -> None:
    """Whole tensors, so that another number of processes can load them; renamed when complete."""
    states = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save((step, *states), path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    dist.barrier()


def load(path: pathlib.Path, model: nn.Module, optimizer: Any) -> int:
    """The step to go on with: what rank 0 finds, on every rank, so that machines without a common disk agree."""
    found = [None]
    if dist.get_rank() == 0 and path.exists():
        found = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(found)  # torch 2.13's own broadcast_from_rank0 waits for ever here, with DDP on gloo
    if found[0] is None:
        return 0
    step, weights, state = found[0]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=WHOLE)
    return step


@record  # the traceback of a rank that fails goes to its error.json, and the launcher shows it
def main() -> None:
    """Train."""
    args = options()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model, optimizer = take(args.engine, Model().to(device), args.deepspeed_config)
    args.run.mkdir(parents=True, exist_ok=True)
    saved = args.run / "checkpoint.pt"
    first = load(saved, model, optimizer) if args.engine in RESUMES else 0
    for step in range(first, args.steps):
        loss = one_step(step, args.engine, model, optimizer, device)
        if dist.get_rank() == 0:
            with (args.run / "losses.jsonl").open("a") as file:
                print(json.dumps({"step": step, "loss": loss, "ranks": dist.get_world_size()}), file=file)
        if args.engine in RESUMES:
            save(saved, step + 1, model, optimizer)
        if step == args.die and first == 0 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    done = f"{saved} has all {first} steps already: --run names another folder"
    if first < args.steps:
        done = f"loss {loss:.4f} after {args.steps} steps"
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {done}", flush=True)
    del model, optimizer  # what holds the process group goes before it does
    dist.destroy_process_group()


def one_step(step: int, engine: str, model: nn.Module, optimizer: Any, device: torch.device) -> float:
    """The mean loss over all ranks."""
    x, y = (part.chunk(dist.get_world_size())[dist.get_rank()].to(device) for part in batch(step))
    loss = model(x, y)
    if engine == "deepspeed":
        model.backward(loss)
        model.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).item()


if __name__ == "__main__":
    main()
