"""A script that knows nothing of disthooks: what a session attaches to, when, and when it must not be silent."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import os
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import AttachError, MatchError, UsageError
from disthooks.run.session import Session
from tests.support.accelerated import tracker
from tests.support.jobs.started import RUN, job

HOOKS = """
save: [{modules: "body", store: {kind: OnDisk, directory: FOLDER}}]
watch: {every: 1, stats: [{kind: Norm}, {kind: Spread}], sinks: [{kind: Jsonl, path: PATH}]}
"""


def methods() -> tuple[Any, ...]:
    return (
        nn.Module.__call__,
        torch.optim.Optimizer.__init__,
        dh.config.Plan.save,
        dh.config.Plan.watch,
        dh.config.Plan.prepare,
    )


UNTOUCHED = methods()


class Net(nn.Module):
    def __init__(self, body: str = "body") -> None:
        super().__init__()
        self.add_module(body, nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
        self.calls = [body]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.calls[0])(x)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: Callable[..., Any], *optimizers: torch.optim.Optimizer) -> None:
    model(torch.ones(512, 16)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


Starts = Callable[..., Session]


@pytest.fixture
def start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    sessions = []

    def begin(text: str = HOOKS) -> Session:
        file = tmp_path / "hooks.yaml"
        file.write_text(text.replace("PATH", str(tmp_path / "log.jsonl")).replace("FOLDER", str(tmp_path)))
        sessions.append(Session(dh.config.from_config(file)))
        sessions[-1].arm()
        return sessions[-1]

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield begin
    for session in sessions:
        session.finish(os.getpid(), failed=True)
    assert methods() == UNTOUCHED


def ended(session: Session) -> list[dict[str, Any]]:
    return session.finish(os.getpid())["attached"]


def test_the_first_step_is_seen_with_its_own_backward(start: Starts, tmp_path: pathlib.Path) -> None:
    session = start()
    model = Net()
    optimizer = sgd(model)
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 16))
    model.train()
    expected = copy.deepcopy(model)
    for _ in range(2):
        step(model, optimizer)
    assert nn.Module.__call__ is UNTOUCHED[0]  # nothing waits, so nothing is in the way
    [told] = ended(session)
    assert told["saved"]["moved"] > 0
    assert told["watched"]["steps"] == 2
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert '"grad_norm/max_rank": null' not in lines[0]  # this rank's own gradients of the first backward
    other = sgd(expected)
    for _ in range(2):
        step(expected, other)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_of_a_student_and_a_teacher_the_student(start: Starts) -> None:
    session = start()
    teacher, student = Net("other"), Net()
    optimizer = sgd(student)
    teacher(torch.ones(2, 16))  # with gradients on, and nobody holds its parameters
    step(student, optimizer)
    [told] = ended(session)
    assert told["watched"]["parameters"] == 4


def test_two_models_of_one_game(start: Starts, tmp_path: pathlib.Path) -> None:
    session = start()
    maker, judge = Net(), Net("judge")  # "body" matches in one of them
    makes, judges = sgd(maker), sgd(judge)
    step(judge, judges)
    step(lambda x: judge(maker(x)), makes)
    assert len(ended(session)) == 2
    assert ['"optimizer": 1' in line for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [False, True]


TOGETHER = """
watch: {every: 1, optimizers: together, rules: [{kind: SkipNonFinite}, {kind: ClipNorm, max_norm: 0.01}],
        sinks: [{kind: Jsonl, path: PATH}]}
