"""ClipPercentile and ClipZScore: numpy's percentile, and the authors' formulas on norms alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import disthooks as dh
from tests.support.engines import close
from tests.support.rules import normed

# --- ClipPercentile

NORMS = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6, 5.3, 0.0, 8.0]


@pytest.mark.parametrize("window", [1, 4, 100])
@pytest.mark.parametrize("q", [0, 10.0, 37.5, 100])
def test_percentile_is_numpys(q: float, window: int) -> None:
    for i, (norm, log) in enumerate(normed(dh.ClipPercentile(q, window), NORMS)):
        seen = [each for each in NORMS[: i + 1] if each > 0]
        threshold = float(np.percentile(seen[-window:], q))
        assert close(log["clip_threshold"], threshold, 1e-12)
        assert close(norm, NORMS[i] * min(1.0, threshold / (NORMS[i] + 1e-6)), 1e-12)
        assert close(log["grad_norm"], NORMS[i], 1e-12)
        assert close(log["grad_norm_clipped"], norm, 1e-12)


def test_percentile_forgets_norms_that_are_none() -> None:
    clean = normed(dh.ClipPercentile(50.0, 3), NORMS)
    dirty = [math.nan, *NORMS[:3], math.inf, NORMS[3], -math.nan, *NORMS[4:]]
    found = normed(dh.ClipPercentile(50.0, 3), dirty)
    kept = [item for item, norm in zip(found, dirty, strict=True) if math.isfinite(norm)]
    assert [norm for norm, _ in kept] == [norm for norm, _ in clean]
    thresholds = [log["clip_threshold"] for _, log in found]
    assert math.isnan(thresholds[0])  # there is none yet
    assert thresholds[4] == thresholds[3]
    assert thresholds[6] == thresholds[5]
    assert thresholds[dirty.index(0.0)] == thresholds[dirty.index(0.0) - 1], "0 enters no history"
    assert all(math.isnan(norm) for (norm, _), given in zip(found, dirty, strict=True) if not math.isfinite(given))


# --- ClipZScore


def zclip(norms: Sequence[float], alpha: float, thresh: float, warm: int, to: str, most: float | None) -> list[float]:
    """The authors' code, on norms alone: to what each is clipped."""
    seen: list[float] = []
    mean = var = 0.0
    found = []
    for norm in norms:
        clip = None
        if len(seen) < warm:
            seen.append(norm)
            mean, var = statistics.fmean(seen), statistics.pvariance(seen)
        else:
            std = var**0.5
            z = (norm - mean) / (std + 1e-6)
            if to == "threshold":
                clip = mean + thresh * std if norm > mean + thresh * std else None
            elif z > thresh:
                clip = mean if to == "mean" else mean + thresh * std / (z / thresh)
            x = norm if clip is None else clip
            mean = alpha * mean + (1 - alpha) * x
            var = alpha * var + (1 - alpha) * (x - mean) ** 2
        limit = min([norm if clip is None else clip, *([] if most is None else [most])])
        found.append(norm * min(1.0, limit / (norm + 1e-6)) if limit < norm else norm)
    return found


SPIKES = [*(1 + 0.3 * math.sin(7 * i) for i in range(12)), 9.0, 1.1, 0.9, 4.0, 30.0, 1.0, 1.3, 2.2, 1.2]


@pytest.mark.parametrize("to", ["adaptive", "mean", "threshold"])
@pytest.mark.parametrize(("warm", "most"), [(1, None), (10, None), (14, 2.0)])
def test_z_score_is_the_authors(to: Any, warm: int, most: float | None) -> None:
    found = normed(dh.ClipZScore(0.9, 1.7, warm, to=to, max_norm=most), SPIKES)
    truth = zclip(SPIKES, 0.9, 1.7, warm, to, most)
    assert sum(a != b for a, b in zip(truth, SPIKES, strict=True)) >= 2
    assert close([norm for norm, _ in found], truth, 2e-6)  # 1e-6 in the formula of the factor
    assert all(log["grad_norm_z"] == 0 for _, log in found[:warm])
    assert found[16][1]["grad_norm_z"] > 1.7
    if most is None:  # nothing else was taken for the norm
        assert close([norm for norm, _ in found if norm < 0.85], [norm for norm in truth if norm < 0.85], 1e-9)


@pytest.mark.parametrize("warm", [2, 9])
def test_z_score_forgets_norms_that_are_none(warm: int) -> None:
    rule, clean = dh.ClipZScore(0.9, 1.0, warm), [norm for norm in NORMS if norm > 0]
    dirty = [0.0, math.nan, *NORMS[:3], math.inf, *NORMS[3:], math.inf, 1.0]
    found = normed(rule, dirty)
    kept = [item for item, norm in zip(found, dirty, strict=True) if math.isfinite(norm) and norm > 0]
    assert kept[:-1] == [(n, log | {"step": s}) for (n, log), s in zip(normed(rule, clean), _steps(kept), strict=False)]
    assert all(math.isnan(norm) for (norm, _), given in zip(found, dirty, strict=True) if not math.isfinite(given))


#: A few batches without labels at the beginning, or one in eight, as with rewards that are all the same.
SILENT = {"at first": [0.0] * 70 + [1.0 + 0.1 * (i % 3) for i in range(100)]}
SILENT["now and then"] = [0.0 if i % 8 == 7 else 1.0 + 0.1 * (i % 3) for i in range(170)]
LEARNING = [dh.ClipPercentile(), dh.ClipPercentile(0.0), dh.ClipZScore(), dh.AdaGC(warmup_steps=5)]
LEARNING += [dh.SkipSpike(loss=False)]


@pytest.mark.parametrize("when", SILENT)
@pytest.mark.parametrize("rule", LEARNING, ids=str)
def test_gradients_of_exactly_0_do_not_stop_training(rule: Any, when: str) -> None:
    norms = SILENT[when]
    found = [norm for norm, log in normed(rule, norms) if not log.get("spike")]
    assert len(found) == len(norms), "no step is left out"
    for norm, given in zip(found, norms, strict=True):
        assert norm == 0 if given == 0 else norm >= 0.79 * given


def test_numbers_that_are_all_the_same_do_not_stop_training() -> None:
    """A limit that equals them would never rise: all that follow would be spikes, and enter as the limit itself."""
    found = normed(dh.SkipSpike(loss=False), [0.1] * 64 + [0.2] * 60)
    assert sum(log["spike"] for _, log in found) < 6


def _steps(found: Sequence[tuple[float, dict[str, Any]]]) -> list[int]:
    return [log["step"] for _, log in found]


@pytest.mark.parametrize(("q", "kind"), [(math.inf, "linf"), (1.0, "l1")])
def test_other_norms(q: float, kind: str) -> None:
    for rule in (
        dh.ClipPercentile(0.0, norm_type=q),
        dh.ClipZScore(warmup_steps=1, z_thresh=1.0, norm_type=q, to="mean"),
    ):
        _, (norm, log) = normed(rule, [1.0, 10.0])
        one = 0.8 if q == math.inf else 1.4
        assert close(log[f"grad_norm_{kind}"], 10 * one, 1e-9)
        assert close(log[f"grad_norm_{kind}_clipped"], one, 1e-6)
        assert close(norm, 1.0, 1e-6)
