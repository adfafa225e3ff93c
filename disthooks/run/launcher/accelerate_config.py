"""Read accelerate's configuration, which ``disthooks launch`` gives to accelerate as it is."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from disthooks.errors import ConfigError


def refuse_section(path: str) -> None:
    """Raise ConfigError if accelerate's file ``path`` has a key ``disthooks``: accelerate refuses keys of others."""
    if "disthooks" in values(path):
        raise ConfigError(
            f"{path}: accelerate refuses a file with the key 'disthooks'. Put what stands under it into a file of its "
            "own, and name this file: disthooks launch --hooks hooks.yaml"
        )


def values(path: str | None) -> dict[str, Any]:
    """The values of accelerate's configuration ``path``, by default of its default file; {} if it cannot be read."""
    path = path or default_file()
    if path is None or not os.path.isfile(path):
        return {}
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        if path.endswith(".json"):
            config = json.loads(text)
        else:
            import yaml

            config = yaml.safe_load(text)
    except Exception:  # accelerate reads the same file, and its own message is better
        return {}
    return config if isinstance(config, dict) else {}


def default_file() -> str | None:
    """The path of accelerate's default configuration; None if it does not exist. To import accelerate takes seconds."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    folder = pathlib.Path(home).expanduser() / "accelerate"
    names = ("default_config.yaml", "default_config.yml", "default_config.json")
    return next((str(folder / name) for name in names if (folder / name).is_file()), None)
