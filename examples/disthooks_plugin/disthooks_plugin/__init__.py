"""A codec and a store for disthooks."""

from disthooks_plugin.codecs import Runs
from disthooks_plugin.stores import Zipped

__all__ = ["Runs", "Zipped"]
