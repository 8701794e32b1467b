"""Sequential temperature scaling (STS; DSpark, arXiv 2607.05147).

    a_k = Π_{i<=k} sigmoid(logit_i / t_i)

Position by position, t_k is the temperature with which a_k has the least calibration error, those
before it fixed. The error alone does not settle it: with a temperature so high that every block is
given the mean, it vanishes too. So among temperatures whose error is no more than a perfect
predictor would show by chance, the one with the least log loss is taken, under a Gaussian prior of
log t around 0, which decides where few blocks say anything.

At position k only blocks count that were verified up to k, whatever became of them there or before.
A block whose window ends earlier is left out even if it is known to have died: its like that lived
on cannot be seen, and to count one without the other would bias the fit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import expit

from sglang_dspark.calibrate.blocks import Blocks
from sglang_dspark.calibrate.reliability import Errors, errors
from sglang_dspark.calibrate.shifts import fit_shifted
from sglang_dspark.observe.record_file import Bools, Floats
from sglang_dspark.schedule.calibration import Scaling

# Blocks that a temperature is fitted on at least; with fewer it stays 1.
MIN_BLOCKS = 100
LEAST, MOST = 0.05, 20.0
_GRID: list[float] = np.linspace(np.log(LEAST), np.log(MOST), 81).tolist()
# The error of the right temperature is above its expectation about every other time.
BY_CHANCE = 1.5
# Standard deviation of log t before anything is known; the weight of a handful of blocks.
PRIOR_SPREAD = 0.5


def fit_scaling(blocks: Blocks, *, shift: bool = False) -> Scaling:
    """shift: fit shifts too (see `shifts.py`)."""
    if shift:
        return fit_shifted(blocks, MIN_BLOCKS, (LEAST, MOST), PRIOR_SPREAD)
    return Scaling(fit_temperatures(blocks), (0.0,) * blocks.gamma)


def fit_temperatures(blocks: Blocks) -> tuple[float, ...]:
    """One a position, 1 where fewer than MIN_BLOCKS blocks have an outcome."""
    temperatures: list[float] = []
    before = np.ones(len(blocks))
    for k, count in enumerate(blocks.counts()):
        seen = blocks.reach > k
        temperature = 1.0
        if count >= MIN_BLOCKS:
            temperature = _best(before[seen], blocks.logits[seen, k], blocks.survived[seen] > k)
        temperatures.append(temperature)
        before = before * expit(blocks.logits[:, k] / temperature)
    return tuple(temperatures)


def _best(before: Floats, logits: Floats, survived: Bools) -> float:
    """before: [n], survival of the tokens before. logits: [n]. survived: [n], up to this token."""

    def predicted(log_t: float) -> Floats:
        chances: Floats = before * expit(logits * np.exp(-log_t))
        return chances

    def error(log_t: float) -> float:
        return errors(predicted(log_t), survived).ece

    def loss(log_t: float) -> float:
        prior = (log_t / PRIOR_SPREAD) ** 2 / 2
        return _log_loss(predicted(log_t), survived) + prior / len(logits)

    found = [errors(predicted(log_t), survived) for log_t in _GRID]
    fine = [i for i, each in enumerate(found) if _by_chance(each)]
    if not fine:
        best = int(np.argmin([each.ece for each in found]))
        return float(np.exp(_refined(error, best)))
    best = min(fine, key=lambda i: loss(_GRID[i]))
    refined = _refined(loss, best)
    still_fine = _by_chance(errors(predicted(refined), survived))
    return float(np.exp(refined if still_fine else _GRID[best]))


def _by_chance(found: Errors) -> bool:
    return found.ece <= BY_CHANCE * found.chance


def _refined(cost: Callable[[float], float], place: int) -> float:
    """The least of `cost` between the neighbours of a place of the grid."""
    bounds = (_GRID[max(place - 1, 0)], _GRID[min(place + 1, len(_GRID) - 1)])
    found = minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": 1e-3})
    # An error in bins has steps, on which the search may end above where it began.
    return float(found.x if found.fun <= cost(_GRID[place]) else _GRID[place])


def _log_loss(predicted: Floats, survived: Bools) -> float:
    right = np.where(survived, predicted, 1 - predicted)
    return float(-np.log(np.maximum(right, 1e-12)).mean())
