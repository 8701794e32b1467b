"""What the host learns from rounds that are over: survivals, depth, trust and pace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from budgets import (
    DEAR_DRAFT,
    GAMMA,
    GRID,
    SLOW_DRAFT,
    STEEP,
    Batch,
    scheduler,
)
from cost_tables import RoundCost
from sglang_dspark.kernels.top_windows import top_windows_reference
from sglang_dspark.schedule import scheduler as module
from sglang_dspark.schedule.budget import Budget, choose_budget
from sglang_dspark.schedule.scheduler import (
    LAST_PROBE,
    USUAL_BLOCKS,
    BudgetScheduler,
    Decision,
)

# --- depth ---------------------------------------------------------------------------------------


def test_dear_drafts_are_shallow_where_little_survives() -> None:
    budgets, batch = scheduler(DEAR_DRAFT), Batch()
    assert batch.decide(budgets).depth == GAMMA  # of a new server everything is expected
    batch.settle(budgets, [0.9, 0.8, 0.05, 0.01])
    decision = batch.decide(budgets)
    assert (decision.depth, decision.budget) == (2, 16)
    tokens = np.array([float(GRID.tiers[decision.tier].tokens)])
    assert decision.seconds == DEAR_DRAFT.drafted.seconds(8, tokens, 0.0, 16.0)[0]


def usual_after(budgets: BudgetScheduler, survival: list[float], rounds: int) -> None:
    """Requests that are over now; what remains of them is what is usual."""
    gone = Batch(4)
    gone.generations -= 7
    for _ in range(rounds):
        gone.learn(budgets, survival, window=1, accepted=0)


def test_what_was_not_drafted_falls_as_it_usually_does() -> None:
    budgets, batch = scheduler(), Batch(1)
    usual_after(budgets, [0.8, 0.6, 0.4, 0.2], rounds=400)
    batch.settle(budgets, [0.4])
    assert batch.decide(budgets).expected_tokens == pytest.approx(1 + 0.4 + 0.3 + 0.2 + 0.1)
    batch.settle(budgets, [0.9, 0.6])
    assert batch.decide(budgets).expected_tokens == pytest.approx(1 + 0.9 + 0.6 + 0.4 + 0.2)
    batch.settle(budgets, [0.7, 0.5, 0.4, 0.4])
    assert batch.decide(budgets).expected_tokens == pytest.approx(1 + 0.7 + 0.5 + 0.4 + 0.4)


def test_shallow_drafts_move_the_whole_of_what_is_usual() -> None:
    """By as much as their last token, in proportion."""
    budgets = scheduler()
    usual_after(budgets, [0.8, 0.6, 0.4, 0.2], rounds=400)
    usual_after(budgets, [0.4], rounds=1)
    share = 1 - 4 / (USUAL_BLOCKS + 4) / 2
    unknown = budgets.decide(np.array([9]), np.array([0]), 0.0)
    assert unknown.expected_tokens == pytest.approx(1 + 2.0 * share)
    usual_after(budgets, [0.4], rounds=400)
    unknown = budgets.decide(np.array([9]), np.array([0]), 0.0)
    assert unknown.expected_tokens == pytest.approx(1 + 2.0 / 2)


def test_survivals_never_rise_along_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is drafted, and even if nothing at all survives for long."""
    budgets, rng, seen = scheduler(), np.random.default_rng(0), []

    def look(survivals: np.ndarray, *others: Any, **more: Any) -> Budget:
        seen.append(survivals)
        return choose_budget(survivals, *others, **more)

    monkeypatch.setattr(module, "choose_budget", look)
    rows = np.arange(6)
    for step in range(900):
        depth = int(rng.integers(1, GAMMA + 1))
        dead = 200 < step < 700
        survivals = np.zeros((6, depth)) if dead else rng.random((6, depth)).cumprod(axis=1)
        if step % 3:
            survivals[0] = 1.0 if not dead else 0.0
        ones, none = np.ones(6, dtype=np.int64), np.zeros(6, dtype=np.int64)
        budgets.learn(rows, none, survivals, ones, none)
        budgets.decide(np.array([*rows, 40]), np.array([*none, 0]), 0.0)  # one is not known
    known = np.stack(seen)
    assert (np.diff(known, axis=2) <= 1e-12).all() and known.min() >= 0 and known.max() <= 1


