"""How often what number occurred."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sglang_dspark.report.distribution import (
    MOST_BARS,
    Bar,
    Distribution,
    bucket_end,
    bucket_quantile,
)


def test_numbers_that_never_occurred_get_a_bar_only_if_asked_for():
    counts = {5: 1, 2: 3}
    assert Distribution.of_counts(counts).bars == (Bar(2, 2, 3), Bar(5, 5, 1))
    assert Distribution.of_counts(counts, gaps=True).bars == (
        *(Bar(2, 2, 3), Bar(3, 3, 0), Bar(4, 4, 0), Bar(5, 5, 1)),
    )


def test_the_mean_stays_exact_when_bars_become_buckets():
    counts = {number: 1 + number % 3 for number in range(MOST_BARS + 10)}
    found = Distribution.of_counts(counts)
    values = [number for number, count in counts.items() for _ in range(count)]
    assert found.mean == pytest.approx(np.mean(values))
    assert [bar.label for bar in found.bars] == [
        "0",
        "1",
        "2",
        "3-4",
        "5-8",
        "9-16",
        "17-32",
        "33-64",
    ]
    assert found.count == len(values)
    for bar in found.bars:
        assert bar.count == sum(bar.low <= value <= bar.high for value in values)


def test_every_number_is_in_the_bucket_that_its_end_names():
    assert [bucket_end(n) for n in (0, 1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 4, 4, 8, 8, 16]


def test_a_histogram_keeps_its_own_buckets():
    found = Distribution.of_buckets([0, 1, 2, 4, math.inf], [2, 0, 1, 3, 1], total=19)
    assert [(bar.label, bar.count) for bar in found.bars] == [
        ("0", 2),
        ("2", 1),
        ("3-4", 3),
        ("5+", 1),
    ]
    assert found.mean == pytest.approx(19 / 7)


def test_of_nothing_there_is_no_distribution():
    assert Distribution.of_counts({}) is None
    assert Distribution.of_counts({3: 0}) is None
    assert Distribution.of_buckets([1, math.inf], [0, 0], 0.0) is None


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 1.0), (0.25, 1.5), (0.5, 2.0), (0.75, 3.0), (1.0, 4.0)],
)
def test_quantiles_spread_a_bucket_evenly(share, expected):
    # Two between 1 and 2, two between 2 and 4.
    assert bucket_quantile([1, 2, 4, math.inf], [0, 2, 2, 0], share) == pytest.approx(expected)


def test_a_quantile_beyond_all_buckets_is_the_end_of_the_last():
    assert bucket_quantile([1, 2, math.inf], [1, 0, 9], 0.9) == 2
    assert bucket_quantile([1, math.inf], [0, 0], 0.5) is None
