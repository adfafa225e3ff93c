"""One YAML file for what to save and what to watch: names only; see ``docs/config.md``."""

# `find` and `Found` are the public names, which scripts use; inside the library they say what they find.
from disthooks.config.locate import ConfigLocation as Found
from disthooks.config.locate import from_config, prepare
from disthooks.config.locate import locate_config as find
from disthooks.config.plan import Plan, Prepared, PreparedReport, SavingPlan

__all__ = ["Found", "Plan", "Prepared", "PreparedReport", "SavingPlan", "find", "from_config", "prepare"]
