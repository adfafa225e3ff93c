"""The simulated accelerator with a host that runs ahead: numbers stay right, and what is missing still shows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks._streams import event_on
from tests.support.sim import simulated
from tests.support.stores.faulty import soon

pytestmark = pytest.mark.full_tier  # a test of the tests

N = 4096


def test_a_query_says_not_yet_of_the_last_items_of_a_stream(sim: torch.device) -> None:
    stream, other = torch.Stream(sim), torch.Stream(sim)
    with simulated.lag(3):
        events = [event_on(stream) for _ in range(5)]
        alone = event_on(other)
        assert soon(events[0].query)
        assert [event.query() for event in events] == [True, True, False, False, False]
        assert not alone.query(), "items of another stream do not count"
        assert not stream.query()
        events[3].synchronize()
        assert [event.query() for event in events] == [True, True, True, True, False]
        stream.synchronize()
        assert events[4].query()
        assert stream.query()
        assert not alone.query()
    assert alone.query()


def test_a_missing_wait_gives_wrong_numbers_with_a_lag_too(sim: torch.device) -> None:
    main, side = torch.accelerator.current_stream(sim), torch.Stream(sim)
    x = torch.ones(N, device=sim)
    side.wait_stream(main)
    with simulated.lag():
        with simulated.held(main):
            y = x * 2
            with side:
                wrong = y + 1
                side.synchronize()
        side.wait_stream(main)
        with side:
            right = y + 1
        main.wait_stream(side)
        assert torch.equal(right.cpu(), torch.full((N,), 3.0))
        assert not torch.equal(wrong.cpu(), torch.full((N,), 3.0))


def model() -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten()]
    linear = [nn.Linear(8 * 64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)]
    return nn.Sequential(*convolutions, *linear)


def trained(device: str, steps: int, pipeline: object = None) -> list[torch.Tensor]:
    """The parameters after some steps."""
    ours = model().to(device)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9)
    batches = [torch.randn(4, 3, 8, 8).to(device) for _ in range(steps)]
    labels = torch.arange(4).to(device)
    attached = dh.save_activations(ours, "", pipeline) if pipeline else None
    for x in batches:
        optimizer.zero_grad()
        F.cross_entropy(ours(x), labels).backward()
        optimizer.step()
    if attached is not None:
        attached.remove()
    return [p.detach().cpu() for p in ours.parameters()]


@pytest.mark.parametrize(
    ("items", "pipeline"),
    [
        (simulated.FOR_EVER, None),
        (1, dh.OnCpu(in_flight="8 KiB")),
        (50, dh.OnCpu(in_flight="8 KiB")),
        (simulated.FOR_EVER, dh.OnCpu(in_flight="8 KiB")),
    ],
    ids=str,
)
def test_training_has_the_bits_of_the_cpu_though_the_host_is_ahead(
    sim: torch.device, items: int, pipeline: object
) -> None:
    truth = trained("cpu", 3)
    with simulated.lag(items), simulated.counted() as seen:
        found = trained("sim", 3, pipeline)
    assert all(torch.equal(a, b) for a, b in zip(truth, found, strict=True))
    if pipeline:
        assert seen["to_host_async_bytes"] > 10_000
    else:
        assert seen["operators_ahead"] > 0.8 * seen["operators"], "few operators may make the host wait"
