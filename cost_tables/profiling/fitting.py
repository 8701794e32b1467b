"""From measured cells to a table, and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cost_tables.measure import Cell
from cost_tables.model import Cells, CostModel, Floats, RoundCost, fit, relative_errors
from cost_tables.profiling.cell_file import Row
from cost_tables.profiling.errors import ProfileError
from cost_tables.profiling.sweep import by_cell

FEWEST_DRAFTED, FEWEST_PLAIN = 6, 2
FOLDS = 5
# A knot for so many cells, so that every piece rests on some.
CELLS_A_KNOT = 5
FEWEST_KNOTS, MOST_KNOTS = (4, 8, 4), (8, 16, 6)


@dataclass(frozen=True)
class CellTime:
    """A cell with what it took. context: KV tokens of the batch. seconds: median of its rounds."""

    cell: Cell
    context: float
    seconds: float
    rounds: int


@dataclass(frozen=True)
class Part:
    """Rounds with a draft, or those without: the fit of all, and errors of fits of the others.

    held_out: |predicted - measured| / measured of each cell by a fit without it, float64 [n].
    """

    times: tuple[CellTime, ...]
    cells: Cells
    model: CostModel
    held_out: Floats

    @property
    def predicted(self) -> Floats:
        """Seconds of each cell by the fit of all, float64 [n]."""
        c = self.cells
        rows = zip(c.requests, c.tokens, c.context, c.drafted, strict=True)
        return np.array([seconds_of(self.model, *row) for row in rows])


@dataclass(frozen=True)
class Fitted:
    """A table. plain: None if too few rounds without a draft were measured."""

    drafted: Part
    plain: Part | None

    @property
    def parts(self) -> list[tuple[str, Part]]:
        named = [("with a draft", self.drafted)]
        return named if self.plain is None else [*named, ("without a draft", self.plain)]

    @property
    def cost(self) -> RoundCost:
        return RoundCost(self.drafted.model, None if self.plain is None else self.plain.model)

    @property
    def held_out(self) -> Floats:
        return np.concatenate([part.held_out for _, part in self.parts])

    @property
    def median_error(self) -> float:
        return float(np.median(self.held_out))


def cell_times(rows: Iterable[Row]) -> list[CellTime]:
    """One entry a cell: the median of all its rounds, of all visits."""
    times = []
    for cell, visits in by_cell(rows).items():
        seconds = [s for row in visits for s in row.seconds]
        context = float(np.mean([row.context for row in visits]))
        times.append(CellTime(cell, context, float(np.median(seconds)), len(seconds)))
    return times


def fit_cells(rows: Iterable[Row]) -> Fitted:
    """Raises ProfileError if there are too few cells."""
    times = cell_times(rows)
    drafted = [t for t in times if t.cell.depth]
    plain = [t for t in times if not t.cell.depth]
    if len(drafted) < FEWEST_DRAFTED:
        raise ProfileError(
            f"{len(drafted)} cells with a draft were measured; a table needs {FEWEST_DRAFTED}"
        )
    return Fitted(_part(drafted), _part(plain) if len(plain) >= FEWEST_PLAIN else None)


def seconds_of(
    model: CostModel, requests: float, tokens: float, context: float, drafted: float
) -> float:
    """T of one round."""
    return float(model.seconds(int(requests), np.array([tokens]), context, drafted)[0])


def knots_for(cells: int) -> tuple[int, int, int]:
    """Most knots of α, θ and δ for so many cells."""
    share = cells / CELLS_A_KNOT / sum(FEWEST_KNOTS)
    requests, tokens, drafted = (
        int(np.clip(round(share * few), few, most))
        for few, most in zip(FEWEST_KNOTS, MOST_KNOTS, strict=True)
    )
    return requests, tokens, drafted


def folds(count: int) -> list[np.ndarray[tuple[int], np.dtype[np.intp]]]:
    """Indices of `count` cells in FOLDS parts (as many as cells, if these are fewer), mixed."""
    mixed = np.random.default_rng(0).permutation(count)
    return [part.astype(np.intp) for part in np.array_split(mixed, min(FOLDS, count))]


def _part(times: Sequence[CellTime]) -> Part:
    cells = as_cells(times)
    knots = knots_for(len(cells))
    errors = np.zeros(len(cells))
    for held_out in folds(len(cells)):
        kept = np.setdiff1d(np.arange(len(cells)), held_out)
        if len(kept) < 2:  # of two cells, one is left: that it costs as much
            kept = np.repeat(kept, 2)
        model = fit(cells.take(kept), knots)
        errors[held_out] = relative_errors(model, cells.take(held_out))
    return Part(tuple(times), cells, fit(cells, knots), errors)


def as_cells(times: Sequence[CellTime]) -> Cells:
    rows = [
        (t.cell.requests, t.cell.tokens, t.cell.requests * t.cell.depth, t.context, t.seconds)
        for t in times
    ]
    return Cells(*np.array(rows, dtype=np.float64).T)
