"""``page``: an explanation, or the report of a run, as one HTML page that needs no network and no library."""

# [Note: the page runs nothing but its own script]
# The page shows names that come from the user's model, and it is sent from one person to another. Two things keep such
# a name from being run as a script. The document stands in a block of JSON in which each "<" is written as \u003c, so
# that no text in it ends the block; and the page's script makes text nodes of its names, never HTML. A content
# security policy stands behind both: the browser runs the script and applies the style whose hashes the page gives,
# and it loads nothing else, from nowhere.

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

#: The scripts of each page, in the order in which they run. All pages have one style.
_SCRIPTS = {
    "explain": ("base.js", "explain.js", "icicle.js", "curve.js"),
    "report": ("base.js", "lines.js", "heat.js", "report.js"),
}


def page(kind: Literal["explain", "report"], document: Mapping[str, Any]) -> str:
    """One self-contained HTML page that shows a document.

    Args:
        kind: "explain" for what :meth:`~disthooks.predict.explanation.Explanation.to_dict` gives, "report" for what
            :func:`~disthooks.report.document.document` gives. Each key is optional; the page leaves out what the
            document does not have. Numbers that JSON cannot hold (NaN, infinite) become null.
        document: what is shown.

    Returns:
        The text of the page, which holds the document.

    Raises:
        TypeError: if JSON cannot hold the document.

    >>> text = page("explain", {"model": "<tiny>", "saved": 4096})
    >>> "<title>&lt;tiny&gt;: its memory in one training step</title>" in text
    True
    """
    style, script = _read("page.css"), "\n".join(map(_read, _SCRIPTS[kind]))
    parts = {
        "policy": f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        "title": html.escape(_title(kind, document)),
        "style": style,
        "script": script,
        "document": _json(document),
    }
    return re.sub(r"@@(\w+)@@", lambda found: parts[found[1]], _read(f"{kind}.html"))


def _title(kind: str, document: Mapping[str, Any]) -> str:
    if kind == "explain":
        return f"{document.get('model') or 'A model'}: its memory in one training step"
    return f"{document.get('name') or 'A run'}: what it logged"


def _json(document: Mapping[str, Any]) -> str:
    # See [Note: the page runs nothing but its own script].
    finite = json.loads(json.dumps(document), parse_constant=lambda _: None)
    return json.dumps(finite, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return importlib.resources.files("disthooks.report.page").joinpath(name).read_text(encoding="utf-8")
