"""Whether rounds that were told to verify more tokens took longer.

A server that verifies whole blocks whatever it is told gives a table in which tokens cost nothing,
and such a table never trims anything. The records of every round are checked as it is timed
(`live`); this looks at the times alone, which no record can talk away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cost_tables.model import Floats
from cost_tables.profiling.fitting import CellTime

FEWEST_SIZES = 3
LARGE = 0.5  # batches from this share of the largest on have to show an effect
LEAST_GROWTH = 0.02  # of the step time, over all sizes: less is noise, whatever its sign


@dataclass(frozen=True)
class Rise:
    """Cells in which nothing but the verify tokens differs: of R requests, drafted `depth` deep.

    tokens: M, ascending. seconds: of each. slope: seconds a token, by least squares.
    rank_correlation: Spearman's, from -1 to 1."""

    requests: int
    depth: int
    context: int
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    slope: float
    rank_correlation: float

    @property
    def growth(self) -> float:
        """By how much of a step's time all tokens between the sizes lengthen it."""
        return self.slope * (self.tokens[-1] - self.tokens[0]) / float(np.median(self.seconds))

    @property
    def rises(self) -> bool:
        return self.growth > LEAST_GROWTH and self.rank_correlation > 0

    @property
    def text(self) -> str:
        return (
            f"R {self.requests}, depth {self.depth}: {1e3 * self.seconds[0]:.1f} ms with "
            f"{self.tokens[0]} verify tokens, {1e3 * self.seconds[-1]:.1f} ms with "
            f"{self.tokens[-1]}; {1e6 * self.slope:+.1f} µs a token ({self.growth:+.0%} in all), "
            f"rank correlation {self.rank_correlation:+.2f} over {len(self.tokens)} sizes"
        )

    def record(self) -> dict[str, Any]:
        return asdict(self)


def rise_of(record: dict[str, Any]) -> Rise:
    """The inverse of `Rise.record`, also from JSON."""
    lists = {name: tuple(record[name]) for name in ("tokens", "seconds")}
    return Rise(**{**record, **lists})


def find_rises(times: Iterable[CellTime]) -> list[Rise]:
    """One for each batch size with enough cells, of the depth and context that has the most."""
    alike: dict[tuple[int, int, int], list[CellTime]] = {}
    for time in times:
        if time.cell.depth:
            key = (time.cell.requests, time.cell.depth, time.cell.context)
            alike.setdefault(key, []).append(time)
    best: dict[int, list[CellTime]] = {}
    for (requests, _, _), found in sorted(alike.items()):
        if len(found) >= max(FEWEST_SIZES, len(best.get(requests, []))):
            best[requests] = found
    return [_rise(found) for found in best.values()]


def without_effect(rises: Sequence[Rise]) -> list[Rise]:
    """Of the large batches, those in which more tokens took no longer."""
    largest = max((rise.requests for rise in rises), default=0)
    return [r for r in rises if r.requests >= LARGE * largest and not r.rises]


def _rise(times: list[CellTime]) -> Rise:
    times = sorted(times, key=lambda time: time.cell.tokens)
    tokens = np.array([time.cell.tokens for time in times], dtype=np.float64)
    seconds = np.array([time.seconds for time in times])
    cell = times[0].cell
    return Rise(
        cell.requests,
        cell.depth,
        cell.context,
        tuple(time.cell.tokens for time in times),
        tuple(time.seconds for time in times),
        float(np.polyfit(tokens, seconds, 1)[0]),
        _rank_correlation(tokens, seconds),
    )


def _rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's; 0 where one of them does not move."""
    from scipy.stats import rankdata

    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])
