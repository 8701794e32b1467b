"""Which rounds the profiler times, and how a server is told to run them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_tables import Fingerprint
from cost_tables.measure import Cell
from cost_tables.profiling import forcing
from cost_tables.profiling.errors import ProfileError
from cost_tables.profiling.facts import Facts, budget_of
from cost_tables.profiling.launch import launch_arguments
from cost_tables.profiling.plan import (
    MOST_ROUNDS,
    Plan,
    doubling,
    make_plan,
    new_tokens,
    room,
    spread,
)

FACTS = Facts(
    gamma=7,
    fingerprint=Fingerprint("cpu", "hidden 64", "float32", 1, 7, "HostAttention"),
    tiers=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    max_requests=32,
    pads_plain=False,
    vocab_size=100,
    max_context=4096,
    kv_tokens=65536,
)


class Pace:
    prefill_tokens_per_s = 10_000.0

    def round_s(self, cell: Cell) -> float:
        return 0.01 + 0.0005 * cell.tokens


def plan(seconds: float, facts: Facts = FACTS) -> Plan:
    return make_plan(facts, Pace(), seconds)


# --- telling a server -----------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 5, 7, 15])
@pytest.mark.parametrize("requests", [1, 3, 48, 256])
def test_every_depth_and_budget_is_read_back_exactly(requests: int, gamma: int) -> None:
    for depth in range(gamma + 1):
        for budget in range(0, requests * depth + 1, 1 + requests // 16):
            told = forcing.encode(depth, budget, requests, gamma)
            assert 0 < told < 1, "all that SGLang takes"
            assert forcing.decode(told, requests, gamma) == (depth, budget)


def test_whatever_is_told_to_any_batch_is_a_legal_round() -> None:
    for i in range(1, 1001):
        for requests in (1, 2, 31):
            depth, budget = forcing.decode(i / 1000, requests, 7)
            assert 0 <= depth <= 7 and 0 <= budget <= requests * depth


def test_an_impossible_round_cannot_be_told() -> None:
    for depth, budget in ((8, 0), (-1, 0), (2, 9), (0, 1)):
        with pytest.raises(ValueError, match="must be 0 to"):
            forcing.encode(depth, budget, 4, 7)


# --- plans ----------------------------------------------------------------------------------------


def test_any_head_of_a_spread_covers_the_range() -> None:
    assert spread([1, 2, 3, 4, 5]) == [5, 1, 3, 2, 4]
    assert spread([3]) == [3] and spread([]) == []
    assert sorted(spread(list(range(12)))) == list(range(12))
    assert doubling(1) == [1] and doubling(48) == [1, 2, 4, 8, 16, 32, 48]


@pytest.mark.parametrize("seconds", [0.0, 30.0, 600.0])
def test_cells_are_rounds_that_the_server_can_run(seconds: float) -> None:
    cells = plan(seconds).cells
    assert len(cells) == len(set(cells))
    for cell in cells:
        assert 1 <= cell.requests <= 32 and 0 <= cell.depth <= 7
        budget = budget_of(cell)
        assert 0 <= budget <= cell.requests * cell.depth
        if cell.depth:
            assert FACTS.tier(cell.requests + budget) == cell.tokens
        else:
            assert cell.tokens == cell.requests


def test_however_little_time_there_is_every_variable_moves_alone() -> None:
    cells = plan(0.0).cells

    def others(cell: Cell, but: str) -> Cell:
        return replace(cell, **{but: 0})

    for name in ("requests", "tokens", "depth", "context"):
        groups: dict[Cell, set[int]] = {}
        for cell in cells:
            groups.setdefault(others(cell, name), set()).add(getattr(cell, name))
        assert max(map(len, groups.values())) > 1 or name == "requests", name
    assert len({cell.requests for cell in cells}) >= 3
    assert {cell.depth > 0 for cell in cells} == {True, False}


def test_more_time_means_more_cells_and_then_more_rounds() -> None:
    plans = [plan(seconds) for seconds in (10, 60, 300, 3600)]
    counts = [len(p.cells) for p in plans]
    assert counts == sorted(counts) and counts[0] < counts[2]
    assert set(plans[0].cells) <= set(plans[-1].cells)
    assert plans[-1].rounds == MOST_ROUNDS > plans[0].rounds
    for p, seconds in zip(plans[1:3], (60, 300), strict=True):
        assert p.seconds <= seconds


def test_what_has_no_room_is_left_out_and_said() -> None:
    small = replace(FACTS, kv_tokens=8192)
    made = plan(3600, small)
    assert made.left_out and "context 1024: needs" in " ".join(made.left_out)
    for group in made.groups:
        length = new_tokens(small, group, made.rounds)
        assert length >= 1
        assert group.requests * (group.context + length + 8) <= small.kv_tokens
        assert length <= room(small, group.requests, group.context)


def test_a_server_without_room_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"no cell has room: R .* needs .* KV tokens"):
        plan(60, replace(FACTS, kv_tokens=64))


def test_batches_above_the_servers_are_refused() -> None:
    with pytest.raises(ProfileError, match="--requests has 64; must be 1 to 32"):
        make_plan(FACTS, Pace(), 60, requests=(1, 64))


# --- starting a server ----------------------------------------------------------------------------

GOOD = ["--model-path", "m", "--speculative-algorithm", "DSPARK"]
GOOD += ["--speculative-draft-model-path", "d"]


def test_the_profiling_flags_are_added_once() -> None:
    made = launch_arguments([*GOOD, "--skip-tokenizer-init"])
    assert made[: len(GOOD)] == GOOD and made.count("--skip-tokenizer-init") == 1
    assert made[-2:] == ["--speculative-verify-budget", "profile"]
    assert launch_arguments([*GOOD, "--speculative-verify-mode=compact"]).count("compact") == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (GOOD[2:], "--model-path is missing"),
        (GOOD[:2], "--speculative-algorithm is missing"),
        (GOOD[:4], "--speculative-draft-model-path is missing"),
        ([*GOOD, "--speculative-verify-mode", "static"], "--speculative-verify-mode is static"),
        ([*GOOD, "--speculative-verify-budget", "0.5"], "--speculative-verify-budget is set by"),
        ([*GOOD, "--port=1"], "--port is chosen by the profiler"),
    ],
)
def test_arguments_that_cannot_be_profiled_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        launch_arguments(arguments)
