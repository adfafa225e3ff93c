"""One small model trained on the same global batch by every engine, so that results can be compared."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh
from tests.support.replicas import data_parallel

BATCH = 8
ENGINES = ["ddp", "fsdp2", "hsdp", "fsdp1", "fsdp1flat"]
#: Those of the first tier; ZeRO-2 has files of its own.
FIRST = ("plain", "dp", "ddp", "fsdp2")
BOTH = [0, 1]


@contextlib.contextmanager
def unsynced(model: Any, wanted: bool = True) -> Iterator[None]:
    """No reduction of gradients in the backwards inside, in the engine's own way; if not ``wanted``, nothing."""
    if not wanted:
        yield
    elif hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        yield


class Fork(nn.Module):
    """One rank may leave ``left`` without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.right(x) + (self.left(x) if both else 0)


class Net(nn.Module):
    """Sizes that do not divide by two, a parameter of one row (an empty shard on rank 1), a scalar's worth of scale,
    and a projection that is used without its module being called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 7)
        self.mid = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 5), nn.GELU())
        self.scale = nn.Parameter(torch.full((1, 5), 1.5))
        self.head = nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mid(self.embed(x)) * self.scale
        return nn.functional.linear(x, self.head.weight)


def where() -> str:
    """The kind of device that tensors are made on."""
    return torch.get_default_device().type


def data(step: int) -> torch.Tensor:
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))


def make(engine: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = Net().to(dtype)
    if engine == "plain":
        return model
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if engine == "dp":
        return data_parallel(model)
    return flat(model, engine) if engine.startswith("fsdp1") else sharded(model, engine)


def sharded(model: Any, engine: str = "fsdp2", shape: tuple[int, ...] = (), **options: Any) -> nn.Module:
    """FSDP2 on a mesh of ``shape``; of two ranks if none is given."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = shape or {"fsdp2": (2,), "hsdp": (2, 1), "hsdp12": (1, 2)}[engine]
    mesh = init_device_mesh(where(), shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fully_shard(model.mid, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


STRATEGIES = {
    "": "FULL_SHARD",
    "op": "SHARD_GRAD_OP",
    "none": "NO_SHARD",
    "hybrid": "HYBRID_SHARD",
}


def flat(model: nn.Module, engine: str = "fsdp1", parts: Sequence[str] = ("mid",), **options: Any) -> nn.Module:
    """FSDP1 with ``parts`` in units of their own: "fsdp1", or "fsdp1flat", and a strategy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy")
    strategy = STRATEGIES[engine.removeprefix("fsdp1").removeprefix("flat")]
    if "HYBRID" in strategy and "device_mesh" not in options:
        options["device_mesh"] = init_device_mesh(where(), (1, 2), mesh_dim_names=("replicate", "shard"))
    chosen = {"use_orig_params": "flat" not in engine, "sharding_strategy": ShardingStrategy[strategy]} | options
    wrap = functools.partial(FullyShardedDataParallel, device_id=torch.get_default_device(), **chosen)
    for part in parts:
        model.set_submodule(part, wrap(model.get_submodule(part)))
    return wrap(model)


def loss_of(model: nn.Module, step: int, engine: str, rank: int = 0, scale: float = 100.0) -> torch.Tensor:
    """Mean over this rank's half of the batch; both halves' mean is that of the whole."""
    x = data(step).to(next(model.parameters()).dtype)
    if engine not in ("plain", "dp"):
        x = x.chunk(2)[rank]
    return model(x).square().mean() * scale


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; a collective when it is a DTensor."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    if is_fsdp1(model):
        return gathered(model)
    named = model.module.named_parameters() if hasattr(model, "module") else model.named_parameters()
    return {name: whole(p.grad) for name, p in named if p.grad is not None}


def is_fsdp1(model: nn.Module) -> bool:
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """All of the gradients of a model that FSDP1 has: a collective for each of its units, of torch's alone."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        handle = vars(module).get("_handle")
        if handle is None or handle.flat_param.grad is None:
            continue
        flat = handle.flat_param
        whole = flat.grad
        if handle.uses_sharded_strategy:
            whole = torch.empty(flat.grad.numel() * handle.world_size, dtype=flat.grad.dtype)
            dist.all_gather_into_tensor(whole, flat.grad.contiguous(), group=handle.process_group)
        whole = whole[: flat._unpadded_unsharded_size.numel()]
        for name, grad in zip(flat._fqns, handle._get_unflat_views(whole), strict=True):
            found[f"{prefix}.{name}".replace("_fsdp_wrapped_module.", "").lstrip(".")] = grad.detach().clone()
    apart = [(n, p) for n, p in model.named_parameters() if not hasattr(p, "_fsdp_flattened") and p.grad is not None]
    return found | {n.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for n, p in apart}


def first_of(model: nn.Module, name: str) -> torch.Tensor | None:
    """Under FSDP1 a view of the gradient whose first element is the parameter's first, on the ranks that have that."""
    for prefix, module in model.named_modules():
        flat = getattr(vars(module).get("_handle"), "flat_param", None)
        for fqn, here in zip(flat._fqns, flat._shard_param_infos, strict=True) if flat is not None else ():
            if f"{prefix}.{fqn}".replace("_fsdp_wrapped_module.", "").lstrip(".") == name:
                return flat.grad[here.offset_in_shard :] if here.in_shard and not here.intra_param_start_idx else None
    raise AssertionError(name)


def train(
    rank: int,
    engine: str,
    rules: Sequence[object] = (),
    stats: Sequence[object] = (),
    steps: int = 2,
    spoil: Callable[[nn.Module, int, int], None] | None = None,
    dtype: torch.dtype = torch.float32,
    groups: Mapping[str, Any] | None = None,
    optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Train a little; the record of each step, and the gradients that the last one used."""
    model = make(engine, dtype)
    optimizer = optimizer_of(model.parameters(), lr=0.01)
    records = []
    with dh.gradients(model, optimizer, rules=rules, stats=stats, every=1, groups=groups) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step, engine, rank).backward()
            if spoil is not None:
                spoil(model, step, rank)
            optimizer.step()
            watch.flush()
            records.append(dict(watch.latest))
    return records, grads_of(model)


def close(found: object, truth: object, tolerance: float = 1e-6) -> bool:
    """Equal, with numbers to within a relative tolerance, in whatever they are nested."""
    if isinstance(truth, dict):
        return found.keys() == truth.keys() and all(close(found[k], truth[k], tolerance) for k in truth)
    if isinstance(truth, (list, tuple)):
        return len(found) == len(truth) and all(map(lambda a, b: close(a, b, tolerance), found, truth))
    if isinstance(truth, torch.Tensor):
        return torch.allclose(found, truth, rtol=tolerance, atol=tolerance * float(truth.abs().max()), equal_nan=True)
    if isinstance(truth, float):
        return math.isclose(found, truth, rel_tol=tolerance) or (math.isnan(found) and math.isnan(truth))
    return found == truth


def all_reduces(count: list[tuple[str, int]]) -> Callable[..., Any]:
    """A stand-in for ``dist.all_reduce`` that writes down what was reduced, but for what the engine reduces."""
    true = dist.all_reduce

    def counted(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        if not any(
            frame.filename.endswith(("_fsdp_collectives.py", "_fsdp_param_group.py", "fsdp/_runtime_utils.py"))
            for frame in inspect.stack()
        ):
            count.append((str(op).split(".")[-1], tensor.numel()))
        return true(tensor, op, *args, **kwargs)

    return counted
