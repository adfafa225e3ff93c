"""What tests share: models, ranks, engines, stores, torch's databases, jobs, a simulated accelerator."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import types
import warnings
from collections.abc import Iterator

import pytest

import disthooks
from tests.support import seeds

# Here, because each process of the tests imports this package, before it takes a seed.
seeds.shift()

#: Of the repository.
ROOT = pathlib.Path(__file__).parents[2]
_PACKAGE = pathlib.Path(disthooks.__file__).parent


def is_ours(code: types.CodeType, package: str = "") -> bool:
    """Whether ``code`` is of a file of the library, or of one of its packages.

    The name "disthooks" in a path does not tell it: it is in all paths of a clone in a folder of that name.
    """
    return pathlib.Path(code.co_filename).is_relative_to(_PACKAGE / package)


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where ``package`` is not installed, without importing it: that is left to the processes that use it."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@contextlib.contextmanager
def no_warning() -> Iterator[None]:
    """A warning inside is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
