"""Laws 1, 2, 6, 11 and 20 where a model is cut through its layers (tensor parallelism) or between them (pipelines)."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks.engines.base import Shard
from disthooks.saved.hooks import SavedTensorHooks
from disthooks.saved.pipeline import pipeline
from tests.support.engines import close, whole
from tests.support.models import identical, stores, tokens
from tests.support.ranks.harness import Ranks
from tests.support.ranks.proof import FOUR, HOWS, KINDS, Train, numbers, run

pytestmark = pytest.mark.dist


class Attention(nn.Module):
    """As many heads as the linear layers give: a part of them on each rank of a tensor-parallel group."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Layers(nn.Module):
    """Two layers between an embedding and a head; or, as a stage of a pipeline, without the one or the other."""

    def __init__(self, first: bool = True, last: bool = True, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width) if first else nn.Identity()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, 50) if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Parts(NamedTuple):
    """What a test asserts of one pipeline."""

    identical: bool
    back: bool
    held: int
    weights_stored: int


GOOD = {kind: Parts(True, True, 0, 0) for kind in KINDS}


_make = SavedTensorHooks.make


def _storage(tensor: Any) -> int:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata


def _prove(make: Any, engine: Any, train: Train, how: str, folder: str) -> dict[str, Parts]:
    truth = run(make, engine, train, how, None)
    found = {}
    for kind, line in stores(folder).items():
        weights, stored = set[int](), set[int]()

        def note(module: nn.Module, _: Any, weights: set[int] = weights) -> None:
            # as the module sees it: gathered, if it is
            weights.add(_storage(module.weight))

        def taken(model: Any, note: Any = note) -> Any:
            model = engine(model)
            for part in getattr(model, "submod", model).modules():
                if isinstance(part, (nn.Linear, nn.LayerNorm)):
                    part.register_forward_pre_hook(note)
            return model

        def noted(hooks: Any, saved: Any, decision: Any, weights: set[int] = weights, stored: set[int] = stored) -> Any:
            if not decision.reason and _storage(saved.part) in weights:  # with a reason it is kept
                stored.add(_storage(saved.part))
            return _make(hooks, saved, decision)

        with mock.patch.object(SavedTensorHooks, "make", noted):
            results, report = run(make, taken, train, how, line)
        back = report.loaded + report.kept_by.get("in place", 0) > 100_000
        found[kind] = Parts(identical(results, truth.numbers), back, report.held, len(stored))
    return found


def _trainer(rank: int) -> Train:
    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        found = []
        for i in range(2):
            out = model(tokens(seed=10 * i + rank))
            getattr(out, "_local_tensor", out).square().mean().backward()
            optimizer.step()
            found += numbers(model)
            optimizer.zero_grad()
        return found

    return train


# --- tensor parallel


def _tensor_parallel(model: nn.Module, sequence: bool = False, mesh: Any = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = mesh or init_device_mesh("cpu", (2,))
    layout = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.out": RowwiseParallel(output_layouts=layout), "mlp.0": ColwiseParallel()}
    plan |= {"mlp.2": RowwiseParallel(output_layouts=layout)}
    if sequence:
        gather = PrepareModuleInput(input_layouts=(layout,), desired_input_layouts=(Replicate(),))
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gather, "mlp": gather}
        outside = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
            "head": ColwiseParallel(input_layouts=layout, output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, outside)
    for block in model.blocks:
        parallelize_module(getattr(block, "unwrapped", block), mesh, plan)
    return model


def _sequence_parallel(model: nn.Module) -> nn.Module:
    return _tensor_parallel(model, sequence=True)


