"""Accelerate on two CPU processes: every engine that it prepares, on a small Llama made from a configuration."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

LIMIT = 0.1
ENGINES = ["ddp", "fsdp1", "fsdp2"]
os.environ["HF_HUB_OFFLINE"] = "1"


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes))


def tokens(step: int, rank: int) -> dict[str, torch.Tensor]:
    x = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"input_ids": x, "labels": x}


@contextlib.contextmanager
def surroundings(engine: str) -> Iterator[None]:
    """What ``accelerate launch`` with a YAML for ``engine`` would have prepared; the process group is there already.

    FSDP on a machine without GPUs takes two liberties: the device by a variable of Accelerate's own, and gloo where
    it knows of no backend.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    variables = {"ACCELERATE_TORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    if engine == "zero":
        variables["ACCELERATE_USE_DEEPSPEED"] = "true"
    before = {name: os.environ.get(name) for name in (*variables, "ACCELERATE_USE_FSDP")}
    backend = PartialState._prepare_backend
    os.environ.update(variables)
    if engine.startswith("fsdp"):
        PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        PartialState._prepare_backend = backend
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def accelerator(engine: str, **options: Any) -> Iterator[Any]:
    """An ``Accelerator`` for ``engine``."""
    from accelerate import Accelerator

    if engine.startswith("fsdp"):
        options["fsdp_plugin"] = _plugin(int(engine[4]), engine.endswith("ac"))
    with surroundings(engine):
        options |= _zero() if engine == "zero" else {}
        yield Accelerator(cpu=engine in ("ddp", "one"), **options)


def _plugin(version: int, checkpointing: bool) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=checkpointing,
        state_dict_type="SHARDED_STATE_DICT",
        **({"use_orig_params": True} if version == 1 else {}),
    )


def _zero() -> dict[str, Any]:
    import deepspeed
    from accelerate import DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": LIMIT,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
        "disthooks": {"watch": {"every": 1, "stats": [{"kind": "Norm"}], "rules": [{"kind": "Scale", "factor": 0.5}]}},
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    return {"deepspeed_plugin": plugin, "kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}


def step(acc: Any, model: nn.Module, optimizer: Any, number: int, rank: int) -> tuple[float, float]:
    """One step of a loop as users write it; the loss, and the norm that Accelerate clipped by."""
    with acc.accumulate(model):
        loss = model(**tokens(number, rank)).loss
        acc.backward(loss)
        norm = acc.clip_grad_norm_(model.parameters(), LIMIT) if acc.sync_gradients else torch.tensor(0.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All of every parameter. (FSDP1's whole state_dict kills the process where there are no GPUs, hooks or not.)"""
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    gathered = Fsdp.summon_full_params(model, writeback=False) if isinstance(model, Fsdp) else contextlib.nullcontext()
    with gathered:
        whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
        return {name: tensor.detach().clone() for name, tensor in whole.items()}


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """What disthooks warned of."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught if "disthooks" in str(w.message)]


def tracker(rows: list[tuple[dict[str, Any], int | None]]) -> Any:
    """A tracker of the script's own, which keeps what it is given."""
    from accelerate.tracking import GeneralTracker

    class Tracker(GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory, tracker = "list", False, None

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            rows.append((values, step))

    return Tracker()
