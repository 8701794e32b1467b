"""Rounds, added up. Memory does not grow with their number, but for two step times each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_dspark.report.distribution import Distribution

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Round:
    """A decode round that is over, of R requests.

    windows: [R] tokens, anchor included. commits: [R] tokens, bonus included. ceiling: [R], the
    same of full windows; None where these were not run. tokens: of the verify forward, M, padding
    included. full: whether every row of every window was run. predicted_s: 0 if no table did;
    measured_s: None if something came in between.
    """

    windows: Ints
    commits: Ints
    ceiling: Ints | None
    tokens: int
    full: bool
    drafted: bool
    predicted_s: float
    measured_s: float | None


@dataclass(frozen=True)
class Totals:
    """What is added up over rounds, by whoever did: `RoundTally`, or a server's metrics.

    windows, commits, ceilings: requests by tokens. budgets: rounds by their verified drafts.
    forwards: rounds by M. computed: Σ M; padding: of these, tokens of no window.
    plain: rounds without a draft.
    """

    rounds: int
    plain: int
    windows: dict[int, int]
    commits: dict[int, int]
    ceilings: dict[int, int]
    budgets: Distribution | None
    forwards: Distribution | None
    computed: int
    padding: int

    @property
    def requests(self) -> int:
        """Windows, one a request and round."""
        return sum(self.windows.values())

    @property
    def verified(self) -> int:
        """Tokens of all windows."""
        return weighted_sum(self.windows)

    @property
    def committed(self) -> int:
        return weighted_sum(self.commits)


@dataclass
class RoundTally:
    """`Totals` of rounds that come one by one."""

    rounds: int = 0
    plain: int = 0
    computed: int = 0
    padding: int = 0
    windows: Counter[int] = field(default_factory=Counter)
    commits: Counter[int] = field(default_factory=Counter)
    ceilings: Counter[int] = field(default_factory=Counter)
    budgets: Counter[int] = field(default_factory=Counter)
    forwards: Counter[int] = field(default_factory=Counter)

    def add(self, done: Round) -> None:
        self.rounds += 1
        self.plain += not done.drafted
        self.computed += done.tokens
        self.padding += 0 if done.full else done.tokens - int(done.windows.sum())
        self.windows.update(done.windows.tolist())
        self.commits.update(done.commits.tolist())
        if done.ceiling is not None:
            self.ceilings.update(done.ceiling.tolist())
        self.budgets[int(np.maximum(done.windows - 1, 0).sum())] += 1
        self.forwards[done.tokens] += 1

    def totals(self) -> Totals:
        return Totals(
            rounds=self.rounds,
            plain=self.plain,
            windows=dict(self.windows),
            commits=dict(self.commits),
            ceilings=dict(self.ceilings),
            budgets=Distribution.of_counts(self.budgets),
            forwards=Distribution.of_counts(self.forwards),
            computed=self.computed,
            padding=self.padding,
        )


def weighted_sum(counts: dict[int, int]) -> int:
    return sum(number * count for number, count in counts.items())
