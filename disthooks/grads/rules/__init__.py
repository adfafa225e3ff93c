"""Rules: what may be done to a gradient between backward and the optimizer's step."""

from disthooks.grads.rules.base import Function, Rule, Work, as_rule
from disthooks.grads.rules.clip import ClipNorm, ClipValue
from disthooks.grads.rules.only import Only, only

__all__ = ["ClipNorm", "ClipValue", "Function", "Only", "Rule", "Work", "as_rule", "only"]
