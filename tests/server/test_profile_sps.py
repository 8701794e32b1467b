"""The profiler on a real server with the tiny target: a small sweep, and what is refused.

Times of a busy machine are not compared closely; what was verified is exact.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cost_tables import load_table, profile_sps
from cost_tables.measure import Cell
from cost_tables.profiling.cell_file import read_cells
from cost_tables.profiling.client import Client
from cost_tables.profiling.facts import budget_of
from cost_tables.profiling.live import LiveRounds
from servers import assert_no_leak, info, serve, speculative
from trained import ARGS, DRAFT, TARGET, budget, mode

pytestmark = [pytest.mark.server, pytest.mark.alone]

SWEEP = ["--minutes", "0.1", "--requests", "1,16", "--contexts", "32,256", "--validate"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    args = [*ARGS, *speculative(DRAFT), *mode("compact"), *budget("profile")]
    with serve(TARGET, args, log) as server:
        yield server


@pytest.fixture(scope="module")
def table(server, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("table") / "t.json"
    assert profile_sps.main(["--url", server.url, "-o", str(out), *SWEEP]) == 0
    assert_no_leak(server)
    return out


@pytest.mark.parametrize(
    "cell", [Cell(4, 4, 0, 32), Cell(4, 8, 7, 32), Cell(4, 8, 1, 32), Cell(4, 32, 7, 32)], ids=str
)
def test_what_is_verified_is_what_was_forced(server, cell: Cell) -> None:
    """Read from the server's own records, not by the profiler's check."""
    rounds = LiveRounds(Client(server.url))
    facts = rounds.facts
    cell = Cell(4, facts.tier(cell.tokens) if cell.depth else 4, cell.depth, cell.context)
    rounds.load(4, 32, 400, seed=0)
    try:
        rounds.visit(cell, 4, 0.02)
        seen = info(server)
    finally:
        rounds.unload()
    forced = [i for i, depth in enumerate(seen["depths"]) if depth == cell.depth]
    last = forced[-3:]
    assert len(last) == 3
    for i in last:
        assert sum(seen["windows_of_rounds"][i]) == 4 + budget_of(cell)
        assert max(seen["windows_of_rounds"][i]) <= cell.depth + 1
        assert (seen["budgets"][i], seen["tokens"][i]) == (budget_of(cell), cell.tokens)


def test_a_round_of_whole_blocks_takes_longer_than_one_without_a_draft(server) -> None:
    """What more verify tokens alone cost is lost in the noise of so small a target. Least times, of
    rounds in turns: others may use the machine."""
    whole, plain = Cell(16, 128, 7, 32), Cell(16, 16, 0, 32)
    rounds = LiveRounds(Client(server.url))
    rounds.load(16, 32, 800, seed=0)
    seconds: dict[Cell, list[float]] = {whole: [], plain: []}
    try:
        for _ in range(4):
            for cell, timed in seconds.items():
                timed += rounds.visit(cell, 4, 0.01).seconds
    finally:
        rounds.unload()
    assert min(seconds[whole]) > 1.2 * min(seconds[plain]), seconds


def test_a_sweep_makes_a_table(table: Path) -> None:
    _, rows = read_cells(table.with_suffix(".csv"))
    assert {Cell(16, 128, 7, 32), Cell(16, 16, 0, 32)} <= {row.cell for row in rows}
    made = load_table(table)
    assert made.cost.plain is not None
    assert made.fingerprint is not None and made.fingerprint.gamma == 7
    assert table.with_suffix(".png").stat().st_size > 10_000


def test_its_choices_were_judged_by_rounds_of_this_server(table: Path) -> None:
    """How good they are is nothing to rely on with rounds of some milliseconds."""
    report = load_table(table).report
    sizes = {rise["requests"]: rise["tokens"] for rise in report["step_time_over_tokens"]}
    assert len(sizes[16]) >= 3 and sizes[16] == sorted(sizes[16])
    found = report["validation"]
    timed = {(r["requests"], r["depth"], r["tokens"]) for r in found["rounds"]}
    assert {(16, 0, 16), (16, 7, 128)} <= timed
    judged = [cell for cell in found["cells"] if cell["requests"] == 16]
    assert [cell["workload"] for cell in judged] == ["low", "middle", "high", "mixed"]
    for cell in judged:
        chosen, best = cell["by_table"], cell["best"]
        for each in (chosen, best):
            assert (16, each["depth"], each["tokens"]) in timed and each["tokens_per_s"] > 0
        same = (chosen["depth"], chosen["tokens"]) == (best["depth"], best["tokens"])
        assert not same or cell["regrets"] == [0.0]
        assert cell["regret"] < 1


def test_an_argument_that_sglang_does_not_know_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cost_tables.profile_sps", "-o", str(tmp_path / "t.json")]
    args = ["--model-path", str(TARGET), *speculative(DRAFT), "--no-such-flag", "1"]
    done = subprocess.run([*command, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert line.startswith("profile-sps: error: the server did not start: ")
    assert "--no-such-flag" in line
