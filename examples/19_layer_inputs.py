"""Checkpoint each layer and move its input out of memory, with one line, under DDP and FSDP2."""

from __future__ import annotations

import os

import torch
from _torchrun import is_rank
from torch import nn

import disthooks as dh

LAYERS, ROWS, LENGTH, HIDDEN = 4, 4, 128, 256


def main(folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=512,
    )

    def train(engine: str, store: dh.OnDisk | None) -> tuple[list[torch.Tensor], int]:
        """The gradients of one step on this rank, and the bytes that were moved."""
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(config)
        model.gradient_checkpointing_enable()  # memory holds one input of each layer then
        saving = None if store is None else dh.save_activations(model, "model.layers.*", store)  # the one line
        if engine == "DDP":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        tokens = torch.randint(512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
        model(input_ids=tokens, labels=tokens).loss.backward()
        grads = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
        return grads, 0 if saving is None else saving.report().moved

    for engine in ("DDP", "FSDP2"):
        plain, _ = train(engine, None)
        grads, moved = train(engine, dh.OnDisk(folder))  # with the model on a GPU: dh.OnCpu()
        assert all(map(torch.equal, grads, plain))
        assert moved == LAYERS * ROWS * LENGTH * HIDDEN * 4  # float32: layers x tokens x hidden
        if dist.get_rank() == 0:
            print(
                f"{engine}: {moved / 2**20:.1f} MiB of layer inputs moved on each rank, gradients bit for bit the same"
            )
    dist.destroy_process_group()


if is_rank(__file__):
    main(os.environ["FOLDER"])