"""


def test_two_optimizers_of_one_model_step_together(start: Starts, tmp_path: pathlib.Path) -> None:
    session = start(TOGETHER)
    model = Net()
    first, last = model.body[0], model.body[2]
    optimizers = [sgd(first), torch.optim.AdamW(last.parameters())]
    model(torch.ones(512, 16)).square().mean().backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for optimizer in optimizers:
        optimizer.step()
    clipped = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    before = [p.detach().clone() for p in model.parameters()]
    first.weight.grad[0, 0] = float("nan")
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    [told] = ended(session)
    assert (told["watched"]["steps"], told["watched"]["parameters"]) == (2, 4)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "grad_norm" in line]
    assert abs(logged[0]["grad_norm"] / norm - 1) < 1e-6
    assert abs(clipped / 0.01 - 1) < 1e-3
    assert [line["skipped"] for line in logged] == [0, 1]


@pytest.mark.parametrize("names", [["left"], ["left", "right"]])
def test_a_pattern_that_matches_in_no_model(start: Starts, names: list[str]) -> None:
    start()
    pairs = [(model, sgd(model)) for model in map(Net, names)]
    for model, optimizer in pairs[:-1]:
        step(model, optimizer)
    with pytest.raises(MatchError, match="'body' matches no module"):
        step(*pairs[-1])


SEVERAL = """
save:
- {modules: "left", store: {kind: OnCpu}}

- {modules: "right", store: {kind: OnCpu}}
- {modules: "right.0", store: {kind: OnCpu}}
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SEVERAL, r"hooks\.yaml:6: 'right\.0' .* inside 'right', that .*hooks\.yaml:5"),
        (SEVERAL.replace('"right"', '"wrong"'), r"hooks\.yaml:5: 'wrong' matches no module"),
        (
            SEVERAL.replace('"right.0", store: {kind: OnCpu}', "right, store: {kind: OnDevice}") + "budget: 1 GiB",
            r"hooks\.yaml:6: save\.2\.store: 'budget' says how much stays on the device",
        ),
    ],
    ids=["overlap", "match", "budget"],
)
def test_of_several_models_an_error_has_the_line_of_its_entry(start: Starts, text: str, says: str) -> None:
    start(text)
    one, two = Net("left"), Net("right")
    both = sgd(one), sgd(two)
    with pytest.raises(UsageError, match=says):
        [step(model, optimizer) for model, optimizer in zip((one, two), both, strict=True)]


