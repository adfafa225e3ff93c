"""``looked_at`` and ``unseen``: what the log of a run has numbers of, and what it cannot show."""

# [Note: nothing stands out]
# A verdict must not claim what was not looked at. So it names what the log has numbers of, and then what it has no
# numbers of: statistics that are off, steps that were not logged, jumps where there are too few steps to know what is
# usual, copies that were not compared again.

from __future__ import annotations

from collections.abc import Iterator

from disthooks.report.log import Run
from disthooks.report.moved import WARM_UP

#: What is looked at, and the names in the log of which one is enough.
_LOOKED_AT = (
    ("gradients that are not finite", {"nonfinite", "skipped", "grad_norm"}),
    ("outputs of modules", {"activation_rms", "activation_max"}),
    ("the loss", {"loss"}),
    ("gradients", {"grad_norm", "grad_max_abs"}),
    ("updates", {"update_ratio"}),
    ("times of ranks", {"input_seconds/max_rank"}),
    ("copies of ranks", {"replicas/compared"}),
)
#: What cannot be seen, the names of which one is needed, and whether a run of one rank has it.
_NEEDED = (
    ("gradients that are not finite in unlogged steps (SkipNonFinite, NonFinite)", {"nonfinite", "skipped"}, True),
    ("which rank leads (Spread)", {"grad_norm/argmax_rank", "grad_norm/peak_rank"}, False),
    ("whether the ranks still have the same model (check_replicas)", {"replicas/compared"}, False),
    ("which rank is slow (Times)", {"input_seconds/max_rank"}, False),
    ("which layer moved first (stats.full())", {"activation_rms", "update_ratio"}, True),
)


def looked_at(run: Run) -> Iterator[str]:
    names = _names(run)
    return (what for what, needed in _LOOKED_AT if needed & names)


def unseen(run: Run) -> Iterator[str]:
    """Sentences about what the log cannot show. See [Note: nothing stands out]."""
    names, several = _names(run), (run.ranks or 2) > 1
    missing = [what for what, needed, alone in _NEEDED if (alone or several) and not needed & names]
    if missing:
        yield f"The log does not tell {'; '.join(missing)}."
    many = len(run.records)
    if many <= WARM_UP:
        steps = f"{many} logged step{'s are' if many > 1 else ' is'}"
        yield f"{steps} too few to know which numbers are unusual: that takes more than {WARM_UP}."
    every = run.about.get("every", 1)
    if every > 1:
        yield (
            f"Every {every}th step is logged: of the steps between them only what lasts is seen, steps that are not "
            "finite, and the largest gradient norm."
        )
    compared = run.comparisons()
    if compared and compared[-1][0] <= run.steps[-1]:
        yield f"The copies of the ranks were compared last after step {compared[-1][0] - 1}."


def _names(run: Run) -> set[str]:
    return {name for record in run.records for name in record} | {name for _, name in run.columns}
