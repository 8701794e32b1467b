"""A records file, and exactly what its report says."""

from __future__ import annotations

import json
import math

import pytest

from recorded import CAP_ACCEPT, COMPACT, STATIC, header, round_of
from sglang_dspark.errors import ConfigError
from sglang_dspark.report.records import report_on_records
from sglang_dspark.report.summary import Missing


def counts(distribution) -> dict[str, int]:
    return {bar.label: bar.count for bar in distribution.bars}


def test_compact(write):
    report = report_on_records(write(COMPACT))
    assert (report.rounds, report.requests) == (3, 6)
    # Accepted 2, 0, 1, 0, 0, 0; windows 3, 1, 4, 3, 1, 1; a bonus and an anchor for each.
    assert (report.committed, report.verified, report.computed) == (9, 13, 16)
    assert report.accept_length == pytest.approx(9 / 6)
    assert report.verify_cost == pytest.approx(13 / 9)
    assert report.accept_rate == pytest.approx(3 / 7)
    assert report.padding == pytest.approx(3 / 16)
    assert report.plain == pytest.approx(1 / 3)
    assert counts(report.commits) == {"1": 4, "2": 1, "3": 1}
    assert counts(report.windows) == {"1": 3, "2": 0, "3": 2, "4": 1}
    assert counts(report.budgets) == {"0": 1, "2": 1, "5": 1}
    assert counts(report.forwards) == {"4": 2, "8": 1}
    for figure in (report.utilisation, report.ceilings):
        assert "cap-accept" in figure.missing


def test_rows_of_full_windows_are_not_padding(write):
    """A batch above the grid is run whole, also where its windows are shorter."""
    above = round_of([2, 2], [1, 0], tokens=8, full=True, tier=None, ceiling=[1, 0])
    report = report_on_records(write([*COMPACT, above]))
    assert report.padding == pytest.approx(3 / 24)


def test_step_times_are_compared_round_by_round_and_tier_by_tier(write):
    steps = report_on_records(write(COMPACT)).steps
    # Off by 2 of 12 ms, 4 of 16 ms, and not at all.
    assert steps.rounds == 3
    assert steps.error == pytest.approx(1 / 6)
    assert steps.bias == pytest.approx(36 / 34)
    assert [(tier.label, tier.rounds) for tier in steps.tiers] == [("4", 2), ("8", 1)]
    assert steps.tiers[0].measured == pytest.approx(0.009)
    assert steps.tiers[0].error == pytest.approx(1 / 12)
    assert steps.tiers[1].points == ((0.020, 0.016),)
    assert (steps.predicted.median, steps.measured.median) == pytest.approx((0.010, 0.012))
    assert steps.predicted.mean == pytest.approx(0.012)


def test_rounds_without_both_times_are_not_compared(write):
    unpredicted = round_of([2], [0], measured_s=9.0)
    interrupted = round_of([2], [0], predicted_s=9.0)
    assert report_on_records(write([*COMPACT, unpredicted, interrupted])).steps.rounds == 3
    steps = report_on_records(write([unpredicted, interrupted])).steps
    assert "auto" in steps.missing


def test_cap_accept_says_what_trimming_loses(write):
    report = report_on_records(write(CAP_ACCEPT, header("cap-accept")))
    # Committed 3, 1, 2, 2 of 4, 1, 4, 2.
    assert report.utilisation == pytest.approx(8 / 11)
    assert counts(report.ceilings) == {"1": 1, "2": 1, "3": 0, "4": 2}
    assert counts(report.budgets) == {"2": 1, "4": 1}
    assert report.verify_cost == pytest.approx(10 / 8)
    for figure in (report.padding, report.steps):
        assert "full windows" in figure.missing


def test_static_has_nothing_to_trim(write):
    report = report_on_records(write(STATIC, header("static")))
    assert report.utilisation == 1.0
    assert counts(report.ceilings) == counts(report.commits) == {"1": 1, "2": 1, "3": 0, "4": 1}
    assert report.verify_cost == pytest.approx(12 / 7)
    for figure in (report.budgets, report.padding, report.plain, report.steps):
        assert isinstance(figure, Missing) and "static mode" in figure.missing


def test_in_compact_only_what_was_verified_teaches_calibration(write):
    half = [0.0, 0.0, 0.0]
    report = report_on_records(write([round_of([3, 1], [2, 0], logits=[half, half])]))
    positions = report.calibration.positions
    assert [position.count for position in positions] == [1, 1, 0]
    assert [position.ece for position in positions] == pytest.approx([0.5, 0.75, None])


def test_where_full_windows_were_run_all_of_a_block_teaches_it(write):
    """Also what the schedule did not want committed, or not even drafted."""
    half = [0.0, 0.0, 0.0]
    rounds = [
        round_of([1, 2], [0, 1], tokens=8, full=True, ceiling=[3, 1], logits=[half, half], depth=0)
    ]
    report = report_on_records(write(rounds, header("cap-accept")))
    positions = report.calibration.positions
    assert [position.count for position in positions] == [2, 2, 2]
    assert [position.observed for position in positions] == [1.0, 0.5, 0.5]
    assert report.plain == 1.0


def test_without_logits_there_is_no_calibration_and_it_says_why(write):
    assert "no confidence logits" in report_on_records(write(COMPACT)).calibration.missing
    only_anchors = [round_of([1], [0], logits=[[0.0, 0.0, 0.0]])]
    assert "no verify window" in report_on_records(write(only_anchors)).calibration.missing


def test_logits_that_are_not_finite_are_left_out(write):
    rounds = [round_of([3, 3], [1, 1], logits=[[0.0, 0.0, 0.0], [None, 0.0, 0.0]])]
    found = report_on_records(write(rounds)).calibration
    assert [position.count for position in found.positions] == [1, 1, 0]


def test_the_run_is_told(write):
    path = write(COMPACT)
    run = report_on_records(path).run
    assert (run.algorithm, run.mode, run.gamma, run.source) == ("DSPARK", "compact", 3, str(path))
    assert run.covers == "all 3 rounds of the file"
    assert dict(run.facts)["tiers"] == "4, 8 tokens, up to 2 requests"


def test_json_holds_every_figure_and_every_reason(write):
    found = json.loads(report_on_records(write(COMPACT)).to_json())
    assert (found["format"], found["version"]) == ("sglang-dspark report", 1)
    assert found["accept_length"] == pytest.approx(1.5)
    assert found["commits"]["bars"][2] == {"low": 3, "high": 3, "count": 1}
    assert "cap-accept" in found["utilisation"]["missing"]
    assert found["run"]["gamma"] == 3 and found["steps"]["tiers"][1]["low"] == 8
    assert not any(isinstance(v, float) and math.isnan(v) for v in found.values())


def test_a_file_without_a_round_is_an_error(write):
    with pytest.raises(ConfigError, match="no decode round yet"):
        report_on_records(write([]))


def test_a_mode_that_we_do_not_know_is_an_error(write):
    with pytest.raises(
        ConfigError, match=r"config\.mode is 'lazy'; must be one of static, compact"
    ):
        report_on_records(write(COMPACT, header("lazy")))


def test_another_file_is_an_error(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    with pytest.raises(ConfigError, match="not a records file"):
        report_on_records(path)
