"""The tests' own plugins; that this file is here also puts the repository on ``sys.path`` for pytest."""

pytest_plugins = ["tests.support.tiers", "tests.support.failures"]
