"""Two ranks of which one fails, in the way that its argument says for each attempt; the other waits for it."""

import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
ways = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
how = ways[min(attempt, len(ways) - 1)]


def fails():
    if how == "raises":
        raise KeyError("the batch of this rank")
    if how == "killed":
        os.kill(os.getpid(), 9)
    if how == "exits":
        sys.exit(3)


def waits():
    if how in ("raises", "killed"):
        dist.all_reduce(torch.ones(3))
    time.sleep(120)


if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
    dist.barrier()
rank = int(os.environ.get("RANK", "0"))
if how == "waits":
    pathlib.Path(f"ready.{rank}").touch()
    print("rank", rank, "waits", flush=True)
if rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
    time.sleep(0.5)
    fails()
waits()
