"""Predicted against observed survival, where it was observed."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_dspark.calibrate.blocks import Blocks
from sglang_dspark.calibrate.reliability import errors_by_position
from sglang_dspark.report.reliability import ReliabilityTally
from sglang_dspark.schedule.calibration import Scaling


def logits(*chances: float) -> np.ndarray:
    values = np.array(chances)
    return np.log(values / (1 - values))


def test_survival_is_the_running_product():
    tally = ReliabilityTally(gamma=3)
    rows = np.stack([logits(0.8, 0.5, 0.5)] * 4)
    tally.add(rows, np.full(4, 4), np.array([3, 2, 1, 0]))
    found = tally.result().positions
    assert [position.predicted for position in found] == pytest.approx([0.8, 0.4, 0.2])
    assert [position.observed for position in found] == pytest.approx([0.75, 0.5, 0.25])
    assert [position.ece for position in found] == pytest.approx([0.05, 0.1, 0.05])
    assert tally.result().ece == pytest.approx(0.2 / 3)


def test_what_lies_behind_a_window_is_not_a_failure_but_unknown():
    tally = ReliabilityTally(gamma=3)
    rows = np.stack([logits(0.9, 0.9, 0.9)] * 3)
    tally.add(rows, np.array([1, 2, 4]), np.array([0, 1, 0]))
    first, second, third = tally.result().positions
    assert (first.count, first.observed) == (2, 0.5)
    # Rejected at the first token, so it did not survive the second and third either.
    assert (second.count, second.observed) == (1, 0.0)
    assert (third.count, third.observed) == (1, 0.0)


def test_bins_part_zero_to_one_and_errors_do_not_cancel_across_them():
    tally = ReliabilityTally(gamma=1)
    rows = np.array([logits(0.1), logits(0.9)])
    tally.add(rows, np.array([2, 2]), np.array([1, 0]))
    (position,) = tally.result().positions
    assert position.predicted == pytest.approx(position.observed)
    assert position.ece == pytest.approx(0.9)
    assert len(position.bins) == 2
    tally.add(np.array([[50.0]]), np.array([2]), np.array([1]))  # a survival of 1 has a bin too
    assert tally.result().positions[0].bins[-1].predicted == pytest.approx(1.0)


def test_rounds_of_different_depths_add_up_and_broken_logits_do_not_count():
    tally = ReliabilityTally(gamma=2)
    tally.add(np.array([logits(0.5)]), np.array([2]), np.array([1]))
    tally.add(np.array([logits(0.5, 0.5), [np.nan, 0.0]]), np.array([3, 3]), np.array([2, 2]))
    assert [position.count for position in tally.result().positions] == [2, 1]


def test_positions_that_no_window_reached_have_no_error():
    tally = ReliabilityTally(gamma=2)
    assert tally.result() is None
    tally.add(np.array([logits(0.5, 0.5)]), np.array([2]), np.array([1]))
    _, second = tally.result().positions
    assert (second.count, second.ece, second.bins) == (0, None, ())
    assert tally.result().ece == pytest.approx(0.5)


def test_a_calibrated_draft_has_next_to_no_error():
    generator = np.random.default_rng(0)
    chances = generator.uniform(0.05, 0.95, size=(40_000, 2))
    taken = generator.random(chances.shape) < chances
    accepted = taken.cumprod(axis=1).sum(axis=1)
    tally = ReliabilityTally(gamma=2)
    tally.add(np.log(chances / (1 - chances)), np.full(len(chances), 3), accepted)
    for position in tally.result().positions:
        assert sum(found.count for found in position.bins) == 40_000
        assert position.chance == pytest.approx(0.006, abs=0.002)
        # A sum of 15 half normal deviations: twice its mean is beyond 4 standard deviations.
        assert position.ece < 2 * position.chance


def test_the_command_that_calibrates_measures_the_same():
    generator = np.random.default_rng(1)
    rows = generator.normal(0, 1.5, size=(500, 3))
    windows, accepted = generator.integers(1, 5, 500), generator.integers(0, 4, 500)
    accepted = np.minimum(accepted, windows - 1)
    tally = ReliabilityTally(gamma=3)
    tally.add(rows, windows, accepted)
    blocks = Blocks(rows, reach=windows - 1, survived=accepted, request=np.arange(500))
    theirs = errors_by_position(blocks, Scaling.identity(3))
    for position, errors in zip(tally.result().positions, theirs, strict=True):
        assert (position.ece, position.chance) == pytest.approx((errors.ece, errors.chance))
