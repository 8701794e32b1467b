"""Temperatures of blocks whose true ones are known.

Over 20 seeds the logarithms of the fitted temperatures had standard deviations of 0.02 to 0.06 with
all outcomes known, and up to 0.08 with trimmed windows: NEAR is four of these.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit

from scaled_blocks import scaled_blocks
from sglang_dspark.calibrate import fit
from sglang_dspark.calibrate.blocks import Blocks
from sglang_dspark.calibrate.fit import LEAST, MIN_BLOCKS, MOST, fit_temperatures
from sglang_dspark.calibrate.reliability import BINS, errors, errors_by_position, survivals
from sglang_dspark.schedule.calibration import Scaling

TRUTH = (2.0, 0.5, 1.5, 1.0)
GAMMA = len(TRUTH)
ONES, ZEROS = (1.0,) * GAMMA, (0.0,) * GAMMA
NEAR = 0.32


def blocks(seed: int, **how: Any) -> Blocks:
    return scaled_blocks(Scaling(TRUTH, ZEROS), seed, **how)


def assert_near(found: tuple[float, ...], truth: tuple[float, ...] = TRUTH) -> None:
    assert np.log(found) == pytest.approx(np.log(truth), abs=NEAR)


# --- the temperatures ----------------------------------------------------------------------------


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_temperatures_come_near_the_truth(seed, trimmed):
    """Windows that know confidences hide outcomes without bias."""
    assert_near(fit_temperatures(blocks(seed, trimmed=trimmed)))


def test_trimmed_windows_give_the_temperatures_of_whole_ones():
    """Of the very same blocks, with what lies behind the windows unknown."""
    whole, cut = (fit_temperatures(blocks(4, trimmed=trimmed)) for trimmed in (False, True))
    assert min(blocks(4, trimmed=True).counts()) < 8_000
    assert np.log(cut) == pytest.approx(np.log(whole), abs=NEAR)


def promised_too_much(found: Blocks) -> list[float]:
    """By the true temperatures, over the blocks that count at each position."""
    said = survivals(found.logits, Scaling(TRUTH, ZEROS))
    seen = [found.reach > k for k in range(GAMMA)]
    return [float((said[s, k] - (found.survived[s] > k)).mean()) for k, s in enumerate(seen)]


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_blocks_that_died_before_their_windows_end_do_not_count_behind_it(seed):
    """If they did, as the only ones without an end in sight, right confidences would look wrong:
    by 0.03 to 0.05 here, where the standard deviation is 0.005."""
    found = blocks(seed, trimmed=True)
    assert promised_too_much(found) == pytest.approx([0.0] * GAMMA, abs=0.02)
    died = found.survived < found.reach
    reach = np.where(died, GAMMA, found.reach)
    counted = Blocks(found.logits, reach, found.survived, found.request)
    assert min(promised_too_much(counted)[2:]) > 0.025


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_error_on_held_out_requests_at_least_halves(seed, trimmed):
    fitted, held_out = blocks(seed, trimmed=trimmed).split(0.3, seed=0)
    temperatures = fit_temperatures(fitted)
    before, after = (
        np.mean(
            [
                each.ece
                for each in errors_by_position(held_out, Scaling(t, ZEROS))
                if each is not None
            ]
        )
        for t in (ONES, temperatures)
    )
    # The error of chance, in 15 bins of so few blocks, is no fault of the temperatures.
    chance = np.mean(
        [e.chance for e in errors_by_position(held_out, Scaling(temperatures, ZEROS)) if e]
    )
    assert after - chance < (before - chance) / 2
    if not trimmed:
        assert after < before / 2 and after < 0.02


def test_a_temperature_that_says_the_mean_of_every_block_is_not_taken():
    """Half of all blocks survive: with the greatest temperature the error would vanish."""
    rng = np.random.default_rng(6)
    logits = rng.normal(0.0, 1.0, 20_000)
    survived = rng.random(len(logits)) < expit(logits / 2)
    flat, right = (errors(expit(logits / t), survived).ece for t in (MOST, 2.0))
    assert flat < right
    found = Blocks(logits[:, None], np.ones(20_000), survived.astype(int), np.arange(20_000))
    assert_near(fit_temperatures(found), (2.0,))


def test_calibrated_confidences_keep_a_temperature_of_one():
    found = blocks(7)
    calibrated = Blocks(found.logits / np.array(TRUTH), found.reach, found.survived, found.request)
    assert_near(fit_temperatures(calibrated), ONES)


def test_earlier_temperatures_are_fixed_when_the_next_is_sought():
    """The fit of a block's head is that of the whole block, cut off."""
    found = blocks(8)
    head = Blocks(found.logits[:, :2], np.minimum(found.reach, 2), found.survived, found.request)
    assert fit_temperatures(head) == fit_temperatures(found)[:2]


@pytest.mark.parametrize("survives", [False, True])
def test_blocks_that_all_end_alike_have_a_temperature_within_bounds(survives):
    logits = np.full((500, 1), 1.0 if survives else -1.0)
    found = Blocks(logits, np.ones(500), np.full(500, int(survives)), np.arange(500))
    (temperature,) = fit_temperatures(found)
    assert LEAST <= temperature <= MOST and temperature < 0.5


