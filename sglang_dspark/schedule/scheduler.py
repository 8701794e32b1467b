"""The host's part of sizing windows: to draft or not, how many tokens to verify, in which tier.

Everything here is numpy on a handful of numbers a request. What it knows of the requests comes from
rounds whose results SGLang has processed, so that deciding never waits for the device: under
overlap these are two rounds old. That is also what keeps the decision lossless (see `budget`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_tables.model import Floats, RoundCost
from cuda_graph.tiers import TierGrid
from sglang_dspark.config import ScheduleConfig
from sglang_dspark.schedule.budget import Budget, choose_budget, early_stop

Ints = npt.NDArray[np.int64]

# After a round without a draft the confidences are those of before: look again after so many.
FIRST_PROBE, LAST_PROBE = 4, 64
# Weight of a new observation in running means: the last 20 rounds or so count.
NEWS = 0.05
# A step that takes so many times as long as predicted was disturbed (prefill, another process).
DISTURBED = 3.0


@dataclass(frozen=True)
class Decision:
    """What is fixed before a round is drafted.

    draft: False: every window is the anchor alone. budget: K, draft tokens to verify.
    tier: index into the grid; None: the batch is larger than the grid, which verifies everything
    without a graph. expected_tokens: committed by the round; seconds: its step time; both predicted
    (0 if there is nothing to predict from).
    """

    draft: bool
    budget: int
    tier: int | None
    expected_tokens: float = 0.0
    seconds: float = 0.0


class BudgetScheduler:
    """Decides about rounds, and learns from those that are over.

    rows: of SGLang's request table. gamma: draft tokens proposed a round.
    """

    def __init__(
        self, config: ScheduleConfig, gamma: int, grid: TierGrid, cost: RoundCost, rows: int
    ) -> None:
        self.config, self.gamma, self.grid, self.cost = config, gamma, grid, cost
        # Latest survivals of the request in each row; valid while its generation is the row's.
        self._survivals = np.ones((rows, gamma))
        self._generations = np.full(rows, -1, dtype=np.int64)
        # What a request of which nothing is known is taken to survive; at first, everything.
        self._usual = np.ones(gamma)
        self._trust = 1.0
        self._pace = {True: 1.0, False: 1.0}  # measured seconds for a predicted one, by `draft`
        self._plain_rounds, self._patience = 0, FIRST_PROBE
        self._random = random.Random(0)

    def decide(self, rows: Ints, generations: Ints, context: float) -> Decision:
        """About the round of the requests in `rows`, which attends to `context` KV tokens."""
        requests = len(rows)
        full = requests * self.gamma
        if requests > self.grid.max_requests:
            return Decision(True, full, None)
        if self.config.budget != "auto":
            share = self._random.random() if self.config.budget == "random" else self.config.budget
            return self.forced(requests, int(share * full))
        budget = choose_budget(
            self._known(rows, generations),
            self.grid,
            self.cost.drafted,
            context,
            self.config.min_gain,
            self._trust,
        )
        seconds = budget.seconds * self._pace[True]
        plain = self._plain(requests, context)
        if plain is not None and plain.expected_tokens / plain.seconds > (
            budget.expected_tokens / seconds
        ):
            self._plain_rounds += 1
            if self._plain_rounds <= self._patience:
                return plain
            self._plain_rounds, self._patience = 0, min(2 * self._patience, LAST_PROBE)
        else:
            self._plain_rounds, self._patience = 0, FIRST_PROBE
        return Decision(True, budget.tokens, budget.tier, budget.expected_tokens, seconds)

    def forced(self, requests: int, budget: int) -> Decision:
        """A round with a given budget. Nothing is predicted: there may be no table."""
        return Decision(True, budget, self.grid.index(requests + budget, requests))

    def stop_early(self, survivals: Floats, context: float) -> Decision:
        """Algorithm 1 over this round's own survivals [R, γ], for where they can be waited for."""
        budget: Budget = early_stop(survivals, self.grid, self.cost.drafted, context, self._trust)
        seconds = budget.seconds * self._pace[True]
        return Decision(True, budget.tokens, budget.tier, budget.expected_tokens, seconds)

    def learn(
        self, rows: Ints, generations: Ints, survivals: Floats, windows: Ints, accepted: Ints
    ) -> None:
        """From a drafted round that is over: survivals [R, γ], the windows and what they took."""
        self._survivals[rows] = survivals
        self._generations[rows] = generations
        self._usual += NEWS * (survivals.mean(axis=0) - self._usual)
        verified = np.arange(self.gamma) < windows[:, None] - 1
        promised = float(survivals[verified].sum())
        # One window says little; a batch is as good as its tokens are many.
        weight = NEWS * min(1.0, promised / 8)
        if promised > 0:
            kept = float(accepted.sum()) / promised
            self._trust += weight * (min(max(kept, 0.25), 2.0) - self._trust)

    def learn_time(self, decision: Decision, seconds: float) -> None:
        """What the round of `decision` took, from its start to that of the next."""
        if decision.seconds <= 0 or seconds > DISTURBED * decision.seconds:
            return
        pace = self._pace[decision.draft]
        self._pace[decision.draft] = pace * (1 + NEWS * (seconds / decision.seconds - 1))

    def _known(self, rows: Ints, generations: Ints) -> Floats:
        known = self._generations[rows] == generations
        found: Floats = np.where(known[:, None], self._survivals[rows], self._usual)
        return found

    def _plain(self, requests: int, context: float) -> Decision | None:
        if self.cost.plain is None:
            return None
        tier = self.grid.index(requests, requests)
        size = np.array([float(self.grid.tiers[tier].tokens)])
        seconds = float(self.cost.plain.seconds(requests, size, context)[0])
        return Decision(False, 0, tier, float(requests), seconds * self._pace[False])
