"""Integrations with training frameworks. Each file imports its framework; ``import disthooks`` imports none of them."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["accelerate", "lightning", "transformers"]


def __getattr__(name: str) -> Any:
    """Import the file of a framework when it is first used: ``disthooks.integrations.transformers``."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: there are {', '.join(__all__)}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
