"""Which rounds are timed for a table, and that the timing finds what they cost."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from cost_tables import measure as module
from cost_tables.measure import Cell, Measured, measure, plan_cells
from sglang_dspark.schedule.grid import make_grid

GRIDS = [
    # (tiers, most requests, gamma)
    (12, 32, 7),
    (12, 1, 1),
    (1, 1, 7),
    (4, 5, 3),
    (1, 48, 7),
    ((3, 20, 64), 8, 7),
]


def cells_of(
    tiers: int | tuple[int, ...], most: int, gamma: int, long_context: int = 1000
) -> tuple[list[int], list[Cell]]:
    tokens = [tier.tokens for tier in make_grid(tiers, most, gamma).tiers]
    return tokens, plan_cells(tokens, gamma, most, 100, long_context)


@pytest.mark.parametrize(("tiers", "most", "gamma"), GRIDS, ids=str)
def test_cells_are_rounds_that_the_server_can_run(
    tiers: int | tuple[int, ...], most: int, gamma: int
) -> None:
    grid = make_grid(tiers, most, gamma)
    tokens, cells = cells_of(tiers, most, gamma)
    assert len(cells) == len(set(cells))
    for cell in cells:
        assert 1 <= cell.requests <= most and cell.context in (100, 1000)
        assert 0 <= cell.depth <= gamma
        assert grid.fit(cell.tokens, cell.requests).tokens == cell.tokens
        if not cell.depth:  # it may be padded, but by no more than a real round is
            assert grid.fit(cell.requests, cell.requests).tokens == cell.tokens
    assert {cell.tokens for cell in cells if cell.depth} == set(tokens)


@pytest.mark.parametrize(("tiers", "most", "gamma"), GRIDS, ids=str)
def test_each_tier_is_timed_with_few_and_with_many_requests(
    tiers: int | tuple[int, ...], most: int, gamma: int
) -> None:
    tokens, cells = cells_of(tiers, most, gamma)
    for tier in tokens:
        drafted = [cell for cell in cells if cell.tokens == tier and cell.depth]
        deep = {cell.requests for cell in drafted if cell.depth == gamma}
        assert min(-(-tier // (gamma + 1)), most) in deep
        assert min(tier, most) in {cell.requests for cell in drafted}
    plain = {cell.requests for cell in cells if not cell.depth}
    assert {1, -(-most // 4), most} <= plain


@pytest.mark.parametrize(("tiers", "most", "gamma"), GRIDS, ids=str)
def test_batches_of_every_size_are_drafted_deeply_and_shallowly(
    tiers: int | tuple[int, ...], most: int, gamma: int
) -> None:
    """Else nothing tells what the draft costs from what the requests cost."""
    _, cells = cells_of(tiers, most, gamma)
    for requests in (1, -(-most // 4), most):
        assert {1, gamma} <= {cell.depth for cell in cells if cell.requests == requests}


def test_a_tier_above_the_largest_batch_is_timed_with_that_batch() -> None:
    """Tier lists may end above what the batch needs: 8 requests never fill 128 tokens."""
    _, cells = cells_of((8, 128), 8, 7)
    assert {cell.requests for cell in cells if cell.tokens == 128 and cell.depth == 7} >= {8}
    assert max(cell.requests for cell in cells) == 8


def test_without_room_there_is_one_context() -> None:
    _, cells = cells_of(6, 8, 3, long_context=100)
    assert {cell.context for cell in cells} == {100}
    _, cells = cells_of(6, 8, 3)
    assert {(cell.context, cell.depth > 0) for cell in cells} == {
        (context, drafts) for context in (100, 1000) for drafts in (False, True)
    }


# --- timing --------------------------------------------------------------------------------------


def cost_of(cell: Cell) -> float:
    """1 to 6 ms: linear in tokens and in drafted tokens."""
    draft = 0.0004 + 0.00002 * cell.requests * cell.depth
    return 0.0005 + 0.00015 * cell.tokens + (draft if cell.depth else 0.0)


def found_by(made: Measured, cell: Cell) -> float:
    """Seconds of a round in the table."""
    model = made.drafted if cell.depth else made.plain
    size, context = np.array([float(cell.tokens)]), float(cell.requests * cell.context)
    return float(model.seconds(cell.requests, size, context, cell.requests * cell.depth)[0])


def test_sleeps_are_found_in_their_order() -> None:
    """In real time, so only what a busy machine does not turn over."""
    _, cells = cells_of((4, 16, 32), 4, 7, long_context=100)
    made = measure(cells, lambda cell: time.sleep(cost_of(cell)), lambda: None, 2.0, passes=6)
    small, large = (found_by(made, Cell(4, tokens, 7, 100)) for tokens in (4, 32))
    assert large > 0.7 * cost_of(Cell(4, 32, 7, 100)) and large > 1.3 * small
    assert made.cells == len(cells) and made.cost.plain is made.plain


class Clock:
    """Time that passes only while a round runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.queued = 0.0, 0.0
        self.runs: list[Cell] = []
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def run(self, cell: Cell) -> None:
        """As on a device, a round is only queued; a first run is slow."""
        self.queued += cost_of(cell) * (1 if cell in self.runs else 100)
        self.runs.append(cell)

    def synchronize(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0


def test_a_linear_cost_is_found_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    _, cells = cells_of(12, 32, 7)
    made = measure(cells, clock.run, clock.synchronize, 1e9)
    for cell in cells:
        assert found_by(made, cell) == pytest.approx(cost_of(cell), rel=1e-3)
    assert made.median_error < 0.01
    assert len(clock.runs) == 6 * len(cells) and set(clock.runs) == set(cells)


def test_a_linear_cost_is_found_between_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the schedule asks for are mostly other rounds than those that were timed."""
    clock = Clock(monkeypatch)
    tokens, cells = cells_of(12, 32, 7)
    made = measure(cells, clock.run, clock.synchronize, 1e9)
    for requests in range(1, 33):
        for depth in range(1, 8):
            for size in tokens:
                if requests <= size <= requests * (depth + 1):
                    cell = Cell(requests, size, depth, 100)
                    assert found_by(made, cell) == pytest.approx(cost_of(cell), rel=1e-3)


def test_every_cell_is_timed_once_however_little_time_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    _, cells = cells_of(4, 5, 3)
    measure(cells, clock.run, clock.synchronize, limit_s=0.0)
    assert len(clock.runs) == 2 * len(cells)  # the first pass is not timed


def test_one_disturbed_pass_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    _, cells = cells_of(4, 5, 3)

    def run(cell: Cell) -> None:
        clock.run(cell)
        clock.queued *= 50 if len(clock.runs) // len(cells) == 2 else 1

    made = measure(cells, run, clock.synchronize, 1e9)
    cell = Cell(5, 20, 3, 100)
    assert found_by(made, cell) == pytest.approx(cost_of(cell), rel=1e-3)


@pytest.mark.parametrize("long_context", [100, 1000])
@pytest.mark.parametrize(("most", "gamma"), [(1, 1), (1, 7), (2, 1)])
@pytest.mark.parametrize("tiers", [1, 12])
def test_the_smallest_servers_get_a_table(
    monkeypatch: pytest.MonkeyPatch, tiers: int, most: int, gamma: int, long_context: int
) -> None:
    clock = Clock(monkeypatch)
    _, cells = cells_of(tiers, most, gamma, long_context)
    made = measure(cells, clock.run, clock.synchronize, 1e9)
    for cell in (Cell(most, most * (gamma + 1), gamma, 100), cells[0]):
        assert found_by(made, cell) == pytest.approx(cost_of(cell), rel=1e-3)
    assert cells[0].depth == 0
