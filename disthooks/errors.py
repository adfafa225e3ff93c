"""The error tree: what went wrong, where, and what to do.

::

    DisthooksError
    ├── UsageError (also ValueError)     an argument that can never work
    │   ├── MatchError                   a pattern that matches nothing
    │   ├── AttachError                  hooks that could not fire on this module or engine
    │   └── ConfigError                  a configuration file that says something unknown
    ├── StoreError (also RuntimeError)   a saved tensor could not be written or read back
    ├── MutationError (also RuntimeError)  a saved tensor was changed in place before backward
    ├── NonFiniteError (also FloatingPointError)  an output, or gradients for too many steps, infinite or NaN
    └── NotSeenError (also KeyError)     the output of a module that has not run, or is not watched

Catching :class:`DisthooksError` catches them all; each also is the built-in error that code written
without disthooks would expect in its place.
"""

from __future__ import annotations

__all__ = [
    "AttachError",
    "ConfigError",
    "DisthooksError",
    "MatchError",
    "MutationError",
    "NonFiniteError",
    "NotSeenError",
    "StoreError",
    "UsageError",
]


class DisthooksError(Exception):
    """Every error that disthooks raises on purpose."""


def as_line(error: BaseException | str) -> str:
    """An error as every command of disthooks writes it on stderr: one line, with the same beginning.

    >>> as_line("there is no script 'a.py'")
    "disthooks: error: there is no script 'a.py'"
    """
    return f"disthooks: error: {' '.join(str(error).split())}"


class UsageError(DisthooksError, ValueError):
    """An argument that can never work, found before anything was changed."""


class MatchError(UsageError):
    """A pattern matched no module or parameter; the message lists near names."""


class AttachError(UsageError):
    """Hooks could not fire on this module or engine; the message says what to do instead."""


class ConfigError(UsageError):
    """A configuration file holds an unknown key or a value of the wrong kind."""


class StoreError(DisthooksError, RuntimeError):
    """A store could not keep a saved tensor, or could not give it back.

    Attributes:
        path: the directory or device that refused, if there is one.
        wanted: bytes asked for.
        free: bytes free there, if known.

    >>> StoreError("disk full", path="/scratch", wanted=4096, free=0).wanted
    4096
    """

    def __init__(
        self, message: str, *, path: str | None = None, wanted: int | None = None, free: int | None = None
    ) -> None:
        super().__init__(message)
        self.path, self.wanted, self.free = path, wanted, free


class MutationError(DisthooksError, RuntimeError):
    """A tensor needed by backward was changed in place after it was saved.

    torch raises a ``RuntimeError`` for this when no saved-tensor hooks are active and checks nothing when
    they are; disthooks checks, and adds the name of the module that saved the tensor.
    """


class NonFiniteError(DisthooksError, FloatingPointError):
    """Something is infinite or NaN, and that was asked to be an error.

    It is the output of a module, with ``blame(raise_error=True)``, or gradients, in more steps in a row than
    :class:`~disthooks.SkipNonFinite` allows.
    """


class NotSeenError(DisthooksError, KeyError):
    """The output of a module that has not run, or that is not watched."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError shows its message quoted, as if it were the key
