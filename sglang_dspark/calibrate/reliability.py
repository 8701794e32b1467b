"""How far predicted survivals are off: the expected calibration error, and that of chance.

    ECE    = Σ_bins |Σ predicted - Σ survived| / n             (bins of equal width)
    chance = Σ_bins sqrt(2/π · Σ predicted (1 - predicted)) / n

The second is what a perfect predictor of n independent blocks is expected to show: the mean size of
a normal deviation with the bin's variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from sglang_dspark.calibrate.blocks import Blocks
from sglang_dspark.observe.record_file import Bools, Floats, Ints
from sglang_dspark.schedule.calibration import Scaling

BINS = 15


@dataclass(frozen=True)
class Errors:
    """ece, chance: as above."""

    ece: float
    chance: float


def errors(predicted: Floats, survived: Bools) -> Errors:
    """predicted, survived: [n], n > 0."""
    place = bins_of(predicted)
    gap = np.bincount(place, weights=predicted - survived, minlength=BINS)
    variance = np.bincount(place, weights=predicted * (1 - predicted), minlength=BINS)
    total = len(predicted)
    return Errors(
        ece=float(np.abs(gap).sum() / total),
        chance=float(np.sqrt(variance * 2 / np.pi).sum() / total),
    )


def bins_of(predicted: Floats) -> Ints:
    """[n]: which bin each belongs to."""
    places: Ints = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    return places


def survivals(logits: Floats, scaling: Scaling) -> Floats:
    """a_k = Π_{i<=k} sigmoid(logit_i / t_i + s_i). logits [n, γ] -> [n, γ]; NaN stays NaN."""
    chances: Floats = expit(logits / np.array(scaling.temperatures) + np.array(scaling.shifts))
    return np.array(np.cumprod(chances, axis=1), dtype=np.float64)


def errors_by_position(blocks: Blocks, scaling: Scaling) -> list[Errors | None]:
    """One a position; None where no block has an outcome."""
    predicted = survivals(blocks.logits, scaling)
    found: list[Errors | None] = []
    for k in range(blocks.gamma):
        seen = blocks.reach > k
        known = errors(predicted[seen, k], blocks.survived[seen] > k) if seen.any() else None
        found.append(known)
    return found
