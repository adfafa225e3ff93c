"""Rules: what may be done to a gradient between backward and the optimizer's step."""

from disthooks.grads.rules.adaptive import ClipAdaptive, ClipPercentile, ClipZScore
from disthooks.grads.rules.base import Function, MicroBatch, Rule, Work, as_rule
from disthooks.grads.rules.clip import ClipNorm, ClipValue
from disthooks.grads.rules.elementwise import Sanitize, Scale
from disthooks.grads.rules.noise import Noise
from disthooks.grads.rules.only import Only, only
from disthooks.grads.rules.skip import Freeze, SkipNonFinite

__all__ = [
    "ClipAdaptive",
    "ClipNorm",
    "ClipPercentile",
    "ClipValue",
    "ClipZScore",
    "Freeze",
    "Function",
    "MicroBatch",
    "Noise",
    "Only",
    "Rule",
    "Sanitize",
    "Scale",
    "SkipNonFinite",
    "Work",
    "as_rule",
    "only",
]
