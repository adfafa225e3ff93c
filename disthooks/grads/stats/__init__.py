"""Named statistics of gradients; those of the final gradient are of what backward left, before any rule."""

from disthooks.grads.stats.across_ranks import Agreement, Spread
from disthooks.grads.stats.base import Found, Stat
from disthooks.grads.stats.elements import Extremes, Histogram, Moments, Zeros
from disthooks.grads.stats.noise import NoiseScale
from disthooks.grads.stats.norms import MaxAbs, NonFinite, Norm
from disthooks.grads.stats.updates import Updates, Weights

__all__ = [
    "Agreement",
    "Extremes",
    "Found",
    "Histogram",
    "MaxAbs",
    "Moments",
    "NoiseScale",
    "NonFinite",
    "Norm",
    "Spread",
    "Stat",
    "Updates",
    "Weights",
    "Zeros",
    "standard",
]


def standard(per_parameter: bool = False) -> tuple[Stat, ...]:
    """What one reading of the final gradients gives: norm, moments, extremes, zeros, the histogram.

    With ``NonFinite`` too, whose look at each rank's own gradients is a small one. The others cost more: ``Spread`` and
    ``NoiseScale`` take norms in backward, ``Updates`` copies the parameters, ``Agreement`` keeps gradients.

    Args:
        per_parameter: also of each parameter; not the histogram, which is long.

    >>> [type(stat).__name__ for stat in standard()]
    ['Norm', 'Moments', 'Extremes', 'Zeros', 'Histogram', 'NonFinite']
    """
    kinds = [kind(per_parameter=per_parameter) for kind in (Norm, Moments, Extremes, Zeros)]
    return (*kinds, Histogram(), NonFinite())
