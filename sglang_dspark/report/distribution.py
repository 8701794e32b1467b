"""How often what number occurred: exactly, or in buckets of powers of two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# More bars than this are put into buckets.
MOST_BARS = 24


@dataclass(frozen=True)
class Bar:
    """Numbers from low to high, both included; high None: no end. count: how often."""

    low: int
    high: int | None
    count: int

    @property
    def label(self) -> str:
        if self.high is None:
            return f"{self.low}+"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Distribution:
    """bars: ascending. mean: exact, also where bars are buckets. count: of all bars, above 0."""

    bars: tuple[Bar, ...]
    mean: float

    @property
    def count(self) -> int:
        return sum(bar.count for bar in self.bars)

    def share(self, bar: Bar) -> float:
        return bar.count / self.count

    @classmethod
    def of_counts(cls, counts: Mapping[int, int], *, gaps: bool = False) -> Distribution | None:
        """From how often each number occurred. gaps: numbers that never did get a bar too."""
        total = sum(counts.values())
        if not total:
            return None
        mean = sum(number * count for number, count in counts.items()) / total
        occurred = sorted(number for number, count in counts.items() if count)
        if gaps:
            occurred = list(range(occurred[0], occurred[-1] + 1))
        bars = tuple(Bar(number, number, counts.get(number, 0)) for number in occurred)
        return cls(bars if len(bars) <= MOST_BARS else in_buckets(bars), mean)

    @classmethod
    def of_buckets(
        cls, ends: Sequence[float], counts: Sequence[int], total: float
    ) -> Distribution | None:
        """From a histogram of whole numbers. ends: greatest number of each bucket, the last may be
        infinite. total: sum of the numbers."""
        if not sum(counts):
            return None
        starts = [0, *(int(end) + 1 for end in ends[:-1])]
        bars = tuple(
            Bar(start, None if end == float("inf") else int(end), count)
            for start, end, count in zip(starts, ends, counts, strict=True)
            if count
        )
        return cls(bars, total / sum(counts))


def in_buckets(bars: Iterable[Bar]) -> tuple[Bar, ...]:
    """The same in buckets 0, 1, 2, 3-4, 5-8, ..."""
    counts: dict[int, int] = {}
    for bar in bars:
        end = bucket_end(bar.low)
        counts[end] = counts.get(end, 0) + bar.count
    return tuple(Bar(end // 2 + 1 if end else 0, end, counts[end]) for end in sorted(counts))


def bucket_end(number: int) -> int:
    """The least power of two that is not less; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0


def bucket_quantile(ends: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The number that this share of all does not exceed, evenly spread within its bucket, from 0
    on; the last finite end if it lies beyond. None: there are none.

    As PromQL's histogram_quantile (prometheus.io/docs, "Query functions").
    """
    wanted = share * sum(counts)
    if not sum(counts):
        return None
    below = start = 0.0
    for end, count in zip(ends, counts, strict=True):
        if end == float("inf"):
            break
        if count and below + count >= wanted:
            return start + (end - start) * (wanted - below) / count
        below, start = below + count, end
    return start
