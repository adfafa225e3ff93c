"""DeepSpeed engines for tests of gradients: one model, its global batch, and the truth in a single process."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh
from disthooks.engines.detect import detect_engine
from tests.support import is_ours
from tests.support.engines import data

LR = 0.1
HALVES = {"bf16": torch.bfloat16, "bf16 in fp32": torch.bfloat16, "fp16": torch.float16}


class Shared(nn.Module):
    """Sizes that do not divide by two, a scalar (empty on rank 1 at stage 3), a frozen parameter and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 7)
        self.gain = nn.Parameter(torch.full((1,), 1.5))
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 7), requires_grad=False)
        self.mid = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 5), nn.GELU())
        self.head = nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(torch.tanh(self.head(self.mid(self.embed(x) * self.frozen) * self.gain)))


def engine_of(stage: int, dtype: str = "fp32", model: nn.Module | None = None, **zero: Any) -> Any:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    type(get_accelerator()).is_fp16_supported = lambda self: True  # torch's CPU kernels do; DeepSpeed asks for oneDNN's
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": zero.pop("accumulate", 2),
        "gradient_clipping": zero.pop("gradient_clipping", 0.0),
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000, **zero},
        "bf16": {"enabled": dtype.startswith("bf16")},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 8, "hysteresis": 1},
        "data_types": {"grad_accum_dtype": "fp32"} if dtype == "bf16 in fp32" else {},
        "torch_autocast": {"enabled": dtype == "autocast", "dtype": "float16"},
    }
    torch.manual_seed(0)
    return deepspeed.initialize(model=model or Shared(), config=config, dist_init_required=False)[0]


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """Whole weights, the masters where there are some; a collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    masters = _masters(engine.optimizer)
    found = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = masters.get(id(parameter))
        if whole is None and (parameter.dtype != torch.float32 or hasattr(parameter, "ds_id")):
            whole = safe_get_full_fp32_param(parameter)  # wrong with round_robin_gradients: not used where it may be
        found[name] = (parameter if whole is None else whole).detach().double().clone()
    return found


def _masters(optimizer: Any) -> dict[int, torch.Tensor]:
    if not hasattr(optimizer, "fp32_groups"):  # of stage 0 in bfloat16
        return {}
    pairs = [
        (p, m)
        for ps, ms in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for p, m in zip(ps, ms, strict=True)
    ]
    return {id(parameter): master for parameter, master in pairs}


def loss_of(model: Any, batch: int, rank: int | None) -> torch.Tensor:
    """Of the whole batch; of this rank's half, whose mean with the other's it is."""
    x = data(batch) if rank is None else data(batch).chunk(2)[rank]
    return model(x.to(next(model.parameters()).dtype)).double().square().mean() * 30


def step(engine: Any, rank: int, batches: Sequence[int] = (0, 1)) -> dict[str, torch.Tensor]:
    """One step of two micro-batches; what it did to the weights, as a gradient (momentum is forgotten first)."""
    before = weights_of(engine)
    _forget(engine)
    for batch in batches:
        engine.backward(loss_of(engine, batch, rank).float())
        engine.step()
    return {name: (before[name] - after) / LR for name, after in weights_of(engine).items()}


def _forget(engine: Any) -> None:
    for state in engine.basic_optimizer.state.values():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"].zero_()


def truth(
    weights: dict[str, torch.Tensor],
    rules: Sequence[Any] = (),
    stats: Sequence[Any] = (),
    half: torch.dtype | None = None,
    batches: Sequence[int] = (0, 1),
    grads: dict[str, torch.Tensor] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The gradients that a single process uses, and what it logs; of ``grads``, if given, and not of the batches."""
    model = Shared().double()
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.data = weights[name].to(half or torch.float64).double()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for batch in batches:
        (loss_of(model, batch, None) / len(batches)).backward()
    for name, parameter in model.named_parameters():
        if grads is not None and name in grads:
            parameter.grad = grads[name].clone()
    record: dict[str, Any] = {}
    if rules or stats:
        with dh.gradients(model, optimizer, rules=rules, stats=stats, every=1) as watch:
            optimizer.step()
        record = watch.latest
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, record


def kept(engine: Any, into: dict[str, torch.Tensor]) -> Any:
    """Have whole final gradients in the user's units written down before each step; gives a handle."""
    ours = detect_engine(engine)

    def look(optimizer: Any) -> None:
        for shard in ours.shards:
            if not shard.parameter.requires_grad:
                continue
            assert shard.part is not None
            whole, grad = torch.zeros(shard.part.shape.numel(), dtype=torch.float64), shard.gradient()
            if grad is not None:
                scaled = grad.flatten().double() / (ours.gradient_scale() or 1.0)
                whole[shard.part.indices(grad.device).flatten()] = scaled
            if shard.sharding == "sharded":
                dist.all_reduce(whole)
            into[shard.name] = whole.view(shard.part.shape)

    return ours.before_any_step(look)


def near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> bool:
    """Every element to within a part of the largest of all."""
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    return found.keys() == wanted.keys() and all(
        float((found[name] - wanted[name]).abs().max()) <= tolerance * largest for name in wanted
    )


def norm(grads: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))


def our_all_reduces(count: list[str]) -> Callable[..., Any]:
    """A stand-in for ``dist.all_reduce`` that writes down what disthooks reduces, beside DeepSpeed."""
    true = dist.all_reduce

    def counted(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        if is_ours(sys._getframe(1).f_code):
            count.append(str(op).split(".")[-1])
        return true(tensor, op, *args, **kwargs)

    return counted
