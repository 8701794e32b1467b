"""What a profile says on the terminal while it runs and when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from cost_tables.measure import Cell
from cost_tables.profiling.effect import Rise, without_effect
from cost_tables.profiling.facts import Facts, budget_of
from cost_tables.profiling.fitting import Fitted
from cost_tables.profiling.plan import FEWEST_ROUNDS, PASSES, Pace, Plan
from cost_tables.profiling.validation import WITHIN, Validation, Verdict
from cost_tables.profiling.validation_plan import TURNS
from cost_tables.profiling.workloads import WORKLOADS

NO_EFFECT = (
    "WARNING: forced budgets seem to have no effect: more verify tokens took no longer in large "
    "batches. A table of such times never trims anything. Either the machine was too busy to tell, "
    "or tokens are free on this device at these sizes (measure larger batches then: "
    "--max-running-requests), or whole blocks are verified whatever is told:"
)


@contextmanager
def progress_bar(console: Console, title: str, visits: int) -> Iterator[Callable[[Cell], None]]:
    """Yields what is to be called with every visit made."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task(title, total=visits)
        yield lambda cell: progress.advance(task)


def print_plan(plan: Plan, facts: Facts, pace: Pace, console: Console) -> None:
    grid = Grid()
    for column in ("R", "context", "cells", "depths", "tokens", "KV tokens"):
        grid.add_column(column, justify="right")
    for group in plan.groups:
        tokens = [cell.tokens for cell in group.cells]
        grid.add_row(
            str(group.requests),
            str(group.context),
            str(len(group.cells)),
            " ".join(map(str, sorted({cell.depth for cell in group.cells}))),
            f"{min(tokens)} to {max(tokens)}",
            str(group.requests * group.context),
        )
    console.print(grid)
    _print_left_out(plan, console)
    slowest = max(plan.cells, key=pace.round_s)
    line(
        console,
        f"{len(plan.cells)} cells, {plan.passes} passes of {plan.rounds} rounds (at least "
        f"{FEWEST_ROUNDS}): about {plan.seconds / 60:.1f} minutes, up to "
        f"{pace.round_s(slowest):.2f} s a round; prompts at {pace.prefill_tokens_per_s:.0f} "
        f"tokens/s; the server has {facts.kv_tokens} KV tokens",
    )


def print_validation_plan(plan: Plan, sweep_s: float, gamma: int, console: Console) -> None:
    """sweep_s: of the sweep that comes before."""
    counts = ", ".join(str(group.requests) for group in plan.groups)
    line(
        console,
        f"validation: R {counts}, {len(plan.cells)} rounds to choose from, {PASSES} passes of "
        f"{plan.rounds}, then {TURNS} turns between the table's choice and the best: about "
        f"{plan.seconds / 60:.1f} minutes, with the sweep {(sweep_s + plan.seconds) / 60:.1f}",
    )
    _print_left_out(plan, console)
    for workload in WORKLOADS:
        survivals = (
            " ".join(f"{survival:.2f}" for survival in row)
            for row in workload.survivals(len(workload.chances), gamma)
        )
        line(
            console,
            f"  {workload.name}: survivals {', and '.join(survivals)}; whole blocks commit "
            f"{workload.accept_length(gamma):.2f} tokens",
        )


def print_fit(fitted: Fitted, console: Console) -> None:
    for name, part in fitted.parts:
        middle, high = np.percentile(part.held_out, [50, 90])
        line(
            console,
            f"rounds {name}: {len(part.times)} cells, error of held-out ones {middle:.1%} in the "
            f"median, up to {high:.1%} in 9 of 10",
        )
    if fitted.plain is None:
        line(console, "rounds without a draft: too few cells; the draft is never skipped")


def print_rises(rises: Sequence[Rise], console: Console) -> None:
    """How step time moves with the forced budget, and loudly if it does not."""
    for rise in rises:
        line(console, f"step time over forced verify tokens, {rise.text}")
    if flat := without_effect(rises):
        line(console, NO_EFFECT, style="bold red")
        for rise in flat:
            line(console, f"  {rise.text}", style="bold red")


def print_validation(validation: Validation, console: Console) -> None:
    grid = Grid()
    for column in ("R", "workload", "table", "tokens/s", "best", "regret, %"):
        grid.add_column(column, justify="right", no_wrap=True)
    for verdict in validation.verdicts:
        contest = verdict.contest
        grid.add_row(
            str(contest.requests),
            contest.workload.name,
            round_text(contest.by_table),
            f"{verdict.throughput[0]:.1f}",
            "the same" if contest.best == contest.by_table else round_text(contest.best),
            _regret_text(verdict),
        )
    console.print(grid)
    regrets = [verdict.regret for verdict in validation.verdicts]
    good = sum(verdict.good for verdict in validation.verdicts)
    line(
        console,
        f"the table's round is within {WITHIN:.0%} of the best one in {good} of {len(regrets)} "
        f"cells ({validation.share_within:.0%}); regret {np.median(regrets):.1%} in the median, "
        f"{max(regrets):.1%} at most; step times of these fresh rounds: off by "
        f"{validation.median_error:.1%} in the median",
    )


def print_written(files: Sequence[Path], console: Console) -> None:
    for file in files:
        line(console, f"written: {file}")
    line(console, f"serve with --speculative-dspark-sps-table-path {files[0]}")


def round_text(cell: Cell) -> str:
    """Depth and budget of a round, which fills its tier."""
    if not cell.depth:
        return "no draft"
    return f"D {cell.depth}, K {budget_of(cell)}"


def line(console: Console, text: str, style: str = "") -> None:
    """One line, as it is."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _regret_text(verdict: Verdict) -> str:
    """In percent, with the least and the greatest of the turns."""
    middle, low, high = (
        f"{100 * value:.1f}"
        for value in (verdict.regret, min(verdict.regrets), max(verdict.regrets))
    )
    return middle if len(verdict.regrets) == 1 else f"{middle} ({low} to {high})"


def _print_left_out(plan: Plan, console: Console) -> None:
    for text in plan.left_out:
        line(console, f"left out: {text}")
