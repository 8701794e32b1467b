"""A report as one HTML page that needs nothing else: no script, no font, no file, no network."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from sglang_dspark.report import plots, tables
from sglang_dspark.report.distribution import Distribution
from sglang_dspark.report.summary import Missing, Report
from sglang_dspark.report.tables import Table
from sglang_dspark.report.words import Figure, further, headlines, percent

_CSS = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d2330; --soft: #5c6573; --grid: #d5dae2;
  --bar: #3b74c4; --ideal: #c2621b; --card: #f5f7fa; }
@media (prefers-color-scheme: dark) { :root { --page: #14181f; --ink: #e4e8ee; --soft: #9aa4b2;
  --grid: #353d4a; --bar: #6ea3ee; --ideal: #f0a05a; --card: #1d232d; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 70rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 0 0 .3rem; }
p { margin: .2rem 0 .6rem; } .soft { color: var(--soft); }
.cards { display: grid; gap: .8rem; margin: 1.2rem 0;
  grid-template-columns: repeat(5, minmax(0, 1fr)); }
.card, section, .note { background: var(--card); border-radius: .5rem; padding: .8rem 1rem;
  min-width: 0; }
.card b { display: block; font-size: 1.9rem; line-height: 1.2; }
.card .soft { font-size: .85rem; }
.sections { display: grid; gap: .8rem; align-items: start;
  grid-template-columns: repeat(2, minmax(0, 1fr)); }
section.wide { grid-column: 1 / 3; }
@media (max-width: 50rem) { .cards, .sections { display: block; }
  .card, section { margin-bottom: .8rem; } }
.note { border-left: 4px solid var(--ideal); margin: .8rem 0; }
svg { max-width: 100%; height: auto; } svg text { font-family: inherit !important; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4rem 0; }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
.facts td { text-align: left; overflow-wrap: anywhere; }
"""


def render(report: Report) -> str:
    """The whole page."""
    run = report.run
    title = f"{run.algorithm}, {run.mode}, γ = {run.gamma}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(run.source)}: {escape(run.covers)}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
        f'<div class="cards">{"".join(map(_card, headlines(report)))}</div>',
        f'<div class="sections">{"".join(_sections(report))}</div>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>sglang-dspark report: {escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n"
        "<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _card(figure: Figure) -> str:
    return (
        f'<div class="card">{escape(figure.name)}<b>{escape(figure.text)}</b>'
        f'<span class="soft">{escape(figure.about)}</span></div>'
    )


def _sections(report: Report) -> Iterable[str]:
    yield _section(
        "Accept length",
        f"Tokens that a window committed, bonus included: {report.commits.mean:.2f} on average.",
        plots.bars("accept-length", report.commits, "tokens committed", "windows"),
    )
    yield _section(
        "Verify windows",
        f"Tokens of a request that a round verified, anchor included: {report.windows.mean:.2f} on "
        "average.",
        plots.bars("verify-windows", report.windows, "tokens of the window", "windows"),
    )
    yield _section("Window by window", "Shares of all windows.", _table(tables.lengths(report)))
    yield _ceilings(report)
    yield _distribution(
        "Budget",
        report.budgets,
        "Draft tokens that a round verified, over all its requests",
        "budget",
        "draft tokens",
    )
    yield _distribution(
        "Verify forward",
        report.forwards,
        "Tokens of a round's verify forward, padding included (compact: its tier)",
        "verify-forward",
        "tokens",
    )
    yield _steps(report)
    yield _refinement(report)
    yield _calibration(report)
    yield _section("More figures", "", _table(_figures(report)), wide=True, kind="facts")
    facts = Table(("", ""), report.run.facts)
    yield _section("The run", "", _table(facts, head=False), wide=True, kind="facts")


def _ceilings(report: Report) -> str:
    title, found = "Ceiling", report.ceilings
    if isinstance(found, Missing):
        return _nothing(title, found)
    return _section(
        title,
        f"Tokens that full windows would have committed: {found.mean:.2f} on average. Utilisation "
        f"is {percent(report.utilisation)}.",
        plots.bars("ceiling", found, "tokens that could be committed", "windows"),
    )


def _distribution(
    title: str, found: Distribution | Missing, about: str, name: str, axis: str
) -> str:
    if isinstance(found, Missing):
        return _nothing(title, found)
    plot = plots.bars(name, found, axis, "rounds")
    data = _table(tables.numbers(found, axis))
    return _section(
        title,
        f"{about}: {found.mean:.1f} on average.",
        f"{plot}<details><summary>Numbers</summary>{data}</details>",
    )


def _steps(report: Report) -> str:
    title, steps = "Step time, predicted and measured", report.steps
    if isinstance(steps, Missing):
        return _nothing(title, steps)
    plot = plots.step_times("step-times", steps)
    by_tier, overall = _table(tables.step_times(steps)), _table(tables.all_times(steps))
    overall = f"<p>Over {escape(steps.covers)}:</p>{overall}"
    if (everything := steps.since_start) is not None:
        overall += (
            f"<p>Over {everything.rounds:,} rounds since the server started, quantiles by bucket "
            f"of its histograms:</p>{_table(tables.all_times(everything))}"
        )
    return _section(
        title,
        f"{steps.rounds:,} rounds: predicted within {percent(steps.error)} in the median; all "
        f"predictions add up to {percent(steps.bias)} of the time measured. The first table has "
        "medians by tokens of the forward; on the dashed line a prediction is right.",
        plot + by_tier + overall,
        wide=True,
    )


def _refinement(report: Report) -> str:
    title, found = "Corrections of the cost table", report.refinement
    if isinstance(found, Missing):
        return _nothing(title, found)
    in_force = (
        "In force: what the server makes of it now, from all rounds of late and of the other tiers."
        if found.in_force
        else "What the server makes of it is on its /metrics, not here."
    )
    return _section(
        title,
        "Seconds for one that the table says, by tokens of the verify forward. Measured: median "
        f"over {found.covers}. {in_force}",
        _table(tables.refinement(found)),
        wide=True,
    )


def _calibration(report: Report) -> str:
    title, found = "Calibration", report.calibration
    if isinstance(found, Missing):
        return _nothing(title, found)
    return _section(
        title,
        "Predicted survival of a draft token and all before it (the running product of what the "
        "draft itself says, before any fit or temperature) against how often they did survive, "
        f"where the window reached the token. ECE {percent(found.ece)}, mean over positions; by "
        "chance: what a perfect prediction of so few blocks would show, on the dashed line.",
        plots.reliability("reliability", found) + _table(tables.calibration(found)),
        wide=True,
    )


def _section(title: str, lead: str, content: str, *, wide: bool = False, kind: str = "") -> str:
    """content: HTML already."""
    classes = " ".join(filter(None, ("wide" if wide else "", kind)))
    return (
        f'<section class="{classes}"><h2>{escape(title)}</h2>'
        f"{f'<p>{escape(lead)}</p>' if lead else ''}{content}</section>"
    )


def _nothing(title: str, missing: Missing) -> str:
    return _section(title, "", f'<p class="soft">Not known: {escape(missing.missing)}.</p>')


def _figures(report: Report) -> Table:
    rows = tuple((figure.name, figure.text, figure.about) for figure in further(report))
    return Table(("", "", ""), rows)


def _table(table: Table, *, head: bool = True) -> str:
    rows = [_row("td", row) for row in table.rows]
    if head and any(table.columns):
        rows.insert(0, _row("th", table.columns))
    return f"<table>{''.join(rows)}</table>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
