"""A scheduler in profiling mode: it runs the round that it is told, in the tier that holds it."""

from __future__ import annotations

import numpy as np
import pytest

from budgets import GAMMA, GRID, MOST, STEEP, Batch, scheduler
from cost_tables import FlatCost, RoundCost
from cost_tables.profiling import forcing
from sglang_dspark.errors import ConfigError
from sglang_dspark.flags import BUDGET
from sglang_dspark.schedule.scheduler import Decision

PLAIN_IS_BEST = RoundCost(STEEP.drafted, FlatCost(1e-4))


def test_until_it_is_told_anything_it_verifies_all() -> None:
    budgets, batch = scheduler(PLAIN_IS_BEST, budget="profile"), Batch(4)
    batch.learn(budgets, [0.1, 0.0, 0.0, 0.0], window=5, accepted=0)
    assert batch.decide(budgets) == budgets.forced(4, 4 * GAMMA)


@pytest.mark.parametrize("requests", [1, 3, MOST])
def test_every_depth_and_budget_can_be_asked_for(requests: int) -> None:
    budgets, batch = scheduler(PLAIN_IS_BEST, budget="profile"), Batch(requests)
    for depth in range(GAMMA + 1):
        for budget in range(requests * depth + 1):
            budgets.share = forcing.encode(depth, budget, requests, GAMMA)
            tier = GRID.index(requests + budget, requests)
            assert batch.decide(budgets) == Decision(depth, budget, tier)


def test_a_batch_of_another_size_runs_a_round_of_that_depth() -> None:
    """Requests come and go while the profiler waits for its batch."""
    budgets = scheduler(budget="profile")
    budgets.share = forcing.encode(2, 9, 6, GAMMA)
    for requests in range(1, MOST + 1):
        decision = Batch(requests).decide(budgets)
        assert decision.depth == 2
        assert decision.budget / requests == pytest.approx(9 / 6, abs=1 / requests)


def test_outside_of_profiling_a_told_share_is_a_share() -> None:
    budgets, batch = scheduler(), Batch(4)
    budgets.share = 0.5
    assert batch.decide(budgets).budget == 4 * GAMMA // 2
    assert np.isclose(forcing.encode(0, 0, 4, GAMMA), 0.5 / (GAMMA + 1))


def test_the_flag_takes_profile_and_says_so() -> None:
    from sglang_dspark.config import _budget

    assert _budget("profile") == "profile" and "profile" in BUDGET.help
    with pytest.raises(ConfigError, match="auto, random, profile, or a number from 0 to 1"):
        _budget("profiling")
