"""Timing the rounds of a server: what counts, what is checked, and what a sweep makes of it.

The server is made up (profiled_fake), so it is known what every round takes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cost_tables.measure import Cell
from cost_tables.profiling.cell_file import Row
from cost_tables.profiling.errors import Drained, ProfileError
from cost_tables.profiling.facts import read_facts
from cost_tables.profiling.live import LiveRounds
from cost_tables.profiling.plan import PASSES, Group, Plan
from cost_tables.profiling.sweep import MeasuredPace, Sweep, by_cell, probe, spread_of
from profiled_fake import GAMMA, FakeServer, cost

CELL = Cell(requests=4, tokens=16, depth=7, context=100)
PLAIN = Cell(requests=4, tokens=4, depth=0, context=100)


def live(server: FakeServer) -> LiveRounds:
    return LiveRounds(server, server.clock, server.sleep)


def loaded(server: FakeServer, new_tokens: int = 1000) -> LiveRounds:
    rounds = live(server)
    rounds.load(4, 100, new_tokens, seed=0)
    return rounds


# --- a visit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [CELL, PLAIN, Cell(4, 8, 1, 100), Cell(4, 32, 7, 100)])
def test_a_visit_times_rounds_of_the_cell_and_of_no_other(cell: Cell) -> None:
    server = FakeServer()
    rounds = loaded(server)
    rounds.visit(Cell(4, 24, 7, 100), 5, 0.01)  # so that something else was told before
    visit = rounds.visit(cell, 10, 0.01)
    assert len(visit.seconds) >= 10
    for seconds in visit.seconds:
        assert seconds == pytest.approx(cost(4, cell.tokens, cell.depth, visit.context), rel=0.01)
    # The context is that of the visit's middle, within the rounds between two readings.
    assert visit.context == pytest.approx(400 + sum(server.lengths), abs=4 * 20)


class Lagging(FakeServer):
    """As under overlap: what a round takes shows in the record of the one after it."""

    before = 0.0

    def run_round(self) -> None:
        super().run_round()
        times = self.record["measured_ms"]
        times[-1], self.before = self.before, times[-1]


def test_rounds_that_still_show_what_was_before_do_not_count() -> None:
    rounds = loaded(Lagging())
    rounds.visit(PLAIN, 5, 0.01)
    visit = rounds.visit(CELL, 5, 0.01)
    assert min(visit.seconds) == pytest.approx(cost(4, 16, 7, visit.context), rel=0.01)


def test_a_wrong_guess_of_a_rounds_time_only_means_more_asking() -> None:
    for guess in (1e-5, 1.0):
        visit = loaded(FakeServer()).visit(CELL, 10, guess)
        assert len(visit.seconds) >= 10


def test_requests_that_end_are_noticed() -> None:
    rounds = loaded(FakeServer(), new_tokens=40)
    rounds.visit(CELL, 4, 0.01)
    with pytest.raises(Drained):
        for _ in range(10):
            rounds.visit(CELL, 4, 0.01)


def test_rounds_of_a_batch_that_has_become_smaller_are_not_waited_for() -> None:
    server = FakeServer()
    rounds = loaded(server)
    server.lengths.pop()
    server.prompts.pop()
    with pytest.raises(Drained):
        rounds.visit(CELL, 4, 0.01)
    assert server.now < 5


class Deaf(FakeServer):
    """Runs full windows, whatever it is told."""

    def decision(self) -> tuple[int, int]:
        return GAMMA, GAMMA * len(self.lengths)


class Short(FakeServer):
    """Says that it does as told, and verifies a token less."""

    def run_round(self) -> None:
        super().run_round()
        self.record["windows_of_rounds"][-1][0] -= 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Deaf, "was told depth 7 and budget 12, and runs depth 7 and budget 28"),
        (Short, "a round verified 15 tokens in a forward of 16; forced were 16 in 16"),
    ],
)
def test_a_budget_that_is_not_honoured_is_an_error_with_the_cells_name(
    kind: type[FakeServer], words: str
) -> None:
    with pytest.raises(ProfileError, match=words) as error:
        loaded(kind()).visit(CELL, 10, 0.01)
    assert "cell of 4 requests, 16 tokens, depth 7, context 100" in str(error.value)


def test_requests_of_others_are_an_error() -> None:
    server = FakeServer()
    rounds = loaded(server)
    server.lengths.append(0)
    with pytest.raises(ProfileError, match="serves others too: a round had 5 requests"):
        rounds.visit(CELL, 10, 0.01)


def test_unload_waits_until_the_server_is_idle() -> None:
    server = FakeServer()
    rounds = loaded(server)
    assert len(server.lengths) == 4
    rounds.unload()
    assert not server.lengths
    server.lengths = [0]  # somebody else's, which abort does not reach
    server.post = lambda path, payload, timeout_s=0.0: refuse(path)  # type: ignore[method-assign]
    with pytest.raises(ProfileError, match="busy"):
        rounds.unload()


def refuse(path: str) -> Any:
    raise ProfileError("busy")


# --- which servers are refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plugin": "other"}, "does not serve a draft with sglang-dspark"),
        ({"mode": "static"}, "runs in verify mode static; must be compact"),
        ({"mode": "cap-accept"}, "runs in verify mode cap-accept; must be compact"),
    ],
)
def test_a_server_that_cannot_be_profiled_is_refused(changes: dict[str, Any], words: str) -> None:
    server = FakeServer()
    server.changes = changes
    with pytest.raises(ProfileError, match=words):
        live(server)


def test_a_server_with_another_budget_is_refused() -> None:
    server = FakeServer()
    info = server.get("/server_info")
    record = info["internal_states"][0]["dspark_info_record"]
    del record["profile"]
    record["schedule"]["budget"] = "auto, from confidences two rounds old"
    with pytest.raises(ProfileError, match=r"is not in profiling mode: .* budget is auto;"):
        read_facts(info, "http://x")


@pytest.mark.parametrize("info", ["<html>", {}, {"internal_states": [{}]}, []])
def test_an_answer_of_something_else_is_refused(info: Any) -> None:
    with pytest.raises(ProfileError, match="does not serve a draft with sglang-dspark"):
        read_facts(info, "http://x")


# --- a sweep --------------------------------------------------------------------------------------

CELLS = (PLAIN, CELL, Cell(4, 32, 7, 100), Cell(4, 8, 1, 100))
GROUPS = (Group(4, 100, CELLS), Group(1, 100, (Cell(1, 8, 7, 100), Cell(1, 1, 0, 100))))


def sweep(server: FakeServer, **options: Any) -> Sweep:
    rounds = live(server)
    pace = probe(rounds, (1, 4), 100)
    plan = Plan(GROUPS, rounds=6, seconds=0.0)
    kept: list[Row] = []
    return Sweep(rounds, plan, pace, kept.append, clock=server.clock, **options)


def test_every_cell_is_visited_in_every_pass_and_the_server_left_idle() -> None:
    server = FakeServer()
    made = sweep(server)
    made.run()
    visits = Counter(row.cell for row in made.rows)
    assert visits == {cell: PASSES for group in GROUPS for cell in group.cells}
    assert not server.lengths
    for row in made.rows:
        expected = cost(row.cell.requests, row.cell.tokens, row.cell.depth, row.context)
        assert row.seconds[0] == pytest.approx(expected, rel=0.01)


def test_the_order_is_random_differs_between_passes_and_is_the_seeds() -> None:
    def order(seed: int) -> list[Cell]:
        made = sweep(FakeServer(), seed=seed)
        made.run()
        return [row.cell for row in made.rows]

    assert order(1) == order(1) != order(2)
    assert any(order(seed)[:6] != order(seed)[6:] for seed in (1, 2))
    assert {order(seed)[0].requests for seed in range(6)} == {1, 4}, "loads are mixed too"


def test_what_an_earlier_sweep_has_is_not_measured_again() -> None:
    server = FakeServer()
    rows = [Row(CELL, 400.0, (0.01,) * 6)] * 2 + [Row(PLAIN, 400.0, (0.01,) * 6)]
    made = sweep(server, rows=list(rows))
    made.run()
    visits = Counter(row.cell for row in made.rows)
    assert visits == {cell: PASSES for group in GROUPS for cell in group.cells}
    assert made.rows[:3] == rows


def test_over_its_time_a_sweep_ends_after_the_first_pass() -> None:
    made = sweep(FakeServer(), limit_s=0.0)
    made.run()
    assert Counter(row.cell for row in made.rows) == {c: 1 for g in GROUPS for c in g.cells}


def test_an_unsteady_cell_is_visited_once_more() -> None:
    server = FakeServer()
    calls = Counter[Cell]()

    def jumpy(requests: int, tokens: int, depth: int, context: float) -> float:
        calls[requests, tokens] += 1  # type: ignore[index]
        slow = (requests, tokens) == (4, 16) and calls[requests, tokens] % 2  # type: ignore[index]
        return cost(requests, tokens, depth, context) * (2 if slow else 1)

    made = sweep(server)
    server.round_time = jumpy
    made.run()
    visits = Counter(row.cell for row in made.rows)
    assert visits[CELL] == PASSES + 1
    assert {visits[cell] for group in GROUPS for cell in group.cells if cell != CELL} == {PASSES}
    assert spread_of(by_cell(made.rows)[CELL]) > 0.5


def test_requests_that_end_are_replaced() -> None:
    server = FakeServer()
    made = sweep(server)
    made.plan = Plan((Group(4, 100, CELLS),), rounds=6, seconds=0.0)
    server.new_tokens_limit = 30
    before = server.loads
    made.run()
    assert server.loads - before > PASSES
    assert Counter(row.cell for row in made.rows) == dict.fromkeys(CELLS, PASSES)


def test_requests_that_always_end_too_soon_are_an_error_with_the_cells_name() -> None:
    server = FakeServer()
    made = sweep(server)
    server.new_tokens_limit = 5
    with pytest.raises(ProfileError, match=r"R \d, tokens .* 3 times the requests ended within 6"):
        made.run()
    assert not server.lengths


def test_after_an_error_the_requests_are_ended_and_the_error_is_what_is_said() -> None:
    server = FakeServer()
    made = sweep(server)
    server.changes = {"windows_of_rounds": [[1] * 40]}
    with pytest.raises((ProfileError, ValueError)):
        made.run()
    assert not server.lengths


def test_a_probe_finds_about_what_rounds_take() -> None:
    server = FakeServer()
    pace: MeasuredPace = probe(live(server), (1, 8), 100)
    for cell in (Cell(1, 1, 0, 100), Cell(8, 64, 7, 100), Cell(4, 16, 7, 100)):
        expected = cost(cell.requests, cell.tokens, cell.depth, 400)
        assert expected / 2 < pace.round_s(cell) < 2 * expected
    assert not server.lengths
