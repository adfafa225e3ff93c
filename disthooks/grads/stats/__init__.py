"""Named statistics of gradients; those of the final gradient are of what backward left, before any rule."""

from disthooks.grads.stats.base import Found, Stat
from disthooks.grads.stats.basic import MaxAbs, NonFinite, Norm

__all__ = ["Found", "MaxAbs", "NonFinite", "Norm", "Stat"]
