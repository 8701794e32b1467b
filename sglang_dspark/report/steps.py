"""Predicted against measured step times of rounds."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from sglang_dspark.report.distribution import bucket_end
from sglang_dspark.report.tally import Ints, Round

# Points that a plot shows; of more, every n-th.
MOST_POINTS = 1200
# Tiers that get a row of their own; with more, buckets of powers of two do.
MOST_TIERS = 12


@dataclass(frozen=True)
class Times:
    """Seconds, over rounds."""

    mean: float
    median: float
    p90: float


@dataclass(frozen=True)
class TierTimes:
    """Rounds whose verify forward had from low to high tokens. Medians, in seconds.

    error: median of |predicted - measured| / measured.
    points: (predicted, measured) of some of them, in seconds.
    """

    low: int
    high: int
    rounds: int
    predicted: float
    measured: float
    error: float
    points: tuple[tuple[float, float], ...]

    @property
    def label(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class AllTimes:
    """Of all rounds since the server started, as its histograms have them: quantiles by bucket."""

    rounds: int
    predicted: Times
    measured: Times


@dataclass(frozen=True)
class StepTimes:
    """rounds: with both times; `covers` says of which. predicted, measured: over these.

    error: median of |predicted - measured| / measured; bias: Σ predicted / Σ measured.
    since_start: None where no server was asked, or where it keeps no histograms.
    """

    rounds: int
    error: float
    bias: float
    predicted: Times
    measured: Times
    covers: str
    tiers: tuple[TierTimes, ...]
    since_start: AllTimes | None = None


class StepTally:
    """Keeps both times of every round that has them."""

    def __init__(self) -> None:
        self._tokens, self._predicted, self._measured = array("q"), array("d"), array("d")

    def add(self, done: Round) -> None:
        if done.predicted_s > 0 and done.measured_s is not None and done.measured_s > 0:
            self._tokens.append(done.tokens)
            self._predicted.append(done.predicted_s)
            self._measured.append(done.measured_s)

    def result(self, covers: str) -> StepTimes | None:
        """None: no round has both times."""
        if not self._tokens:
            return None
        tokens = np.array(self._tokens)
        times = np.array([self._predicted, self._measured])
        errors = np.abs(times[0] - times[1]) / times[1]
        stride = -(-len(tokens) // MOST_POINTS)
        return StepTimes(
            rounds=len(tokens),
            error=float(np.median(errors)),
            bias=float(times[0].sum() / times[1].sum()),
            predicted=times_of(times[0]),
            measured=times_of(times[1]),
            covers=covers,
            tiers=tuple(
                _tier(tokens[own], times[:, own], errors[own], stride) for own in _groups(tokens)
            ),
        )


def times_of(seconds: np.typing.NDArray[np.float64]) -> Times:
    """seconds: [n]."""
    median, p90 = np.quantile(seconds, [0.5, 0.9])
    return Times(float(seconds.mean()), float(median), float(p90))


def _groups(tokens: Ints) -> list[Ints]:
    """Places of the rounds of each tier, ascending by tier."""
    keys = tokens
    if len(np.unique(tokens)) > MOST_TIERS:
        keys = np.array([bucket_end(int(count)) for count in tokens])
    return [np.flatnonzero(keys == key) for key in np.unique(keys)]


def _tier(
    tokens: Ints,
    times: np.typing.NDArray[np.float64],
    errors: np.typing.NDArray[np.float64],
    stride: int,
) -> TierTimes:
    predicted, measured = np.median(times, axis=1)
    return TierTimes(
        low=int(tokens.min()),
        high=int(tokens.max()),
        rounds=len(tokens),
        predicted=float(predicted),
        measured=float(measured),
        error=float(np.median(errors)),
        points=tuple((float(p), float(m)) for p, m in times[:, ::stride].T),
    )
