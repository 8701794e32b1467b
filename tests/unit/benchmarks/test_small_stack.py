"""Packed windows in the tiers of a pool: what tests/gpu replays from graphs, here without any."""

from __future__ import annotations

import json

import pytest
import torch

from cuda_graph import TierGrid
from small_stack import Sizes, SmallStack, alone, batch, make_pool, replay_ms, windows_of

CPU = torch.device("cpu")
SIZES = Sizes(hidden=32, intermediate=64, heads=2, layers=2, dtype=torch.float32)
GRID = TierGrid.of([3, 8, 17, 40], max_requests=5, gamma=7)


@pytest.mark.parametrize(
    ("tokens", "requests"), [(1, 1), (3, 3), (3, 1), (7, 2), (9, 5), (17, 3), (18, 5), (40, 5)]
)
def test_a_replay_computes_what_every_request_alone_does(tokens: int, requests: int) -> None:
    stack = SmallStack(SIZES, CPU)
    pool = make_pool(stack, SIZES, GRID, CPU)
    windows = windows_of(tokens, requests, 8, seed=tokens)
    inputs = batch(windows, SIZES, CPU)
    tier = GRID.fit(tokens, requests)
    replayed = pool.replay(tier.tokens, inputs)
    assert len(replayed) == tier.tokens
    torch.testing.assert_close(replayed[:tokens], alone(stack, windows, inputs))


def test_rows_of_another_request_would_show() -> None:
    """The check above can fail: one row in another request's window changes its result."""
    stack = SmallStack(SIZES, CPU)
    windows = windows_of(9, 2, 8, seed=0)
    inputs = batch(windows, SIZES, CPU)
    inputs["request"][int(windows[0])] = 0
    pool = make_pool(stack, SIZES, GRID, CPU)
    mixed = pool.replay(17, inputs)[:9]
    assert not torch.allclose(mixed, alone(stack, windows, inputs), atol=1e-3)


def test_times_of_replays_are_reported(record_property) -> None:
    pool = make_pool(SmallStack(SIZES, CPU), SIZES, GRID, CPU)
    inputs = batch(windows_of(3, 2, 8, seed=0), SIZES, CPU)
    times = {tier.tokens: replay_ms(pool, tier.tokens, inputs, passes=3) for tier in GRID.tiers}
    assert min(times.values()) > 0
    record_property("replay_ms_eager", json.dumps(times))
