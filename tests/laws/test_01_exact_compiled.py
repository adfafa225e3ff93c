"""Law 1, exact, together with torch.compile, export and traces: inside compiled code and around it.

The gradients are those of the compiled model without hooks, and the hooks are never silently lost.
"""

from __future__ import annotations

import copy
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.models import Tiny, identical, tokens

#: torch 2.13 gives the linker the path of its libraries without quotes.
LINKS = pytest.mark.skipif(" " in torch.__path__[0], reason="inductor cannot link if torch's folder has a space")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Dynamo does not know")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(64), nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.register_buffer("mask", torch.rand(32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x)) * self.mask


class Net(nn.Module):
    """Two blocks, and something to compile before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second = nn.Embedding(50, 64), Block(), Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(tokens) * 1.5) + 1
        return F.linear(self.second(x.sin()), self.embed.weight)


@pytest.fixture
def to(tmp_path: Any) -> Any:
    return pipeline(dh.OnDisk(tmp_path), at_least=0)


def steps(model: nn.Module, forward: Callable[..., Any] | None = None) -> list[torch.Tensor]:
    """The gradients of the second step of two, which must compile nothing more."""
    for again in (False, True):
        model.zero_grad()
        with torch._dynamo.config.patch(error_on_recompile=again):
            (model if forward is None else forward)(tokens()).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def blocks(model: Net, backend: str = "aot_eager") -> Net:
    for block in (model.first, model.second):
        block.compile(backend=backend, fullgraph=True)
    return model


@functools.cache
def truth(compiled: str, backend: str = "aot_eager") -> list[torch.Tensor]:
    """The gradients without hooks of a model that is compiled block by block, or as a whole."""
    model = Net()
    return steps(
        blocks(model, backend) if compiled == "blocks" else model,
        torch.compile(model, backend=backend) if compiled == "model" else None,
    )


def in_place(model: nn.Module, to: Any, patterns: Any = ("first", "second")) -> Callable[[], int]:
    saving = dh.save_activations(model, patterns, to)
    return lambda: saving.report().moved


def wrap(model: Net, to: Any) -> Callable[[], int]:
    model.first, model.second = wrappers = dh.SaveWith(model.first, to), dh.SaveWith(model.second, to)
    return lambda: sum(wrapper.report().moved for wrapper in wrappers)


def breaks() -> int:
    return sum(counters["graph_break"].values())


@pytest.mark.first_tier(backend=("aot_eager",))
@pytest.mark.parametrize(
    ("first", "attach", "backend"),
    [
        ("hooks", in_place, "aot_eager"),
        pytest.param("hooks", in_place, "inductor", marks=LINKS),
        ("compile", in_place, "aot_eager"),
        ("compile", wrap, "aot_eager"),
    ],
)
def test_a_compiled_module_keeps_its_hooks(first: str, attach: Any, backend: str, to: Any) -> None:
    wanted = truth("blocks", backend)
    counters.clear()
    model = Net()
    if first == "compile":
        steps(blocks(model, backend))
    moved = attach(model, to)
    if first == "hooks":
        blocks(model, backend)
    assert identical(steps(model), wanted)
    assert moved() > 2**19
    assert breaks() == 0


@pytest.mark.parametrize("order", ["in place, compile", "compile, in place", "wrap, compile", "compile, wrap"])
def test_what_torch_compile_returns_keeps_its_hooks(order: str, to: Any) -> None:
    model = Net()
    for what in order.split(", "):
        if what == "compile":
            model.first = torch.compile(model.first, backend="aot_eager", fullgraph=True)
        elif what == "wrap":
            model.first = hooks = dh.SaveWith(model.first, to)
        else:
            hooks = dh.save_activations(model, "first", to)
    model.second.compile(backend="aot_eager")
    assert identical(steps(model), truth("blocks"))
    assert hooks.report().moved > 2**18
    assert breaks() == 0
    if order == "compile, in place":
        assert type(copy.deepcopy(model).first) is type(torch.compile(nn.Identity()))


def test_a_block_around_compiled_code_knows_parameters(to: Any) -> None:
    model = Net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with saved:
            return compiled(x)

    saved = dh.saving(to)
    assert identical(steps(model, forward), truth("model"))
    assert saved.report().kept_by["parameter"] > 2**18
    assert saved.report().moved > 2**19


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_and_buffers_stay(autocast: bool, to: Any) -> None:
    model = blocks(Net())
    saving = dh.save_activations(model, "first", to)
    x = torch.randn(1, 32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model.first(x).float().sum().backward()
    report = saving.report()
    assert report.kept_by["buffer"] == model.first.mask.nbytes
    weights = sum(layer.weight.nbytes for layer in model.first.mlp if isinstance(layer, nn.Linear))
    assert (report.recast * 2 if autocast else report.kept_by["parameter"]) >= weights


OUTSIDE: dict[str, tuple[Any, int, int]] = {  # breaks, and graphs: both blocks share one
    "wrapper": (wrap, 2, 4),
    "in place": (in_place, 2, 4),
    "in place, torch.nn modules": (lambda m, to: in_place(m, to, "*.mlp"), 3, 6),  # a block's forward breaks, too
    "the model": (lambda m, to: in_place(m, to, ""), 0, 1),
}


@pytest.mark.parametrize("way", OUTSIDE)
def test_hooks_in_a_compiled_model_break_its_graph_and_are_on(way: str, to: Any) -> None:
    wanted, model, compiler = truth("model"), Net(), CompileCounterWithBackend("aot_eager")
    counters.clear()
    attach, count, graphs = OUTSIDE[way]
    moved = attach(model, to)
    assert identical(steps(model, torch.compile(model, backend=compiler)), wanted)
    assert moved() > 2**19
    assert (breaks(), compiler.frame_count) == (count, graphs)
    assert all("module.compile(fullgraph=True)" in why for why in counters["graph_break"])


@LINKS
@pytest.mark.second_tier
@pytest.mark.usefixtures("one_thread")  # several add up an embedding's gradient in any order
def test_hooks_in_a_model_compiled_by_inductor_are_on(to: Any) -> None:
    wanted = truth("model", "inductor")
    moved = in_place(model := Net(), to)
    assert identical(steps(model, torch.compile(model)), wanted)
    assert moved() > 2**19


class Loop(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * 1.5
        for block in (self.first, self.second):
            x = block(x) + 1
        return F.linear(x.sin(), self.embed.weight)


@pytest.mark.parametrize("attach", [in_place, wrap])
def test_one_graph_is_refused_in_training_and_given_in_evaluation(attach: Any, to: Any) -> None:
    attach(model := Net(), to)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(tokens())
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"module\.compile\(fullgraph=True\)"):
        compiled(tokens())


def test_hooks_come_and_go_on_a_model_that_runs_compiled(to: Any) -> None:
    model = Net()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(tokens())
    saving = dh.save_activations(compiled, "first", to)
    assert identical(steps(model, compiled), truth("model"))
    saving.remove()
    assert identical(steps(model, compiled), truth("model"))
    assert saving.report().calls == 2


@pytest.mark.parametrize("made", ["outside", "inside", "decorator"])
def test_a_block_or_a_function_in_compiled_code_is_hooked(made: str, to: Any) -> None:
    model, reports = Net(), []

    def block(x: torch.Tensor) -> Any:
        with outer if made == "outside" else dh.saving(to) as saved:
            return model(x), saved

    def forward(x: torch.Tensor) -> torch.Tensor:
        y, saved = (compiled(x), outer) if made == "decorator" else compiled(x)
        reports.append(saved)
        return y

    outer = dh.saving(to)
    if made == "decorator":
        model.first.forward = outer(model.first.forward)  # type: ignore[method-assign]
    compiled = torch.compile(model if made == "decorator" else block, backend="aot_eager")
    assert identical(steps(model, forward), truth("model"))
    assert reports[-1].report().moved > 2**18
    assert counters["stats"]["unique_graphs"] > 0  # what is called inside is compiled all the same


@torch._functorch.config.patch(donated_buffer=False)  # with them torch allows one backward alone
def test_other_shapes_and_more_backwards_compile_nothing_more(to: Any) -> None:
    in_place(model := Net(), to)
    compiled = torch.compile(model, backend="aot_eager")
    for batch in (2, 3, 5):
        with torch._dynamo.config.patch(error_on_recompile=batch > 3):  # dynamic since the second
            loss = compiled(tokens(batch=batch)).sum()
        once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        assert identical(list(once), list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)))
    (first,) = torch.autograd.grad(loss, [model.first.norm.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):  # as without hooks
        torch.autograd.grad(first.sum(), [model.embed.weight])


def test_a_checkpoint_around_compiled_code_is_counted(to: Any) -> None:
    saving = dh.save_activations(model := Net(), "first", to)
    compiled = torch.compile(lambda x: checkpoint(model.first, x, use_reentrant=False).sum(), backend="aot_eager")
    with pytest.warns(UserWarning, match="activation checkpoint"):
        compiled(torch.randn(2, 32, 64, requires_grad=True)).backward()
    assert set(saving.report().passed) == {"checkpoint"}


def test_compiled_autograd_unpacks_right_and_says_what_it_costs(to: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    wanted = torch.autograd.grad(model(torch.ones(32, 64)).sum(), list(model.parameters()))
    saving = dh.save_activations(model, "0", to)
    loss = model(torch.ones(32, 64)).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert identical([p.grad for p in model.parameters()], list(wanted))
    assert saving.report().loaded > 0
    assert any("leave compiled autograd off" in why for why in counters["graph_break"])


@LINKS
@pytest.mark.second_tier
@pytest.mark.usefixtures("one_thread")
def test_bits_are_those_of_blocks_that_are_compiled_one_by_one(to: Any, monkeypatch: Any) -> None:
    """Inductor fuses across the blocks of a loop when it has the whole model, and not where the graph breaks."""
    monkeypatch.setattr("disthooks.saved.when_to_hook._said", set())
    alone = steps(blocks(Loop(), "inductor"))
    saving = dh.save_activations(model := Loop(), ["first", "second"], to)
    with pytest.warns(UserWarning, match="not bit for bit those of the model compiled whole") as told:
        found = steps(model, torch.compile(model))
    assert identical(found, alone)
    assert len([it for it in told if "bit for bit" in str(it.message)]) == 1
    assert saving.report().moved > 2**18
    saving.remove()
    assert identical(steps(blocks(model, "inductor")), alone)  # with hooks and without


# --- Export, traces and transforms of models with hooks: what they make is as if no hooks were there


def plain() -> Tiny:
    torch.manual_seed(0)
    return Tiny().eval()


def attached_in_place(folder: pathlib.Path) -> Tiny:
    dh.save_activations(model := plain(), "blocks.*", pipeline(dh.OnDisk(folder), at_least=0))
    return model


def wrapped(folder: pathlib.Path) -> Tiny:
    model = plain()
    model.blocks = nn.ModuleList(dh.SaveWith(block, dh.OnDisk(folder), at_least=0) for block in model.blocks)
    return model


ways = pytest.mark.parametrize("attached", [attached_in_place, wrapped])


@ways
@pytest.mark.parametrize("strict", [False, True])
def test_export_gives_the_program_of_the_plain_model(
    attached: Callable[..., Tiny], strict: bool, tmp_path: Any
) -> None:
    got, want = (torch.export.export(m, (tokens(),), strict=strict) for m in (attached(tmp_path), plain()))
    graph = str(got.graph).replace("__checkpoint_wrapped_module", "")
    assert graph == str(want.graph)
    assert got.graph_signature.parameters == want.graph_signature.parameters


@ways
def test_make_fx_records_nothing_of_ours(attached: Callable[..., Tiny], tmp_path: Any) -> None:
    def operators(model: nn.Module) -> list[str]:
        graph = make_fx(lambda x: torch.autograd.grad(model(x).sum(), list(model.parameters())))(tokens()).graph
        return [str(node.target) for node in graph.nodes if node.op == "call_function"]

    assert operators(attached(tmp_path)) == operators(plain())


@ways
def test_symbolic_and_jit_traces_compute_the_same(attached: Callable[..., Tiny], tmp_path: Any) -> None:
    model, wanted = attached(tmp_path), plain()(tokens())
    assert torch.equal(torch.fx.symbolic_trace(model)(tokens()), wanted)
    with pytest.warns(UserWarning, match=r"torch\.jit\.trace records the forward of .* without the hooks"):
        traced = torch.jit.trace(model, (tokens(),), check_trace=False)
    assert torch.equal(traced(tokens()), wanted)


def test_a_script_of_an_attached_model_is_told_and_can_be_wrapped(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Sequential(nn.Tanh(), nn.Linear(64, 4))), torch.randn(8, 16)
    wanted = str(torch.jit.script(model).code)
    line = pipeline(dh.OnDisk(tmp_path), at_least=0)
    with dh.save_activations(model, ["0", "1"], line) as saving:
        with pytest.warns(UserWarning, match=r"torch\.jit\.script records the forward of '0' without") as told:
            scripted = torch.jit.script(model)
        assert len([it for it in told if "disthooks" in str(it.message)]) == 1
        assert str(scripted.code) == wanted
        assert saving.report().passed == {"torch.jit.script": 2}
        scripted(x).sum().backward()
        assert saving.report().calls == 0
    wrapped = dh.SaveWith(scripted, line)
    wrapped(x).sum().backward()
    assert wrapped.report().moved > 0


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacfwd, torch.func.jacrev])
def test_transforms_of_torch_func_pass_through_with_weights_that_train(transform: Any, tmp_path: Any) -> None:
    model, x = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)), torch.randn(8, 16)
    wanted = transform(copy.deepcopy(model))(x)
    saving = dh.save_activations(model, nn.Linear, pipeline(dh.OnDisk(tmp_path), at_least=0))
    assert torch.equal(transform(model)(x), wanted)
    assert set(saving.report().passed) == {"hooks disabled"}
