"""One YAML file for what to save and what to watch: names only; see ``docs/config.md``."""

from disthooks.config.attached import Prepared, PreparedReport, SavingPlan
from disthooks.config.find import Found, find
from disthooks.config.front import from_config, prepare
from disthooks.config.plan import Plan

__all__ = ["Found", "Plan", "Prepared", "PreparedReport", "SavingPlan", "find", "from_config", "prepare"]