class Ahead(torch.optim.Optimizer):
    """An optimizer that has another one inside."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize("several", [True, False], ids=["two", "one inside another"])
def test_however_many_optimizers_a_model_is_attached_to_once(start: Starts, several: bool) -> None:
    session = start()
    model = Net()
    step(model, *[sgd(part) for part in (model.body[0], model.body[2])] if several else [Ahead(model.parameters())])
    [told] = ended(session)
    assert told["watched"] == {"steps": 1, "parameters": 4, "nonfinite": 0}
    assert told["saved"]["calls"] == 1


@pytest.mark.parametrize("how", ["prepare", "plan"])
def test_a_script_that_attaches_itself_wins(start: Starts, how: str, tmp_path: pathlib.Path) -> None:
    session = start()
    model = Net()
    optimizer = sgd(model)
    step(model, optimizer)  # attached by the session
    if how == "prepare":
        mine = dh.prepare(model, optimizer, tmp_path / "hooks.yaml")
        gradients = mine.gradients
    else:
        plan = dh.config.from_config(tmp_path / "hooks.yaml")
        mine, gradients = plan.save(model), plan.watch(model, optimizer)
    step(model, optimizer)
    assert gradients.steps == 1
    other = Net()
    step(other, sgd(other))  # nor is anything attached from now on
    assert ended(session) == []
    mine.remove()
    gradients.remove()


def test_a_compiled_model(start: Starts) -> None:
    session = start()
    model = Net()
    optimizer = sgd(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(torch.ones(2, 16))
    step(compiled, optimizer)
    [told] = ended(session)
    assert told["watched"]["steps"] == 1


@pytest.mark.parametrize("strict", [False, True])
def test_nothing_called_is_said_at_the_first_step(
    start: Starts, strict: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    session = start(HOOKS + "strict: true" * strict)
    model = Net()
    optimizer = sgd(model)
    torch.func.functional_call(model.body[0], {}, torch.ones(1, 16))  # a part alone
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if strict:
        with pytest.raises(AttachError, match=r"first step of SGD begins and nothing is attached.*only some of"):
            optimizer.step()
        return
    for _ in range(2):
        optimizer.step()
    found = session.finish(os.getpid())
    said = capsys.readouterr().err
    assert said.count("SGD is left alone: nothing is attached to its model: Linear was called and has only some") == 1
    assert "WARNING: nothing was attached" in said
    assert (found["attached"], len(found["left_alone"])) == ([], 1)


def test_several_processes_and_no_wrapper(start: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Net()
    wanted = r"a launcher started 2 processes .* torch\.distributed was not initialised in this one: each would train"
    with pytest.raises(AttachError, match=wanted):
        step(model, sgd(model))


def test_steps_that_only_fill_a_state_pass(start: Starts) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    session = start()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    get_optimizer_state_dict(model, optimizer)  # makes a step, before any forward
    assert optimizer.state
    step(model, optimizer)
    [told] = ended(session)
    assert told["watched"]["steps"] == 1


def test_a_script_without_training_is_warned_of(start: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    session = start()
    with torch.no_grad():
        Net()(torch.ones(1, 16))
    assert ended(session) == []
    assert "WARNING: the script ended and no model was trained" in capsys.readouterr().err


def test_what_came_later_is_left_in_place(start: Starts) -> None:
    session = start()
    mine, kind = torch.optim.Optimizer.__init__, torch.optim.Optimizer
    theirs = lambda self, *args, **kwargs: mine(self, *args, **kwargs)  # noqa: E731
    kind.__init__ = theirs
    try:
        session.finish(os.getpid(), failed=True)
        assert kind.__init__ is theirs
        model = Net()
        step(model, sgd(model))  # what is under it does nothing any more
        assert nn.Module.__call__ is UNTOUCHED[0]
    finally:
        kind.__init__ = UNTOUCHED[1]


def test_signatures_stay(start: Starts) -> None:
    start()
    waiting = sgd(Net())  # while it waits, calls are heard
    for now, before in zip(methods(), UNTOUCHED, strict=True):
        assert now is not before
        assert (now.__name__, now.__doc__, now.__qualname__) == (before.__name__, before.__doc__, before.__qualname__)
        assert inspect.signature(now) == inspect.signature(before)
    assert type(waiting) is torch.optim.SGD


def test_a_step_with_a_closure_acts_in_the_first_one_too(start: Starts) -> None:
    session = start("watch: {every: 1, rules: [{kind: ClipNorm, max_norm: 0.01}], stats: [{kind: Norm}]}")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for number in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.full((64, 16), 9.0)).square().mean()
            loss.backward()
            return loss

        _ = optimizer.step(closure=closure) if number == 1 else optimizer.step(closure)  # type: ignore[arg-type]
        moved = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
        assert torch.stack([one.norm() for one in moved]).norm().item() == pytest.approx(0.01, rel=1e-3)
    other = nn.Linear(2, 2)
    lbfgs = torch.optim.LBFGS(other.parameters())
    lbfgs.step(lambda: [loss := other(torch.ones(1, 2)).square().sum(), loss.backward()][0])
    ended(session)
    start("strict: true\nwatch: {every: 1, rules: [{kind: ClipNorm, max_norm: 1.0}]}")
    another = nn.Linear(2, 2)
    strict = torch.optim.LBFGS(another.parameters())
    with pytest.raises(UsageError, match="more than once in a step"):
        strict.step(lambda: [loss := another(torch.ones(1, 2)).square().sum(), loss.backward()][0])


@pytest.mark.parametrize("watch", ["", "watch: {every: 1, stats: [{kind: Norm}]}"], ids=["save", "save and watch"])
def test_lbfgs_goes_on_and_its_tensors_are_saved(start: Starts, watch: str, capsys: pytest.CaptureFixture[str]) -> None:
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(512, 16)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        return [parameter.detach() for parameter in model.parameters()]

    truth = trained()
    session = start('save: [{modules: "body", store: {kind: OnDisk, directory: FOLDER}}]\n' + watch)
    assert all(torch.equal(*pair) for pair in zip(trained(), truth, strict=True))
    [told] = ended(session)
    assert told["saved"]["moved"] > 0
    assert told["saved"]["calls"] > 2
    assert ("LBFGS is left alone" in capsys.readouterr().err) == bool(watch)


def test_a_reference_beside_the_wrapped_model_is_left_alone(
    start: Starts, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("disthooks.run.optimizers.launched_world_size", lambda: 2)
    monkeypatch.setattr("disthooks.run.optimizers.reason_alone", lambda: None)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/pg", rank=0, world_size=1)
    try:
        session = start("watch: {every: 1, stats: [{kind: Norm}]}")
        reference = Net()
        wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(reference))
        pair = sgd(reference), sgd(wrapped)
        for _ in range(2):
            step(reference, pair[0])
            step(wrapped, pair[1])
        [told] = ended(session)
    finally:
        torch.distributed.destroy_process_group()
    assert told["watched"]["steps"] == 2
    assert capsys.readouterr().err.count("SGD is left alone") == 1
    for mine, theirs in zip(reference.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("ddp", [False, True], ids=["plain", "DDP"])
def test_models_that_the_script_drops_are_freed_and_what_they_logged_is_written(
    start: Starts, ddp: bool, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = start()
    if ddp:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/pg", rank=0, world_size=1)

    def fold(steps: int) -> list[weakref.ref[Any]]:
        model: Any = nn.parallel.DistributedDataParallel(Net()) if ddp else Net()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            step(model, optimizer)
        model(torch.ones(512, 16))  # a search for the batch that fits ends like this
        weight = (model.module if ddp else model).body[0].weight
        states = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
        return [weakref.ref(model), weakref.ref(weight), weakref.ref(optimizer), *states]

    try:
        for steps in (2, 0, 3, 2, 2):
            left = fold(steps)
            gc.collect()
            assert [one() for one in left] == [None] * len(left)
        told = session.finish(os.getpid())["attached"]
    finally:
        if ddp:
            torch.distributed.destroy_process_group()
    assert [one["watched"]["steps"] for one in told] == [2, 0, 3, 2, 2]
    assert all(one["saved"]["moved"] > 0 for one in told)
    lines = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [0, 1, 0, 1, 2, 0, 1, 0, 1]
    said = capsys.readouterr().err
    assert ", 4 models; saved" in said
    assert "watched 9 steps of 4 parameters" in said
    assert said.count("watched 0 steps") == 1


FORKS = """
import multiprocessing, os, signal, time, torch
def train():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
fork = multiprocessing.get_context("fork")
for target, args in ((train, ()), (time.sleep, (60,))):
    child = fork.Process(target=target, args=args)
    child.start()
    if args:
        time.sleep(0.5)
        child.terminate()
    child.join()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_fork_that_trains_loses_no_record(tmp_path: pathlib.Path) -> None:
    (tmp_path / "disthooks.yaml").write_text(
        "watch: {every: 1, stats: [{kind: Norm}], sinks: [{kind: Jsonl, path: log.jsonl}]}"
    )
    (tmp_path / "forks.py").write_text(FORKS)
    done = job([*RUN, "forks.py"], tmp_path)
    assert [each["step"] for each in done.logged()] == [0, 1, 2]
    assert done.err.count("watched 3 steps") == 1


