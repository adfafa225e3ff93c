"""The plan of a tape, and the prediction of the next tape."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from disthooks.saved.stores.plan import Placement, Tapes, make_plan


@pytest.mark.parametrize("seed", range(200))
def test_each_entry_has_a_place_and_every_limit_holds(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 3, 10, 50)) for _ in range(rng.randint(0, 40))]
    limits = [rng.randint(0, 200) for _ in range(rng.randint(0, 2))] + [None]
    reads = rng.sample(range(len(sizes)), rng.randint(0, len(sizes))) if rng.random() < 0.5 else None
    plan = make_plan(sizes, limits, reads)
    assert len(plan.places) == len(sizes)
    assert sorted(plan.order) == list(range(len(sizes)))
    assert list(plan.order[: len(reads or ())]) == (reads or [])
    for place, limit in enumerate(limits):
        held = sum(size for size, where in zip(sizes, plan.places, strict=True) if where == place)
        assert limit is None or held <= limit
    where = [plan.places[position] for position in plan.order]
    assert where == sorted(where), "what backward reads later is never nearer"


@pytest.mark.parametrize("seed", range(50))
def test_the_first_saved_are_sent_and_no_more_than_must_be(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 20) for _ in range(rng.randint(1, 60))]
    limit = rng.randint(0, sum(sizes))
    where = list(make_plan(sizes, [limit, None]).places)
    assert where == sorted(where, reverse=True), "what is sent was saved before what stays"
    sent = where.count(1)
    assert sent == 0 or sum(sizes[sent - 1 :]) > limit, "one entry less would be too few"


def test_what_backward_never_reads_goes_furthest() -> None:
    plan = make_plan([10] * 4, [20, None], reads=[0, 3])
    assert plan.places == (0, 1, 1, 0)
    assert plan.order == (0, 3, 2, 1)


# -- the prediction


def tapes(most: int = 8) -> Tapes:
    """Tapes whose plans say in place of a place how many bytes they expect."""
    return Tapes(lambda sizes, reads: Placement(tuple(sizes), ()), most)


def step(ours: Tapes, sizes: Sequence[int]) -> list[bool]:
    """Save one tape and read it back: for each entry whether it was saved under a plan for entries of its size."""
    right = [ours.put(size) == size for size in sizes]
    ours.end()
    return right


def test_the_first_tape_is_unknown_and_the_next_ones_are_planned() -> None:
    ours = tapes()
    assert not any(step(ours, [10] * 5))
    assert all(step(ours, [10] * 5))


def test_two_lengths_in_turn_are_both_expected() -> None:
    ours, short, long = tapes(), [5, 6, 6], [5, 10, 10, 10]
    for _ in range(2):
        step(ours, short)
        step(ours, long)
    assert all(step(ours, short)), "its first entry is that of the longer tape"
    assert all(step(ours, long))


def test_random_lengths_are_guessed_and_leave_no_more_than_the_newest() -> None:
    ours = tapes(most=4)
    for n in range(1, 101):
        assert all(step(ours, [n, 2 * n])) == (n > 1), "all entries grow with the length"
    assert len(ours._known) == 4
    assert len(ours._after) <= 5


def test_two_lengths_tell_which_entries_grow() -> None:
    ours = tapes()
    assert not any(step(ours, [10, 7, 100]))
    assert step(ours, [20, 7, 200]) == [True, False, True], "of one length it is not known that 7 does not grow"
    for n in (35, 12, 90):
        assert all(step(ours, [n, 7, 10 * n]))
