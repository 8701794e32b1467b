"""What the host decides about a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from budgets import (
    CHEAP_PROBE,
    DEAR_DRAFT,
    FREE,
    GAMMA,
    GRID,
    MOST,
    SLOW_DRAFT,
    STEEP,
    Batch,
    scheduler,
)
from cost_tables import FlatCost, RoundCost
from sglang_dspark.schedule.scheduler import (
    FIRST_BLOCKS,
    FIRST_PROBE,
    LAST_PROBE,
    NEWS_OF_REQUEST,
    PROBE_SHARE,
    BudgetScheduler,
    Decision,
)

# --- what is known of a request ------------------------------------------------------------------


def test_of_a_new_server_everything_is_expected() -> None:
    decision = Batch(3).decide(scheduler())
    assert (decision.depth, decision.budget) == (GAMMA, 3 * GAMMA)
    assert decision.expected_tokens == 3 * (1 + GAMMA)


def test_a_block_moves_its_request_and_what_is_usual() -> None:
    """A request is taken for the usual one, and then moves away from it with each of its blocks."""
    budgets, known = scheduler(), Batch(1)
    known.learn(budgets, [0.75, 0.25, 0.0, 0.0], window=5, accepted=1)  # 1, as promised
    usual = (FIRST_BLOCKS * GAMMA + 1) / (FIRST_BLOCKS + 1)
    unknown = budgets.decide(np.array([7]), np.array([0]), 0.0)
    assert unknown.expected_tokens == pytest.approx(1 + usual)
    own = usual + NEWS_OF_REQUEST * (1 - usual)
    assert known.decide(budgets).expected_tokens == pytest.approx(1 + own)
    known.settle(budgets, [0.75, 0.25, 0.0, 0.0])
    assert known.decide(budgets).expected_tokens == pytest.approx(2.0)


def test_a_new_generation_forgets_the_rows_old_tenant() -> None:
    budgets, old, other = scheduler(), Batch(1), Batch(1)
    other.rows = np.array([5])
    old.settle(budgets, [0.5, 0.5, 0.0, 0.0])
    other.settle(budgets, [1.0, 1.0, 1.0, 1.0])
    new = budgets.decide(old.rows, old.generations + 1, 0.0)
    assert old.decide(budgets).expected_tokens == pytest.approx(2.0)
    assert new.expected_tokens > 4


# --- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("requests", [1, 3, 16])
def test_a_forced_budget_is_its_share_of_the_drafts(share: float, requests: int) -> None:
    decision = Batch(requests).decide(scheduler(budget=share))
    assert (decision.depth, decision.budget) == (GAMMA, int(share * requests * GAMMA))
    assert decision.tier == GRID.index(requests + decision.budget, requests)
    assert (decision.expected_tokens, decision.seconds) == (0.0, 0.0)


def test_random_budgets_are_legal_and_differ() -> None:
    budgets, seen = scheduler(budget="random"), set()
    for _ in range(200):
        decision = Batch(3).decide(budgets)
        assert decision.depth == GAMMA and 0 <= decision.budget <= 3 * GAMMA
        assert decision.tier == GRID.index(3 + decision.budget, 3)
        seen.add(decision.budget)
    assert len(seen) >= 3 * GAMMA


def test_a_running_server_can_be_told_another_budget() -> None:
    budgets, batch = scheduler(), Batch()
    free = batch.decide(budgets)
    budgets.share = 0.5
    assert batch.decide(budgets).budget == 8 * GAMMA // 2
    budgets.share = "auto"
    assert batch.decide(budgets) == free


@pytest.mark.parametrize("budget", ["auto", "random", 0.25])
def test_a_batch_above_the_grid_verifies_all_without_a_tier(budget: Any) -> None:
    decision = Batch(MOST + 1).decide(scheduler(SLOW_DRAFT, budget=budget))
    assert decision == Decision(GAMMA, (MOST + 1) * GAMMA, None)


def test_the_tier_of_a_decision_always_holds_its_rows() -> None:
    rng = np.random.default_rng(0)
    trimmed = shallow = plain = 0
    for cost in (FREE, STEEP, DEAR_DRAFT, RoundCost(STEEP.drafted, FlatCost(0.01))):
        budgets = scheduler(cost)
        for _ in range(150):
            batch = Batch(int(rng.integers(1, MOST + 1)))
            requests = len(batch.rows)
            decision = batch.decide(budgets, float(rng.integers(0, 10_000)))
            assert decision.tier is not None
            tier = GRID.tiers[decision.tier]
            assert tier.tokens >= requests + decision.budget and tier.slots >= requests
            assert 0 <= decision.depth <= GAMMA
            assert 0 <= decision.budget <= requests * decision.depth
            trimmed += decision.budget < requests * decision.depth
            shallow += 0 < decision.depth < GAMMA
            plain += not decision.drafts
            depth = decision.depth or GAMMA
            survivals = rng.random((requests, depth)).cumprod(axis=1)
            early = budgets.stop_early(survivals, 0.0)
            assert early.depth == depth and early.tier is not None
            assert 0 <= early.budget <= requests * depth
            assert GRID.tiers[early.tier].tokens >= requests + early.budget
            windows = rng.integers(1, depth + 2, requests)
            accepted = rng.integers(0, windows)
            budgets.learn(batch.rows, batch.generations, survivals, windows, accepted)
    assert min(trimmed, shallow, plain) > 50


def test_a_batch_with_broken_confidences_is_not_trimmed() -> None:
    """Nor left without a draft; the row's next tenant is not to blame."""
    budgets, batch = scheduler(SLOW_DRAFT), Batch()
    nothing_accepted(budgets, batch)
    assert not batch.decide(budgets).drafts
    budgets.learn_broken(batch.rows[3:4], batch.generations[3:4])
    assert batch.decide(budgets) == budgets.forced(8, 8 * GAMMA)
    assert not Batch(3).decide(budgets).drafts  # the broken one is not among them
    batch.generations[3] += 1
    assert batch.decide(budgets).seconds > 0  # decided by the table again


