"""The sweep: every cell visited in several passes, in random order, and unsteady ones once more."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from cost_tables.measure import Cell
from cost_tables.model import Cells, CostModel, fit
from cost_tables.profiling.cell_file import Row
from cost_tables.profiling.errors import Drained, ProfileError
from cost_tables.profiling.facts import Facts
from cost_tables.profiling.live import Visit
from cost_tables.profiling.plan import Group, Plan, new_tokens, room

UNSTEADY = 0.15  # interquartile range over median of a cell's rounds
LOADS_A_VISIT = 3  # new loads for a cell whose requests keep ending
OVERTIME = 1.25  # a sweep ends at so much of the time it was given, but for its first pass


class Rounds(Protocol):
    """`live.LiveRounds`."""

    facts: Facts

    def load(self, requests: int, context: int, new_tokens: int, seed: int) -> float: ...

    def visit(self, cell: Cell, rounds: int, expected_s: float) -> Visit: ...

    def unload(self) -> None: ...


@dataclass
class MeasuredPace:
    """What a round takes, from a handful of cells at first."""

    model: CostModel
    prefill_tokens_per_s: float

    def round_s(self, cell: Cell) -> float:
        size, context = np.array([float(cell.tokens)]), float(cell.requests * cell.context)
        return float(self.model.seconds(cell.requests, size, context, 0.0)[0])


def probe(rounds: Rounds, counts: Sequence[int], context: int) -> MeasuredPace:
    """A short look at the smallest and the largest batch, which also warms them up."""
    facts = rounds.facts
    found: list[tuple[Cell, float]] = []
    rates: list[float] = []
    for count in sorted({min(counts), max(counts)}):
        fits = min(context, room(facts, count, 0) - 64)
        if fits < 1:
            continue
        cells = [
            Cell(count, facts.plain_tokens(count), 0, fits),
            Cell(count, facts.tier(count * (1 + facts.gamma)), facts.gamma, fits),
        ]
        spent = rounds.load(count, fits, 64, seed=count)
        rates.append(count * fits / spent)
        try:
            for cell in cells:
                found.append((cell, float(np.median(rounds.visit(cell, 2, 0.05).seconds))))
        except Drained:
            pass  # what was seen of it will do
        finally:
            rounds.unload()
    if len(found) < 2:
        raise ProfileError(
            f"no room to try a batch of {min(counts)}: the server has {facts.kv_tokens} KV tokens"
        )
    sizes = np.array([cell.tokens for cell, _ in found], dtype=np.float64)
    nothing, seconds = np.zeros(len(found)), np.array([s for _, s in found])
    model = fit(Cells(nothing, sizes, nothing, nothing, seconds), (1, 4, 1))
    return MeasuredPace(model, max(rates))


def spread_of(rows: Iterable[Row]) -> float:
    """Interquartile range over median of all rounds of a cell."""
    low, middle, high = np.percentile([s for row in rows for s in row.seconds], [25, 50, 75])
    return float((high - low) / middle)


def by_cell(rows: Iterable[Row]) -> dict[Cell, list[Row]]:
    found: dict[Cell, list[Row]] = {}
    for row in rows:
        found.setdefault(row.cell, []).append(row)
    return found


@dataclass
class Sweep:
    """keep: called with every row as soon as it is measured. advance: with every visit made or
    left out. limit_s: of the sweep; over it, only the first pass is brought to its end."""

    rounds: Rounds
    plan: Plan
    pace: MeasuredPace
    keep: Callable[[Row], None]
    advance: Callable[[Cell], None] = lambda cell: None
    limit_s: float = float("inf")
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    rows: list[Row] = field(default_factory=list)

    def run(self) -> None:
        """What `rows` (of an earlier sweep) already has is not measured again."""
        began = self.clock()
        done = Counter(row.cell for row in self.rows)
        for number in range(self.plan.passes):
            for group in self._order(self.plan.groups, number):
                left = tuple(cell for cell in group.cells if done[cell] <= number)
                for cell in set(group.cells) - set(left):
                    self.advance(cell)
                if number and self.clock() - began > self.limit_s:
                    return
                self._visit_all(replace(group, cells=left), number)
        self._visit_unsteady(began)

    def _visit_unsteady(self, began: float) -> None:
        unsteady = {
            cell
            for cell, rows in by_cell(self.rows).items()
            if spread_of(rows) > UNSTEADY and len(rows) <= self.plan.passes
        }
        for group in self._order(self.plan.groups, self.plan.passes):
            if self.clock() - began > self.limit_s:
                return
            cells = tuple(cell for cell in group.cells if cell in unsteady)
            self._visit_all(replace(group, cells=cells), self.plan.passes)

    def _order(self, groups: Sequence[Group], number: int) -> list[Group]:
        rng = random.Random(1000 * self.seed + number)
        mixed = [replace(g, cells=tuple(rng.sample(g.cells, len(g.cells)))) for g in groups]
        rng.shuffle(mixed)
        return mixed

    def _visit_all(self, group: Group, number: int) -> None:
        if not group.cells:
            return
        seed = hash((self.seed, number, group.requests, group.context))
        with self._loaded(group, seed):
            for cell in group.cells:
                visit = self._visit(group, cell, seed)
                row = Row(cell, visit.context, visit.seconds)
                self.rows.append(row)
                self.keep(row)
                self.advance(cell)

    @contextmanager
    def _loaded(self, group: Group, seed: int) -> Iterator[None]:
        try:
            self._load(group, seed)
            yield
        except BaseException:
            with suppress(ProfileError):  # a second one would hide what went wrong
                self.rounds.unload()
            raise
        self.rounds.unload()

    def _visit(self, group: Group, cell: Cell, seed: int) -> Visit:
        for attempt in range(LOADS_A_VISIT):
            try:
                return self.rounds.visit(cell, self.plan.rounds, self._expected(cell))
            except Drained:
                self.rounds.unload()
                self._load(group, seed + attempt + 1)
        raise ProfileError(
            f"R {cell.requests}, tokens {cell.tokens}, depth {cell.depth}, context {cell.context}: "
            f"{LOADS_A_VISIT} times the requests ended within {self.plan.rounds} rounds; there is "
            "no KV room for longer ones"
        )

    def _load(self, group: Group, seed: int) -> None:
        length = new_tokens(self.rounds.facts, group, self.plan.rounds)
        self.rounds.load(group.requests, group.context, length, seed)

    def _expected(self, cell: Cell) -> float:
        seen = [s for row in self.rows if row.cell == cell for s in row.seconds]
        return float(np.median(seen)) if seen else self.pace.round_s(cell)
