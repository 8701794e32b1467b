"""Which rounds a validation measures, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence

from cost_tables.measure import Cell
from cost_tables.profiling.facts import Facts
from cost_tables.profiling.plan import (
    FEWEST_ROUNDS,
    MOST_ROUNDS,
    PASSES,
    Pace,
    Plan,
    groups_of,
    load_s,
    spread,
    visit_s,
)
from cost_tables.profiling.search import rounds_to_choose

TURNS = 4  # of the second measurement
LIKELY_DUELLISTS = 3  # different rounds of a batch size that the second measurement has to do with


def plan_validation(
    facts: Facts, pace: Pace, seconds: float, counts: Sequence[int], context: int
) -> Plan:
    """All rounds to choose from of as many batch sizes as `seconds` are enough for: the largest
    however little time there is, then the smallest, then what lies between."""
    chosen: list[list[Cell]] = []
    left_out: list[str] = []
    spent = 0.0
    for requests in spread(sorted(counts)):
        cells = rounds_to_choose(facts, requests, context)
        more = _seconds(pace, cells, FEWEST_ROUNDS)
        if chosen and spent + more > seconds:
            left_out.append(f"R {requests}: no time")
            continue
        chosen.append(cells)
        spent += more
    rounds, total = FEWEST_ROUNDS, spent
    for more_rounds in range(FEWEST_ROUNDS + 1, MOST_ROUNDS + 1):
        longer = sum(_seconds(pace, cells, more_rounds) for cells in chosen)
        if longer <= seconds:
            rounds, total = more_rounds, longer
    everything = groups_of([cell for cells in chosen for cell in cells])
    return Plan(everything, rounds, total, tuple(left_out))


def _seconds(pace: Pace, cells: Sequence[Cell], rounds: int) -> float:
    """Of both measurements of a batch size."""
    visits, load = sum(visit_s(pace, cell, rounds) for cell in cells), load_s(pace, cells[0])
    duel = LIKELY_DUELLISTS * visits / len(cells) + load
    return PASSES * (visits + load) + TURNS * duel
