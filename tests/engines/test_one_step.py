"""Laws 11, 12 and 16 for what steps together: several optimizers, stages of a pipeline, experts of each rank."""

from __future__ import annotations

import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.errors import AttachError, MatchError, UsageError
from disthooks.grads.attachment import Gradients
from disthooks.run.session import Session
from tests.support.engines import FIRST, close, whole
from tests.support.ranks.harness import Ranks
from tests.support.ranks.truth import make

pytestmark = pytest.mark.dist

WATCHED = [stats.Norm(per_parameter=True), stats.MaxAbs(), stats.Moments(), stats.Zeros(), stats.NonFinite()]
WATCHED += [stats.Weights(), stats.Updates(per_parameter=True)]
#: What one process logs otherwise: a rank's name, and the mean of gradients that add up to nothing.
UNLIKE = ("_rank", "rank", "nonfinite_at")


def rules() -> list[Any]:
    return [dh.SkipNonFinite(), dh.only("*bias", dh.ClipValue(0.2)), dh.ClipNorm(0.5)]


def alike(found: dict[str, Any], truth: dict[str, Any], tolerance: float = 1e-10) -> list[str]:
    """The names whose values differ."""
    keys = [key for key in found.keys() | truth.keys() if not any(part in key for part in UNLIKE)]
    keys = [key for key in keys if key != "nonfinite" or not truth[key]]  # a layer that is cut spreads NaN otherwise
    nan = [key for key in keys if isinstance(truth.get(key), float) and math.isnan(truth[key])]
    unlike = [key for key in nan if not math.isnan(found.get(key, 0.0))]
    return unlike + [
        key
        for key in keys
        if key not in nan
        and not (key in found and key in truth and close(found[key], truth[key], tolerance))
        and not abs((found.get(key) or 0.0) - (truth.get(key) or 0.0)) < 1e-12
    ]


# --- several optimizers


def _optimizers(model: nn.Module, muon: bool = False) -> list[Any]:
    named = list(model.named_parameters())
    inside = ("mid.1.weight", "side.weight") if muon else ("mid", "scale")
    first = [p for name, p in named if any(part in name for part in inside)]
    second = [p for name, p in named if not any(part in name for part in inside)]
    adamw = torch.optim.AdamW(second, lr=0.01, foreach=False)
    if muon:  # it computes in bfloat16, so its steps are small here
        return [torch.optim.Muon(first, lr=1e-8, weight_decay=0.0), adamw]
    return [torch.optim.SGD(first, lr=0.05, momentum=0.9), adamw]


def _batch(step: int, share: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + share)).double()


def _two(rank: int, engine: str, shares: int, share: int, muon: bool = False) -> list[Any]:
    """Four steps of two optimizers, of which the third has a NaN in the first share: records, norms and weights."""
    model = make(engine, "step", shares, torch.float64)
    optimizers = _optimizers(model, muon)
    found: list[Any] = []
    with dh.gradients(model, optimizers, rules=rules(), stats=WATCHED[: -1 if muon else None], every=1) as watch:
        for step in range(4):
            for each in range(shares) if engine == "plain" else [share]:
                x = _batch(step, each)
                if step == 2 and each == 0:
                    x[0, 0] = math.nan
                (model(x, True).square().mean() * 30.0 / (shares if engine == "plain" else 1)).backward()
            for optimizer in optimizers:
                optimizer.step()
            norm = watch.norm
            for optimizer in optimizers:
                optimizer.zero_grad()
            watch.flush()
            # FSDP1 has a part of each; that the weights are right is seen in the norms of the steps that follow.
            named = [] if engine == "fsdp1" else model.named_parameters()
            weights = {n.removeprefix("module."): whole(p) for n, p in named}
            found.append((dict(watch.latest), float(norm), weights))
        found.append(watch.report().collectives)
    return found


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "tp"])
def test_two_optimizers(ranks: Ranks, engine: str) -> None:
    _equal(ranks(_two_on, engine), _two(0, "plain", 1 if engine == "tp" else 2, 0))


