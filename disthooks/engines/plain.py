"""A module in one process: its gradients are whole and nothing reduces them."""

from __future__ import annotations

from disthooks.engines.base import Engine


class Plain(Engine):
    """A module that no engine has taken."""
