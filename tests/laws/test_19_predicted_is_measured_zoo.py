"""Law 19, predicted is measured: every model of the zoo, its saved bytes by module and its peak, to the byte."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.support import zoo
from tests.support.predicted import beside

pytestmark = pytest.mark.second_tier

#: Models with a router, whose choice is not known: each expert is assumed to be chosen equally often.
ROUTED = {"mixtral", "mixtral_loop"}


@pytest.mark.parametrize("name", zoo.names())
def test_saved_bytes_and_peak_are_those_of_a_real_step(name: str) -> None:
    found = beside(
        functools.partial(zoo.build, name), functools.partial(zoo.context, name) if name in zoo.AUTOCAST else None
    )
    assert found.wrong() == {}
    assert found.predicted.saved_bytes > 1 << 19
    if name in zoo.DATA_DEPENDENT:
        # Experts that take unequal numbers of tokens have another peak, but they save the same bytes together.
        assert abs(found.peak_off) < 0.1 * found.measured.peak_bytes
    else:
        assert found.peak_off == 0
    assert {each.what for each in found.predicted.unknown} == ({"what topk chooses"} if name in ROUTED else set())
