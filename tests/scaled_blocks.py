"""Blocks whose true calibration is known."""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from sglang_dspark.calibrate.blocks import Blocks
from sglang_dspark.schedule.calibration import Scaling


def scaled_blocks(
    truth: Scaling, seed: int, count: int = 20_000, mean: float = 0.8, trimmed: bool = False
) -> Blocks:
    """Token k survives with the chance sigmoid(logit_k / t_k + s_k); ten blocks a request.

    mean: of what the sigmoid is of. trimmed: windows end where the true survival falls below a
    level that is another for each.
    """
    rng, gamma = np.random.default_rng(seed), len(truth.temperatures)
    scaled = rng.normal(mean, 1.5, (count, gamma))
    logits = (scaled - np.array(truth.shifts)) * np.array(truth.temperatures)
    chances = expit(scaled)
    survived = (rng.random(chances.shape) < chances).cumprod(axis=1).sum(axis=1)
    reach = np.full(count, gamma)
    if trimmed:
        levels = rng.uniform(0.05, 0.4, (count, 1))
        reach = (chances.cumprod(axis=1) > levels).sum(axis=1)
    return Blocks(logits, reach, np.minimum(survived, reach), np.arange(count) // 10)
