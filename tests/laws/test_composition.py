"""Law 1 beside others that use saved-tensor hooks, or change modules: right, or an error that says what to do."""

from __future__ import annotations

import concurrent.futures
import functools
import pathlib
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from tests.support.models import Block, Recurrent, Tiny, identical, step, tokens


def _everything(folder: pathlib.Path) -> dh.saving:
    return dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder)))


def _gradients(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Of the input and the parameters, from fixed seeds."""
    model.zero_grad()
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(1)
    run(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


# -- nested attachments


def test_the_inner_attachment_wins_and_the_outer_one_says_so(tmp_path: pathlib.Path) -> None:
    model = Tiny()
    truth = step(model, tokens())
    model.blocks[0].mlp = dh.SaveToDisk(model.blocks[0].mlp, tmp_path)
    inner = model.blocks[0].mlp
    with dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path)) as outer:
        assert identical(step(model, tokens()), truth)
    assert outer.report().inner == 1
    assert inner.report().inner == 0
    assert inner.report().moved > 0
    assert "calls inside that another attachment took: 1" in str(outer.report())
    assert outer.report().calls == 2


def test_a_module_that_calls_itself_is_one_attachment(tmp_path: pathlib.Path) -> None:
    """Modules of one attachment inside one another share their contents and are not counted as strangers."""

    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor, deep: bool = True) -> torch.Tensor:
            return self(super().forward(x), deep=False) if deep else super().forward(x)

    model, x = Twice(64, 64), torch.randn(64, 64)
    truth = step(model, x)
    with dh.save_activations(model, "", dh.OnDisk(tmp_path)) as saving:
        assert identical(step(model, x), truth)
    assert (saving.report().calls, saving.report().inner) == (2, 0)


def test_hooks_of_others_outside_and_inside(tmp_path: pathlib.Path) -> None:
    block = Block()
    truth = _gradients(block, block)
    seen: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor

    theirs = functools.partial(torch.autograd.graph.saved_tensors_hooks, pack, lambda t: t)
    wrapped = dh.SaveToDisk(block, tmp_path)

    def outside(x: torch.Tensor) -> torch.Tensor:
        with theirs():
            return wrapped(x.sin()).cos()

    def inside(x: torch.Tensor) -> torch.Tensor:
        with _everything(tmp_path), theirs():
            return block(x)

    plain = _gradients(block, lambda x: block(x.sin()).cos())
    assert identical(_gradients(block, outside), plain)
    assert len(seen) == 2  # the sine and the cosine: what the block saves is ours
    assert wrapped.report().moved > 0
    assert identical(_gradients(block, inside), truth)
    assert len(seen) > 10


# -- torch.func, autograd Functions, modules of all kinds


def test_a_functional_gradient_inside_says_what_to_do(tmp_path: pathlib.Path) -> None:
    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(lambda y: super(Inner, self).forward(y).square().sum())(x)

    model = nn.Sequential(nn.Linear(8, 8), Inner(8, 8))
    truth = step(model, torch.ones(4, 8))
    with (
        dh.save_activations(model, "1", dh.OnDisk(tmp_path)),
        pytest.raises(dh.errors.AttachError, match=r"'1' calls torch\.func\.grad.*attach to other modules"),
    ):
        model(torch.ones(4, 8))
    with dh.save_activations(model, "0", dh.OnDisk(tmp_path)):
        assert identical(step(model, torch.ones(4, 8)), truth)


class Scaled(torch.autograd.Function):
    """A custom Function that saves an input, an output, an intermediate and nothing."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y, y.sum(-1, keepdim=True), None)  # type: ignore[attr-defined]
        ctx.scale = scale  # type: ignore[attr-defined]
        return y * scale

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, y, total, nothing = ctx.saved_tensors  # type: ignore[attr-defined]
        assert nothing is None
        return grad * y * ctx.scale + 0 * (x + total), None  # type: ignore[attr-defined]


class Lora(nn.Module):
    """A frozen layer with a low-rank adapter beside it, as PEFT puts it in the layer's place."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Tied(nn.Module):
    """One weight in two layers, one layer called three times, a Function, and a cell unrolled over time."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(64, 64), nn.Linear(64, 64)
        self.leave.weight = self.enter.weight
        self.cell = nn.LSTMCell(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.enter(x).tanh()
        state = (x[:, 0] * 0, x[:, 0] * 0)
        for t in range(5):
            state = self.cell(x[:, t], state)
        return self.leave(Scaled.apply(state[0], 0.5))


def _adapted() -> nn.Module:
    block = Block().requires_grad_(False)
    block.qkv, block.out = Lora(block.qkv), Lora(block.out)
    return block


@pytest.mark.parametrize("pattern", ["", "?*"])
@pytest.mark.parametrize("make", [Tied, _adapted, lambda: nn.Sequential(nn.GRU(64, 32, 2, dropout=0.2))])
def test_modules_of_all_kinds(make: Callable[[], nn.Module], pattern: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = make()

    def run(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y[0] if isinstance(y, tuple) else y

    truth = _gradients(model, run)
    with dh.save_activations(model, pattern, dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))) as saving:
        assert identical(_gradients(model, run), truth)
    assert saving.report().moved > 10_000
    assert saving.report().held == 0


def test_the_real_peft(tmp_path: pathlib.Path) -> None:
    """Adapters put in before and after attaching; their own class checks still find the layers."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")

    def build(attach: str) -> tuple[nn.Module, dh.Saving | None]:
        torch.manual_seed(0)
        model, saving = Tiny(), None
        if attach == "before":
            saving = dh.save_activations(model, ["blocks.*.mlp", "blocks.*.qkv"], dh.OnDisk(tmp_path))
        torch.manual_seed(1)
        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["qkv", "mlp.0", "mlp.2"], r=4, lora_dropout=0.1)
        )
        if attach == "after":
            saving = dh.save_activations(model, "*.blocks.*", dh.OnDisk(tmp_path))
        return model, saving

    truth = step(build("")[0], tokens())
    for attach in ("before", "after"):
        model, saving = build(attach)
        assert identical(step(model, tokens()), truth)
        assert saving is not None
        assert saving.report().moved > 0
        assert saving.report().held == 0


def test_a_recurrent_model_in_the_middle_of_a_sequence(tmp_path: pathlib.Path) -> None:
    """Truncated backpropagation through time: the state is detached and goes on into the next call."""

    def train(model: Recurrent) -> list[torch.Tensor]:
        state, found = None, []
        for i in range(3):
            model.zero_grad()
            x = torch.randn(4, 10, 16, generator=torch.Generator().manual_seed(i))
            y, state = model.rnn(x, state)
            y.square().mean().backward()
            state = state.detach()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    torch.manual_seed(0)
    model = Recurrent()
    truth = train(model)
    with dh.save_activations(model, "rnn", dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))) as saving:
        assert identical(train(model), truth)
    assert saving.report().moved > 0


def test_a_view_of_one_token_does_not_keep_the_sequence(tmp_path: pathlib.Path) -> None:
    """A class token is too small to store, but as a view it would keep all that it is cut from in memory."""
    x = torch.randn(8, 128, 64, requires_grad=True)
    truth = torch.autograd.grad(F.silu(x.sin()[:, 0, :16]).square().sum(), x)
    with dh.saving(dh.OnDisk(tmp_path)) as saved:
        y = x.sin()
        token = y[:, 0, :16]
        z = F.silu(token).square().sum()
    storage = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
    del y, token
    assert storage.expired()
    assert saved.report().kept_by["small"] == 2 * 8 * 16 * 4
    assert identical(list(torch.autograd.grad(z, x)), list(truth))


def _lazy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(32, 32, 1), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(64), nn.Tanh(), nn.Linear(64, 64)
    )


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("pattern", ["", "?", nn.modules.lazy.LazyModuleMixin, "0"])
def test_lazy_modules_are_attached_and_materialise_in_the_first_call(
    pattern: str | type, autocast: bool, tmp_path: pathlib.Path
) -> None:
    """Batch norm's running statistics, made in that call, are buffers in it: batch norm writes them uncounted."""

    def run(model: nn.Module) -> list[list[torch.Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return [_gradients(model, model) for _ in range(2)]

    truth, model, reports = run(_lazy()), _lazy(), []
    with dh.save_activations(model, pattern, dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))) as saving:
        for i, wanted in enumerate(truth):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                assert identical(_gradients(model, model), wanted)
            reports.append(saving.report())
            assert reports[-1].calls == len(saving.names) * (i + 1)
    assert [type(part).__name__ for part in model[1:4]] == ["BatchNorm1d", "Tanh", "Linear"]
    first, both = reports
    assert both.moved == 2 * first.moved > 0
    assert both.recast == 2 * first.recast
    assert {why: 2 * nbytes for why, nbytes in first.kept_by.items()} == both.kept_by
    assert first.kept_by.get("buffer", 0) == (0 if pattern == "0" else 2 * 32 * 4)


def test_gradients_of_a_lazy_model_name_the_remedy() -> None:
    model = _lazy()
    for attach in (
        lambda: dh.on_gradient(model, "*", torch.zeros_like),
        lambda: dh.gradients(model, torch.optim.SGD([torch.ones(1)], 0.1), stats=[dh.stats.Norm()]),
    ):
        with pytest.raises(dh.errors.AttachError, match=r"'1\.weight' has no shape yet.*run the model once"):
            attach()


class Streams(nn.Module):
    """Runs its branches in threads of its own, as an inference server's model or a pipeline does."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            left, right = pool.map(lambda layer: layer(x).tanh(), (self.left, self.right))
        return left + right


def test_a_forward_in_threads_of_the_user_is_told(tmp_path: pathlib.Path) -> None:
    model, line = nn.Sequential(Streams(), nn.Linear(64, 64)), dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))
    x = torch.randn(32, 64)
    truth = step(model, x)
    with dh.save_activations(model, "?", line) as saving:
        with pytest.warns(UserWarning, match="'0' saved nothing in the thread that called it.*attach to the layers"):
            assert identical(step(model, x), truth)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            step(model, x)
    assert any("saved nothing in the thread" in advice for advice in saving.report().advice())
    with warnings.catch_warnings(), dh.save_activations(model, nn.Linear, line) as saving:  # the remedy
        warnings.simplefilter("error")
        assert identical(step(model, x), truth)
    assert {"0.left", "0.right", "1"} == set(saving.report().sites)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Identity()),
        nn.Sequential(nn.Sequential(nn.Linear(64, 64)).requires_grad_(False), nn.Identity()),
        nn.Sequential(nn.Sequential(nn.Linear(64, 64)), nn.Tanh()),
    ],
)
def test_a_forward_in_its_own_thread_is_not(model: nn.Module, tmp_path: pathlib.Path) -> None:
    with warnings.catch_warnings(), dh.save_activations(model, "?", dh.OnDisk(tmp_path)):
        warnings.simplefilter("error")
        model(torch.randn(4, 64).requires_grad_()).sum().backward()


def test_an_inner_attachment_takes_all_and_nobody_warns(tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(nn.Sequential(dh.SaveToDisk(nn.Linear(64, 64), tmp_path)))
    with warnings.catch_warnings(), dh.save_activations(model, "0", dh.OnDisk(tmp_path)):
        warnings.simplefilter("error")
        model(torch.randn(4, 64)).sum().backward()


def test_what_is_never_called_is_told(tmp_path: pathlib.Path) -> None:
    """MultiheadAttention reads the weights of its out_proj and does not call it."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 4, batch_first=True), "linear": nn.Linear(64, 64)})
    with pytest.warns(UserWarning, match=r"no hooks on 'attention\.out_proj': .*attach to the MultiheadAttention"):
        saving = dh.save_activations(model, nn.Linear, dh.OnDisk(tmp_path))
    assert saving.names == ("linear",)
    with pytest.raises(dh.errors.AttachError, match="attach to the MultiheadAttention"):
        dh.save_activations(model, "attention.out_proj", dh.OnDisk(tmp_path))
    with warnings.catch_warnings(), dh.save_activations(model, ["attention", "*out_proj"], dh.OnDisk(tmp_path)) as both:
        warnings.simplefilter("error")  # the attention is attached, and all that is in it
    assert both.names == ("attention",)


def test_an_attached_module_that_had_no_call_is_in_the_report(tmp_path: pathlib.Path) -> None:
    model = nn.ModuleDict({"one": nn.Linear(64, 64), "two": nn.Linear(64, 64), "three": nn.Linear(64, 64)})
    with dh.save_activations(model, "*", dh.OnDisk(tmp_path)) as saving:
        assert saving.report().uncalled == ()  # the first call may be to come
        model["one"](torch.randn(64, 64)).sum().backward()
        with torch.no_grad():
            model["three"](torch.randn(64, 64))
    assert saving.report().uncalled == ("two",)
    assert any("never called so far: two." in advice for advice in saving.report().advice())


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: self.row(row).tanh())(x)


def test_an_attached_module_inside_vmap_is_told_and_the_one_around_it_stores(tmp_path: pathlib.Path) -> None:
    model, line = nn.Sequential(nn.Linear(64, 64), Mapped()), dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))
    x = torch.randn(32, 64)
    truth = step(model, x)
    with dh.save_activations(model, "*row", line) as saving:
        with pytest.warns(UserWarning, match=r"'1\.row' is called inside a transform of torch\.func") as told:
            assert identical(step(model, x), truth)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, x)
    assert len(told) == 1
    assert saving.report().passed == {"hooks disabled": 2}
    assert any("torch.func (vmap" in advice for advice in saving.report().advice())
    with warnings.catch_warnings(), dh.save_activations(model, "1", line) as saving:  # the remedy
        warnings.simplefilter("error")
        assert identical(step(model, x), truth)
    assert saving.report().moved == 2 * x.nbytes


@pytest.mark.parametrize("to", [dh.OnCpu(), dh.Tiered(dh.OnDevice("1 GiB"), dh.OnCpu())])
def test_a_store_where_the_tensors_are_says_so(to: dh.OnCpu | dh.Tiered, tmp_path: pathlib.Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(64, 64)
    with dh.save_activations(model, "?", to) as saving:
        with pytest.warns(UserWarning, match=r"stores nothing of '.'.*in CPU memory.*OnDisk\(directory\)"):
            step(model, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            step(model, x)
    assert saving.report().stored == 0
    assert any("stores nothing" in advice for advice in saving.report().advice())
    for stages in ((dh.Compact(), to), (dh.Recompute(), to), (dh.Tiered(dh.OnCpu("1 KiB"), dh.OnDisk(tmp_path)),)):
        with warnings.catch_warnings(), dh.save_activations(model, "?", dh.pipeline(*stages)):
            warnings.simplefilter("error")
            step(model, x)
