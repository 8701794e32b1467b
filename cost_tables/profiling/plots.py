"""Pictures of a table and of what it was fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cost_tables.model import CostModel, Floats, RoundCost, StepCost
from cost_tables.profiling.fitting import Fitted, Part
from cost_tables.profiling.plan import spread
from cost_tables.profiling.search import committed
from cost_tables.profiling.validation import WITHIN, Validation, Verdict

LINES = 4  # batch sizes that T is drawn for


def plot_fit(fitted: Fitted, gamma: int, path: Path) -> None:
    """Measured against fitted; T over M; errors over M."""
    figure, (scatter, curves, errors) = _panels(3)
    for name, part in fitted.parts:
        scatter.plot(1e3 * part.cells.seconds, 1e3 * part.predicted, ".", label=name)
        relative = 100 * (part.predicted / part.cells.seconds - 1)
        errors.plot(part.cells.tokens, relative, ".", label=name)
    ends = [1e3 * part.cells.seconds for _, part in fitted.parts]
    line = [min(e.min() for e in ends), max(e.max() for e in ends)]
    scatter.plot(line, line, color="grey", linewidth=1)
    scatter.set(xlabel="measured, ms", ylabel="fitted, ms", xscale="log", yscale="log")
    _draw_curves(curves, fitted.drafted, gamma)
    errors.axhline(0, color="grey", linewidth=1)
    errors.set(xlabel="M, tokens of the verify forward", ylabel="fitted - measured, %")
    errors.set_xscale("log")
    scatter.legend()
    _save(figure, path)


def plot_cost(cost: RoundCost, gamma: int, path: Path) -> None:
    """T over M of a table alone."""
    figure, (curves,) = _panels(1)
    for requests in batch_sizes(cost.drafted):
        tokens = token_range(requests, gamma)
        drafted = float(requests * gamma)
        seconds = cost.drafted.seconds(requests, tokens, 0.0, drafted)
        curves.plot(tokens, 1e3 * seconds, label=f"R = {requests}")
    _label(curves)
    _save(figure, path)


def plot_validation(validation: Validation, path: Path) -> None:
    """Regret over R; and the throughput of every round of the largest batch, over M."""
    figure, (regrets, rates) = _panels(2)
    by_workload: dict[str, list[Verdict]] = {}
    for verdict in validation.verdicts:
        by_workload.setdefault(verdict.contest.workload.name, []).append(verdict)
    for name, verdicts in by_workload.items():
        counts = [verdict.contest.requests for verdict in verdicts]
        regrets.plot(counts, [100 * verdict.regret for verdict in verdicts], "o-", label=name)
        _draw_rates(rates, validation, verdicts[-1])
    regrets.axhline(100 * WITHIN, color="grey", linewidth=1)
    regrets.set(xlabel="R, requests", ylabel="regret, %")
    regrets.legend()
    largest = max(verdict.contest.requests for verdict in validation.verdicts)
    rates.set(
        title=f"R = {largest}; ring: the table's round",
        xlabel="M, tokens of the verify forward",
        ylabel="tokens/s",
    )
    for axis in (regrets, rates):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
    _save(figure, path)


def batch_sizes(cost: StepCost, most: int = LINES) -> list[int]:
    """Some R that a table has knots at; of SGLang's tables, which may have none, some powers."""
    knots: Iterable[float] = cost.request_knots if isinstance(cost, CostModel) else (1, 8, 64)
    return sorted(spread([int(knot) for knot in knots])[:most])


def token_range(requests: int, gamma: int, points: int = 64) -> Floats:
    """M from single anchors to full windows, float64, at most `points`."""
    values: Floats = np.linspace(requests, requests * (gamma + 1), points).round()
    return np.unique(values)


def _draw_curves(axis: Any, part: Part, gamma: int) -> None:
    """Lines: the fit at full depth and the mean context of each R; points: what was measured."""
    cells = part.cells
    for requests in sorted(spread([int(r) for r in np.unique(cells.requests)])[:LINES]):
        here = cells.take(
            np.flatnonzero((cells.requests == requests) & (cells.drafted == requests * gamma))
        )
        if not len(here):
            continue
        tokens, drafted = token_range(requests, gamma), float(requests * gamma)
        seconds = part.model.seconds(requests, tokens, float(here.context.mean()), drafted)
        (line,) = axis.plot(tokens, 1e3 * seconds, label=f"R = {requests}")
        axis.plot(here.tokens, 1e3 * here.seconds, ".", color=line.get_color())
    _label(axis)


def _draw_rates(axis: Any, validation: Validation, verdict: Verdict) -> None:
    """Points: every round that can be chosen; a ring around the one that the table chose."""
    contest = verdict.contest
    survivals = contest.workload.survivals(contest.requests, validation.gamma)
    times = [t for t in validation.times if t.cell.requests == contest.requests]
    rates = {t.cell: committed(survivals, t.cell) / t.seconds for t in times}
    (points,) = axis.plot([cell.tokens for cell in rates], list(rates.values()), ".")
    chosen = contest.by_table
    axis.plot(
        [chosen.tokens],
        [rates[chosen]],
        "o",
        color=points.get_color(),
        fillstyle="none",
        markersize=10,
    )


def _label(axis: Any) -> None:
    axis.set(xlabel="M, tokens of the verify forward", ylabel="T, ms (depth γ)")
    axis.set_xscale("log")
    axis.legend()


def _panels(count: int) -> tuple[Any, Sequence[Any]]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(5 * count, 4), squeeze=False)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    return figure, axes[0]


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    temp = path.with_name(path.name + ".tmp")
    figure.savefig(temp, dpi=120, format="png")
    pyplot.close(figure)
    temp.replace(path)
