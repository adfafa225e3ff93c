"""What a capture has and has not, how many there are, and a disk or a process that fails; engines: test_rerun.py."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.report.replay import replay
from tests.support import ROOT


class Unit(nn.Module):
    """The rows of its weighted input, with length 1: NaN for zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("bias", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor, *more: Any, power: float = 2.0, **others: Any) -> torch.Tensor:
        x = self.weight * x + self.bias
        return x / (x**power).sum(-1, keepdim=True) ** (1 / power)


class Net(nn.Module):
    def __init__(self, call: Callable[..., Any] = lambda unit, x: unit(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unit, self.last = nn.Linear(4, 4, bias=False), Unit(), nn.Linear(4, 1)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.call(self.unit, self.first(x)))


def train(model: nn.Module, folder: Any, bad: Any = (2,), steps: int = 4, captures: int = 3) -> list[dict[str, Any]]:
    """The records that have a second run; the batch of bad steps is zero."""
    records: list[dict[str, Any]] = []
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], sinks=[records.append], every=1) as watch:
        call = watch.rerun(lambda x: model(x).square().mean().backward(), folder, captures=captures)
        for step in range(steps):
            call(torch.randn(3, 4) * (step not in bad))
            optimizer.step()
            optimizer.zero_grad()
    return [each for each in records if "rerun" in each]


def facts_of(record: dict[str, Any]) -> dict[str, Any]:
    (folder,) = record["rerun_capture"]
    return json.loads((pathlib.Path(folder) / "capture.json").read_text())


def test_a_capture_has_the_call_and_training_has_the_bits_of_a_skip(tmp_path: pathlib.Path) -> None:
    skipped, model = Net(), Net()
    train(skipped, None, steps=3)
    (record,) = train(model, tmp_path, steps=3)
    assert all(map(torch.equal, model.state_dict().values(), skipped.state_dict().values()))
    assert record["rerun_capture"] == [str(tmp_path / "step-2.rank-0")]
    facts = facts_of(record)
    assert (facts["module"], facts["class"], facts["call"], facts["in_backward"]) == ("unit", "Unit", 0, False)
    assert (facts["args"], facts["kwargs"], facts["left_out"]) == ([{"tensor": "input.0"}], {}, [])
    assert facts["training"] == [""]
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "step-2.rank-0" / "tensors.safetensors")
    assert sorted(tensors) == ["input.0", "random.cpu", "state.bias", "state.weight"]
    assert torch.equal(tensors["state.weight"], model.unit.weight)
    assert torch.equal(tensors["input.0"], torch.zeros(3, 4))
    assert [each.name for each in tmp_path.iterdir()] == ["step-2.rank-0"]


class Cache(NamedTuple):
    size: int


def test_arguments_of_all_kinds(tmp_path: pathlib.Path) -> None:
    """What JSON cannot hold is left out, and said; the call is replayed without it."""

    def call(unit: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return unit(x, (x, [1, None]), {"mask": x > 0, "cache": Cache(3)}, power=2.0, name="a", cache=object())

    (record,) = train(Net(call), tmp_path)
    facts = facts_of(record)
    assert facts["args"][1:] == [
        {"tuple": [{"tensor": "input.1.0"}, {"list": [1, None]}]},
        {"dict": {"mask": {"tensor": "input.2.mask"}, "cache": None}},
    ]
    assert facts["kwargs"] == {"power": 2.0, "name": "a", "cache": None}
    assert facts["left_out"] == ["input.2.cache: a Cache", "input.cache: a object"]
    found = replay(record["rerun_capture"][0], Net)
    assert (found.operator.name, found.left_out) == ("aten.div.Tensor", tuple(facts["left_out"]))


@pytest.mark.parametrize(
    ("most", "left_out"), [(40, "input.0: too large, 48 B"), (70, "state.weight: too large, 16 B")]
)
def test_what_is_too_large_is_left_out(most: int, left_out: str, tmp_path: pathlib.Path) -> None:
    """The input has 48 bytes, the bias and then the weight 16 each."""
    with mock.patch("disthooks.grads.capture._MOST", most):
        (record,) = train(Net(), tmp_path)
    assert facts_of(record)["left_out"] == [left_out]


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant: bool, tmp_path: pathlib.Path) -> None:
    model = Net(lambda unit, x: checkpoint(unit, x, use_reentrant=reentrant))
    (record,) = train(model, tmp_path)
    assert (facts_of(record)["module"], facts_of(record)["call"]) == ("unit", 0)


def test_code_between_modules_is_of_the_module_around(tmp_path: pathlib.Path) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return self.b(x / x.norm())

    model = nn.Sequential(Around(), nn.Linear(1, 1))
    (record,) = train(model, tmp_path)
    assert facts_of(record)["module"] == "0"
    assert replay(record["rerun_capture"][0], lambda: model).operator.name == "aten.div.Tensor"


