"""The plan of a tape, and the prediction of the next tape."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from disthooks.saved.stores.plan import Placement, Tapes, make_plan


def places(plan: Placement) -> list[int]:
    """The place of each entry."""
    return [group.place for group in plan.groups for _ in range(group.first, group.last + 1)]


@pytest.mark.parametrize("seed", range(200))
def test_each_entry_is_in_one_group_and_every_limit_holds(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((0, 1, 3, 10, 50)) for _ in range(rng.randint(0, 40))]
    limits = [rng.randint(0, 200) for _ in range(rng.randint(0, 2))] + [None]
    reads = rng.sample(range(len(sizes)), rng.randint(0, len(sizes))) if rng.random() < 0.5 else None
    plan = make_plan(sizes, limits, group=rng.randint(1, 60), reads=reads)
    assert [i for g in plan.groups for i in range(g.first, g.last + 1)] == list(range(len(sizes)))
    assert all(g.nbytes == sum(sizes[g.first : g.last + 1]) for g in plan.groups)
    assert all(plan.group(i).first <= i <= plan.group(i).last for i in range(len(sizes)))
    for place, limit in enumerate(limits):
        assert limit is None or plan.nbytes(place) <= limit
    assert sorted(plan.back) == [i for i, g in enumerate(plan.groups) if g.place]
    assert all((g.asked == 0) == (g.place == 0) for g in plan.groups)


@pytest.mark.parametrize("seed", range(50))
def test_the_first_saved_are_sent_and_no_more_than_must_be(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 20) for _ in range(rng.randint(1, 60))]
    limit = rng.randint(0, sum(sizes))
    plan = make_plan(sizes, [limit, None], group=32)
    where = places(plan)
    assert where == sorted(where, reverse=True), "what is sent was saved before what stays"
    sent = where.count(1)
    assert sent == 0 or sum(sizes[sent - 1 :]) > limit, "one entry less would be too few"


def test_backward_asks_in_the_order_of_its_reads_and_only_for_what_fits() -> None:
    sizes = [7, 3, 5, 9, 4, 6, 8, 2]
    plan = make_plan(sizes, [20, None], group=10)
    back = [plan.groups[i] for i in plan.back]
    assert [g.first for g in back] == sorted((g.first for g in back), reverse=True)
    assert [g.asked for g in back] == sorted(g.asked for g in back)
    held = plan.nbytes(0)
    for read, position in enumerate(reversed(range(len(sizes))), start=1):
        held += sum(g.nbytes for g in back if g.asked == read)
        on_demand = any(g.asked == read and g.last == position for g in back)
        assert held <= 20 or on_demand
        assert plan.group(position).asked <= read, "it is there when it is read"
        held -= sizes[position]


def test_what_backward_never_reads_goes_furthest() -> None:
    plan = make_plan([10] * 4, [20, None], group=1, reads=[0, 3])
    assert places(plan) == [0, 1, 1, 0]


# -- the prediction


def tapes(limit: int = 25, most: int = 8) -> Tapes:
    return Tapes(lambda sizes, reads: make_plan(sizes, [limit, None], group=1, reads=reads), most)


def step(ours: Tapes, sizes: Sequence[int], reads: Sequence[int] | None = None) -> list[bool]:
    """Save one tape and read it back: for each entry whether it was saved under its own plan."""
    right = []
    for position, size in enumerate(sizes):
        ours.put(size)
        plan = ours.plan
        right.append(plan is not None and position < len(plan) and plan.group(position).nbytes == size)
    ours.end(reads)
    return right


def test_the_first_tape_is_unknown_and_the_next_ones_are_planned() -> None:
    ours = tapes()
    assert not any(step(ours, [10] * 5))
    assert all(step(ours, [10] * 5))
    assert ours.plan is not None
    assert places(ours.plan) == [1, 1, 1, 0, 0]


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
