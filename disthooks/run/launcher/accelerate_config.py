"""Take the ``disthooks`` section out of accelerate's configuration: accelerate refuses keys that it does not know."""

# [Note: lines and columns stay]
# The user's file is split into two files: the section `disthooks`, and the rest for accelerate. In each file the text
# of the other is replaced by blanks and not cut out. So an error names the line and the column of the user's own file.
# An alias of YAML in one part may name an anchor in the other part. Then the part alone cannot be read, its values are
# written anew, and its errors have other lines.

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from disthooks.errors import ConfigError

_KEY = "disthooks"


def split(path: str, folder: pathlib.Path) -> tuple[str, str] | None:
    """Write the section and the rest into two files of ``folder``; see [Note: lines and columns stay].

    Args:
        path: accelerate's configuration, YAML or JSON.
        folder: the directory for the two files.

    Returns:
        The paths of the section and of the rest; None if there is no section.

    Raises:
        ConfigError: if the file cannot be read, or is not what its name says.
    """
    text = _text(path)
    parts = _of_json(path, text) if path.endswith(".json") else _of_yaml(path, text)
    if parts is None:
        return None
    files = [folder / f"{_KEY}.yaml", folder / f"accelerate{pathlib.Path(path).suffix or '.yaml'}"]
    for file, part in zip(files, parts, strict=True):
        file.write_text(part, encoding="utf-8")
    return str(files[0]), str(files[1])


def values(path: str | None) -> dict[str, Any]:
    """The values of accelerate's configuration ``path``, by default of its default file; {} if it cannot be read."""
    path = path or default_file()
    if path is None or not os.path.isfile(path):
        return {}
    try:
        if path.endswith(".json"):
            config = json.loads(_text(path))
        else:
            import yaml

            config = yaml.safe_load(_text(path))
    except Exception:  # accelerate reads the same file, and its own message is better
        return {}
    return config if isinstance(config, dict) else {}


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _of_json(path: str, text: str) -> tuple[str, str] | None:
    try:
        whole = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(whole, dict) or _KEY not in whole:
        return None
    section = whole.pop(_KEY)
    return json.dumps(section), json.dumps(whole)


def _of_yaml(path: str, text: str) -> tuple[str, str] | None:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("reading a configuration file needs PyYAML: pip install 'disthooks[config]'") from error
    try:
        root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
        whole = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if not isinstance(whole, dict) or _KEY not in whole:
        return None
    key, value = next((key, value) for key, value in root.value if key.value == _KEY)
    start, begin, end = key.start_mark.index, value.start_mark.index, value.end_mark.index
    section, rest = whole.pop(_KEY), whole
    parts = _blank(text[:begin]) + text[begin:end], text[:start] + _blank(text[start:end]) + text[end:]
    # See [Note: lines and columns stay]
    pairs = zip(parts, (section, rest), strict=True)
    texts = [part if _loads(yaml, part, values) else yaml.safe_dump(values) for part, values in pairs]
    return texts[0], texts[1]


def _blank(text: str) -> str:
    return "".join(character if character == "\n" else " " for character in text)


def _loads(yaml: Any, text: str, wanted: Any) -> bool:
    try:
        return bool(yaml.safe_load(text) == wanted)
    except yaml.YAMLError:
        return False


def default_file() -> str | None:
    """The path of accelerate's default configuration; None if it does not exist. To import accelerate takes seconds."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    folder = pathlib.Path(home).expanduser() / "accelerate"
    names = ("default_config.yaml", "default_config.yml", "default_config.json")
    return next((str(folder / name) for name in names if (folder / name).is_file()), None)
