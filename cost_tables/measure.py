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
    """A round to time. requests: R. tokens: M, padding included; with plain, R rounded up.
    context: KV tokens of each request. plain: without a draft."""

    requests: int
    tokens: int
    context: int
    plain: bool = False


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
    tiers: Sequence[int], width: int, max_requests: int, context: int, long_context: int
) -> list[Cell]:
    """Cells that cover a grid: every tier with few and with many requests, and rounds without a
    draft. long_context: of some further cells; the same as `context` if there is no room."""
    cells = []
    for tokens in tiers:
        fewest, most = -(-tokens // width), min(tokens, max_requests)
        between = round((fewest * most) ** 0.5)
        for requests in sorted({fewest, between, most}):
            cells.append(Cell(requests, tokens, context))
    for requests in {1, max(1, max_requests // 4), max_requests}:
        tokens = next(t for t in tiers if t >= requests * width)
        plain = next(t for t in tiers if t >= requests)
        if long_context > context:
            cells.append(Cell(requests, tokens, long_context))
            cells.append(Cell(requests, plain, long_context, plain=True))
    # Rounds without a draft: what fills each tier that one request a row can fill.
    for tokens in tiers:
        if tokens <= max_requests:
            cells.append(Cell(tokens, tokens, context, plain=True))
    largest = next(t for t in tiers if t >= max_requests)
    cells.append(Cell(max_requests, largest, context, plain=True))
    return sorted(set(cells), key=lambda c: (c.plain, c.tokens, c.requests, c.context))


def measure(
    cells: Sequence[Cell],
    run: Callable[[Cell], None],
    synchronize: Callable[[], None],
    limit_s: float,
    passes: int = 5,
) -> Measured:
    """Time every cell, in turns, until `passes` are done or limit_s is over, but at least twice.

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
        if done >= 2 and time.perf_counter() - began > limit_s:
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
        (c.requests, c.tokens, c.requests * c.context, s)
        for c, s in zip(cells, seconds, strict=True)
        if c.plain == plain
    ]
    if len(rows) == 1:  # a server for one request has one round without a draft: same cost always
        rows *= 2
    columns = np.array(rows, dtype=np.float64).T
    return Cells(*columns)


def _held_out_error(cells: Cells, folds: int = 4) -> float:
    """Median relative error of every fourth cell under a fit of the others, over all cells."""
    if len(cells) < 2 * folds:
        return float(np.median(relative_errors(fit(cells), cells)))
    index = np.arange(len(cells))
    errors = [
        relative_errors(
            fit(cells.take(index[index % folds != k])), cells.take(index[index % folds == k])
        )
        for k in range(folds)
    ]
    return float(np.median(np.concatenate(errors)))