class Workload:
    """Rounds of eight requests whose next token survives with the same chance everywhere."""

    def __init__(self, cost: RoundCost = DEAR_DRAFT) -> None:
        self.budgets, self.batch = scheduler(cost), Batch(8)
        self._random = np.random.default_rng(0)

    def play(self, chance: float, rounds: int) -> list[int]:
        """The depths of these rounds."""
        depths = []
        for _ in range(rounds):
            decision = self.batch.decide(self.budgets)
            depths.append(decision.depth)
            self.run(decision, chance)
        return depths

    def run(self, decision: Decision, chance: float) -> None:
        survivals = np.cumprod(np.full((8, decision.depth), chance), axis=1)
        windows = top_windows_reference(torch.from_numpy(survivals), decision.budget).numpy()
        survives = self._random.random(survivals.shape) < chance
        accepted = np.minimum(survives.cumprod(axis=1).sum(axis=1), windows - 1)
        rows = (self.batch.rows, self.batch.generations)
        self.budgets.learn(*rows, survivals, windows, accepted)


def test_now_and_then_the_whole_block_is_drafted() -> None:
    depths = Workload().play(0.3, rounds=4 * (LAST_PROBE + 1) + 1)
    assert [i for i, depth in enumerate(depths) if depth == GAMMA] == [
        i * (LAST_PROBE + 1) for i in range(5)
    ]
    assert max(depth for depth in depths if depth < GAMMA) == 1


def test_deep_drafts_put_the_next_look_off() -> None:
    """What is counted are shallow rounds in a row."""
    workload = Workload()
    workload.play(0.3, rounds=LAST_PROBE - 10)
    workload.batch.settle(workload.budgets, [0.95] * GAMMA)
    assert workload.play(0.95, rounds=1) == [GAMMA]
    workload.batch.settle(workload.budgets, [0.3, 0.1, 0.0, 0.0])
    assert max(workload.play(0.3, rounds=LAST_PROBE)) == 1
    assert workload.play(0.3, rounds=1) == [GAMMA]


def test_a_workload_that_turns_good_climbs_back_to_deep_drafts() -> None:
    workload = Workload()
    assert workload.play(0.3, rounds=300)[-20:] == [1] * 20
    turned = workload.play(0.97, rounds=LAST_PROBE + 40)
    assert turned[0] == 1 and turned[-30:] == [GAMMA] * 30
    new = workload.budgets.decide(np.array([50]), np.array([0]), 0.0)  # others are hoped for too
    assert new.depth == GAMMA


# --- trust and pace ------------------------------------------------------------------------------


def test_the_budget_falls_where_survivals_promise_too_much() -> None:
    budgets, batch = scheduler(STEEP), Batch()
    survival = [0.75, 0.5, 0.5, 0.25]
    batch.settle(budgets, survival, window=5, accepted=16)  # 2 a request, as promised
    before = batch.decide(budgets)
    for _ in range(60):
        batch.learn(budgets, survival, window=5, accepted=16)
    assert batch.decide(budgets).expected_tokens == pytest.approx(before.expected_tokens)
    for _ in range(60):
        batch.learn(budgets, survival, window=5, accepted=4)
    after = batch.decide(budgets)
    assert after.budget < before.budget
    assert after.expected_tokens < before.expected_tokens


def test_modest_survivals_are_scaled_up_to_what_can_be_accepted_at_most() -> None:
    budgets, batch = scheduler(), Batch()
    for _ in range(200):
        batch.learn(budgets, [0.5, 0.4, 0.3, 0.2], window=5, accepted=8 * 3)
    assert batch.decide(budgets).expected_tokens > 8 + 2.5 * 8  # promised 1.4 each, accepted 3
    batch.settle(budgets, [0.9] * GAMMA)
    for decision in (batch.decide(budgets), budgets.stop_early(np.full((8, 3), 0.9), 0.0)):
        assert decision.expected_tokens == 8 + decision.budget == 8 + 8 * decision.depth


