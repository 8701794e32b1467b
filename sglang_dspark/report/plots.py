"""The plots of a report, as SVG elements to stand in an HTML page.

Colours are CSS: text takes the page's own, and the rest its variables `--bar`, `--grid`, `--ideal`,
so that one picture is readable in light and in dark. Text stays text.
"""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sglang_dspark.report.distribution import Distribution
from sglang_dspark.report.reliability import Calibration, Position
from sglang_dspark.report.steps import StepTimes

# matplotlib knows no CSS: these stand for it until the picture is made.
TEXT, GRID, BAR, IDEAL = "#010101", "#020202", "#030303", "#040404"
_CSS = {TEXT: "currentColor", GRID: "var(--grid)", BAR: "var(--bar)", IDEAL: "var(--ideal)"}
_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT),
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "font.size": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",  # the same picture for the same report
}
_INCHES = (5.4, 2.7)
_MOST_LABELS = 12


def bars(name: str, distribution: Distribution, axis: str, of: str) -> str:
    """Shares of each number or bucket. name: of the picture, unlike any other's on the page."""
    with rc_context(_STYLE):
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        places = range(len(distribution.bars))
        axes.bar(places, [distribution.share(bar) for bar in distribution.bars], color=BAR)
        step = -(-len(places) // _MOST_LABELS)
        axes.set_xticks(places[::step], [bar.label for bar in distribution.bars[::step]])
        axes.set_xlabel(axis)
        axes.set_ylabel(f"share of {of}")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(axis="y")
        return _svg(figure, name)


def step_times(name: str, steps: StepTimes) -> str:
    """Measured over predicted milliseconds, a point a round, a colour a tier."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(_INCHES[0] + 1.2, 3.6), layout="constrained")
        axes = figure.add_subplot()
        colours = matplotlib.colormaps["viridis"]
        for place, tier in enumerate(steps.tiers):
            # The ends of the map would vanish in a dark or a light page.
            colour = colours(0.25 + 0.55 * place / max(len(steps.tiers) - 1, 1))
            predicted, measured = 1e3 * np.array(tier.points).T
            label = f"{tier.label} tokens"
            axes.plot(predicted, measured, "o", color=colour, alpha=0.7, ms=3, mew=0, label=label)
        _identity(axes, *axes.get_xlim())
        # A few disturbed rounds must not squeeze the others into a corner.
        axes.set_ylim(0, 1.6e3 * max(tier.measured for tier in steps.tiers))
        axes.set_xlabel("predicted, ms")
        axes.set_ylabel("measured, ms")
        axes.grid()
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, markerscale=2)
        return _svg(figure, name)


def reliability(name: str, calibration: Calibration) -> str:
    """Observed over predicted survival, a panel a position; areas are counts."""
    known = [position for position in calibration.positions if position.count]
    columns = min(4, len(known))
    rows = -(-len(known) // columns)
    with rc_context(_STYLE):
        figure = Figure(figsize=(2.3 * columns + 0.6, 2.3 * rows + 0.3), layout="constrained")
        for place, position in enumerate(known):
            axes = figure.add_subplot(rows, columns, place + 1)
            _panel(axes, position)
            if place % columns == 0:
                axes.set_ylabel("survived")
            if place + columns >= len(known):
                axes.set_xlabel("predicted survival")
        return _svg(figure, name)


def _panel(axes: Axes, position: Position) -> None:
    _identity(axes, 0.0, 1.0)
    most = max(found.count for found in position.bins)
    axes.scatter(
        [found.predicted for found in position.bins],
        [found.observed for found in position.bins],
        s=[8 + 60 * found.count / most for found in position.bins],
        color=BAR,
        linewidths=0,
    )
    axes.set_title(f"position {position.position}: ECE {100 * (position.ece or 0):.1f} %", size=9)
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))


def _identity(axes: Axes, low: float, high: float) -> None:
    axes.plot([low, high], [low, high], color=IDEAL, linestyle="--", linewidth=1)


def _svg(figure: Figure, name: str) -> str:
    """The element alone, without what only a file of its own needs."""
    output = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(output, format="svg", transparent=True, metadata=nothing)
    text = output.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    # Ids are of the whole page, and every picture starts to count anew.
    text = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    for stand_in, css in _CSS.items():
        text = text.replace(stand_in, css)
    return text.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
