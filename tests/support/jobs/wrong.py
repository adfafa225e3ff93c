"""Wrong configurations, each with what is wrong with it: the error, its line (None: the file has none), its words."""

from __future__ import annotations

from typing import NamedTuple


class Wrong(NamedTuple):
    """A file; ``{folder}`` in it is a directory of its own, with a file ``plain.txt`` in it."""

    text: str | bytes
    line: int | None
    says: str
    error: str = "ConfigError"


_SAVE = "save:\n- modules: net.0\n  store: {kind: OnCpu}\n"
_STORE = "save:\n- modules: net.0\n  store:\n    kind: "


def _store(text: str) -> str:
    return f"save:\n- modules: net.0\n  store: {text}\n"


def _rule(text: str) -> str:
    return f"watch:\n  every: 1\n  rules:\n  - {text}\n"


def _sink(text: str) -> str:
    return f"watch:\n  stats: standard\n  sinks:\n  - {text}\n"


WRONG: dict[str, Wrong] = {
    # The text.
    "empty": Wrong("", 1, "is empty: it needs 'save' or 'watch'"),
    "comments alone": Wrong("# save:\n", 1, "is empty"),
    "a list at the top": Wrong("- save\n- watch\n", 1, "should be a valid dictionary .* got a list"),
    "a tab": Wrong("save:\n\t- modules: x\n", 2, "is not YAML: .*YAML takes no tabs"),
    "never closed": Wrong("save: [\n", 2, "is not YAML"),
    "binary": Wrong(b"\x7fELF\x02\x01\x01\x00\x00\xff", 1, "is no text in UTF-8: a byte is 0xff"),
    "a NUL": Wrong(b"watch:\n  \x00", 2, "is not YAML: special characters"),
    "two documents": Wrong("watch: {}\n---\nwatch: {}\n", 2, "but found another document"),
    "a tag": Wrong("save: !!python/object/apply:os.getcwd []\n", 1, "the tag .*getcwd cannot stand here"),
    "contains itself": Wrong("save: &all\n- *all\n", 1, "contains itself"),
    "a key twice": Wrong(_SAVE + "watch:\n  stats: standard\nsave: []\n", 6, "'save' stands here and in line 1"),
    "an argument twice": Wrong(_STORE + "OnCpu\n    limit: 1\n    limit: 2\n", 6, "'limit' stands here and in line 5"),
    "a key that is no text": Wrong("on: 1\n", 1, "a key is a text, got on"),
    "nothing to do": Wrong("run: here\n", 1, "has neither 'save' nor 'watch'"),
    # Keys and their types.
    "unknown at the top": Wrong(_SAVE + "wach: {}\n", 4, "wach is not known; did you mean 'watch'?"),
    "unknown in save": Wrong(_SAVE + "  atleast: 3\n", 4, "save.0.atleast is not known; did you mean 'at_least'?"),
    "unknown in watch": Wrong("watch:\n  rule: []\n", 2, "watch.rule is not known; did you mean 'rules'?"),
    "unknown in a store": Wrong(_STORE + "OnCpu\n    limits: 1\n", 5, "no argument 'limits'.* mean 'limit'?"),
    "unknown in a rule": Wrong(_rule("kind: ClipNorm\n    maxnorm: 1"), 5, "no argument .* mean 'max_norm'?"),
    "two of them": Wrong("sav: []\nwach: {}\n", 1, "mean 'save'.; .*:2: wach is not known; did you mean 'watch'?"),
    "save is no list": Wrong("save:\n  modules: x\n", 1, "save: a list of entries is needed: write"),
    "no store": Wrong("save:\n- modules: net.0\n", 2, "save.0.store: field required"),
    "no modules": Wrong("save:\n- store: {kind: OnCpu}\n", 2, "save.0.modules: field required"),
    "modules without any": Wrong("save:\n- modules: []\n  store: {kind: OnCpu}\n", 2, "must not be empty"),
    "one module twice": Wrong("save:\n- modules:\n  - net\n  - net\n  store: {kind: OnCpu}\n", 4, "here and at .*:3"),
    "a store that is a word": Wrong(_store("OnCpu"), 3, "did you mean {kind: OnCpu}?"),
    "exact is a word": Wrong(_SAVE + "exact: very\n", 4, "exact: input should be a valid boolean, got 'very'"),
    "every 0": Wrong("watch:\n  every: 0\n  stats: standard\n", 2, "watch.every: .*greater than or equal to 1, got 0"),
    "watch nothing": Wrong("watch:\n  every: 5\n", 1, "has neither rules nor stats"),
    "a misspelt word": Wrong("watch:\n  stats: standart\n", 2, "did you mean 'standard'?"),
    "groups is a list": Wrong("watch:\n  groups: [a]\n", 2, "watch.groups: names with patterns are needed"),
    # Kinds and their arguments.
    "no kind": Wrong(_store("{limit: 3}"), 3, "has no kind; a store is one of OnCpu, OnDevice, OnDisk, Tiered"),
    "a misspelt store": Wrong(_STORE + "OnDisc\n", 4, "'OnDisc' is no store; did you mean 'OnDisk'?"),
    "a misspelt rule": Wrong(_rule("kind: Clipnorm"), 4, "'Clipnorm' is no rule; did you mean 'ClipNorm'?"),
    "a rule for a store": Wrong(_STORE + "ClipNorm\n", 4, "'ClipNorm' is a rule, no store"),
    "an argument missing": Wrong(_rule("kind: ClipNorm"), 4, "ClipNorm needs 'max_norm'"),
    "a word for a number": Wrong(
        _rule("kind: ClipNorm\n    max_norm: big"), 5, "a number or a mapping is needed, got 'big'"
    ),
    "a word that is not one": Wrong(_rule("{kind: ClipNorm, max_norm: 1, by: parameters}"), 4, "mean 'parameter'?"),
    "a negative norm": Wrong(_rule("{kind: ClipNorm, max_norm: -1}"), 4, "a positive, finite number is needed"),
    "a negative limit": Wrong(_store("{kind: OnCpu, limit: -1}"), 3, "limit=-1 is not a number of bytes"),
    "a negative gate": Wrong(_SAVE + "  at_least: -4\n", 4, "greater than or equal to 0, got -4"),
    "one tier": Wrong(_store("{kind: Tiered, stores: [{kind: OnCpu}]}"), 3, "takes two or more stores"),
    "an unknown dtype": Wrong(
        "save:\n- modules: net.0\n  codecs:\n  - kind: Cast\n    dtype: bf16\n  store: {kind: OnCpu}\n",
        5,
        "'bf16' is no dtype of torch; did you mean 'bfloat16'?",
    ),
    "own class in no module": Wrong(_rule("kind: nowhere.at_all:Rule"), 4, "cannot be imported: No module named"),
    "own class not in its module": Wrong(_rule("kind: wrong_classes:Nothing"), 4, "has no attribute 'Nothing'"),
    "own module that raises": Wrong(_rule("kind: wrong_module:Rule"), 4, "cannot be imported: RuntimeError: not today"),
    "own class that raises": Wrong(_rule("kind: wrong_classes:Raises"), 4, "raised RuntimeError: not today"),
    "own class of another noun": Wrong(_STORE + "wrong_classes:Raises\n", 3, "is no store: a subclass of .*Store"),
    "the name of a tracker": Wrong(_sink("kind: AccelerateTrackr"), 4, "did you mean .AccelerateTracker."),
    # Paths.
    "a variable that is not set": Wrong(_STORE + "OnDisk\n    directory: $SCRATHC/x\n", 5, "did you mean .SCRATCH?"),
    "a variable that is empty": Wrong(_STORE + "OnDisk\n    directory: $EMPTY\n", 5, "'EMPTY' is empty"),
    "an octal number": Wrong("budget: 010\n" + _SAVE, 1, "'010' is an octal number or a time to YAML 1.1"),
    "minutes and seconds": Wrong("budget: 1:30\n" + _SAVE, 1, "'1:30' is an octal number or a time to YAML 1.1"),
    "an unknown placeholder": Wrong(_STORE + "OnDisk\n    directory: /x/{rnk}\n", 5, "did you mean {rank}?"),
    "a directory that is not there": Wrong(_STORE + "OnDisk\n    directory: {folder}/no\n", 3, "No such file or dir"),
    "a directory that is a file": Wrong(_STORE + "OnDisk\n    directory: {folder}/plain.txt\n", 3, "Not a directory"),
    "a run that is a file": Wrong("run: {folder}/plain.txt/run\n" + _SAVE, 1, "cannot be made: Not a directory"),
    # What only the model can tell.
    "a pattern without match": Wrong(
        "save:\n- modules:\n  - net.0\n  - nett.2\n  store: {kind: OnCpu}\n", 4, "near names: net", "MatchError"
    ),
    "a parameter without match": Wrong(
        _rule("kind: only\n    pattern: '*.bias_'\n    rule: {kind: Scale, factor: 2}"), 5, "near names", "MatchError"
    ),
    "a group without match": Wrong(
        "watch:\n  stats: standard\n  groups:\n    heads: head.*\n", 4, "matches no parameter", "MatchError"
    ),
    "a lossy codec": Wrong(
        "exact: true\n" + _SAVE + "  codecs:\n  - kind: Compact\n  - kind: Quantize\n",
        7,
        "Quantize loses digits, and 'exact: true' forbids that",
    ),
    "two entries for one module": Wrong(
        _SAVE + "- modules: 'net.?'\n  store: {kind: OnCpu}\n", 4, "'net..' and .*:2: 'net.0' both match 'net.0'"
    ),
    "one inside another": Wrong(
        _SAVE + "- modules: net\n  store: {kind: OnCpu}\n", 2, "'net.0' .* is inside 'net', that .*:4: 'net' matches"
    ),
    "a budget below the weights": Wrong("budget: 1 KiB\n" + _SAVE, 1, r"1.0 KiB \(1024 bytes\) .* 4.3 KiB \(4356 b"),
    "a budget that is no size": Wrong(_SAVE + "budget: much\n", 4, "'much' is not a number of bytes"),
    "a budget beside OnDevice": Wrong(
        "budget: 1 GiB\n" + _store("{kind: Tiered, stores: [{kind: OnDevice, limit: 1}, {kind: OnCpu}]}"),
        4,
        "'budget' says how much stays on the device",
    ),
    "a tracker without its engine": Wrong(_sink("kind: DeepSpeedMonitor"), 4, "give DeepSpeed's engine"),
}
# Found by the first rank, which opens sinks; the others say so.
ON_THE_FIRST: dict[str, Wrong] = {
    "a log in a file": Wrong(_sink("kind: Jsonl\n    path: {folder}/plain.txt/log"), 4, "Jsonl: .* cannot be written"),
}
# Found by the second rank alone.
ON_THE_SECOND: dict[str, Wrong] = {
    "a directory of one rank": Wrong(
        _STORE + "OnDisk\n    directory: {folder}/rank{rank}\nwatch: {stats: standard}\n", 3, "rank1.*No such file"
    ),
}
