"""The error classes of disthooks. Each message says what is wrong, where, and what to do.

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

Catching :class:`DisthooksError` catches them all. Each is also the built-in error that code without disthooks expects
in its place, so a script's own ``except ValueError`` still works.
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
    """The base of all errors that disthooks raises on purpose."""


def as_line(error: BaseException | str) -> str:
    """The text of an error as each command of disthooks writes it on stderr: one line that begins with "disthooks".

    >>> as_line("there is no script 'a.py'")
    "disthooks: error: there is no script 'a.py'"
    """
    return f"disthooks: error: {' '.join(str(error).split())}"


class UsageError(DisthooksError, ValueError):
    """An argument that can never work. It is raised before anything is changed."""


class MatchError(UsageError):
    """A pattern matches no module or parameter; the message has the nearest names."""


class AttachError(UsageError):
    """Hooks would never be called on this module or engine; the message says what to do instead."""


class ConfigError(UsageError):
    """A configuration has an unknown key or a wrong value, or cannot be read; the message has file and line."""


class StoreError(DisthooksError, RuntimeError):
    """A store could not keep a saved tensor, or could not return it.

    Attributes:
        path: the directory or device that failed; None if there is none.
        wanted: the bytes that were needed; None if not known.
        free: the bytes that are free there; None if not known.

    >>> StoreError("disk full", path="/scratch", wanted=4096, free=0).wanted
    4096
    """

    def __init__(
        self, message: str, *, path: str | None = None, wanted: int | None = None, free: int | None = None
    ) -> None:
        super().__init__(message)
        self.path, self.wanted, self.free = path, wanted, free


class MutationError(DisthooksError, RuntimeError):
    """A tensor that backward needs was changed in place after it was saved.

    torch raises a ``RuntimeError`` for this if no saved-tensor hooks are active, and does not check it if they are. So
    disthooks checks it, and the message has the name of the module that saved the tensor.
    """


class NonFiniteError(DisthooksError, FloatingPointError):
    """A value is infinite or NaN, and the user asked for an error in this case.

    The value is the output of a module, with ``blame(raise_error=True)``, or a gradient, in more steps in a row than
    :class:`~disthooks.SkipNonFinite` allows.
    """


class NotSeenError(DisthooksError, KeyError):
    """A script asked for the output of a module that has not run, or that is not watched."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError puts its message in quotes, as if the message were the key
