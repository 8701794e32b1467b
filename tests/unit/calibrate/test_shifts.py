"""Temperatures and shifts of blocks whose true ones are known.

Over 20 seeds the fitted shifts and the logarithms of the temperatures had standard deviations of
SPREAD at most: NEAR is four of these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.optimize import check_grad
from scipy.special import expit, logit

from scaled_blocks import scaled_blocks
from sglang_dspark.calibrate import shifts
from sglang_dspark.calibrate.blocks import Blocks
from sglang_dspark.calibrate.fit import LEAST, MIN_BLOCKS, MOST, PRIOR_SPREAD, fit_scaling
from sglang_dspark.calibrate.reliability import errors_by_position
from sglang_dspark.schedule.calibration import Scaling

TRUTH = Scaling((2.0, 0.5, 1.5, 1.0), (-1.0, 0.5, 0.0, 1.0))
GAMMA = len(TRUTH.temperatures)
SPREAD = 0.08
NEAR = 4 * SPREAD


def blocks(seed: int, **how: Any) -> Blocks:
    return scaled_blocks(TRUTH, seed, **how)


def distance(found: Scaling) -> np.ndarray:
    """[2, gamma] of log t and s from the truth."""
    return np.array(
        [
            np.log(found.temperatures) - np.log(TRUTH.temperatures),
            np.array(found.shifts) - np.array(TRUTH.shifts),
        ]
    )


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_both_come_near_the_truth(seed, trimmed):
    """Windows that know confidences hide outcomes without bias."""
    found = fit_scaling(blocks(seed, trimmed=trimmed), shift=True)
    assert np.abs(distance(found)).max() < NEAR


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_shift_mends_what_no_temperature_can(seed):
    """A draft that is sure of half where a third survives."""
    rng = np.random.default_rng(seed)
    said = rng.normal(0.0, 0.5, 20_000)
    survived = rng.random(len(said)) < expit(said + logit(1 / 3))
    one = Blocks(said[:, None], np.ones(20_000, int), survived.astype(int), np.arange(20_000))
    fitted, held_out = one.split(0.3, seed=0)

    def error(scaling: Scaling) -> float:
        (found,) = errors_by_position(held_out, scaling)
        assert found is not None
        return found.ece

    before, divided, shifted = (
        error(scaling)
        for scaling in (
            Scaling.identity(1),
            fit_scaling(fitted),
            fit_scaling(fitted, shift=True),
        )
    )
    assert before > 0.14 and divided > before / 2  # 1/2 instead of 1/3
    assert shifted < before / 4 and shifted < 0.03


def test_positions_without_enough_blocks_are_left_as_they_are():
    found = blocks(4, count=2_000)
    reach = np.where(np.arange(2_000) < MIN_BLOCKS - 1, 3, 2)
    cut = Blocks(found.logits, reach, np.minimum(found.survived, reach), found.request)
    scaling = fit_scaling(cut, shift=True)
    assert scaling.temperatures[2:] == (1.0, 1.0) and scaling.shifts[2:] == (0.0, 0.0)
    assert abs(scaling.shifts[0] + 1) < 0.5


@pytest.mark.parametrize("survives", [False, True])
def test_blocks_that_all_end_alike_stay_within_bounds(survives):
    logits = np.full((500, 1), 1.0 if survives else -1.0)
    found = Blocks(logits, np.ones(500, int), np.full(500, int(survives)), np.arange(500))
    scaling = fit_scaling(found, shift=True)
    assert LEAST <= scaling.temperatures[0] <= MOST
    assert 0 < scaling.shifts[0] * (1 if survives else -1) <= shifts.MOST_SHIFT


def test_the_gradient_is_that_of_the_loss(monkeypatch):
    seen = []
    monkeypatch.setattr(
        shifts, "minimize", lambda loss, start, **_: seen.append(loss) or _At(start)
    )
    shifts.fit_shifted(blocks(5, count=500), MIN_BLOCKS, (LEAST, MOST), PRIOR_SPREAD)
    for loss in seen:
        point = np.array([0.3, -0.7])
        off = check_grad(lambda x, loss=loss: loss(x)[0], lambda x, loss=loss: loss(x)[1], point)
        assert off < 1e-5
    assert len(seen) == GAMMA


class _At:
    def __init__(self, x: np.ndarray) -> None:
        self.x = x
