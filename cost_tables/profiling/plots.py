"""Pictures of a table and of what it was fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cost_tables.model import CostModel, Floats, RoundCost, StepCost
from cost_tables.profiling.fitting import Fitted, Part
from cost_tables.profiling.plan import spread

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
