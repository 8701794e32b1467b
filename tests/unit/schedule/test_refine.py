"""Tables that are corrected by what steps take while serving."""

from __future__ import annotations

import numpy as np
import pytest

from cost_tables import CostModel, FlatCost
from cost_tables.refine import BOUND, RefinedCost, Refinement

SIZES = (8, 16, 32, 64)


def measured(
    refinement: Refinement, tier: int, factor: float, rounds: int = 200, drafted: bool = True
) -> None:
    """Rounds of a tier that take `factor` times as long as the table says."""
    for _ in range(rounds):
        refinement.learn(tier, drafted, 0.01, factor * 0.01)


def factors(refinement: Refinement, drafted: bool = True) -> list[float]:
    return [refinement.factor(tier, drafted) for tier in range(len(SIZES))]


def test_nothing_is_corrected_at_first() -> None:
    assert factors(Refinement(SIZES)) == [1.0] * 4


def test_a_tier_takes_what_it_was_measured_to_take() -> None:
    """Of others of its kind the same is thought, as long as nothing better is known."""
    refinement = Refinement(SIZES)
    measured(refinement, 1, 1.5)
    assert factors(refinement) == pytest.approx([1.5] * 4, rel=0.01)
    assert factors(refinement, drafted=False) == [1.0] * 4


def test_tiers_are_told_apart() -> None:
    refinement = Refinement(SIZES)
    for _ in range(100):
        measured(refinement, 0, 1.0, rounds=1)
        measured(refinement, 3, 2.0, rounds=1)
    known = factors(refinement)
    assert known[0] < 1.12 and known[3] > 1.75 and 1.2 < known[1] < 1.7


def test_one_step_moves_little_however_long_it_takes() -> None:
    refinement = Refinement(SIZES)
    measured(refinement, 1, 1000.0, rounds=1)
    assert 1.0 < refinement.factor(1, drafted=True) < 1.5
    measured(refinement, 1, 1.0, rounds=20)
    before = refinement.factor(1, drafted=True)
    measured(refinement, 1, 1000.0, rounds=1)
    assert before < refinement.factor(1, drafted=True) < 1.05 * before


def test_a_slow_tier_that_is_avoided_is_thought_of_as_the_others_in_the_end() -> None:
    refinement = Refinement(SIZES)
    measured(refinement, 3, 3.0, rounds=40)
    assert refinement.factor(3, drafted=True) > 2.5
    measured(refinement, 1, 1.0, rounds=200)
    assert refinement.factor(3, drafted=True) < 1.25


def test_the_kind_that_is_not_run_is_hoped_to_be_faster_but_not_feared_to_be_slower() -> None:
    refinement = Refinement(SIZES)
    measured(refinement, 1, 2.0, drafted=False)
    measured(refinement, 1, 1.0, drafted=True, rounds=400)
    assert refinement.factor(1, drafted=False) == pytest.approx(1.0, rel=0.02)
    measured(refinement, 1, 2.0, drafted=True, rounds=400)
    assert refinement.factor(1, drafted=False) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_corrections_are_bounded(factor: float) -> None:
    refinement = Refinement(SIZES)
    measured(refinement, 2, factor, rounds=1000)
    assert np.abs(refinement.corrections(True)).max() <= BOUND + 1e-9
    assert np.abs(refinement.corrections(True)).max() > BOUND - 0.01


def test_refinement_can_be_switched_off() -> None:
    refinement = Refinement(SIZES, enabled=False)
    measured(refinement, 1, 2.0)
    assert factors(refinement) == [1.0] * 4


def test_refined_costs_are_the_tables_at_the_tiers_and_between_them_in_between() -> None:
    table = CostModel(0.01, (1.0,), (0.0,), (8.0, 64.0), (0.0, 0.02))
    refinement = Refinement(SIZES)
    cost = RefinedCost(table, refinement, drafted=True)
    tokens = np.array([8.0, 16.0, 32.0, 64.0])
    assert (cost.seconds(2, tokens, 0.0) == table.seconds(2, tokens, 0.0)).all()
    measured(refinement, 3, 2.0, rounds=60)
    measured(refinement, 1, 1.0, rounds=60)
    ratio = cost.seconds(2, tokens, 0.0) / table.seconds(2, tokens, 0.0)
    assert ratio == pytest.approx(factors(refinement))
    (between,) = RefinedCost(FlatCost(), refinement, drafted=True).seconds(2, np.array([48.0]), 0.0)
    assert ratio[2] < between < ratio[3]
