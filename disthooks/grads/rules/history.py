"""``History``: the last numbers of a rule, kept on the device, and the limit that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disthooks.grads.rules.base import State

_CONSTANT = 1e-9  # a smaller deviation from the mean is rounding: 1e-16 for each of up to some thousand numbers


@dataclass(frozen=True)
class History:
    """The numbers of the last steps, and the limit ``mean + sigmas * std`` of the next one.

    The tensors are in the state of a rule, under names that begin with the name of the number. There may be one number
    or one for each parameter. Nothing waits for the device; see [Note: no host sync] in grads/records.py.

    Attributes:
        window: how many numbers are kept of each; when a new one comes, the oldest is forgotten.
        least: how many there must be before there is a limit.
        sigmas: how many standard deviations the limit is above the mean. They are divided by n - 1.

    >>> history, state = History(window=3, least=2, sigmas=2.0), {}
    >>> state = history.start("norm", (), torch.device("cpu"))
    >>> for number in (9.0, 1.0, 2.0, 3.0):
    ...     history.push(state, "norm", torch.tensor(number, dtype=torch.float64), torch.tensor(True))
    >>> history.limit(state, "norm")
    tensor(4., dtype=torch.float64)
    """

    window: int
    least: int
    sigmas: float

    def start(self, name: str, shape: tuple[int, ...], device: torch.device) -> State:
        """An empty history of one number, for ``shape=()``, or of several."""
        return {
            f"{name}_history": torch.zeros(self.window, *shape, dtype=torch.float64, device=device),
            f"{name}_count": torch.zeros(shape, dtype=torch.int64, device=device),
        }

    def mean(self, state: State, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean and the standard deviation; NaN if there are too few numbers."""
        numbers, count = state[f"{name}_history"], state[f"{name}_count"].clamp(max=self.window)
        is_there = _places(numbers) < count
        mean = numbers.sum(0) / count
        deviations = torch.where(is_there, numbers - mean, 0.0)
        return mean, (deviations.square().sum(0) / (count - 1)).sqrt()

    def limit(self, state: State, name: str) -> torch.Tensor:
        """The largest number that is no spike; infinity while there are fewer than ``least`` numbers.

        It is infinity also if the numbers are all the same: they do not tell how far a number may be from them.
        """
        mean, deviation = self.mean(state, name)
        is_known = (state[f"{name}_count"] >= self.least) & (deviation > _CONSTANT * mean.abs())
        return torch.where(is_known, mean + self.sigmas * deviation, torch.inf)

    def push(self, state: State, name: str, number: torch.Tensor, is_valid: torch.Tensor) -> None:
        """Put ``number`` into the history, where ``is_valid`` is true."""
        self.put(state[f"{name}_history"], state[f"{name}_count"], number, is_valid)

    @staticmethod
    def put(numbers: torch.Tensor, count: torch.Tensor, number: torch.Tensor, is_valid: torch.Tensor | bool) -> None:
        """Write ``number`` over the oldest of ``numbers`` and count it, where ``is_valid`` is true.

        This is for states whose tensors have other names than those of :meth:`start`.
        """
        # Only the device knows the count, so it is compared with all places.
        is_here = (_places(numbers) == count % len(numbers)) & is_valid
        numbers.copy_(torch.where(is_here, number, numbers))
        count.add_(is_valid)


def _places(numbers: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(numbers), device=numbers.device).view(-1, *[1] * (numbers.ndim - 1))
