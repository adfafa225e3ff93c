"""What a plan attached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disthooks._handles import Attachment
from disthooks.config.watchers import Watchers
from disthooks.errors import MatchError, UsageError
from disthooks.grads.attached import Gradients, GradientsReport
from disthooks.saved.inplace import Saving
from disthooks.saved.report import SavedReport


class SavingPlan(Attachment):
    """What :meth:`Plan.save` attached: one handle for all entries of ``save``.

    Attributes:
        names: the modules, in the order of the entries.
        missed: the numbers of the entries that did not match, and why; empty unless ``partly`` was asked for.
        counts: how many modules each entry that matches has.
    """

    def __init__(self, parts: Sequence[Saving], missed: Mapping[int, MatchError] | None = None) -> None:
        super().__init__()
        self._parts, self.missed = parts, dict(missed or {})
        self.counts = tuple(len(part.names) for part in parts)
        self.names = tuple(name for part in parts for name in part.names)
        for part in parts:
            self.on_remove(part.remove)

    def report(self) -> SavedReport:
        """The sum over all entries, on this rank."""
        return sum((part.report() for part in self._parts), SavedReport())


@dataclass(frozen=True)
class PreparedReport:
    """What :meth:`Prepared.report` gives.

    Attributes:
        saved: what happened to saved tensors on this rank; None without ``save``.
        gradients: what a step does with gradients; None without ``watch``.
    """

    saved: SavedReport | None
    gradients: GradientsReport | None

    @property
    def moved(self) -> int:
        """Bytes of saved tensors that were taken out of the memory they were in."""
        return self.saved.moved if self.saved else 0

    def __str__(self) -> str:
        return "\n".join(str(part) for part in (self.saved, self.gradients) if part is not None)


class Prepared(Attachment):
    """What :func:`disthooks.prepare` attached.

    Attributes:
        saving: what ``save`` attached; None when the configuration has no ``save``.
        gradients: what ``watch`` attached; None when it has no ``watch``.
        watchers: what ``blame`` and ``check_replicas`` attached; None without ``watch`` and them.
    """

    def __init__(
        self, saving: SavingPlan | None, gradients: Gradients | None, watchers: Watchers | None = None
    ) -> None:
        super().__init__()
        self.saving, self.gradients, self.watchers = saving, gradients, watchers
        for part in (saving, watchers, gradients):  # gradients last, so removed first: its last record asks the others
            if part is not None:
                self.on_remove(part.remove)

    def report(self) -> PreparedReport:
        """What happened so far, on this rank."""
        saved = self.saving.report() if self.saving else None
        return PreparedReport(saved, self.gradients.report() if self.gradients else None)

    def state_dict(self) -> dict[str, Any]:
        """That of the gradients, to be saved beside the optimizer's; empty without ``watch``."""
        return self.gradients.state_dict() if self.gradients else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; call it on every rank.

        Raises:
            UsageError: when it is of another configuration; nothing is changed then.
        """
        if self.gradients is not None:
            self.gradients.load_state_dict(state)
        elif state:
            raise UsageError("the state is of a configuration with 'watch', and this one has none")
