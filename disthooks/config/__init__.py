"""One YAML file for what to save and what to watch: names only; see ``docs/config.md``."""

from disthooks.config.locate import Found, find, from_config, prepare
from disthooks.config.plan import Plan, Prepared, PreparedReport, SavingPlan

__all__ = ["Found", "Plan", "Prepared", "PreparedReport", "SavingPlan", "find", "from_config", "prepare"]
