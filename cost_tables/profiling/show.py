"""`show TABLE` and `compare A B`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Grid

from cost_tables.files import Table, TableError, load_table
from cost_tables.model import CostModel, StepCost
from cost_tables.profiling.effect import rise_of
from cost_tables.profiling.errors import ProfileError
from cost_tables.profiling.plots import batch_sizes, plot_cost, token_range
from cost_tables.profiling.printing import line

GAMMA_UNKNOWN = 7  # SGLang's tables do not say
CONTEXT_A_REQUEST = 512  # KV tokens that predictions are printed for
COLUMNS = 6


def show(path: Path, console: Console, png: Path | None = None) -> None:
    table = _load(path)
    console.print(f"[bold]{table.source}[/]", highlight=False)
    if table.fingerprint is None:
        console.print("it does not say where it was measured")
    else:
        for name, value in asdict(table.fingerprint).items():
            console.print(f"  {name:8} {value}", highlight=False, markup=False)
    error = table.median_error
    console.print(
        "error not stated" if error is None else f"median error {error:.1%} on held-out cells"
    )
    _print_report(table.report, console)
    for name, cost in _parts(table):
        _print_parts(name, cost, console)
    gamma = _gamma(table)
    console.print(
        f"T in ms at depth γ = {gamma}, {CONTEXT_A_REQUEST} context tokens a request",
        highlight=False,
    )
    console.print(_predictions(table, gamma))
    if png is not None:
        plot_cost(table.cost, gamma, png)
        console.print(f"written: {png}", markup=False)


def _print_report(report: dict[str, Any], console: Console) -> None:
    """What the profiler found out beside the model, in short."""
    for found in report.get("step_time_over_tokens", ()):
        line(console, f"step time over forced verify tokens, {rise_of(found).text}")
    if validation := report.get("validation"):
        regrets = [cell["regret"] for cell in validation["cells"]]
        line(
            console,
            f"its choice is within {validation['within']:.0%} of the best round in "
            f"{validation['share_within']:.0%} of {len(regrets)} batches; regret "
            f"{np.median(regrets):.1%} in the median, {max(regrets):.1%} at most",
        )


def compare(first: Path, second: Path, console: Console) -> None:
    """What differs in the fingerprints, and the ratio of T over a grid."""
    a, b = _load(first), _load(second)
    if a.fingerprint is None or b.fingerprint is None:
        console.print("one of them does not say where it was measured")
    else:
        differences = a.fingerprint.differences(b.fingerprint)
        for line in differences or ["measured on the same: no field differs"]:
            console.print(line, markup=False, highlight=False)
    for (name, left), (_, right) in zip(_parts(a), _parts(b), strict=False):
        console.print(f"{name}: T of the second over the first")
        console.print(_ratios(name, left, right, min(_gamma(a), _gamma(b))))
    if (a.cost.plain is None) != (b.cost.plain is None):
        console.print("rounds without a draft: only in one of them")


def _load(path: Path) -> Table:
    try:
        return load_table(path)
    except TableError as error:
        raise ProfileError(str(error)) from error


def _parts(table: Table) -> list[tuple[str, StepCost]]:
    parts: list[tuple[str, StepCost]] = [("with a draft", table.cost.drafted)]
    if table.cost.plain is not None:
        parts.append(("without a draft", table.cost.plain))
    return parts


def _gamma(table: Table) -> int:
    return GAMMA_UNKNOWN if table.fingerprint is None else table.fingerprint.gamma


def _print_parts(name: str, cost: StepCost, console: Console) -> None:
    if not isinstance(cost, CostModel):
        console.print(f"{name}: steps per second over batch tokens, as SGLang's profiler has it")
        return
    console.print(
        f"{name}: bias {1e3 * cost.bias:.3f} ms, {1e9 * cost.seconds_per_context_token:.2f} ns a "
        f"context token and {1e9 * cost.seconds_per_attended_token:.2f} ns for each verify token "
        f"that attends to it, {1e3 * cost.seconds_per_draft_step:.3f} ms a draft step",
        highlight=False,
    )
    grid = Grid()
    for column in ("part", "at", "ms"):
        grid.add_column(column)
    for part, knots, seconds in (
        ("α(R)", cost.request_knots, cost.request_seconds),
        ("θ(M)", cost.token_knots, cost.token_seconds),
        ("δ(N)", cost.draft_knots, cost.draft_seconds),
    ):
        at = " ".join(f"{knot:g}" for knot in knots)
        grid.add_row(part, at, " ".join(f"{1e3 * second:.3f}" for second in seconds))
    console.print(grid)


def _predictions(table: Table, gamma: int) -> Grid:
    grid = Grid()
    grid.add_column("R")
    for i in range(COLUMNS):
        share = i / (COLUMNS - 1)
        grid.add_column(f"K = {share:.0%}", justify="right")
    grid.add_column("no draft", justify="right")
    for requests in batch_sizes(table.cost.drafted, 8):
        seconds = _seconds(table.cost.drafted, requests, gamma)
        plain = table.cost.plain
        without = "-" if plain is None else f"{1e3 * float(_plain(plain, requests)):.2f}"
        grid.add_row(str(requests), *(f"{1e3 * second:.2f}" for second in seconds), without)
    return grid


def _seconds(
    cost: StepCost, requests: int, gamma: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """At COLUMNS budgets from 0 to all."""
    tokens = np.linspace(requests, requests * (gamma + 1), COLUMNS)
    context = float(CONTEXT_A_REQUEST * requests)
    return np.asarray(cost.seconds(requests, tokens, context, float(requests * gamma)))


def _plain(cost: StepCost, requests: int) -> float:
    tokens = np.array([float(requests)])
    return float(cost.seconds(requests, tokens, float(CONTEXT_A_REQUEST * requests))[0])


def _ratios(name: str, left: StepCost, right: StepCost, gamma: int) -> Grid:
    """T of the second for one of the first."""
    grid = Grid()
    for column in ("R", "least", "median", "most"):
        grid.add_column(column, justify="right")
    for requests in batch_sizes(left, 8):
        tokens = token_range(requests, gamma)
        context, drafted = float(CONTEXT_A_REQUEST * requests), float(requests * gamma)
        if name == "without a draft":
            tokens, drafted = np.array([float(requests)]), 0.0
        ratio = np.asarray(right.seconds(requests, tokens, context, drafted)) / np.asarray(
            left.seconds(requests, tokens, context, drafted)
        )
        values = (ratio.min(), float(np.median(ratio)), ratio.max())
        grid.add_row(str(requests), *(f"{value:.2f}" for value in values))
    return grid
