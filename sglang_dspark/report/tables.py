"""The tables of a report, as cells of text for every rendering; the first column names a row."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dspark.report.distribution import Distribution
from sglang_dspark.report.refinement import Refinement
from sglang_dspark.report.reliability import Calibration
from sglang_dspark.report.steps import AllTimes, StepTimes
from sglang_dspark.report.summary import Missing, Report
from sglang_dspark.report.words import NOTHING, factor, milliseconds, percent

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """rows: each as long as columns."""

    columns: Row
    rows: tuple[Row, ...]


def lengths(report: Report) -> Table:
    """How many windows were so long, committed so much, would have committed so much if full."""
    shown = {"verify window": report.windows, "committed": report.commits}
    if not isinstance(report.ceilings, Missing):
        shown["ceiling"] = report.ceilings
    counts = [{bar.label: found.share(bar) for bar in found.bars} for found in shown.values()]
    ends = {(bar.low, bar.label) for found in shown.values() for bar in found.bars}
    rows = [
        (label, *(percent(shares[label]) if label in shares else NOTHING for shares in counts))
        for _, label in sorted(ends)
    ]
    means = ("mean", *(f"{found.mean:.2f}" for found in shown.values()))
    return Table(("tokens", *shown), (*rows, means))


def numbers(distribution: Distribution, what: str) -> Table:
    rows = [
        (bar.label, f"{bar.count:,}", percent(distribution.share(bar))) for bar in distribution.bars
    ]
    mean = ("mean", f"{distribution.mean:.1f}", "")
    return Table((what, "rounds", "share"), (*rows, mean))


def step_times(steps: StepTimes) -> Table:
    """Medians by tier, in milliseconds."""
    rows = [
        (
            tier.label,
            f"{tier.rounds:,}",
            milliseconds(tier.predicted),
            milliseconds(tier.measured),
            percent(tier.error),
        )
        for tier in steps.tiers
    ]
    return Table(("tokens", "rounds", "predicted, ms", "measured, ms", "error"), tuple(rows))


def all_times(steps: StepTimes | AllTimes) -> Table:
    """Over all rounds, in milliseconds."""
    rows = [
        (name, milliseconds(times.mean), milliseconds(times.median), milliseconds(times.p90))
        for name, times in (("predicted", steps.predicted), ("measured", steps.measured))
    ]
    return Table(("ms", "mean", "median", "90 %"), tuple(rows))


def refinement(found: Refinement) -> Table:
    """Seconds for one that the table says: as measured, and as the server takes it where known."""
    factors = ("measured", "in force") if found.in_force else ("measured",)
    rows = [
        (
            f"{each.label}, {'drafted' if each.drafted else 'no draft'}",
            f"{each.rounds:,}",
            *map(factor, (each.measured, each.in_force)[: len(factors)]),
        )
        for each in found.corrections
    ]
    return Table(("tokens", "rounds", *factors), tuple(rows))


def calibration(found: Calibration) -> Table:
    rows = [
        (
            str(position.position),
            f"{position.count:,}",
            percent(position.predicted),
            percent(position.observed),
            percent(position.ece),
            percent(position.chance),
        )
        for position in found.positions
    ]
    return Table(("position", "blocks", "predicted", "survived", "ECE", "by chance"), tuple(rows))
