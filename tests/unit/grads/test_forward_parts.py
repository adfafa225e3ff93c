"""Statistics of forwards: what is said when there is nothing to read, and fingerprints whatever thread comes first."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.errors import UsageError
from tests.support.replicas import replicate


def stepped(watched: Any, run: Any) -> tuple[list[str], dict[str, Any]]:
    """The warnings of three steps, and the record of the last one."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with dh.gradients(model, optimizer, stats=[watched], every=1) as watch:
            for _ in range(3):
                run(model, watch)
                optimizer.step()
    return [str(each.message) for each in seen if "has no numbers" in str(each.message)], watch.latest


def without_a_call(model: nn.Module, watch: Any) -> None:
    weight, bias = model[0].parameters()
    nn.functional.linear(torch.ones(1, 2), weight, bias).sum().backward()


def with_a_loss(model: nn.Module, watch: Any) -> None:
    loss = model(torch.ones(1, 2)).sum()
    watch.note_loss(loss)
    loss.backward()


@pytest.mark.parametrize(
    ("watched", "word"), [(stats.Loss(), "note_loss"), (stats.Activations(), "no output was read")]
)
def test_a_statistic_that_reads_nothing_says_so_once(watched: Any, word: str) -> None:
    said, _ = stepped(watched, without_a_call)
    assert len(said) == 1
    assert word in said[0]
    assert "in step 0" in said[0]
    said, latest = stepped(watched, with_a_loss)
    assert not said
    assert {"loss", "activation_rms"} & latest.keys()


@pytest.mark.parametrize("kind", [stats.Activations, stats.Loss, stats.Times])
def test_a_statistic_without_numbers_of_parameters_refuses_them(kind: Any) -> None:
    with pytest.raises(UsageError, match=rf"{kind.__name__}\(per_parameter=True\): it has no numbers of single"):
        kind(per_parameter=True)


def _printed(first: int) -> dict[str, Any]:
    """The fingerprints of a step whose two replicas run one after the other, the replica ``first`` first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.arange(24.0).view(6, 4).chunk(2)
    with dh.gradients(model, optimizer, stats=[stats.Fingerprints()], every=1) as watch:
        outputs: dict[int, torch.Tensor] = {}
        replicas = replicate(model, 2)
        for place in (first, 1 - first):

            def run(place: int = place) -> None:
                outputs[place] = replicas[place](inputs[place])

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        torch.cat([outputs[0], outputs[1]]).sum().backward()
        optimizer.step()
        watch.flush()
        return {name: value for name, value in watch.latest.items() if name.startswith("fingerprint/")}


def test_fingerprints_do_not_depend_on_which_replica_runs_first() -> None:
    one, two = _printed(0), _printed(1)
    assert one == two
    assert len(set(one.values())) > 6