def test_no_module_made_it(tmp_path: pathlib.Path) -> None:
    """The batch is not finite, or the code of the loss made it."""
    model = nn.Linear(4, 1, bias=False)
    with mock.patch.object(torch, "randn", lambda *shape: torch.full(shape, torch.inf)):
        (record,) = train(model, tmp_path / "batch", bad=(), steps=1)
    assert "rerun_capture" not in record
    assert record["rerun_why"].startswith("no module was found that made it")
    records: list[dict[str, Any]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], sinks=[records.append], every=1) as watch:
        watch.rerun(lambda x: model(x).sum().sqrt().backward(), tmp_path / "loss")(torch.zeros(3, 4))
        optimizer.step()
    assert records[0]["rerun_why"].startswith("no module was found that made it")
    assert list(tmp_path.iterdir()) == []


def test_a_mask_on_purpose_is_not_to_blame_for_the_loss(tmp_path: pathlib.Path) -> None:
    model = Parts(lambda self, x: self.mask(x).softmax(-1) * x, mask=Scaled(masked))
    records: list[dict[str, Any]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], sinks=[records.append], every=1) as watch:
        watch.rerun(lambda x: model(x).sum().sqrt().backward(), tmp_path)(torch.zeros(3, 4))
        optimizer.step()
    assert records[0]["rerun_why"].startswith("no module was found that made it")


def test_at_most_so_many_are_written_and_none_is_replaced(tmp_path: pathlib.Path) -> None:
    (tmp_path / "step-1.rank-0").mkdir()
    records = train(Net(), tmp_path, bad=(1, 2, 3), captures=2)
    written = [record.get("rerun_capture") for record in records]
    assert written == [[str(tmp_path / "step-1.rank-0.2")], [str(tmp_path / "step-2.rank-0")], None]
    assert list((tmp_path / "step-1.rank-0").iterdir()) == []


