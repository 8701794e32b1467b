"""Whether what a table chooses is the best that there is: fresh rounds, on the server it is of.

A cell of the validation is a batch of R requests with a workload. Of every round that the schedule
could choose for it (a depth and a budget that fills a tier, or no draft) the throughput is
R · τ / T, τ by the workload's survivals and T measured anew. What the table calls best has the
regret

    1 - throughput(the table's round) / throughput(the best round)

T does not depend on what is accepted, so one set of measured rounds serves all workloads. The best
of many noisy measurements is better than it should be; so both rounds are measured once more,
taking turns, and the regret is the median of these turns alone. It can be negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cost_tables.measure import Cell
from cost_tables.model import RoundCost
from cost_tables.profiling.cell_file import Row
from cost_tables.profiling.facts import Facts, budget_of
from cost_tables.profiling.fitting import CellTime, cell_times
from cost_tables.profiling.plan import Plan, groups_of, seconds_of
from cost_tables.profiling.search import choice_of_table, committed
from cost_tables.profiling.sweep import OVERTIME, MeasuredPace, Rounds, Sweep, by_cell
from cost_tables.profiling.validation_plan import TURNS
from cost_tables.profiling.workloads import WORKLOADS, Workload

WITHIN = 0.03  # a regret that is as good as none

# Shows how far a measurement is: title and visits in, what is called with every visit out.
Bar = Callable[[str, int], AbstractContextManager[Callable[[Cell], None]]]


@dataclass(frozen=True)
class Contest:
    """A cell of the validation, and the two rounds that matter in it."""

    requests: int
    workload: Workload
    by_table: Cell
    best: Cell


@dataclass(frozen=True)
class Verdict:
    """throughput: tokens a second of the table's and of the best round, as measured last.
    regrets: of each turn; a single 0 where both are the same round."""

    contest: Contest
    throughput: tuple[float, float]
    regrets: tuple[float, ...]

    @property
    def regret(self) -> float:
        return float(np.median(self.regrets))

    @property
    def good(self) -> bool:
        return self.regret <= WITHIN


@dataclass(frozen=True)
class Validation:
    """context: prompt tokens of a request. times: of all rounds to choose from, measured anew.
    median_error: |by the table - measured| / measured over these."""

    gamma: int
    context: int
    verdicts: tuple[Verdict, ...]
    times: tuple[CellTime, ...]
    median_error: float

    @property
    def share_within(self) -> float:
        return sum(verdict.good for verdict in self.verdicts) / len(self.verdicts)

    def record(self) -> dict[str, Any]:
        """For the table's file."""
        return {
            "context": self.context,
            "workloads": {
                w.name: {
                    "chances": w.chances,
                    "survivals": w.survivals(len(w.chances), self.gamma).tolist(),
                    "accept_length": w.accept_length(self.gamma),
                }
                for w in WORKLOADS
            },
            "within": WITHIN,
            "share_within": self.share_within,
            "median_error": self.median_error,
            "cells": [_verdict_record(verdict) for verdict in self.verdicts],
            "rounds": [{**_round(t.cell), "ms": 1e3 * t.seconds} for t in self.times],
        }


@contextmanager
def _no_bar(title: str, visits: int) -> Iterator[Callable[[Cell], None]]:
    yield lambda cell: None


def validate(
    rounds: Rounds,
    plan: Plan,
    pace: MeasuredPace,
    cost: RoundCost,
    seed: int = 0,
    bar: Bar = _no_bar,
) -> Validation:
    """Measure, compare, and measure again what matters. Raises ProfileError."""
    facts = rounds.facts
    times = {t.cell: t for t in cell_times(_measure(rounds, plan, pace, seed, bar, "validating"))}
    contests = [
        _contest(cost, facts, [t for t in times.values() if t.cell.requests == requests], workload)
        for requests in sorted({cell.requests for cell in times})
        for workload in WORKLOADS
        if len(workload.chances) <= requests  # of fewer it is another workload
    ]
    cells = {c for each in contests if each.by_table != each.best for c in _rounds_of(each)}
    duels = replace(plan, groups=groups_of(tuple(cells)), passes=TURNS)
    rows = by_cell(_measure(rounds, duels, pace, seed + 1, bar, "once more"))
    return Validation(
        facts.gamma,
        plan.cells[0].context,
        tuple(_verdict(contest, facts, times, rows) for contest in contests),
        tuple(times.values()),
        _median_error(cost, times.values()),
    )


def _measure(
    rounds: Rounds, plan: Plan, pace: MeasuredPace, seed: int, bar: Bar, title: str
) -> list[Row]:
    with bar(title, plan.passes * len(plan.cells)) as advance:
        kept: list[Row] = []
        limit_s = OVERTIME * seconds_of(plan, pace)
        Sweep(rounds, plan, pace, kept.append, advance, limit_s, seed).run()
    return kept


def _contest(
    cost: RoundCost, facts: Facts, times: Sequence[CellTime], workload: Workload
) -> Contest:
    """times: of all rounds to choose from, of one batch size."""
    requests = times[0].cell.requests
    survivals = workload.survivals(requests, facts.gamma)
    best = max(times, key=lambda t: committed(survivals, t.cell) / t.seconds)
    kv_tokens = float(np.mean([t.context for t in times]))
    chosen = choice_of_table(cost, facts, survivals, kv_tokens, best.cell.context)
    return Contest(requests, workload, chosen, best.cell)


def _verdict(
    contest: Contest, facts: Facts, times: Mapping[Cell, CellTime], rows: Mapping[Cell, list[Row]]
) -> Verdict:
    survivals = contest.workload.survivals(contest.requests, facts.gamma)
    chosen, best = (committed(survivals, cell) for cell in _rounds_of(contest))
    if contest.by_table == contest.best:
        rate = best / times[contest.best].seconds
        return Verdict(contest, (rate, rate), (0.0,))
    seconds = [
        [float(np.median(row.seconds)) for row in rows[cell]] for cell in _rounds_of(contest)
    ]
    regrets = tuple(
        1 - (chosen / of_chosen) / (best / of_best)
        # A round that was unsteady has been visited once more than the other.
        for of_chosen, of_best in zip(*seconds, strict=False)
    )
    rates = chosen / float(np.median(seconds[0])), best / float(np.median(seconds[1]))
    return Verdict(contest, rates, regrets)


def _rounds_of(contest: Contest) -> tuple[Cell, Cell]:
    return contest.by_table, contest.best


def _median_error(cost: RoundCost, times: Iterable[CellTime]) -> float:
    errors = []
    for time in times:
        cell = time.cell
        model = cost.drafted if cell.depth else cost.plain
        if model is not None:
            size, drafted = np.array([float(cell.tokens)]), float(cell.requests * cell.depth)
            by_table = float(model.seconds(cell.requests, size, time.context, drafted)[0])
            errors.append(abs(by_table / time.seconds - 1))
    return float(np.median(errors))


def _round(cell: Cell) -> dict[str, int]:
    budget = budget_of(cell)
    return {
        "requests": cell.requests,
        "tokens": cell.tokens,
        "depth": cell.depth,
        "budget": budget,
    }


def _verdict_record(verdict: Verdict) -> dict[str, Any]:
    contest = verdict.contest
    by_table, best = verdict.throughput
    return {
        "requests": contest.requests,
        "workload": contest.workload.name,
        "by_table": {**_round(contest.by_table), "tokens_per_s": by_table},
        "best": {**_round(contest.best), "tokens_per_s": best},
        "regret": verdict.regret,
        "regrets": verdict.regrets,
    }
