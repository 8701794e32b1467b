"""Sequential scaling with a shift: what a temperature cannot mend.

    a_k = Π_{i<=k} sigmoid(logit_i / t_i + s_i)

A temperature leaves a confidence of 1/2 where it is, and no other one crosses it; a draft that is
sure of too much everywhere needs a shift (Platt, 1999, "Probabilistic outputs for support vector
machines", here position by position, those before fixed, as in STS).

Temperature and shift of a position are those of least log loss, under Gaussian priors of log t and
s around 0. The log loss is proper: it is least where predictions are right, and where none says
anything of a block it is not as low as where some do. So no error in bins needs to be looked at.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from sglang_dspark.calibrate.blocks import Blocks
from sglang_dspark.observe.record_file import Bools, Floats
from sglang_dspark.schedule.calibration import Scaling

# Standard deviation of a shift before anything is known: from 1/2 to 1/4 or 3/4 is not unusual.
SHIFT_SPREAD = 1.0
MOST_SHIFT = 10.0
# Where rounding would make a survival 0 or 1, and its log loss infinite.
TINY = 1e-12


def fit_shifted(
    blocks: Blocks, min_blocks: int, bounds: tuple[float, float], log_t_spread: float
) -> Scaling:
    """bounds: least and greatest temperature. Positions with fewer blocks keep t = 1, s = 0."""
    temperatures, shifts = [], []
    before = np.ones(len(blocks))
    for k, count in enumerate(blocks.counts()):
        seen = blocks.reach > k
        temperature, shift = 1.0, 0.0
        if count >= min_blocks:
            temperature, shift = _best(
                before[seen],
                blocks.logits[seen, k],
                blocks.survived[seen] > k,
                bounds,
                log_t_spread,
            )
        temperatures.append(temperature)
        shifts.append(shift)
        before = before * expit(blocks.logits[:, k] / temperature + shift)
    return Scaling(tuple(temperatures), tuple(shifts))


def _best(
    before: Floats, logits: Floats, survived: Bools, bounds: tuple[float, float], spread: float
) -> tuple[float, float]:
    """before [n]: survival of the tokens before. logits [n]. survived [n]: up to this token."""

    def loss(point: Floats) -> tuple[float, Floats]:
        log_t, shift = point
        scaled = logits * np.exp(-log_t)
        chance = expit(scaled + shift)
        predicted = np.clip(before * chance, TINY, 1 - TINY)
        # d(log loss)/d(chance) · d(chance)/d(its logit)
        slope = np.where(survived, -1 / predicted, 1 / (1 - predicted)) * before
        slope = slope * chance * (1 - chance) / len(logits)
        prior = ((log_t / spread) ** 2 + (shift / SHIFT_SPREAD) ** 2) / 2 / len(logits)
        value = -np.log(np.where(survived, predicted, 1 - predicted)).mean() + prior
        gradient = [
            -(slope * scaled).sum() + log_t / spread**2 / len(logits),
            slope.sum() + shift / SHIFT_SPREAD**2 / len(logits),
        ]
        return float(value), np.array(gradient)

    limits = [tuple(np.log(bounds)), (-MOST_SHIFT, MOST_SHIFT)]
    found = minimize(loss, np.zeros(2), jac=True, method="L-BFGS-B", bounds=limits)
    return float(np.exp(found.x[0])), float(found.x[1])