LIGHTNING = """
import lightning, torch
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
data = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", **quiet).fit(Lit(), data)
"""


@pytest.mark.full_tier
def test_processes_that_lightning_starts_are_not_waited_for(tmp_path: pathlib.Path) -> None:
    (tmp_path / "disthooks.yaml").write_text("watch: {every: 1, stats: [{kind: Norm}]}")
    (tmp_path / "lit.py").write_text(LIGHTNING)
    done = job([*RUN, "lit.py"], tmp_path)
    assert done.code == 0
    assert "is left alone" in done.err
    assert "Lightning started the other processes itself" in done.err


@pytest.mark.parametrize("limit", [1e-3, None], ids=["clips", "does not clip"])
def test_before_an_accelerator_clips(start: Starts, tmp_path: pathlib.Path, limit: float | None) -> None:
    from accelerate import Accelerator

    session = start()
    accelerator = Accelerator(cpu=True)
    model = Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    true, left = [], []
    for _ in range(2):
        accelerator.backward(model(torch.ones(512, 16)).square().mean())
        true.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        if limit:
            accelerator.clip_grad_norm_(model.parameters(), limit)
        left.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    assert (left < true) == bool(limit)
    (told,) = ended(session)
    assert told["watched"]["steps"] == 2
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["grad_norm"] for line in lines] == pytest.approx(true, rel=1e-6)
    assert "clip_grad_norm_" not in vars(accelerator)


