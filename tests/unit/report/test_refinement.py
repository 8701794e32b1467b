"""How far rounds were from their table, and what a server makes of it."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console

from recorded import COMPACT, STATIC, header, round_of
from sglang_dspark.report import html, terminal
from sglang_dspark.report.records import report_on_records
from sglang_dspark.report.refinement import RatioTally
from sglang_dspark.report.steps import MOST_TIERS
from sglang_dspark.report.tally import Round


def done(tokens: int, ratio: float, drafted: bool = True) -> Round:
    """One that took `ratio` times what its table said."""
    one = np.ones(1, dtype=np.int64)
    return Round(one, one, None, tokens, False, drafted, 0.01, 0.01 * ratio)


def test_records_tell_what_was_measured_and_not_what_the_server_makes_of_it(write):
    found = report_on_records(write(COMPACT)).refinement
    assert not found.in_force
    facts = [(c.label, c.drafted, c.rounds, c.measured, c.in_force) for c in found.corrections]
    assert facts == [
        ("4", True, 1, pytest.approx(1.2), None),
        ("8", True, 1, pytest.approx(0.8), None),
        ("4", False, 1, pytest.approx(1.0), None),
    ]


def test_rounds_without_both_times_tell_nothing(write):
    rounds = [round_of([2], [0], measured_s=9.0), round_of([2], [0], predicted_s=9.0)]
    assert "auto" in report_on_records(write(rounds)).refinement.missing


@pytest.mark.parametrize(("mode", "words"), [("static", "no cost table"), ("cap-accept", "learns")])
def test_modes_that_correct_nothing_say_so(write, mode, words):
    assert words in report_on_records(write(STATIC, header(mode))).refinement.missing


def test_a_tier_is_told_by_its_median_and_its_factor():
    tally = RatioTally()
    for ratio in (1.0, 1.1, 9.0):
        tally.add(done(16, ratio))
    found = tally.result("these", {(16, True): 1.05, (32, True): 1.3, (16, False): 0.9})
    facts = [(c.low, c.drafted, c.rounds, c.measured, c.in_force) for c in found.corrections]
    assert facts == [
        (16, True, 3, pytest.approx(1.1), 1.05),
        (32, True, 0, None, 1.3),  # run earlier, and not among the last rounds
        (16, False, 0, None, 0.9),
    ]


def test_many_sizes_are_put_into_buckets_of_each_kind_alone():
    tally = RatioTally()
    for tokens in range(1, MOST_TIERS + 2):
        tally.add(done(tokens, tokens, drafted=False))
    tally.add(done(7, 1.0))
    found = tally.result("these", {(5, False): 1.5, (6, False): 1.7})
    labels = [(c.label, c.drafted) for c in found.corrections]
    assert labels == [("7", True), *((name, False) for name in ("1", "2", "3-4", "5-8", "9-13"))]
    five_to_eight = found.corrections[4]
    assert (five_to_eight.measured, five_to_eight.in_force) == pytest.approx((6.5, 1.6))


def test_nothing_is_nothing():
    assert RatioTally().result("these", {}) is None


def test_the_page_and_the_terminal_show_it(write):
    report = report_on_records(write(COMPACT))
    page = html.render(report)
    assert "Corrections of the cost table" in page
    assert re.search(r"<td>4, drafted</td><td>1</td><td>1\.20</td></tr>", page)
    output = io.StringIO()
    terminal.show(report, Console(file=output, width=100))
    assert re.search(r"4, no draft .* 1 .* 1\.00 ", output.getvalue())
