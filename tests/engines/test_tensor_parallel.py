"""Tensor parallelism as people write it: sequence parallelism, transformers' ``tp_plan``, flattened meshes.

Rules and statistics give what a single process in float64 gives.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.engines.shard import Shard
from tests.support.engines import close, whole
from tests.support.ranks.harness import Ranks

FOUR_RANKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _whole_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 8), Block(), nn.LayerNorm(8)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # no gradient is zero by symmetry
    return model


def _sequence_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1.norm": SequenceParallel(),
        "1.up": ColwiseParallel(input_layouts=Shard(1)),
        "1.down": RowwiseParallel(output_layouts=Shard(1)),
        "2": SequenceParallel(),
    }
    return parallelize_module(model, mesh, plan)


def _tokens(share: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(share))


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    out = model(tokens)
    out = out.full_tensor() if hasattr(out, "full_tensor") else out
    return (out * torch.linspace(0.1, 1.0, 8, dtype=out.dtype)).square().mean() * 30.0


def _steps(model: nn.Module, losses: Any, limit: float) -> tuple[list[float], dict[str, torch.Tensor], list[bool]]:
    """Two clipped steps: logged norms, the weights after them, and whether each gradient lay as its parameter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    norms, alike = [], []
    rules = [dh.only("*norm*", dh.ClipValue(0.5)), dh.ClipNorm(limit)]
    with dh.gradients(model, optimizer, rules=rules, stats=[dh.stats.Norm()], every=1) as watch:
        for step in range(2):
            model.zero_grad()
            losses(model, step).backward()
            optimizer.step()
            watch.flush()
            norms.append(watch.latest["grad_norm"])
            pairs = [(p, p.grad) for p in model.parameters() if p.grad is not None]
            alike += [getattr(p, "placements", None) == getattr(g, "placements", None) for p, g in pairs]
    return norms, {name: whole(p) for name, p in model.named_parameters()}, alike


def _mean_loss(model: nn.Module, step: int, shares: int) -> torch.Tensor:
    return torch.stack([_loss(model, _tokens(10 * step + share)) for share in range(shares)]).mean()


def _same(rank: int, model: nn.Module, shares: int, share: int) -> list[Any]:
    truth = _steps(_whole_model(), lambda m, step: _mean_loss(m, step, shares), 1.0)
    found = _steps(model, lambda m, step: _loss(m, _tokens(10 * step + share)), 1.0)
    return [
        truth[0][0] > 1.0,
        close(found[0], truth[0], 1e-11),
        close(list(found[1].values()), list(truth[1].values()), 1e-11),
        all(found[2]),
    ]


def _sequences(rank: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    model = _sequence_parallel(_whole_model(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    placements = {n: p.placements for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    _loss(model, _tokens(0)).backward()
    differ = [n for n, p in model.named_parameters() if p.grad.placements != placements[n]]  # type: ignore[union-attr]
    assert {"0.weight", "1.norm.weight", "2.bias"} <= set(differ), differ  # or this test would show nothing
    return _same(rank, model, 1, 0)


def test_gradients_that_lie_otherwise_than_their_parameters(ranks: Ranks) -> None:
    assert ranks(_sequences) == [[True] * 4] * 2


def _one_function(rank: int) -> list[Any]:
    """A function of one final gradient sees its sum over the ranks, not this rank's share of it."""
    from torch.distributed.device_mesh import init_device_mesh

    model = _sequence_parallel(_whole_model(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    seen: list[torch.Tensor] = []
    with dh.on_gradient(model, "1.norm.weight", lambda grad: seen.append(grad.to_local().clone())):
        _loss(model, _tokens(0)).backward()
        optimizer.step()
    alone = _whole_model()
    _loss(alone, _tokens(0)).backward()
    truth = alone.get_parameter("1.norm.weight").grad
    assert truth is not None
    return [close(seen[0], truth, 1e-11)]


def test_a_function_of_a_gradient_that_is_partial(ranks: Ranks) -> None:
    assert ranks(_one_function) == [[True]] * 2


def _flattened(rank: int) -> list[Any]:
    """``dp_shard`` and ``cp`` flattened into one dimension for FSDP2, beside tensor parallelism; norms are not cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_shard", "cp", "tp"))
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    model = _whole_model()
    plan = {"1.up": ColwiseParallel(), "1.down": RowwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    for part in (model[1], model):  # type: ignore[index]
        fully_shard(part, mesh=flat)
    return _same(rank, model, 2, rank // 2)


def _flattened_wide(rank: int) -> list[Any]:
    """Both dimensions that are flattened have two ranks, and tensor parallelism none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_shard", "cp", "tp"))
    model = _whole_model()
    fully_shard(model, mesh=mesh["dp_shard", "cp"]._flatten("dp_shard_cp"))
    return _same(rank, model, 4, rank)


@pytest.mark.parametrize("how", [_flattened, _flattened_wide])
def test_a_flattened_dimension(four: Ranks, how: Any) -> None:
    assert four(how) == [[True] * 4] * FOUR_RANKS


def _llama(rank: int, folder: str) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaForCausalLM

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    mesh = init_device_mesh("cpu", (2,))
    cut = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh)
    alone = LlamaForCausalLM.from_pretrained(folder).double()
    cut = cut.double()
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    found = _steps(cut, lambda m, step: m(ids + step, labels=ids).loss, 0.1)
    truth = _steps(alone, lambda m, step: m(ids + step, labels=ids).loss, 0.1)
    assert any(hasattr(p, "placements") for p in cut.parameters())
    return [
        truth[0][0] > 0.1,
        close(found[0], truth[0], 1e-5),
        close(list(found[1].values()), list(truth[1].values()), 1e-5),
        all(found[2]),
    ]


def test_transformers_tensor_parallel_plan(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=80, **sizes, **heads)).save_pretrained(tmp_path)
    assert ranks(_llama, str(tmp_path)) == [[True] * 4] * 2


def _plain_gradient(rank: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    model = _sequence_parallel(_whole_model(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    name, parameter = next(iter(model.named_parameters()))
    with pytest.raises(dh.errors.UsageError) as raised:
        Shard(name, parameter, True, "sharded", None)._as_parameter(torch.zeros(8))
    return str(raised.value)


def test_a_plain_gradient_of_a_dtensor_says_what_to_do(ranks: Ranks) -> None:
    for said in ranks(_plain_gradient):
        assert "'0.weight'" in said
        assert "the kind of its parameter, on the same device mesh" in said
