"""Which rounds to time for a table, and the timing. Knows of a round only how to run one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cost_tables.model import Cells, CostModel, RoundCost, fit, relative_errors


@dataclass(frozen=True)
class Cell:
    """A round to time. requests: R. tokens: M, padding included. depth: drafted tokens of each
    request; 0: a round without a draft. context: KV tokens of each request."""

    requests: int
    tokens: int
    depth: int
    context: int


@dataclass(frozen=True)
class Measured:
    """A fitted table. median_error: relative, of cells held out from a second fit."""

    cost: RoundCost
    drafted: CostModel
    plain: CostModel
    median_error: float
    cells: int
    seconds: float


def plan_cells(
    tiers: Sequence[int],
    gamma: int,
    max_requests: int,
    context: int,
    long_context: int,
    padded: bool = True,
) -> list[Cell]:
    """Cells that cover a grid: every tier with few requests drafted deeply and many drafted
    shallowly, in between, and rounds without a draft. long_context: of some further cells; the same
    as `context` if there is no room. padded: whether rounds without a draft fill a tier too."""
    cells = set()
    for i, tokens in enumerate(tiers):
        fewest = min(-(-tokens // (gamma + 1)), max_requests)
        most = min(tokens, max_requests)
        depth = (1, (gamma + 1) // 2, gamma)[i % 3]
        cells |= {Cell(fewest, tokens, gamma, context), Cell(most, tokens, depth, context)}
        if tokens <= max_requests:
            cells.add(Cell(tokens, tokens, 0, context))
    for requests in {1, -(-max_requests // 4), max_requests}:
        full = next(t for t in tiers if t >= requests * (gamma + 1))
        least = next(t for t in tiers if t >= requests) if padded else requests
        shallow = next(t for t in tiers if t >= 2 * requests)
        cells.add(Cell(requests, shallow, 1, context))
        cells.add(Cell(requests, full, gamma, long_context))
        cells |= {Cell(requests, least, 0, length) for length in (context, long_context)}
    return sorted(cells, key=lambda c: (c.depth, c.tokens, c.requests, c.context))


def measure(
    cells: Sequence[Cell],
    run: Callable[[Cell], None],
    synchronize: Callable[[], None],
    limit_s: float,
    passes: int = 5,
) -> Measured:
    """Time every cell, in turns, until `passes` are done or limit_s is over, but at least once.

    run: queue one round of a cell on the device. The first run of a cell is not counted.
    """
    began = time.perf_counter()
    timed: list[list[float]] = [[] for _ in cells]
    for done in range(passes + 1):
        # Every other pass backwards, so that a slow moment does not hit the same cells again.
        order = range(len(cells)) if done % 2 else reversed(range(len(cells)))
        for i in order:
            synchronize()
            start = time.perf_counter()
            run(cells[i])
            synchronize()
            if done:
                timed[i].append(time.perf_counter() - start)
        if done and time.perf_counter() - began > limit_s:
            break
    seconds = [statistics.median(times) for times in timed]
    drafted = _select(cells, seconds, plain=False)
    plain = _select(cells, seconds, plain=True)
    model, plain_model = fit(drafted), fit(plain)
    return Measured(
        RoundCost(model, plain_model),
        model,
        plain_model,
        _held_out_error(drafted),
        len(cells),
        time.perf_counter() - began,
    )


def _select(cells: Sequence[Cell], seconds: Sequence[float], plain: bool) -> Cells:
    rows = [
        (c.requests, c.tokens, c.requests * c.depth, c.requests * c.context, s)
        for c, s in zip(cells, seconds, strict=True)
        if plain == (c.depth == 0)
    ]
    if len(rows) == 1:  # a server for one request has one round without a draft: same cost always
        rows *= 2
    return Cells(*np.array(rows, dtype=np.float64).T)


def _held_out_error(cells: Cells, folds: int = 4) -> float:
    """Median relative error of every fourth cell under a fit of the others, over all cells."""
    if len(cells) < 2 * folds:
        return float(np.median(relative_errors(fit(cells), cells)))
    fold = np.arange(len(cells)) % folds
    errors = []
    for k in range(folds):
        kept, held_out = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        errors.append(relative_errors(fit(cells.take(kept)), cells.take(held_out)))
    return float(np.median(np.concatenate(errors)))
