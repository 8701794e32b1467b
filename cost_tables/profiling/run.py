"""A profile from end to end: plan, sweep, fit, files."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from cost_tables.files import save_table
from cost_tables.measure import Cell
from cost_tables.profiling.cell_file import CellFile, Header, Row, read_cells
from cost_tables.profiling.errors import ProfileError
from cost_tables.profiling.facts import Facts
from cost_tables.profiling.fitting import Fitted, fit_cells
from cost_tables.profiling.plan import FEWEST_ROUNDS, Plan, doubling, make_plan
from cost_tables.profiling.plots import plot_fit
from cost_tables.profiling.sweep import MeasuredPace, Rounds, Sweep, probe

OVERTIME = 1.25  # a sweep ends at so much of the time it was given, but for its first pass


@dataclass(frozen=True)
class Options:
    """out: the table. seconds: of the sweep. requests: R to measure; None: powers of two.
    contexts: prompt tokens, ascending."""

    out: Path
    seconds: float
    requests: tuple[int, ...] | None
    contexts: tuple[int, ...]
    resume: bool = False
    overwrite: bool = False
    dry_run: bool = False
    seed: int = 0

    @property
    def cells_file(self) -> Path:
        return self.out.with_suffix(".csv")

    @property
    def plot_file(self) -> Path:
        return self.out.with_suffix(".png")

    def check(self) -> None:
        """Before anything is started: whether all files can be written. Raises ProfileError."""
        if self.out.suffix != ".json":
            raise ProfileError(f"-o is {self.out}; its name must end in .json")
        if self.out.is_dir():
            raise ProfileError(f"-o {self.out} is a folder; must be a file")
        try:
            with tempfile.TemporaryFile(dir=self.out.parent):
                pass
        except OSError as error:
            raise ProfileError(
                f"-o {self.out}: nothing can be written to {self.out.parent} ({error.strerror})"
            ) from error
        if self.resume:
            read_cells(self.cells_file)
        elif not (self.dry_run or self.overwrite) and self.cells_file.exists():
            raise ProfileError(
                f"{self.cells_file} holds the cells of another run: --resume goes on with them, "
                "--overwrite measures anew"
            )


def profile(rounds: Rounds, options: Options, console: Console) -> bool:
    """Measure, fit and write; whether it ran to its end. Raises ProfileError."""
    facts = rounds.facts
    counts = options.requests or doubling(facts.max_requests)
    earlier = _earlier(options, facts)
    pace = probe(rounds, counts, options.contexts[0])
    plan = make_plan(facts, pace, options.seconds, options.requests, options.contexts)
    _print_plan(plan, facts, pace, console)
    if options.dry_run:
        return True
    cells = CellFile(options.cells_file, Header(facts.fingerprint, options.seed), earlier)
    try:
        finished = _sweep(rounds, plan, pace, options, cells, earlier, console)
    finally:
        cells.close()
    rows = read_cells(options.cells_file)[1]
    _write(fit_cells(rows), facts, options, console)
    return finished


def _earlier(options: Options, facts: Facts) -> list[Row]:
    """What a sweep goes on with."""
    if not options.resume:
        return []
    header, rows = read_cells(options.cells_file)
    if differences := header.fingerprint.differences(facts.fingerprint):
        raise ProfileError(
            f"--resume: {options.cells_file} was measured elsewhere: {'; '.join(differences)} "
            "(file against this server)"
        )
    return rows


def _sweep(
    rounds: Rounds,
    plan: Plan,
    pace: MeasuredPace,
    options: Options,
    cells: CellFile,
    earlier: list[Row],
    console: Console,
) -> bool:
    """Whether it was not interrupted."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("measuring", total=plan.passes * len(plan.cells))

        def advance(cell: Cell) -> None:
            progress.advance(task)

        sweep = Sweep(
            rounds,
            plan,
            pace,
            cells.append,
            advance,
            OVERTIME * options.seconds,
            options.seed,
            rows=list(earlier),
        )
        try:
            sweep.run()
        except KeyboardInterrupt:
            console.print(f"interrupted; {options.cells_file} keeps {len(sweep.rows)} visits")
            return False
    return True


def _print_plan(plan: Plan, facts: Facts, pace: MeasuredPace, console: Console) -> None:
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
    for text in plan.left_out:
        console.print(f"left out: {text}", markup=False, highlight=False)
    slowest = max(plan.cells, key=pace.round_s)
    console.print(
        f"{len(plan.cells)} cells, {plan.passes} passes of {plan.rounds} rounds (at least "
        f"{FEWEST_ROUNDS}): about {plan.seconds / 60:.1f} minutes, up to "
        f"{pace.round_s(slowest):.2f} s a round; prompts at {pace.prefill_tokens_per_s:.0f} "
        f"tokens/s; the server has {facts.kv_tokens} KV tokens",
        highlight=False,
    )


def _write(fitted: Fitted, facts: Facts, options: Options, console: Console) -> None:
    cells = sum(len(part.times) for _, part in fitted.parts)
    save_table(
        options.out,
        fitted.drafted.model,
        facts.fingerprint,
        fitted.median_error,
        cells,
        None if fitted.plain is None else fitted.plain.model,
    )
    plot_fit(fitted, facts.gamma, options.plot_file)
    for name, part in fitted.parts:
        middle, high = np.percentile(part.held_out, [50, 90])
        console.print(
            f"rounds {name}: {len(part.times)} cells, error of held-out ones {middle:.1%} in the "
            f"median, up to {high:.1%} in 9 of 10",
            highlight=False,
        )
    if fitted.plain is None:
        console.print("rounds without a draft: too few cells; the draft is never skipped")
    for file in (options.out, options.cells_file, options.plot_file):
        console.print(f"written: {file}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"serve with --speculative-dspark-sps-table-path {options.out}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
