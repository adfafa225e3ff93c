"""What is run again, and what is refused; the engines are in tests/engines/test_rerun.py."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.report.document import document
from disthooks.report.log import read

SKIP = [dh.SkipNonFinite()]


class Fault:
    """Multiplies an output of a module by ``factor``, in so many of the next calls."""

    def __init__(self, module: nn.Module, factor: float = math.nan) -> None:
        self.left, self.factor = 0, factor
        module.register_forward_hook(self._spoil)

    def _spoil(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        self.left -= 1
        return output * self.factor if self.left >= 0 else None


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def train(
    spoil: Callable[[Fault, int], None] = lambda fault, step: None,
    rules: Any = SKIP,
    factor: float = math.nan,
    steps: int = 4,
    step_by: Callable[..., None] | None = None,
    between: Callable[[nn.Module, int], None] = lambda model, step: None,
    probe: bool = True,
    wraps: bool = True,
    place: int = 0,
) -> tuple[dict[str, torch.Tensor], dict[int, dict[str, Any]]]:
    """The state after some steps, and the records, by step."""
    model, records = net(), []
    fault, optimizer = Fault(model[place], factor), torch.optim.Adam(model.parameters(), lr=0.01)
    stats = dh.stats.full()  # every=1 makes each step a logged one, with times
    with dh.gradients(model, optimizer, rules=rules, stats=stats, sinks=[records.append], every=1) as watch:

        def forward_backward(x: torch.Tensor, scale: Callable[[Any], Any] = lambda loss: loss) -> torch.Tensor:
            loss = model(x).square().mean()
            watch.note_loss(loss)
            scale(loss).backward()
            return loss.detach()

        call = watch.rerun(forward_backward, probe=probe) if wraps else forward_backward
        for step in range(steps):
            spoil(fault, step)
            if step_by is not None:
                step_by(call, optimizer, batch(step))
            else:
                call(batch(step))
                between(model, step)
                optimizer.step()
            optimizer.zero_grad()
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        found.setdefault(record["step"], {}).update(record)
    return copy.deepcopy(model.state_dict()), found


def once(fault: Fault, step: int) -> None:
    fault.left = 1 if step == 2 else 0


def twice(fault: Fault, step: int) -> None:
    fault.left = 2 if step == 2 else 0


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert not [name for name in one if not torch.equal(one[name], other[name])]


def test_a_finite_spike_is_run_again_and_states_of_rules_are_those_of_a_run_without_it() -> None:
    rules = [dh.SkipSpike(window=64, least=8, loss=False), dh.ClipAdaptive(), dh.SkipNonFinite()]

    def late(fault: Fault, step: int) -> None:
        fault.left = 1 if step == 30 else 0

    clean, _ = train(rules=rules, steps=40, wraps=False)
    state, records = train(late, rules=rules, factor=1e5, steps=40, place=3)
    assert_same(state, clean)
    assert records[30]["rerun"] == "transient"
    assert [step for step, record in records.items() if "rerun" in record] == [30]


def _closure(call: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.step(lambda: call(x))


def _scaled(call: Any, optimizer: Any, x: torch.Tensor) -> None:
    _scaler.unscale_(optimizer) if call(x, _scaler.scale) is None else None
    _scaler.step(optimizer)
    _scaler.update()


def _autocast(call: Any, optimizer: Any, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        call(x)
    optimizer.step()


_scaler = torch.amp.GradScaler("cpu", init_scale=256.0)


@pytest.mark.parametrize("how", [_closure, _autocast])
def test_other_ways_to_step(how: Any) -> None:
    clean, _ = train(step_by=how, wraps=False)
    state, records = train(once, step_by=how)
    assert_same(state, clean)
    assert records[2]["rerun"] == "transient"


def test_a_spike_under_a_grad_scaler() -> None:
    rules = [dh.SkipSpike(window=64, least=8, loss=False)]

    def late(fault: Fault, step: int) -> None:
        fault.left = 1 if step == 20 else 0

    clean, _ = train(rules=rules, steps=24, step_by=_scaled, wraps=False)
    state, records = train(late, rules=rules, factor=1e4, steps=24, step_by=_scaled, place=3)
    assert_same(state, clean)
    assert records[20]["rerun"] == "transient"


def test_bad_twice_is_left_out_and_buffers_are_put_back() -> None:
    skipped, _ = train(once, wraps=False)
    state, records = train(twice)
    assert_same(state, skipped)
    assert records[2]["rerun"] == "repeats"
    assert records[2]["skipped"] == 1.0


def test_bad_again_with_other_bits_differs() -> None:
    factors = iter((math.nan, math.inf))

    def each(fault: Fault, step: int) -> None:
        fault.left = 2 if step == 2 else 0
        if step == 2:
            kind = type("Each", (Fault,), {"factor": property(lambda self: next(factors), lambda self, value: None)})
            fault.__class__ = kind

    _, records = train(each)
    assert records[2]["rerun"] == "differs"
    assert records[2]["skipped"] == 1.0


def _outside(model: nn.Module, step: int) -> None:
    if step == 2:
        sum((each * 0).sum() for each in model.parameters()).backward()  # type: ignore[union-attr]


def _changes(model: nn.Module, step: int) -> None:
    if step == 2:
        model[0].weight.grad.mul_(1.0)  # type: ignore[index]


@pytest.mark.parametrize(
    ("between", "why"),
    [(_outside, "a backward outside of the function"), (_changes, "the loop changed the gradients")],
)
def test_a_step_that_cannot_be_run_again_says_why(between: Any, why: str) -> None:
    _, records = train(once, between=between)
    assert (records[2]["rerun"], records[2]["skipped"]) == ("refused", 1.0)
    assert why in records[2]["rerun_why"]


def test_an_argument_that_was_changed_is_refused() -> None:
    def changes(call: Any, optimizer: Any, x: torch.Tensor) -> None:
        call(x)
        x.add_(1)
        optimizer.step()

    _, records = train(once, step_by=changes, probe=False)
    assert "an argument was changed" in records[2]["rerun_why"]


def test_a_loop_that_begins_again_forgets_the_calls() -> None:
    def begins_again(call: Any, optimizer: Any, x: torch.Tensor) -> None:
        call(x + 1)
        optimizer.zero_grad()
        call(x)
        optimizer.step()

    def late(fault: Fault, step: int) -> None:
        fault.left = 2 if step == 2 else 0  # both calls of the first run

    clean, _ = train(step_by=begins_again, wraps=False)
    state, records = train(late, step_by=begins_again)
    assert (records[2]["rerun"], records[2]["rerun_calls"]) == ("transient", 1)
    trained = [name for name in state if "running" not in name and "batches" not in name]
    assert not [name for name in trained if not torch.equal(state[name], clean[name])]


def _watched(**options: Any) -> tuple[nn.Module, Any, Any]:
    model = net()
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    return model, optimizer, dh.gradients(model, optimizer, **({"rules": SKIP} | options))


def test_what_can_never_work_is_an_error_at_once() -> None:
    for options, why in (
        ({"rules": [dh.ClipNorm(1.0)]}, "no rule leaves steps out"),
        ({"restore_buffers": False}, "leave out restore_buffers=False"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    ):
        _, _, watch = _watched(**options)
        with watch, pytest.raises(UsageError, match=why):
            watch.rerun(print)
    model = net()
    with dh.gradients(model, torch.optim.SGD(model[0].parameters(), lr=0.1), rules=SKIP) as watch:
        with pytest.raises(UsageError, match="no optimizer of this attachment has them"):
            watch.rerun(print)
        model[1:].requires_grad_(False)
        assert callable(watch.rerun(print))
        with pytest.raises(UsageError, match="takes the function"):
            watch.rerun(None)  # type: ignore[arg-type]


def test_calls_that_can_never_be_made_again_are_errors() -> None:
    model, optimizer, watch = _watched()
    with watch:
        call = watch.rerun(lambda x: model(next(x) if hasattr(x, "__next__") else x).sum().backward())
        with pytest.raises(UsageError, match="an argument is an iterator"):
            call(iter([batch(0)]))
        with torch.inference_mode(), pytest.raises(UsageError, match="inference_mode"):
            call(batch(0))

        def steps(x: torch.Tensor) -> None:
            model(x).sum().backward()
            optimizer.step()

        with pytest.raises(UsageError, match="steps inside of the function"):
            watch.rerun(steps)(batch(0))
    assert call(batch(0)) is None  # after remove() the function is called as it is


def test_several_attachments_to_one_optimizer_are_refused() -> None:
    model, optimizer, watch = _watched(sinks=[(records := []).append], stats=[dh.stats.Norm()], every=1)
    fault = Fault(model[0])
    with watch, dh.gradients(model, optimizer, stats=[dh.stats.Norm()]):
        call = watch.rerun(lambda x: model(x).sum().backward())
        fault.left = 1
        call(batch(0))
        optimizer.step()
    assert [record["rerun_why"] for record in records if "rerun_why" in record] == [
        "other attachments watch the same optimizers"
    ]


def test_the_report_says_it_in_words(tmp_path: Any) -> None:
    log = tmp_path / "log.jsonl"
    model, optimizer, watch = _watched(sinks=[dh.sinks.Jsonl(log)], stats=[dh.stats.Norm()], every=1)
    fault = Fault(model[0])

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    with watch:
        call = watch.rerun(forward_backward)
        for step in range(4):
            fault.left = {1: 1, 2: 2}.get(step, 0)
            call(batch(step))
            optimizer.step()
            optimizer.zero_grad()
    told = document(read(log).runs[-1], str(log))
    text = " ".join([told["verdict"]["headline"], *told["verdict"]["sentences"]])
    assert (
        "Step 1: a rule left it out; run again, its gradients were good, with other bits on rank 0: the step was made."
        in text
    )
    assert "Step 2: run again, it gave the same bits: the fault is in the data or in the program." in text
    assert [each["step"] for each in told["events"] if each["kind"] == "rerun"] == [1, 2]


# --- loops of other people


def test_a_loop_that_clips_by_a_norm_of_its_own_is_not_run_again() -> None:
    """The norm is that of the first gradients: a NaN would spoil the second ones."""

    def clips(call: Any, optimizer: Any, x: torch.Tensor) -> None:
        call(x)
        parameters = optimizer.param_groups[0]["params"]
        norm = nn.utils.get_total_norm([each.grad for each in parameters])
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        optimizer.step()

    skipped, _ = train(once, step_by=clips, wraps=False)
    state, records = train(once, step_by=clips)
    assert_same(state, skipped)
    assert "measured the norm of the gradients before" in records[2]["rerun_why"]


def test_a_loop_that_clips_by_torchs_norm_clips_the_second_gradients() -> None:
    def clips(call: Any, optimizer: Any, x: torch.Tensor) -> None:
        call(x)
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
        optimizer.step()

    clean, _ = train(step_by=clips, wraps=False)
    state, records = train(once, step_by=clips)
    assert_same(state, clean)
    assert records[2]["rerun"] == "transient"


def test_a_step_that_never_comes_leaves_nothing_to_the_next_record() -> None:
    made: list[int] = []

    def clips(call: Any, optimizer: Any, x: torch.Tensor) -> None:
        call(x)
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
        made.append(len(made))
        if len(made) != 3:  # the loop leaves out the step that was run again
            optimizer.step()

    _, records = train(once, step_by=clips)
    assert not [step for step, record in records.items() if "rerun" in record]


def _apart(kind: str, probe: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
    """One backward through two models, each with an optimizer; only the first one is watched."""
    torch.manual_seed(0)
    models, records = (nn.Linear(4, 4), nn.Linear(4, 2)), []
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in models)
    fault, grads = Fault(models[0]), []
    stats = [dh.stats.Norm()]
    with dh.gradients(models[0], first, rules=SKIP, stats=stats, sinks=[records.append], every=1) as watch:

        def forward_backward(x: torch.Tensor) -> None:
            models[1](models[0](x)).square().mean().backward()

        call = watch.rerun(forward_backward, probe=probe) if kind != "plain" else forward_backward
        for step in range(3):
            fault.left = 1 if step == 2 and kind == "bad" else 0
            call(batch(step))
            try:
                first.step()
            finally:
                grads = [each.grad.clone() for each in models[1].parameters()]
            second.step()
            first.zero_grad()
            second.zero_grad()
    return [each.detach().clone() for each in models[0].parameters()], grads, records


def test_gradients_of_another_optimizer_are_never_added_to() -> None:
    with pytest.raises(UsageError, match="parameters of another optimizer got gradients"):
        _apart("good", True)
    weights, grads, _ = _apart("plain", False)
    found, mine, _ = _apart("good", False)
    assert all(torch.equal(a, b) for a, b in zip(weights + grads, found + mine, strict=True))
    _, bad, records = _apart("bad", False)
    assert all(
        bool(each.isnan().all()) for each in bad[:1]
    )  # the fault is in what that optimizer gets, as without rerun
    assert [each["rerun"] for each in records if "rerun" in each] == ["refused"]


def _scaled_apart(has_rerun: bool, is_bad: bool) -> tuple[list[torch.Tensor], list[Any]]:
    """Two losses, two optimizers, a GradScaler each; a spike in the first model."""
    torch.manual_seed(0)
    models, records = (nn.Linear(4, 4), nn.Linear(4, 2)), []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (256.0, 64.0)]
    fault = Fault(models[0], 1e4)
    rules, both = [dh.SkipSpike(window=64, least=8, loss=False)], nn.ModuleList(models)
    with dh.gradients(both, optimizers, rules=rules, stats=[dh.stats.Norm()], sinks=[records.append], every=1) as watch:

        def forward_backward(x: torch.Tensor) -> torch.Tensor:
            losses = [model(x).square().mean() for model in models]
            for scaler, loss in zip(scalers, losses, strict=True):
                scaler.scale(loss).backward()
            return losses[0].detach()

        call = watch.rerun(forward_backward) if has_rerun else forward_backward
        for step in range(24):
            fault.left = 1 if step == 20 and is_bad else 0
            call(batch(step))
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.unscale_(optimizer)
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.step(optimizer)
            for scaler in scalers:
                scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return [each.detach().clone() for each in both.parameters()], [each for each in records if "rerun" in each]


def test_two_optimizers_with_a_grad_scaler_each() -> None:
    clean, _ = _scaled_apart(False, False)
    found, records = _scaled_apart(True, True)
    assert [each["rerun"] for each in records] == ["transient"]
    assert all(torch.equal(a, b) for a, b in zip(clean, found, strict=True))


def test_calls_without_a_step_are_not_held() -> None:
    """A loop that zeroes gradients in place and never steps: nothing tells that it began again."""
    model, optimizer, watch = _watched()
    with watch:
        call, seen = watch.rerun(lambda x: model(x).sum().backward()), []
        for number in range(20):
            x = batch(number)
            seen.append(weakref.ref(x))
            call(x)
            optimizer.zero_grad(set_to_none=False)
        del x
        assert sum(each() is not None for each in seen) <= 1


def test_random_numbers_go_on_where_the_step_was() -> None:
    """The loop draws some between its call and the step; dropout of the next step depends on how many."""
    clean, found = (
        train(
            spoil=lambda fault, step, at=at: setattr(fault, "left", int(step == at)), between=lambda *_: torch.rand(3)
        )
        for at in (-1, 2)
    )
    assert found[1][2]["rerun"] == "transient"
    assert all(map(torch.equal, clean[0].values(), found[0].values()))
