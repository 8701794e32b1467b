"""A profile from end to end: plan, sweep, fit, files, and a validation if it is asked for."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from cost_tables.files import save_table
from cost_tables.profiling.cell_file import CellFile, Header, Row, read_cells
from cost_tables.profiling.effect import find_rises
from cost_tables.profiling.errors import ProfileError
from cost_tables.profiling.facts import Facts
from cost_tables.profiling.fitting import Fitted, fit_cells
from cost_tables.profiling.plan import Plan, doubling, make_plan
from cost_tables.profiling.plots import plot_fit, plot_validation
from cost_tables.profiling.printing import (
    line,
    print_fit,
    print_plan,
    print_rises,
    print_validation,
    print_validation_plan,
    print_written,
    progress_bar,
)
from cost_tables.profiling.sweep import OVERTIME, MeasuredPace, Rounds, Sweep, probe
from cost_tables.profiling.validation import validate
from cost_tables.profiling.validation_plan import plan_validation

VALIDATION_SHARE = 1.0  # of the sweep's time


@dataclass(frozen=True)
class Options:
    """out: the table. seconds: of the sweep. requests: R to measure; None: powers of two.
    contexts: prompt tokens, ascending. validate: whether the table's choices are judged by fresh
    measurements, which takes as long again."""

    out: Path
    seconds: float
    requests: tuple[int, ...] | None
    contexts: tuple[int, ...]
    resume: bool = False
    overwrite: bool = False
    dry_run: bool = False
    seed: int = 0
    validate: bool = False

    @property
    def cells_file(self) -> Path:
        return self.out.with_suffix(".csv")

    @property
    def plot_file(self) -> Path:
        return self.out.with_suffix(".png")

    @property
    def validation_plot_file(self) -> Path:
        return self.out.with_suffix(".validation.png")

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
    print_plan(plan, facts, pace, console)
    validation_plan = _validation_plan(plan, facts, pace, options, console)
    if options.dry_run:
        return True
    cells = CellFile(options.cells_file, Header(facts.fingerprint, options.seed), earlier)
    try:
        finished = _sweep(rounds, plan, pace, options, cells, earlier, console)
    finally:
        cells.close()
    fitted = fit_cells(read_cells(options.cells_file)[1])
    report = _write(fitted, facts, options, console)
    if finished and validation_plan is not None:
        return _validate(rounds, validation_plan, pace, fitted, report, options, console)
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


def _validation_plan(
    plan: Plan, facts: Facts, pace: MeasuredPace, options: Options, console: Console
) -> Plan | None:
    """None: nobody asked for one. plan: of the sweep."""
    if not options.validate:
        return None
    context = min(group.context for group in plan.groups)
    counts = [group.requests for group in plan.groups if group.context == context]
    found = plan_validation(facts, pace, VALIDATION_SHARE * options.seconds, counts, context)
    print_validation_plan(found, plan.seconds, facts.gamma, console)
    return found


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
    with progress_bar(console, "measuring", plan.passes * len(plan.cells)) as advance:
        limit_s = OVERTIME * options.seconds
        sweep = Sweep(
            rounds, plan, pace, cells.append, advance, limit_s, options.seed, rows=list(earlier)
        )
        try:
            sweep.run()
        except KeyboardInterrupt:
            console.print(f"interrupted; {options.cells_file} keeps {len(sweep.rows)} visits")
            return False
    return True


def _write(fitted: Fitted, facts: Facts, options: Options, console: Console) -> dict[str, Any]:
    """The table and its plot. Returns what the table's file reports beside the model."""
    rises = find_rises(fitted.drafted.times)
    report = {"step_time_over_tokens": [rise.record() for rise in rises]}
    _save(fitted, facts, report, options)
    plot_fit(fitted, facts.gamma, options.plot_file)
    print_fit(fitted, console)
    print_rises(rises, console)
    print_written((options.out, options.cells_file, options.plot_file), console)
    return report


def _save(fitted: Fitted, facts: Facts, report: dict[str, Any], options: Options) -> None:
    save_table(
        options.out,
        fitted.drafted.model,
        facts.fingerprint,
        fitted.median_error,
        sum(len(part.times) for _, part in fitted.parts),
        None if fitted.plain is None else fitted.plain.model,
        report,
    )


def _validate(
    rounds: Rounds,
    plan: Plan,
    pace: MeasuredPace,
    fitted: Fitted,
    report: dict[str, Any],
    options: Options,
    console: Console,
) -> bool:
    """Whether it was not interrupted."""
    bar = partial(progress_bar, console)
    try:
        validation = validate(rounds, plan, pace, fitted.cost, options.seed + 1, bar)
    except KeyboardInterrupt:
        console.print("interrupted; the table is written, and not validated")
        return False
    _save(fitted, rounds.facts, {**report, "validation": validation.record()}, options)
    plot_validation(validation, options.validation_plot_file)
    print_validation(validation, console)
    line(console, f"written: {options.out}, {options.validation_plot_file}")
    return True