def test_a_disk_without_room_is_one_sentence(tmp_path: pathlib.Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            (record,) = train(model := Net(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (text,) = [str(each.message) for each in said if "capture" in str(each.message) or "step-2" in str(each.message)]
    assert text.startswith(f"{tmp_path / 'step-2.rank-0'} cannot be written: ")
    assert text.endswith("; training goes on")
    assert ("rerun_capture" in record, list(tmp_path.iterdir())) == (False, [])
    assert all(each.isfinite().all() for each in model.parameters())


def test_a_process_that_is_killed_in_the_middle_leaves_no_half_folder(tmp_path: pathlib.Path) -> None:
    script = (
        "import os, pathlib, signal, sys\nfrom unittest import mock\n"
        "from tests.unit.grads.test_capture import Net, train\n"
        "killed = lambda *words, **more: os.kill(os.getpid(), signal.SIGKILL)\n"
        "with mock.patch('disthooks.grads.capture.json.dumps', killed):\n    train(Net(), pathlib.Path(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [each.name for each in tmp_path.iterdir()] == [".step-2.rank-0.part"]
    assert os.listdir(tmp_path / ".step-2.rank-0.part") == ["tensors.safetensors"]
    train(Net(), tmp_path)  # the next run takes the place
    assert sorted(os.listdir(tmp_path)) == ["step-2.rank-0"]


def test_a_tensor_that_cannot_be_read_stops_the_search_and_not_the_training(tmp_path: pathlib.Path) -> None:
    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.aminmax:
                raise RuntimeError("no")
            return super().__torch_function__(func, types, args, kwargs or {})

    with pytest.warns(UserWarning, match=r"rerun\(capture=\): RuntimeError: no; training goes on"):
        (record,) = train(Net(lambda unit, x: unit(x.as_subclass(Odd)).as_subclass(torch.Tensor)), tmp_path)
    assert record["rerun"] == "repeats"


def test_without_safetensors_it_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'disthooks\[capture\]'"):
        train(Net(), "captures")


# -- which module is named, and what a capture must have, where that is not plain


class Scaled(nn.Module):
    """Its input times a weight, through ``function``."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(4)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight * x)


def root_of_nothing(x: torch.Tensor) -> torch.Tensor:
    """Finite, and its gradient is not."""
    return (x - x.detach()).abs().sqrt()


class Parts(nn.Module):
    """Two modules and the code between them."""

    def __init__(self, forward: Callable[..., torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.code = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(self, x)


def masked(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(torch.arange(4) > 1, -torch.inf)


def siblings(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.first(x)
    return self.a(h) + self.b(h)


def makes_aux(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.aux = x.mean().detach()
    return self.first(x) / self.first(x).norm()


def known_elsewhere() -> Parts:
    """``dec`` has the embedding of the model, which knows it under another name."""
    shared = Scaled()
    inner = Parts(lambda self, x: self.emb(x) / self.emb(x).norm(), emb=shared)
    return Parts(lambda self, x: self.dec(self.emb(x)), emb=shared, dec=inner)


def length(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm()


NAMED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "a sum of two readers": (
        lambda: Parts(siblings, first=Scaled(), a=Scaled(root_of_nothing), b=Scaled()),
        "a",
        "aten.div.Tensor",
    ),
    "a sum of two readers, of which the second made it": (
        lambda: Parts(siblings, first=Scaled(), a=nn.Tanh(), b=Parts(lambda self, x: root_of_nothing(x))),
        "b",
        "aten.div.Tensor",
    ),
    "code of the model, backward": (
        lambda: Parts(lambda self, x: root_of_nothing(self.first(x)) + 1, first=Scaled()),
        "",
        "aten.div.Tensor",
    ),
    "a mask on purpose": (
        lambda: Parts(lambda self, x: self.a(self.mask(x).softmax(-1) * x), mask=Scaled(masked), a=Scaled(length)),
        "a",
        "aten.div.Tensor",
    ),
    "log of zero, and then dropout": (
        lambda: Parts(lambda self, x: self.drop(self.a(x)), a=Scaled(torch.log), drop=nn.Dropout(0.5)),
        "a",
        "aten.log.default",
    ),
    "a weight of a module that is not called": (
        lambda: Parts(lambda self, x: self.a(x), a=Parts(lambda self, x: length(x * self.emb.weight), emb=Scaled())),
        "a",
        "aten.div.Tensor",
    ),
    "an attribute that forward sets": (lambda: Parts(makes_aux, first=Scaled()), "", "aten.div.Tensor"),
    "a module known elsewhere": (known_elsewhere, "dec", "aten.div.Tensor"),
    "memory that nobody filled": (lambda: Scaled(lambda x: torch.empty_like(x).copy_(x).log()), "", "aten.log.default"),
    "size and dtype as arguments": (
        lambda: Parts(lambda self, x: self.a(x.to(torch.float32).reshape(torch.Size([3, 4]))), a=Scaled(length)),
        "a",
        "aten.div.Tensor",
    ),
    "a reentrant checkpoint, backward": (
        lambda: Scaled(lambda x: checkpoint(root_of_nothing, x, use_reentrant=True)),
        "",
        "aten.div.Tensor",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_module_is_named_and_replayed(name: str, tmp_path: pathlib.Path) -> None:
    build, module, operator = NAMED[name]
    (record,) = train(build(), tmp_path, bad=(0,), steps=1)
    facts = facts_of(record)
    assert (facts["module"], facts["left_out"]) == (module, [])
    assert replay(record["rerun_capture"][0], build).operator.name == operator


def test_the_micro_batch_is_told(tmp_path: pathlib.Path) -> None:
    """Of two calls of one module, each with a backward of its own, the second one's gradient of its weight is bad."""
    model, records = Scaled(lambda x: x.abs().sqrt()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], sinks=[records.append], every=1) as watch:
        call = watch.rerun(lambda x: model(x).square().sum().backward(), tmp_path)
        call(torch.ones(3, 4))
        call(torch.zeros(3, 4))
        optimizer.step()
    assert (facts_of(records[0])["call"], facts_of(records[0])["in_backward"]) == (1, True)


def test_two_models_of_one_step(tmp_path: pathlib.Path) -> None:
    models, records = [nn.Sequential(nn.Linear(4, 4, bias=False), part) for part in (Unit(), nn.Tanh())], []
    optimizer = torch.optim.SGD(nn.ModuleList(models).parameters(), lr=0.1)
    with dh.gradients(models, optimizer, rules=[dh.SkipNonFinite()], sinks=[records.append], every=1) as watch:
        call = watch.rerun(lambda x: models[1](models[0](x)).sum().backward(), tmp_path)
        call(torch.zeros(3, 4))
        optimizer.step()
    assert facts_of(records[0])["class"] == "Unit"


def test_gradients_and_rules_are_those_of_a_step_without_a_capture(tmp_path: pathlib.Path) -> None:
    """A finite spike that a rule with a memory sees, with a rule behind it that rewrites."""
    found = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        with dh.gradients(model, optimizer, rules=[dh.SkipSpike(loss=False), dh.AdaGC()]) as watch:
            call = watch.rerun(lambda x, net=model: (net(x).square() * x.square().mean()).mean().backward(), folder)
            for step in range(80):
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
                call(x * (1 if step != 75 else 1e4))
                optimizer.step()
                assert watch.was_skipped == (step == 75)
                if step == 75:
                    found.append([each.grad.clone() for each in model.parameters()])
                optimizer.zero_grad()
            assert watch.steps == 80
        found[-1] += [each.clone() for each in model.state_dict().values()]
    assert all(map(torch.equal, *found))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_looked_at_is_one_sentence(tmp_path: pathlib.Path) -> None:
    with pytest.warns(UserWarning, match="cannot be written: .*; training goes on"):
        (record,) = train(Net(), tmp_path / ("long" * 100))
    assert "rerun_capture" not in record


def test_steps_without_a_module_to_name_leave_captures_for_others(tmp_path: pathlib.Path) -> None:
    model, batches = Net(), [torch.full((3, 4), torch.nan), torch.zeros(3, 4)]
    records: list[dict[str, Any]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], sinks=[records.append], every=1) as watch:
        call = watch.rerun(lambda x: model(x).square().mean().backward(), tmp_path, captures=1)
        for x in batches:
            call(x)
            optimizer.step()
            optimizer.zero_grad()
    assert [("rerun_why" in each, "rerun_capture" in each) for each in records] == [(True, False), (False, True)]
