"""A report on the terminal: the figures that matter first, what was served last."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_dspark.report import tables
from sglang_dspark.report.summary import Missing, Report
from sglang_dspark.report.words import Figure, further, headlines


def show(report: Report, console: Console) -> None:
    run = report.run
    title = f"{run.algorithm}, {run.mode}, γ = {run.gamma}"
    console.print(f"{title}: {run.source}, {run.covers}", soft_wrap=True, markup=False)
    for note in report.notes:
        console.print(f"note: {note}", style="yellow", soft_wrap=True, markup=False)
    console.print(_figures(headlines(report), style="bold"))
    console.print(_figures(further(report)))
    _print(console, "Windows by tokens", tables.lengths(report))
    if not isinstance(report.steps, Missing):
        _print(console, "Step times by tokens of the forward", tables.step_times(report.steps))
    if not isinstance(report.refinement, Missing):
        _print(console, "Step time for one of the table's", tables.refinement(report.refinement))
    if not isinstance(report.calibration, Missing):
        _print(console, "Survival of drafts", tables.calibration(report.calibration))
    for topic, what in run.facts:
        console.print(f"{topic}: {what}", style="dim", soft_wrap=True, markup=False)


def _figures(figures: tuple[Figure, ...], style: str = "") -> Table:
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(justify="right", style=style, no_wrap=True)
    table.add_column(style="dim")
    for figure in figures:
        table.add_row(*map(escape, (figure.name, figure.text, figure.about)))
    return table


def _print(console: Console, title: str, content: tables.Table) -> None:
    table = Table()
    for place, column in enumerate(content.columns):
        table.add_column(escape(column), justify="right" if place else "left")
    for row in content.rows:
        table.add_row(*map(escape, row))
    console.print(f"\n{title}")
    console.print(table)