def goes_on(log: pathlib.Path, weights: list[list[torch.Tensor]]) -> list[dict[str, Any]]:
    """A script of eight steps, and its second life from the fourth on: the same weights and records."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(8), *range(4, 8)]
    # Each life of a script is a run of its own, at another time; its first record says all that the loop has set.
    own = ("run", "restart", "time", "about", "names")
    measured = [{k: v for k, v in line.items() if k not in own and not k.startswith("loop/")} for line in lines]
    assert measured[8:] == measured[4:8]
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    return lines


ADAPTS = """
watch: {every: 1, stats: [{kind: Norm}], sinks: [{kind: Jsonl, path: PATH}],
        rules: [{kind: ClipZScore, z_thresh: 0.5, warmup_steps: 3}]}
"""


def _accelerated(folder: pathlib.Path, steps: range, resume: bool) -> list[torch.Tensor]:
    """A script that accelerate's checkpoints let go on; it knows nothing of disthooks."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    if resume:
        accelerator.load_state(str(folder))
    for number in steps:
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(number)) * (1, 1, 9)[number % 3]
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 3 and not resume:
            accelerator.save_state(str(folder))
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_resumed_script_goes_on_with_its_rules_and_in_its_log(start: Starts, tmp_path: pathlib.Path) -> None:
    found = []
    for steps, resume in ((range(8), False), (range(4, 8), True)):
        session = start(ADAPTS)
        found.append(_accelerated(tmp_path / "state", steps, resume))
        assert session.finish(os.getpid())["attached"][0]["watched"]["steps"] == len(steps)
    assert any(line["clip_ratio"] < 1 for line in goes_on(tmp_path / "log.jsonl", found)[4:8])


def test_the_trainer_under_a_session_goes_on_from_its_checkpoint(start: Starts, tmp_path: pathlib.Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.net(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    rows = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(4, generator=rows), "labels": torch.ones(1)} for i in range(16)]
    options: dict[str, Any] = {"use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 8, "save_steps": 4}
    options |= {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "max_grad_norm": 0, "learning_rate": 0.1}
    found: list[list[torch.Tensor]] = []
    logs: list[list[float]] = []
    args = TrainingArguments(str(tmp_path / "out"), **options)
    for resumed in (None, str(tmp_path / "out" / "checkpoint-4")):
        session = start(ADAPTS)
        torch.manual_seed(0)
        trainer = Trainer(model=Regression(), args=args, train_dataset=data)
        trainer.train(resume_from_checkpoint=resumed)
        found.append([p.detach().clone() for p in trainer.model.parameters()])
        logs.append([entry["gradients/grad_norm"] for entry in trainer.state.log_history if "loss" in entry])
        session.finish(os.getpid())
        assert (tmp_path / "out" / "checkpoint-8" / "disthooks.pt").is_file()
    lines = goes_on(tmp_path / "log.jsonl", found)
    assert logs == [[line["grad_norm"] for line in lines[:8]]] * 2


LIT_ADAPTS = ADAPTS.replace("{kind: Norm}", "{kind: Norm}, {kind: MaxAbs}, {kind: Spread}")


def test_lightnings_trainer_under_a_session_goes_on_from_its_checkpoint(
    start: Starts, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    scale = torch.tensor([1.0, 1.0, 9.0, 1.0]).repeat_interleave(8)[:, None]
    data = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)) * scale  # four batches an epoch
    quiet: dict[str, Any] = {name: False for name in ("enable_progress_bar", "enable_model_summary")}
    quiet |= {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "gradient_clip_val": 0.1}
    weights, states, metrics = [], [], []
    for number, resumed in enumerate((None, tmp_path / "lit" / "epoch=0-step=4.ckpt")):
        session = start(LIT_ADAPTS)
        torch.manual_seed(0)
        keeps = ModelCheckpoint(tmp_path / "lit", save_top_k=-1, every_n_epochs=1, enable_version_counter=False)
        trainer = lightning.Trainer(callbacks=[keeps], logger=False, **quiet)
        model = Lit()
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=resumed)
        weights.append([p.detach().clone() for p in model.parameters()])
        states.append(torch.load(tmp_path / "lit" / "epoch=1-step=8.ckpt", weights_only=False)["callbacks"])
        (told,) = ended(session)
        assert told["watched"]["steps"] == (8, 4)[number]
        metrics.append(sorted(name for name in trainer.callback_metrics if name.startswith("gradients/")))
    assert "begin anew" not in capsys.readouterr().err
    lines = goes_on(tmp_path / "log.jsonl", weights)
    assert any(line["clip_ratio"] < 1 for line in lines[4:8])
    (name,) = [name for name in states[0] if name.startswith("WaitingCallback")]
    assert states[0][name]["optimizers"][0]["steps"] == 8
    assert repr(states[0][name]) == repr(states[1][name])
    assert min(line["grad_norm"] for line in lines) > 0.1  # from before Lightning clips
    assert metrics == [["gradients/clip_ratio", "gradients/grad_max_abs", "gradients/grad_norm"]] * 2


