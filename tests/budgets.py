"""Budget schedulers over known costs, and batches for them to decide about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cost_tables import CostModel, FlatCost, RoundCost
from cuda_graph import TierGrid
from sglang_dspark.config import ScheduleConfig
from sglang_dspark.schedule.scheduler import BudgetScheduler, Decision

GAMMA, MOST = 4, 16
GRID = TierGrid.choose(MOST, GAMMA, 12)
FREE = RoundCost(FlatCost(0.01))  # tokens cost nothing: all are verified
STEEP = RoundCost(CostModel(0.02, (1.0,), (0.0,), (1.0, 80.0), (0.0, 0.06)))
# A drafted token costs as much as a verified one.
DEAR_DRAFT = RoundCost(replace(STEEP.drafted, draft_knots=(0.0, 80.0), draft_seconds=(0.0, 0.06)))
# A draft pays if all of it is accepted (5 tokens in 3 ms a round), not if next to nothing is.
SLOW_DRAFT = RoundCost(FlatCost(0.003), plain=FlatCost(0.001))
# The same if next to nothing is accepted, but to find out costs little.
CHEAP_PROBE = RoundCost(FlatCost(0.003), plain=FlatCost(0.0026))


def scheduler(cost: RoundCost = FREE, **config: Any) -> BudgetScheduler:
    return BudgetScheduler(ScheduleConfig(**config), GAMMA, GRID, cost, rows=64)


class Batch:
    """Requests 0 to R - 1 in the rows of the same number."""

    def __init__(self, requests: int = 8) -> None:
        self.rows = np.arange(requests)
        self.generations = np.zeros(requests, dtype=np.int64)

    def decide(self, by: BudgetScheduler, context: float = 0.0) -> Decision:
        return by.decide(self.rows, self.generations, context)

    def learn(self, by: BudgetScheduler, survival: list[float], window: int, accepted: int) -> None:
        """Every request has the same survivals and window; together they took `accepted`."""
        requests = len(self.rows)
        took = np.full(requests, accepted // requests)
        took[: accepted % requests] += 1
        by.learn(
            self.rows,
            self.generations,
            np.array([survival] * requests),
            np.full(requests, window),
            took,
        )

    def settle(
        self, by: BudgetScheduler, survival: list[float], window: int = 1, accepted: int = 0
    ) -> None:
        """`learn` until nothing else is thought of these requests."""
        for _ in range(80):
            self.learn(by, survival, window, accepted)