def test_only_the_window_counts_as_promised() -> None:
    """8 tokens of survival 1/2 were verified: 4 accepted are as many as promised."""
    budgets, batch = scheduler(), Batch()
    batch.settle(budgets, [0.5] * GAMMA, window=2, accepted=4)
    assert batch.decide(budgets).expected_tokens == pytest.approx(8 + 8 * GAMMA * 0.5)


def test_windows_of_the_anchor_alone_say_nothing_of_trust() -> None:
    budgets, batch = scheduler(), Batch()
    batch.settle(budgets, [0.5] * GAMMA)
    assert batch.decide(budgets).expected_tokens == pytest.approx(8 + 8 * GAMMA * 0.5)


def measured(budgets: BudgetScheduler, decision: Decision, factor: float, rounds: int = 60) -> None:
    """Rounds of `decision` that take `factor` times as long as the table says."""
    for _ in range(rounds):
        budgets.learn_time(decision, factor * decision.seconds)


def test_drafts_that_are_slower_than_their_table_stop_paying() -> None:
    """All accepted, a draft gains 5 / 3 over a round without: not if it takes twice as long."""
    budgets, batch = scheduler(SLOW_DRAFT), Batch()
    drafted = batch.decide(budgets)
    measured(budgets, drafted, 1.5)
    assert batch.decide(budgets).drafts
    measured(budgets, drafted, 2.0)
    plain = batch.decide(budgets)
    assert not plain.drafts
    measured(budgets, plain, 2.0)  # but so do rounds without
    assert batch.decide(budgets) == drafted


def test_one_slow_step_decides_nothing() -> None:
    budgets, batch = scheduler(SLOW_DRAFT), Batch()
    measured(budgets, batch.decide(budgets), 2.9, rounds=1)
    assert batch.decide(budgets).drafts


def test_unpredicted_steps_are_not_learned() -> None:
    budgets, batch = scheduler(SLOW_DRAFT), Batch()
    drafted = batch.decide(budgets)
    for _ in range(60):
        budgets.learn_time(Decision(GAMMA, 3, 0), 0.006)  # forced: nothing was predicted
    assert batch.decide(budgets) == drafted


def test_steps_that_stay_disturbed_become_the_usual_ones() -> None:
    """A neighbour that takes four fifths of the machine from now on: both kinds are slower."""
    budgets, batch = scheduler(SLOW_DRAFT), Batch()
    drafted = batch.decide(budgets)
    measured(budgets, drafted, 20.0, rounds=200)
    plain = batch.decide(budgets)
    assert not plain.drafts
    measured(budgets, plain, 16.0, rounds=200)  # 5 tokens in 60 ms, or 1 in 16
    assert batch.decide(budgets) == drafted


def test_predicted_seconds_stay_those_of_the_table() -> None:
    budgets, batch = scheduler(), Batch()
    measured(budgets, batch.decide(budgets), 2.0)
    assert batch.decide(budgets).seconds == pytest.approx(0.01)


def test_budgets_leave_tiers_that_become_slow_and_come_back() -> None:
    """Within 200 rounds each, as the times of steps that really ran tell."""
    workload = Workload(STEEP)
    budgets, batch = workload.budgets, workload.batch

    def play(slow: int | None, rounds: int) -> list[int]:
        """Rounds on a machine where tiers from `slow` on take twice as long; their tiers."""
        tiers = []
        for _ in range(rounds):
            decision = batch.decide(budgets)
            assert decision.tier is not None
            tiers.append(decision.tier)
            workload.run(decision, 0.8)
            late = slow is not None and decision.tier >= slow
            budgets.learn_time(decision, decision.seconds * (2.0 if late else 1.0))
        return tiers

    usual = play(None, 200)[-1]
    assert len(set(play(None, 50))) == 1
    left = play(usual, 200)
    assert left[0] == usual and np.mean(np.array(left[-50:]) < usual) > 0.9
    back = play(None, 200)
    assert back[0] < usual and np.mean(np.array(back[-20:]) == usual) > 0.9