def _two_on(rank: int, engine: str, muon: bool = False) -> list[Any]:
    """Tensor parallelism gives its ranks the same share of the batch."""
    shares, share = {"tp": (2, 0), "hsdp": (4, rank), "tp+fsdp2": (4, rank // 2)}.get(engine, (2, rank))
    return _two(rank, engine, shares, share, muon)


def _at_different_times(rank: int, engine: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The second optimizer accumulates, and steps in each second iteration: norms, means of the ranks', weights."""
    model = make(engine, "step", 2, torch.float64)
    first, second = _optimizers(model)
    norms, means = [], []
    with dh.gradients(model, [first, second], rules=[dh.ClipNorm(0.5)], stats=[stats.Spread()], every=1) as watch:
        for step in range(4):
            stepping = [first, second] if step % 2 else [first]
            for share in range(2) if engine == "plain" else [rank]:
                (model(_batch(step, share), True).square().mean() * 30.0 / (2 if engine == "plain" else 1)).backward()
            watch.begin_step(optimizers=stepping)
            for optimizer in stepping:
                optimizer.step()
                optimizer.zero_grad()
            watch.flush()
            norms.append(watch.latest["grad_norm"])
            means.append(watch.latest["grad_norm/mean_rank"])
    named = [] if engine == "fsdp1" else model.named_parameters()
    return norms, means, {n.removeprefix("module."): whole(p) for n, p in named}


def _by_torch() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make("plain", "step", 2, torch.float64)
    first, second = _optimizers(model)
    norms = []
    for step in range(4):
        stepping = [first, second] if step % 2 else [first]
        for share in range(2):
            (model(_batch(step, share), True).square().mean() * 15.0).backward()
        parameters = [p for optimizer in stepping for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.5)))
        for optimizer in stepping:
            optimizer.step()
            optimizer.zero_grad()
    return norms, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.parametrize("engine", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_two_optimizers_that_step_at_different_times(ranks: Ranks, engine: str) -> None:
    norms, weights = _by_torch()
    found = [_at_different_times(0, "plain")] if engine == "plain" else ranks(_at_different_times, engine)
    for theirs, means, now in found:
        assert close(theirs, norms, 1e-10), (theirs, norms)
        assert close(now, weights if now else {}, 1e-10)
        # In the last step it is that of two micro-batches for the second optimizer, on every engine.
        assert engine == "plain" or close(means, ranks(_at_different_times, "ddp")[0][1], 1e-10)


def _in_backward(rank: int, engine: str, rule: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """An optimizer for each parameter, which steps in backward: what is raised, and the weights after two steps."""
    model = make(engine, "step", 2, torch.float64)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    error = ""
    with dh.gradients(model, list(optimizers.values()), rules=[rule]):
        for batch in range(2):
            x = _batch(batch, 0)  # the same on each rank
            try:
                model(x, True).square().mean().mul(30.0).backward()
            except UsageError as raised:
                error = str(raised)
                break
    return error, {n.removeprefix("module."): whole(p) for n, p in model.named_parameters()}


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_optimizers_that_step_inside_backward(ranks: Ranks, engine: str) -> None:
    for found, _ in ranks(_in_backward, engine, dh.SkipNonFinite()):
        assert "SkipNonFinite(max_consecutive=None) needs all of them" in found
    clip = dh.ClipValue(0.01)
    if engine == "ddp":
        assert all("before DDP has reduced the gradient" in found for found, _ in ranks(_in_backward, engine, clip))
        return
    truth = _in_backward(0, "plain", clip)
    for found in ranks(_in_backward, engine, clip):
        assert close(found, truth, 1e-10)
    for found, _ in ranks(_in_backward, engine, dh.ClipNorm(0.1, by="parameter")):
        assert "needs all of them" in found, "a collective inside backward could wait for ever"


@pytest.mark.parametrize(("engine", "muon"), [("hsdp", False), ("tp+fsdp2", False), ("tp+fsdp2", True)])
def test_two_optimizers_on_a_mesh(four: Ranks, engine: str, muon: bool) -> None:
    found = four(_two_on, engine, muon)
    _equal(found, _two(0, "plain", 4 if engine == "hsdp" else 2, 0, muon), 1e-6 if muon else 1e-10)


def _equal(found: list[list[Any]], truth: list[Any], tolerance: float = 1e-10) -> None:
    for mine in found:
        # a SUM for each round of rules; a MAX in a logged step; a SUM of the update, which Muon's bfloat16 makes unlike
        assert mine[-1] == (2, 4 if tolerance < 1e-6 else 3)
        for step, (here, there) in enumerate(zip(mine[:-1], truth[:-1], strict=True)):
            assert alike(here[0], there[0], tolerance) == [], step
            assert close(here[1], there[1], tolerance) or (step == 2 and math.isnan(here[1]) and math.isnan(there[1]))
            assert not here[2] or close(here[2], there[2], tolerance), step
    steps = [record for record, *_ in truth[:-1]]
    assert [record["skipped"] for record in steps] == [0, 0, 1, 0]
    assert min(record["grad_norm"] for record in steps if record["skipped"] == 0) > 0.5  # all are clipped


# --- stages of a pipeline


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.front(x)))


class Back(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.back, self.head = nn.Linear(8, 8), nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.back(x)))