def _tensor_and_data_parallel(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    _tensor_parallel(model, mesh=mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def _tensor(rank: int, engine: Callable[[nn.Module], nn.Module], how: str, folder: str) -> dict[str, Parts]:
    # the ranks of a tensor-parallel group are given the same batch
    return _prove(Layers, engine, _trainer(rank // 2), how, folder)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("engine", [_tensor_parallel, _sequence_parallel])
def test_tensor_parallel(ranks: Ranks, engine: Any, how: str, tmp_path: pathlib.Path) -> None:
    assert ranks(_tensor, engine, how, str(tmp_path)) == [GOOD, GOOD]


def _kept(rank: int, engine: Callable[[nn.Module], nn.Module], folder: str) -> tuple[int, int]:
    """Bytes of activations in the store, and of DTensors that were kept because nobody could look inside."""
    line = pipeline(dh.OnDisk(folder), at_least=0)
    report = run(Layers, engine, _trainer(0), "before", line).report
    return report.stored, report.kept_by.get("subclass", 0)


@pytest.mark.parametrize("engine", [_tensor_parallel, _sequence_parallel])
def test_the_local_part_of_an_activation_is_stored(ranks: Ranks, engine: Any, tmp_path: pathlib.Path) -> None:
    for stored, kept in ranks(_kept, engine, str(tmp_path)):
        assert stored > 1_000_000 > 10 * kept


@pytest.mark.full_tier(how=("before", "wrappers"))
@pytest.mark.parametrize("how", HOWS)
def test_tensor_parallel_and_sharded(how: str, tmp_path: pathlib.Path) -> None:
    assert FOUR(_tensor, _tensor_and_data_parallel, how, str(tmp_path)) == [GOOD] * 4


# --- pipelines: a rank has one stage, and several microbatches between their forward and their backward


def _stage_module(rank: int) -> nn.Module:
    return Layers(first=rank == 0, last=rank == 1)


def _stage(rank: int, model: nn.Module) -> Any:
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage(model, rank, 2, torch.device("cpu"))


def _train_stage(schedule: str) -> Train:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    kind = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[schedule]

    def train(stage: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)
        runner = kind(stage, 4, loss_fn=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()))
        found = []
        for i in range(2):
            batch, losses = tokens(seed=i, batch=8), []
            runner.step(batch) if stage.is_first else runner.step(target=batch, losses=losses)
            optimizer.step()
            found += [*numbers(stage.submod), *(loss.detach() for loss in losses)]
            optimizer.zero_grad()
        return found

    return train


def _stages(rank: int, schedule: str, how: str, folder: str) -> dict[str, Parts]:
    make, engine = functools.partial(_stage_module, rank), functools.partial(_stage, rank)
    return _prove(make, engine, _train_stage(schedule), how, folder)


@pytest.mark.parametrize("how", ["before", "wrappers"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_pipeline_stages(ranks: Ranks, schedule: str, how: str, tmp_path: pathlib.Path) -> None:
    assert ranks(_stages, schedule, how, str(tmp_path)) == [GOOD, GOOD]


# --- Gradients: sequence parallelism, transformers' ``tp_plan``, flattened meshes


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


def _sequence_parallel_plan(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

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
    """A function of one final gradient sees its sum over the ranks, too, not this rank's share of it."""
    from torch.distributed.device_mesh import init_device_mesh

    model = _sequence_parallel_plan(_whole_model(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    placements = {n: p.placements for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    seen: list[torch.Tensor] = []
    with dh.on_gradient(model, "1.norm.weight", lambda grad: seen.append(grad.to_local().clone())):
        _loss(model, _tokens(0)).backward()
        differ = [n for n, p in model.named_parameters() if p.grad.placements != placements[n]]  # type: ignore[union-attr]
        assert {"0.weight", "1.norm.weight", "2.bias"} <= set(differ), differ  # or this test would show nothing
        optimizer.step()
    _loss(alone := _whole_model(), _tokens(0)).backward()
    return [close(seen[0], alone.get_parameter("1.norm.weight").grad, 1e-11), *_same(rank, model, 1, 0)]


def test_gradients_that_lie_otherwise_than_their_parameters(ranks: Ranks) -> None:
    assert ranks(_sequences) == [[True] * 5] * 2


def _flattened(rank: int, shape: tuple[int, int, int]) -> list[Any]:
    """``dp_shard`` and ``cp`` flattened into one dimension for FSDP2, beside tensor parallelism; norms are not cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "cp", "tp"))
    model: Any = _whole_model()
    if shape[2] > 1:
        plan = {"1.up": ColwiseParallel(), "1.down": RowwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], plan)
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    for part in (model[1], model):
        fully_shard(part, mesh=flat)
    return _same(rank, model, 4 // shape[2], rank // shape[2])


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1)])
def test_a_flattened_dimension(four: Ranks, shape: tuple[int, int, int]) -> None:
    assert four(_flattened, shape) == [[True] * 4] * 4


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

    model = _sequence_parallel_plan(_whole_model(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    name, parameter = next(iter(model.named_parameters()))
    with pytest.raises(dh.errors.UsageError) as raised:
        Shard(name, parameter, True, "sharded", None)._as_parameter(torch.zeros(8))
    return str(raised.value)


def test_a_plain_gradient_of_a_dtensor_says_what_to_do(ranks: Ranks) -> None:
    for said in ranks(_plain_gradient):
        assert "'0.weight'" in said
        assert "the kind of its parameter, on the same device mesh" in said
