"""Whether survivals can be trusted: predicted against observed, per draft position.

    a_k = Π_{i<=k} sigmoid(logit_i)      predicted: tokens 1..k of the block all survive
    ECE_k = Σ_bins |Σ a_k - Σ survived| / n
    by chance: Σ_bins sqrt(2/π · Σ a_k (1 - a_k)) / n, what a perfect predictor would show

A block counts at position k if its window reached k, whatever became of the tokens before: windows
know confidences, never outcomes. Where they are trimmed, low survivals are hardly seen, and by a
fit that knows more than these logits the ones that are seen do better; whole windows (static,
cap-accept) show all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from cost_tables.model import Floats
from sglang_dspark.calibrate.reliability import BINS, bins_of
from sglang_dspark.report.tally import Ints


@dataclass(frozen=True)
class Bin:
    """Blocks whose predicted survival fell into one of `BINS` equal parts of 0..1; means."""

    count: int
    predicted: float
    observed: float


@dataclass(frozen=True)
class Position:
    """Draft position k, 1-based. count: blocks whose windows reached it; 0: nothing is known.
    ece, chance (its size by chance), predicted, observed: None then."""

    position: int
    count: int
    ece: float | None
    chance: float | None
    predicted: float | None
    observed: float | None
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Calibration:
    """ece: mean over the positions of which anything is known."""

    positions: tuple[Position, ...]
    ece: float


class ReliabilityTally:
    """Adds up blocks of at most gamma drafts, in memory that does not grow with them."""

    def __init__(self, gamma: int) -> None:
        self._counts = np.zeros((gamma, BINS), dtype=np.int64)
        self._predicted, self._survived, self._variance = np.zeros((3, gamma, BINS))

    def add(self, logits: Floats, windows: Ints, accepted: Ints) -> None:
        """logits [R, D]: confidence logits; rows with one that is not finite are left out.
        windows, accepted: [R], of what was verified and not only of what was committed."""
        sound = np.isfinite(logits).all(axis=1)
        survivals = np.cumprod(expit(logits[sound]), axis=1)
        positions = np.arange(logits.shape[1])
        rows, columns = np.nonzero(positions < windows[sound, None] - 1)
        predicted = survivals[rows, columns]
        survived = columns < accepted[sound][rows]
        places = (columns, bins_of(predicted))
        np.add.at(self._counts, places, 1)
        np.add.at(self._predicted, places, predicted)
        np.add.at(self._survived, places, survived)
        np.add.at(self._variance, places, predicted * (1 - predicted))

    def result(self) -> Calibration | None:
        """None: no block was seen."""
        positions = tuple(self._position(k) for k in range(len(self._counts)))
        errors = [position.ece for position in positions if position.ece is not None]
        return Calibration(positions, sum(errors) / len(errors)) if errors else None

    def _position(self, k: int) -> Position:
        counts, predicted, survived = self._counts[k], self._predicted[k], self._survived[k]
        total = int(counts.sum())
        if not total:
            return Position(k + 1, 0, None, None, None, None, ())
        bins = tuple(
            Bin(int(counts[b]), float(predicted[b] / counts[b]), float(survived[b] / counts[b]))
            for b in np.flatnonzero(counts)
        )
        return Position(
            position=k + 1,
            count=total,
            ece=float(np.abs(predicted - survived).sum() / total),
            chance=float(np.sqrt(self._variance[k] * 2 / np.pi).sum() / total),
            predicted=float(predicted.sum() / total),
            observed=float(survived.sum() / total),
            bins=bins,
        )