def test_where_confidences_are_wrong_in_form_the_error_is_the_least_there_is():
    """No temperature turns a confidence of 0.5 into one of 0.8; of the others the best counts."""
    rng = np.random.default_rng(9)
    logits = rng.normal(1.0, 2.0, 20_000)
    survived = rng.random(len(logits)) < 0.8
    found = Blocks(logits[:, None], np.ones(20_000), survived.astype(int), np.arange(20_000))
    (temperature,) = fit_temperatures(found)
    ece = errors(expit(logits / temperature), survived).ece
    grid = np.geomspace(LEAST, MOST, 300)
    assert ece <= min(errors(expit(logits / t), survived).ece for t in grid) + 1e-3


# --- few blocks ----------------------------------------------------------------------------------


def test_positions_without_enough_blocks_keep_one():
    found = blocks(10, count=2_000)
    reach = np.where(np.arange(2_000) < MIN_BLOCKS - 1, 3, 2)
    cut = Blocks(found.logits, reach, np.minimum(found.survived, reach), found.request)
    assert cut.counts() == [2_000, 2_000, MIN_BLOCKS - 1, 0]
    assert fit_temperatures(cut)[2:] == (1.0, 1.0)
    assert fit_temperatures(cut)[:2] == fit_temperatures(found)[:2]


@pytest.mark.parametrize("seed", range(8))
def test_a_handful_of_survivors_moves_a_temperature_little(seed):
    """Of 1,000 blocks some ten reach the second token. Over 40 seeds the logarithm of its
    temperature stays within 0.3; without the prior it is at a bound (3) in every third."""
    rng = np.random.default_rng(seed)
    logits = np.stack([np.full(1_000, -4.6), rng.normal(1.0, 2.0, 1_000)], axis=1)
    survived = (rng.random(logits.shape) < expit(logits)).cumprod(axis=1).sum(axis=1)
    found = fit_temperatures(Blocks(logits, np.full(1_000, 2), survived, np.arange(1_000)))
    assert abs(math.log(found[1])) < 0.5


def test_what_was_not_drafted_is_not_read():
    found = blocks(11)
    logits, reach = found.logits.copy(), np.minimum(found.reach, 2)
    logits[:, 2:] = np.nan
    cut = Blocks(logits, reach, np.minimum(found.survived, 2), found.request)
    assert fit_temperatures(cut) == (*fit_temperatures(found)[:2], 1.0, 1.0)


# --- the error -----------------------------------------------------------------------------------


def test_an_error_by_hand():
    """Two bins: 0.1 and 0.12, where one of two survived; 0.9, where all three did."""
    predicted = np.array([0.10, 0.12, 0.9, 0.9, 0.9])
    survived = np.array([True, False, True, True, True])
    found = errors(predicted, survived)
    assert found.ece == pytest.approx((abs(0.22 - 1) + abs(2.7 - 3)) / 5)
    low, high = 0.1 * 0.9 + 0.12 * 0.88, 3 * 0.09
    assert found.chance == pytest.approx(
        math.sqrt(2 / math.pi) * (math.sqrt(low) + math.sqrt(high)) / 5
    )


@pytest.mark.parametrize("count", [300, 5_000])
def test_chance_is_what_a_perfect_predictor_shows(count):
    rng, found = np.random.default_rng(12), []
    for _ in range(400):
        predicted = rng.random(count)
        found.append(errors(predicted, rng.random(count) < predicted))
    measured = np.array([each.ece for each in found])
    expected = np.mean([each.chance for each in found])
    assert measured.mean() == pytest.approx(expected, abs=5 * measured.std() / math.sqrt(400))


def test_certainty_has_a_bin():
    assert errors(np.array([0.0, 1.0]), np.array([False, True])).ece == 0.0
    assert errors(np.array([1.0]), np.array([False])).ece == 1.0


def test_survivals_are_running_products():
    found = survivals(np.array([[0.0, math.log(3), np.nan]]), Scaling.identity(3))
    assert found[0, :2] == pytest.approx([0.5, 0.375]) and np.isnan(found[0, 2])
    halved = survivals(np.array([[math.log(9)]]), Scaling((2.0,), (0.0,)))
    assert halved[0, 0] == pytest.approx(0.75)
    shifted = survivals(np.array([[math.log(9)]]), Scaling((2.0,), (math.log(3),)))
    assert shifted[0, 0] == pytest.approx(0.9)


def test_survivals_are_those_that_windows_are_sized_by():
    import torch

    from sglang_dspark.schedule import calibration

    logits, shifts = np.random.default_rng(13).normal(0, 3, (50, GAMMA)), (0.5, -1.0, 0.0, 2.0)
    rescale = calibration.Rescale(torch.tensor(TRUTH), torch.tensor(shifts), None)
    expected = calibration.survivals(rescale.head(torch.from_numpy(logits)))
    found = survivals(logits, Scaling(TRUTH, shifts))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


def test_the_docs_say_how_many_bins_and_blocks():
    text = (Path(fit.__file__).parents[2] / "docs" / "calibration.md").read_text()
    assert f"{BINS} bins" in text and f"{MIN_BLOCKS} blocks" in text