def test_a_state_that_nobody_kept_is_said(start: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    first = torch.optim.AdamW(model.parameters())
    step(model, first)
    start(ADAPTS)
    second = torch.optim.AdamW(model.parameters())
    second.load_state_dict(first.state_dict())
    step(model, second)
    assert "AdamW goes on from a state that the script has loaded" in capsys.readouterr().err


def test_what_is_attached_and_what_is_not_finite_is_said(start: Starts, capsys: pytest.CaptureFixture[str]) -> None:
    session = start(
        HOOKS.replace("every: 1", "every: 4").replace("{kind: Spread}", "{kind: NonFinite}") + "blame: true"
    )
    model = Net()
    optimizer = sgd(model)
    step(model, optimizer)
    said = capsys.readouterr().err
    assert (
        "hooks.yaml: attached to Net on 1 rank: save 'body': 1 module to OnDisk; watch 4 parameters on a plain module"
        in said
    )
    model.body[1] = nn.Sequential(nn.Tanh())  # what is attached stays
    with torch.no_grad():
        model.body[0].weight[0, 0] = torch.nan
    for _ in range(5):
        step(model, optimizer)
    [told] = ended(session)
    said = capsys.readouterr().err
    assert said.count("WARNING: step 1: gradients are not finite, of 4 parameters: body.2.bias on rank 0, ") == 1
    assert said.count("forward 1: body.0 (Linear), call 0: its inputs were finite, its weights were not") == 1
    assert told["watched"]["nonfinite"] == 5
    assert "watched 6 steps of 4 parameters, 5 of them with gradients that were NOT FINITE" in said


def test_the_trackers_that_a_script_has_get_the_numbers(start: Starts) -> None:
    from accelerate import Accelerator

    mine = {"kind": "AccelerateTracker", "prefix": "mine/"}
    for sinks, prefix in (([], "gradients/"), ([mine], "mine/")):
        rows: list[tuple[dict[str, Any], int | None]] = []
        session = start(json.dumps({"watch": {"every": 1, "stats": [{"kind": "Norm"}], "sinks": sinks}}))
        accelerator = Accelerator(cpu=True, log_with=tracker(rows))
        accelerator.init_trackers("run")
        model = Net()
        model, optimizer = accelerator.prepare(model, sgd(model))
        for _ in range(3):
            step(model, optimizer)
        session.finish(os.getpid())
        assert [number for _, number in rows] == [0, 1, 2]
        for row, _ in rows:
            assert f"{prefix}grad_norm" in row
            assert all(key.startswith((f"{prefix}grad_norm", f"{prefix}loop/")) for key in row)
