"""Rules: what is done to a gradient between backward and the optimizer's step. Each registers itself."""

from disthooks.grads.rules.base import Function, MicroBatch, Rule, Work, as_rule

__all__ = ["Function", "MicroBatch", "Rule", "Work", "as_rule"]