def _stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Front().double(), Back().double()]


def _loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out, target) * 40.0


def _spiked(step: int, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In the last step the loss of one copy is a spike; its last stage alone has the target."""
    x, y = _data(10 + step, copy)
    return x, y * (30.0 if step == 3 and copy == 1 else 1.0)


def _data(step: int, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + copy)
    x, y = torch.randn(8, 6, generator=generator).double(), torch.randn(8, 3, generator=generator).double()
    if step == 2 and copy == 0:
        y[0, 0] = math.nan  # only the last stage of one copy has the target
    return x, y


CALM = [dh.SkipSpike(sigmas=4.0, least=2), dh.AdaGC(ratio=0.8, beta=0.5, warmup_steps=1, max_norm=30.0)]


def _watch(model: Any, optimizer: Any, batch: Any, **options: Any) -> Gradients:
    watched = [*WATCHED, stats.Loss(), stats.Activations()]
    chosen = rules() if batch is _data else CALM
    return dh.gradients(model, optimizer, rules=chosen, stats=watched, every=1, **options)


def _one_process(copies: int, batch: Callable[[int, int], Any] = _data) -> list[Any]:
    """The truth: both stages in one process, on the batches of all copies."""
    model = nn.Sequential(*_stages())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    found: list[Any] = []
    with _watch([model[0], model[1]], optimizer, batch) as watch:
        for step in range(4):
            optimizer.zero_grad()
            for x, y in (batch(step, copy) for copy in range(copies)):
                for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
                    loss = _loss(model(part), target)
                    watch.note_loss(loss)
                    (loss / (2 * copies)).backward()
            optimizer.step()
            watch.flush()
            found.append((dict(watch.latest), [whole(p) for p in model.parameters()]))
    return found


def _pipeline(rank: int, copies: int, engine: str, batch: Callable[[int, int], Any] = _data) -> list[Any]:
    """One stage on each rank, in ``copies`` data-parallel copies, by torch's own schedule of two micro-batches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = init_device_mesh("cpu", (2, copies), mesh_dim_names=("pp", "dp"))
    place, copy = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    module: Any = _stages()[place]
    if engine == "ddp":
        module = nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    elif engine == "fsdp2":
        fully_shard(module, mesh=mesh["dp"])
    # What goes in and out; without it the stage runs an additional forward in the first step.
    wires = [torch.zeros(4, width, dtype=torch.float64, requires_grad=width == 8) for width in ((6, 8), (8, 3))[place]]
    stage = PipelineStage(module, place, 2, torch.device("cpu"), *wires, group=mesh.get_group("pp"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)
    schedule = ScheduleGPipe(stage, 2, loss_fn=_loss)
    found: list[Any] = []
    with _watch(module, optimizer, batch, process_group="world") as watch:
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(step, copy)
            losses: list[torch.Tensor] = []
            schedule.step(x) if place == 0 else schedule.step(target=y, losses=losses)
            for loss in losses:
                watch.note_loss(loss)
            optimizer.step()
            watch.flush()
            found.append((dict(watch.latest), [whole(p) for p in module.parameters()]))
        found.append(watch.report().collectives)
    return found


def _equal_stages(found: list[list[Any]], copies: int, truth: list[Any], left_out: Any = ("skipped", 2)) -> None:
    front = len(list(_stages()[0].parameters()))
    for rank, mine in enumerate(found):
        assert mine[-1] == (2, 4) if left_out[0] == "skipped" else mine[-1][0] == 1
        for step, ((record, weights), (record0, weights0)) in enumerate(zip(mine[:-1], truth, strict=True)):
            assert alike(record, record0) == [], step
            assert close(weights, weights0[front:] if rank >= copies else weights0[:front], 1e-10), step
            where = {at["rank"] for at in record.get("nonfinite_at", ())} - {None}
            assert where <= {0, copies}, "the copy that has the NaN"
    assert [record[left_out[0]] for record, _ in truth] == [float(step == left_out[1]) for step in range(4)]


@pytest.mark.first_tier
def test_two_stages(ranks: Ranks) -> None:
    _equal_stages(ranks(_pipeline, 1, "plain"), 1, _one_process(1))


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_stages_with_two_copies(four: Ranks, engine: str) -> None:
    _equal_stages(four(_pipeline, 2, engine), 2, _one_process(2))


def _in_a_session(rank: int, folder: str) -> list[float]:
    """A script that knows nothing of disthooks trains two stages; the norms that the first rank logged."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    watch = {"every": 1, "process_group": "world", "rules": [{"kind": "ClipNorm", "max_norm": 0.5}]}
    watch["sinks"] = [{"kind": "Jsonl", "path": f"{folder}/log.jsonl"}]
    session = Session(dh.config.from_config({"watch": watch}))
    session.arm()
    try:
        stage = PipelineStage(_stages()[rank], rank, 2, torch.device("cpu"))
        optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=0.01, foreach=False)
        schedule = ScheduleGPipe(stage, 2, loss_fn=_loss)
        for step in range(2):
            optimizer.zero_grad()
            x, y = _data(step, 0)
            schedule.step(x) if rank == 0 else schedule.step(target=y)
            optimizer.step()
    finally:
        session.finish(os.getpid())
    lines = [json.loads(line) for line in pathlib.Path(folder, "log.jsonl").read_text().splitlines()]
    return [line["grad_norm"] for line in lines if "grad_norm" in line]


def test_stages_under_disthooks_run(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    """The session attaches before the first stage sends to the second, which would wait for it."""
    model = nn.Sequential(*_stages())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    truth = []
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(0.5)]) as watch:
        for step in range(2):
            optimizer.zero_grad()
            x, y = _data(step, 0)
            for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
                (_loss(model(part), target) / 2).backward()
            optimizer.step()
            truth.append(float(watch.norm))
    assert close(ranks(_in_a_session, str(tmp_path), timeout=30)[0], truth, 1e-10)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_spike_of_the_loss_on_one_rank_of_one_stage(four: Ranks, engine: str) -> None:
    """All stages leave the step out; per-tensor clips are those of one process."""
    _equal_stages(four(_pipeline, 2, engine, _spiked), 2, _one_process(2, _spiked), ("spike", 3))


# --- experts of which each rank has its own


class Moe(nn.Module):
    """A dense layer, and experts that another rank does not have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(6, 6)
        torch.manual_seed(10 + seed)
        self.experts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[1](torch.tanh(self.experts[0](self.dense(x))))


def _moe(rank: int, engine: str, owners: int) -> tuple[nn.Module, list[nn.Parameter]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = Moe(rank % owners).double()
    experts = list(model.experts.parameters())
    if engine == "ddp":
        ignored = [name for name, _ in model.named_parameters() if name.startswith("experts")]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        return nn.parallel.DistributedDataParallel(model), experts
    if engine == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), ignored_params=set(experts))
        return model, experts
    ignored_states = {"ignored_states": experts, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, use_orig_params=True, **ignored_states), experts


def _experts(rank: int, engine: str, owners: int) -> list[Any]:
    world = dist.get_world_size()
    model, own = _moe(rank, engine, owners)
    groups = [dist.new_group(list(range(at, at + owners))) for at in range(0, world, owners)]
    copies = [dist.new_group(list(range(at, world, owners))) for at in range(owners)][rank % owners]
    experts: Any = "*experts*" if owners == world else {"*experts*": groups[rank // owners]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: list[Any] = []
    watched = [stats.Norm(per_parameter=True), stats.MaxAbs(), stats.Moments(), stats.NonFinite(), stats.Updates()]
    with dh.gradients(model, optimizer, rules=rules(), stats=watched, every=1, experts=experts) as watch:
        for step in range(4):
            optimizer.zero_grad()
            x = _batch(step, rank)
            if step == 2 and rank == world - 1:
                x[0, 0] = math.nan
            (model(x).square().mean() * 40.0).backward()
            for parameter in own if owners < world else []:  # the loop reduces them over their copies
                dist.all_reduce(parameter.grad, group=copies)
            optimizer.step()
            watch.flush()
            found.append((dict(watch.latest), [whole(p) for p in own]))
    return found


def _experts_in_one_process(world: int, owners: int) -> list[Any]:
    dense, parts = Moe(0).dense.double(), [Moe(owner).experts.double() for owner in range(owners)]
    model = nn.ModuleDict({"dense": dense, **{str(owner): part for owner, part in enumerate(parts)}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: list[Any] = []
    watched = [stats.Norm(), stats.MaxAbs(), stats.Moments(), stats.NonFinite(), stats.Updates()]
    with dh.gradients(model, optimizer, rules=rules(), stats=watched, every=1) as watch:
        for step in range(4):
            optimizer.zero_grad()
            for rank in range(world):
                x, part = _batch(step, rank), parts[rank % owners]
                if step == 2 and rank == world - 1:
                    x[0, 0] = math.nan
                loss = part[1](torch.tanh(part[0](dense(x)))).square().mean() * 40.0
                loss.backward(inputs=list(part.parameters()), retain_graph=True)  # a sum over ranks
                (loss / world).backward(inputs=list(dense.parameters()))  # a mean over ranks
            optimizer.step()
            watch.flush()
            found.append((dict(watch.latest), [[whole(p) for p in part.parameters()] for part in parts]))
    return found


def _equal_experts(found: list[list[Any]], owners: int, truth: list[Any]) -> None:
    for rank, mine in enumerate(found):
        for step, ((record, weights), (record0, weights0)) in enumerate(zip(mine, truth, strict=True)):
            record = {key: value for key, value in record.items() if "/param/" not in key}
            assert alike(record, record0) == [], step
            assert close(weights, weights0[rank % owners], 1e-10), step
    assert [record["skipped"] for record, _ in truth] == [0, 0, 1, 0]


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_experts(ranks: Ranks, engine: str) -> None:
    _equal_experts(ranks(_experts, engine, 2), 2, _experts_in_one_process(2, 2))


def test_experts_with_copies(four: Ranks) -> None:
    _equal_experts(four(_experts, "fsdp2", 2), 2, _experts_in_one_process(4, 2))


def _unnamed_experts(rank: int, engine: str, is_same_at_first: bool) -> list[str]:
    model, _ = _moe(0 if is_same_at_first else rank, engine, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    said = []
    try:
        with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]):
            for step in range(2):
                optimizer.zero_grad()
                model(_batch(step, rank)).square().mean().backward()
                optimizer.step()
    except (AttachError, UsageError) as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("is_same_at_first", [False, True])
def test_experts_that_nobody_names_are_an_error(ranks: Ranks, engine: str, is_same_at_first: bool) -> None:
    """Where they begin with the same values, their gradients tell it in the first step."""
    for said in ranks(_unnamed_experts, engine, is_same_at_first):
        assert "experts='*.experts.*'" in said[0], said
        assert ("AttachError" in said[0]) == (engine == "ddp" or not is_same_at_first)


def _copies_without_a_group(rank: int, owners: int, experts: Any) -> str:
    """The error at attach; ``owners`` ranks have different experts, and the others have copies of these."""
    model, _ = _moe(rank, "fsdp2", owners)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        watch = dh.gradients(model, optimizer, rules=rules(), experts=experts)
    except AttachError as error:
        return str(error)
    with watch:
        (model(_batch(0, rank)).square().mean() * 40.0).backward()
        optimizer.step()
        return "attached"


def test_copies_of_experts_ask_for_their_group(four: Ranks) -> None:
    """2 x 2: without the group whose ranks have different experts each copy would count."""
    for said in four(_copies_without_a_group, 2, "experts.*"):
        assert "the ranks [0, 2] have the same values" in said
        assert "experts={pattern: group}" in said
    assert four(_copies_without_a_group, 2, {"experts.*": "world"}) == ["attached"] * 4
    assert four(_copies_without_a_group, 4, "experts.*") == ["attached"] * 4


# --- what is refused, and what ends a joint step


def test_lists_that_cannot_be() -> None:
    model = nn.Linear(2, 2)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    for optimizers, said in (([], "give the optimizers"), ([one, one], "is in two of the optimizers")):
        with pytest.raises(UsageError, match=said):
            dh.gradients(model, optimizers, rules=[dh.ClipNorm(1.0)])
    with pytest.raises(UsageError, match="give the models"):
        dh.gradients([], one, rules=[dh.ClipNorm(1.0)])
    with pytest.raises(AttachError, match="are in none of the models"):
        dh.gradients([nn.Linear(2, 2), nn.Linear(3, 2)], one, rules=[dh.ClipNorm(1.0)])
    with pytest.raises(MatchError, match="no parameter of any rank matches 'expert"):
        dh.gradients(model, one, rules=[dh.ClipNorm(1.0)], experts="expert.*")
    with pytest.raises(UsageError, match="process_group='all'"):
        dh.gradients(model, one, rules=[dh.ClipNorm(1.0)], process_group="all")


def test_models_of_the_same_names() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(2, 2), nn.Linear(2, 3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    watched = [stats.Norm(per_parameter=True), stats.Activations()]
    with dh.gradients(models, optimizers, rules=[dh.only("model1.*", dh.Scale(0.0))], stats=watched) as watch:
        for model in models:
            model(torch.ones(1, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert {"grad_norm/param/model0.weight", "activation_rms/module/model1."} <= watch.latest.keys()
    assert models[0].weight.grad.abs().sum() > 0 == models[1].weight.grad.abs().sum()


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_a_scaler_that_keeps_one_optimizer_back(which: int, begins: bool) -> None:
    """The optimizer whose gradients are finite does not step either, in whatever order the loop steps them."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with dh.gradients(model, optimizers, rules=[dh.SkipNonFinite(), dh.ClipNorm(0.5)], every=1) as watch:
        for bad in (False, True, False):
            before = [p.detach().clone() for p in model.parameters()]
            losses = [part(torch.ones(1, 2)).square().sum() for part in model]
            losses[which] = losses[which] * (math.inf if bad else 1.0)
            scaler.scale(sum(losses)).backward()
            if begins:  # before the scaler decides, as in a loop that clips by code of its own
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                watch.begin_step(scaler)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
            assert moved == [not bad] * 4
            if not bad:
                grads = [p.grad for p in model.parameters()]
                assert close(float(torch.nn.utils.get_total_norm(grads)), 0.5, 1e-4)
                assert float(watch.norm) < 20.0, "in the user's units"
            for optimizer in optimizers:
                optimizer.zero_grad()


def test_norm_needs_something_that_measures_it() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]) as watch:
        with pytest.raises(UsageError, match="there was no step yet"):
            _ = watch.norm
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        watch.begin_step()
        assert float(watch.norm) == 5.0
        assert close(float(model.weight.grad.norm()), 1.0, 1e-6)
        optimizer.step()
    with dh.gradients(model, optimizer, rules=[dh.ClipValue(1.0)]) as watch, warnings.catch_warnings():
        optimizer.step()
        with pytest.raises(UsageError, match="nothing measures the norm"):
            _ = watch.norm


class Layered(nn.Module):
    """A dense layer, and four experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.experts = nn.Linear(6, 6), nn.ParameterDict({"w": nn.Parameter(torch.randn(4, 6, 6))})


def _expert_parallel(rank: int) -> tuple[float, list[torch.Tensor]]:
    """Experts are cut over one dimension of a mesh and sharded over the other; the rest is sharded over both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_mod_ep", "ep"))
    everyone = root["dp_mod_ep", "ep"]._flatten("dp")
    model: Any = Layered().double()
    model.experts.w = nn.Parameter(distribute_tensor(model.experts.w, root["ep"], [Shard(0)]))
    fully_shard(model.experts, mesh=root["dp_mod_ep"])
    fully_shard(model, mesh=everyone)
    return _with_ones(model)


def _with_ones(model: nn.Module) -> tuple[float, list[torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0), dh.AdaGC(warmup_steps=1, max_norm=0.1)]) as watch:
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    return float(watch.norm), [whole(p) for p in model.parameters()]


def test_expert_parallel_meshes(four: Ranks) -> None:
    truth = _with_ones(Layered().double())
    for found in four(_expert_parallel):
        assert close(found[0], truth[0], 1e-12)
        assert close(found[1], truth[1], 1e-12)
