"""Whether forcing a budget does anything is seen in the times of the rounds alone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from cost_tables import load_table
from cost_tables.measure import Cell
from cost_tables.profiling.effect import find_rises, rise_of, without_effect
from cost_tables.profiling.fitting import CellTime
from cost_tables.profiling.live import LiveRounds
from cost_tables.profiling.run import Options, profile
from cost_tables.profiling.show import show
from profiled_fake import FakeServer, RoundTime, cost


def times(seconds: dict[int, float], requests: int = 8, depth: int = 7) -> list[CellTime]:
    """seconds: by tokens."""
    return [
        CellTime(Cell(requests, tokens, depth, 128), 0.0, s, 9) for tokens, s in seconds.items()
    ]


def test_slope_and_rank_correlation_are_those_of_the_times() -> None:
    (rise,) = find_rises(times({8: 0.010, 24: 0.014, 16: 0.012}))
    assert rise.tokens == (8, 16, 24)
    assert rise.slope == pytest.approx(0.00025) and rise.rank_correlation == pytest.approx(1.0)
    (rise,) = find_rises(times({8: 0.010, 16: 0.012, 24: 0.011}))
    assert rise.rank_correlation == pytest.approx(0.5) and rise.rises
    assert "R 8, depth 7: 10.0 ms with 8 verify tokens, 11.0 ms with 24" in rise.text


def test_only_cells_that_differ_in_nothing_else_are_compared() -> None:
    deep, shallow = times({8: 0.01, 16: 0.01}), times({8: 0.001, 16: 0.002, 32: 0.003}, depth=2)
    plain = times({8: 9.0}, depth=0)
    (rise,) = find_rises([*deep, *shallow, *plain])
    assert (rise.depth, rise.seconds) == (2, (0.001, 0.002, 0.003))
    assert find_rises(deep) == [], "two sizes are no trend"


FLAT, FALLING = {8: 0.01, 16: 0.01, 64: 0.01}, {8: 0.010, 16: 0.009, 64: 0.0085}
NOISE = {8: 0.01, 16: 0.01001, 64: 0.01002}  # rises, by nothing
RISING = {8: 0.01, 16: 0.012, 64: 0.02}


@pytest.mark.parametrize("seconds", [FLAT, FALLING, NOISE], ids=["flat", "falling", "noise"])
def test_large_batches_in_which_tokens_cost_nothing_are_named(seconds: dict[int, float]) -> None:
    rises = find_rises([*times(RISING, 1), *times(RISING, 4), *times(seconds, 8)])
    assert [rise.requests for rise in without_effect(rises)] == [8]


def test_small_batches_may_be_free() -> None:
    rises = find_rises([*times(FLAT, 1), *times(RISING, 4), *times(RISING, 8)])
    assert without_effect(rises) == [] == without_effect([])


def test_a_records_text_is_that_of_the_rise() -> None:
    (rise,) = find_rises(times(RISING))
    assert rise_of({**rise.record(), "tokens": list(rise.tokens)}) == rise


def whole_block(requests: int, tokens: int, depth: int, context: float) -> float:
    """Verifies all of it, and records what it was told."""
    return cost(requests, 8 * requests, depth, context)


@pytest.mark.parametrize(("round_time", "loud"), [(cost, False), (whole_block, True)])
def test_a_profile_prints_and_keeps_it(tmp_path: Path, round_time: RoundTime, loud: bool) -> None:
    server, text = FakeServer(round_time), io.StringIO()
    rounds = LiveRounds(server, server.clock, server.sleep)
    wanted = Options(tmp_path / "t.json", 60.0, None, (128, 1024))
    assert profile(rounds, wanted, Console(file=text, width=200))
    assert ("WARNING: forced budgets seem to have no effect" in text.getvalue()) == loud
    kept = load_table(tmp_path / "t.json").report["step_time_over_tokens"]
    found = {rise["requests"]: rise for rise in kept}
    assert 8 in found and len(found[8]["tokens"]) >= 3
    if not loud:
        assert found[8]["slope"] == pytest.approx(0.0002, rel=0.05)
    text = io.StringIO()
    show(tmp_path / "t.json", Console(file=text, width=200))
    assert f"{1e6 * found[8]['slope']:+.1f} µs a token" in text.getvalue()
