"""Judging what a table chooses by fresh rounds: the regret is exact where the server is made up."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cost_tables import CostModel, FlatCost, RoundCost, load_table
from cost_tables.measure import Cell
from cost_tables.model import Floats
from cost_tables.profiling.facts import budget_of
from cost_tables.profiling.live import LiveRounds
from cost_tables.profiling.plan import FEWEST_ROUNDS, MOST_ROUNDS
from cost_tables.profiling.run import Options, profile
from cost_tables.profiling.search import choice_of_table, committed, rounds_to_choose
from cost_tables.profiling.show import show
from cost_tables.profiling.sweep import MeasuredPace, probe
from cost_tables.profiling.validation import Validation, validate
from cost_tables.profiling.validation_plan import TURNS, plan_validation
from cost_tables.profiling.workloads import WORKLOADS, Workload
from profiled_fake import GAMMA, FakeServer, cost

CONTEXT = 100
COUNTS = (1, 2, 4, 8)
# As the made-up server is: exact but for the context, which hardly matters there.
TRUE = RoundCost(
    CostModel(0.003, (0.0, 8.0), (0.0, 0.0024), (0.0, 64.0), (0.0, 0.0128), 2e-8,
              (0.0, 56.0), (0.0, 0.00056)),
    CostModel(0.002, (0.0, 8.0), (0.0, 0.0024), (0.0, 8.0), (0.0, 0.0016), 2e-8),
)  # fmt: skip
ALL = RoundCost(FlatCost())  # tokens are free: whole blocks are best


def live(server: FakeServer) -> LiveRounds:
    return LiveRounds(server, server.clock, server.sleep)


@contextmanager
def silent(title: str, visits: int) -> Iterator[Callable[[Cell], None]]:
    yield lambda cell: None


def judge(table: RoundCost, server: FakeServer | None = None, bar: Any = silent) -> Validation:
    rounds = live(server or FakeServer())
    pace = probe(rounds, COUNTS, CONTEXT)
    plan = plan_validation(rounds.facts, pace, 60.0, COUNTS, CONTEXT)
    return validate(rounds, plan, pace, table, seed=1, bar=bar)


def rate(workload: Workload, cell: Cell) -> float:
    """Tokens a second of the made-up server."""
    survivals = workload.survivals(cell.requests, GAMMA)
    seconds = cost(cell.requests, cell.tokens, cell.depth, cell.requests * CONTEXT)
    return committed(survivals, cell) / seconds


# --- what is judged -------------------------------------------------------------------------------


def test_a_workload_is_the_survivals_that_it_states() -> None:
    steady, mixed = Workload("steady", (0.5,)), Workload("mixed", (0.5, 0.25))
    assert steady.survivals(2, 3).tolist() == [[0.5, 0.25, 0.125]] * 2
    assert mixed.survivals(3, 2).tolist() == [[0.5, 0.25], [0.25, 0.0625], [0.5, 0.25]]
    assert steady.accept_length(3) == pytest.approx(1.875)
    lengths = [workload.accept_length(7) for workload in WORKLOADS[:3]]
    assert lengths == sorted(lengths) and lengths[0] < 1.7 and lengths[2] > 4.5


def test_a_round_commits_the_greatest_survivals_of_what_it_drafts() -> None:
    survivals = np.array([[0.9, 0.8, 0.1], [0.5, 0.4, 0.3]])
    assert committed(survivals, Cell(2, 2, 0, 0)) == 2
    assert committed(survivals, Cell(2, 4, 3, 0)) == pytest.approx(2 + 0.9 + 0.8)
    # Of one drafted token each, no third can be verified, whatever room the tier has.
    assert committed(survivals, Cell(2, 8, 1, 0)) == pytest.approx(2 + 0.9 + 0.5)


def test_whatever_the_schedules_search_chooses_is_among_the_rounds_that_are_measured() -> None:
    facts = live(FakeServer()).facts
    rng = np.random.default_rng(0)
    for requests, _ in product((1, 3, 8), range(30)):
        at, steep = rng.uniform(0.1, 3, 2) / 64, rng.uniform(0, 3)
        drafted = CostModel(0.01, (1.0,), (0.0,), (0.0, 64.0), (0.0, float(64 * at[0])), 0.0,
                            (0.0, 56.0), (0.0, float(steep)))  # fmt: skip
        plain = FlatCost(float(rng.uniform(0.005, 0.05)))
        survivals = np.sort(rng.random((requests, GAMMA)))[:, ::-1]
        options = rounds_to_choose(facts, requests, CONTEXT)
        for table in (RoundCost(drafted), RoundCost(drafted, plain)):
            chosen = choice_of_table(table, facts, survivals, 100.0, CONTEXT)
            assert chosen in options

            rates = {cell: rate_by_table(table, survivals, cell) for cell in options}
            assert rates[chosen] == pytest.approx(max(rates.values()), rel=1e-6)
    assert len(options) == len(set(options))
    assert all(0 <= budget_of(cell) <= cell.requests * cell.depth for cell in options)


def rate_by_table(table: RoundCost, survivals: Floats, cell: Cell) -> float:
    model = table.drafted if cell.depth else table.plain
    if model is None:
        return 0.0
    tokens, drafted = np.array([float(cell.tokens)]), float(cell.requests * cell.depth)
    seconds = model.seconds(cell.requests, tokens, 100.0, drafted)
    return committed(survivals, cell) / float(seconds[0])


# --- verdicts -------------------------------------------------------------------------------------


def test_a_true_table_has_no_regret() -> None:
    found = judge(TRUE)
    # A batch of one is no mixture.
    assert len(found.verdicts) == len(COUNTS) * len(WORKLOADS) - 1
    assert found.share_within == 1.0
    assert max(verdict.regret for verdict in found.verdicts) < 0.005
    assert found.median_error < 0.01
    chosen = {verdict.contest.by_table.depth for verdict in found.verdicts}
    assert 0 in chosen and max(chosen) > 1, "else there was nothing to choose"


def test_a_table_in_which_tokens_are_free_loses_what_whole_blocks_cost() -> None:
    found = judge(ALL)
    for verdict in found.verdicts:
        contest = verdict.contest
        assert (contest.by_table.depth, contest.by_table.tokens) == (
            GAMMA,
            8 * contest.requests,
        )
        options = rounds_to_choose(live(FakeServer()).facts, contest.requests, CONTEXT)
        best = max(rate(contest.workload, cell) for cell in options)
        expected = 1 - rate(contest.workload, contest.by_table) / best
        assert verdict.regret == pytest.approx(expected, abs=0.01)
        assert verdict.good == (verdict.regret <= 0.03)
    low = [v.regret for v in found.verdicts if v.contest.workload.name == "low"]
    assert max(low) > 0.3 and found.share_within < 0.6


LUCKY = Cell(8, 24, 7, CONTEXT)  # to draft less for the same budget is always better


class Flattered(FakeServer):
    """Rounds of one kind seem twice as fast as they are, until they are looked at once more."""

    flattering = True

    def __init__(self) -> None:
        super().__init__(self.seconds)

    def seconds(self, requests: int, tokens: int, depth: int, context: float) -> float:
        lucky = self.flattering and (requests, tokens, depth) == (8, 24, 7)
        return cost(requests, tokens, depth, context) * (0.5 if lucky else 1.0)

    @contextmanager
    def bar(self, title: str, visits: int) -> Iterator[Callable[[Cell], None]]:
        self.flattering = title != "once more"
        yield lambda cell: None


def test_the_best_by_luck_is_not_believed() -> None:
    server = Flattered()
    found = judge(TRUE, server, server.bar)
    fooled = [v for v in found.verdicts if v.contest.best == LUCKY]
    assert len(fooled) == len(WORKLOADS)
    first = {time.cell: time.seconds for time in found.times}
    for verdict in fooled:
        workload, chosen = verdict.contest.workload, verdict.contest.by_table
        survivals = workload.survivals(8, GAMMA)
        once = 1 - (committed(survivals, chosen) / first[chosen]) / (
            committed(survivals, LUCKY) / first[LUCKY]
        )
        assert once > 0.1
        assert verdict.regret == pytest.approx(
            1 - rate(workload, chosen) / rate(workload, LUCKY), abs=0.01
        )
        assert verdict.regret <= 0.01 and len(verdict.regrets) >= TURNS


def test_a_validation_measures_anew() -> None:
    """On a machine that has become half as fast since its table was made."""
    slow = FakeServer(lambda *round_: 2 * cost(*round_))
    found = judge(TRUE, slow)
    assert found.median_error == pytest.approx(0.5, abs=0.01)
    assert found.share_within == 1.0, "what is best has not changed"


# --- its plan -------------------------------------------------------------------------------------


def test_the_time_decides_how_many_batch_sizes_and_then_how_many_rounds() -> None:
    rounds = live(FakeServer())
    pace: MeasuredPace = probe(rounds, COUNTS, CONTEXT)
    plans = [
        plan_validation(rounds.facts, pace, seconds, COUNTS, CONTEXT)
        for seconds in (0.0, 30.0, 3600.0)
    ]
    sizes = [[group.requests for group in plan.groups] for plan in plans]
    assert sizes[0] == [8] and sizes[2] == list(COUNTS) and 1 in sizes[1]
    assert plans[0].left_out == ("R 1: no time", "R 4: no time", "R 2: no time")
    assert plans[0].rounds == FEWEST_ROUNDS and plans[2].rounds == MOST_ROUNDS
    assert plans[1].seconds <= 30.0
    for plan in plans:
        for group in plan.groups:
            options = rounds_to_choose(rounds.facts, group.requests, CONTEXT)
            assert set(group.cells) == set(options), "every one of them, or none"


# --- in a profile ---------------------------------------------------------------------------------


def options(folder: Path) -> Options:
    return Options(folder / "t.json", 60.0, None, (128, 1024), validate=True)


def run(folder: Path, server: FakeServer, **changes: bool) -> tuple[bool, str]:
    text = io.StringIO()
    where = Console(file=text, width=200)
    done = profile(live(server), replace(options(folder), **changes), where)
    return done, text.getvalue()


def test_a_validated_profile_says_so_in_its_output_its_table_and_a_plot(tmp_path: Path) -> None:
    done, said = run(tmp_path, FakeServer())
    assert done and "within 3% of the best one in 15 of 15 cells (100%)" in said
    assert "high: survivals 0.85 0.72" in said and "mixed: survivals 0.85" in said
    assert (tmp_path / "t.validation.png").stat().st_size > 10_000
    table = load_table(tmp_path / "t.json")
    found = table.report["validation"]
    assert found["share_within"] == 1.0 and found["within"] == 0.03 and len(found["cells"]) == 15
    assert found["workloads"]["low"]["survivals"][0][:2] == pytest.approx([0.4, 0.16])
    measured = {(r["requests"], r["depth"], r["tokens"]) for r in found["rounds"]}
    for cell in found["cells"]:
        for name in ("by_table", "best"):
            each = cell[name]
            assert (each["requests"], each["depth"], each["tokens"]) in measured
    text = io.StringIO()
    show(tmp_path / "t.json", Console(file=text, width=200))
    assert "its choice is within 3% of the best round in 100% of 15 batches" in text.getvalue()


def test_a_dry_run_says_what_the_validation_takes_and_measures_nothing(tmp_path: Path) -> None:
    server = FakeServer()
    done, said = run(tmp_path, server, dry_run=True)
    assert done and server.loads == 2 and list(tmp_path.iterdir()) == []
    assert "validation: R 1, 2, 4, 8, " in said and " minutes, with the sweep " in said


class InterruptedLate(FakeServer):
    """Ctrl-C in the first load after the table has been written."""

    table: Path

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.table.exists():
            self.table = self.table / "never"
            raise KeyboardInterrupt


def test_an_interrupted_validation_leaves_the_table(tmp_path: Path) -> None:
    server = InterruptedLate()
    server.table = tmp_path / "t.json"
    done, said = run(tmp_path, server)
    assert not done and "the table is written, and not validated" in said
    assert not server.lengths, "its requests were ended"
    assert "validation" not in load_table(tmp_path / "t.json").report
    assert json.loads((tmp_path / "t.json").read_text())["report"]["step_time_over_tokens"]