# --- rounds without a draft ----------------------------------------------------------------------


def plain_rounds(budgets: BudgetScheduler, batch: Batch) -> int:
    """How many rounds without a draft come before the next one with a draft."""
    count = 0
    while not batch.decide(budgets).drafts:
        count += 1
        assert count <= 2 * LAST_PROBE
    return count


def nothing_accepted(budgets: BudgetScheduler, batch: Batch) -> None:
    batch.settle(budgets, [0.1, 0.0, 0.0, 0.0], window=5)


def test_where_drafting_does_not_pay_it_is_tried_again_ever_more_rarely() -> None:
    budgets, batch = scheduler(CHEAP_PROBE), Batch()
    assert batch.decide(budgets).drafts  # optimistic
    nothing_accepted(budgets, batch)
    decision = batch.decide(budgets)
    assert (decision.depth, decision.budget, decision.tier) == (0, 0, GRID.index(8, 8))
    assert (decision.expected_tokens, decision.seconds) == (8.0, 0.0026)
    assert plain_rounds(budgets, batch) == FIRST_PROBE - 1
    patience = FIRST_PROBE
    for _ in range(6):
        nothing_accepted(budgets, batch)
        patience = min(2 * patience, LAST_PROBE)
        assert plain_rounds(budgets, batch) == patience
    assert patience == LAST_PROBE


def test_a_look_that_costs_much_is_put_off() -> None:
    """A drafted round takes as long as three without, and gives a tenth more tokens."""
    budgets, batch = scheduler(SLOW_DRAFT), Batch()
    nothing_accepted(budgets, batch)
    rounds = plain_rounds(budgets, batch)
    assert (3 - 1.1) / PROBE_SHARE <= rounds <= (3 - 1.0) / PROBE_SHARE
    assert rounds > 4 * FIRST_PROBE


def test_good_survivals_bring_the_draft_back() -> None:
    budgets, batch = scheduler(CHEAP_PROBE), Batch()
    for _ in range(3):
        nothing_accepted(budgets, batch)
        assert plain_rounds(budgets, batch) >= FIRST_PROBE
    batch.settle(budgets, [1.0] * GAMMA, window=5, accepted=8 * GAMMA)
    assert [batch.decide(budgets).drafts for _ in range(10)] == [True] * 10
    nothing_accepted(budgets, batch)
    assert plain_rounds(budgets, batch) == FIRST_PROBE  # patience began anew


def test_without_a_plain_cost_there_is_always_a_draft() -> None:
    budgets, batch = scheduler(RoundCost(SLOW_DRAFT.drafted)), Batch()
    for _ in range(10):
        nothing_accepted(budgets, batch)
        assert batch.decide(budgets).drafts


def new_requests(rows: int) -> Batch:
    batch = Batch(rows)
    batch.generations += 9
    return batch


def test_a_new_request_is_asked_and_a_crowd_of_them_only_if_it_may_help() -> None:
    """A draft pays from two fifths of a token a request on; a tenth is usual. One new request may
    well be so much better, hardly the mean of sixteen."""
    for requests, asked in ((1, True), (16, False)):
        budgets = scheduler(RoundCost(FlatCost(0.004), plain=FlatCost(0.003)))
        nothing_accepted(budgets, Batch())
        batch = new_requests(requests)
        assert batch.decide(budgets).drafts == asked
        assert not budgets.decide(batch.rows, batch.generations, 0.0).drafts, "asked once"
