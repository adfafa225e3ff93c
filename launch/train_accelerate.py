"""The same with Hugging Face accelerate, which takes the engine from its configuration file.

accelerate launch --config_file launch/accelerate/fsdp2.yaml launch/train_accelerate.py
"""

from __future__ import annotations

import argparse
import json
import pathlib

import torch
from accelerate import Accelerator
from model import BATCH, Model, batch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, TensorDataset


@record  # the traceback of a rank that fails goes to its error.json, and the launcher shows it
def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--run", type=pathlib.Path, default=pathlib.Path("runs/example"))
    args = parser.parse_args()
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [batch(step) for step in range(args.steps)]
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    loader = DataLoader(data, batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    args.run.mkdir(parents=True, exist_ok=True)
    for step, (x, y) in enumerate(loader):
        loss = model(x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        if accelerator.is_main_process:
            with (args.run / "losses.jsonl").open("a") as file:
                print(json.dumps({"step": step, "loss": mean, "ranks": accelerator.num_processes}), file=file)
    accelerator.print(f"{accelerator.distributed_type}: loss {mean:.4f} after {args.steps} steps")
    del model, optimizer, loader, loss
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
