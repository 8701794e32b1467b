"""Ragged windows in captured graphs: right in every tier, and cheaper than padded full blocks."""

from __future__ import annotations

import json

import pytest
import torch

from cuda_graph import TierGrid
from small_stack import Sizes, SmallStack, alone, batch, make_pool, replay_ms, windows_of

WIDTH, REQUESTS = 8, 64
EXACT = Sizes(hidden=256, intermediate=512, heads=4, layers=2, dtype=torch.float32)
# Large enough that 512 rows cost more than reading the weights does.
LARGE = Sizes(hidden=2048, intermediate=8192, heads=16, layers=4, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def test_a_replay_of_every_tier_computes_what_every_request_alone_does() -> None:
    """Up and down through the tiers, so that each follows a larger one and a smaller one."""
    device = torch.device("cuda")
    stack, grid = SmallStack(EXACT, device), TierGrid.choose(REQUESTS, WIDTH - 1, 12)
    pool = make_pool(stack, EXACT, grid, device)
    for i, tier in enumerate((*grid.tiers, *reversed(grid.tiers))):
        tokens = max(1, tier.tokens - i % 3)
        least = -(-tokens // WIDTH)
        for requests in {least, min(tier.slots, tokens)}:
            windows = windows_of(tokens, requests, WIDTH, seed=tokens)
            inputs = batch(windows, EXACT, device)
            replayed = pool.replay(tier.tokens, inputs)[:tokens].clone()
            torch.testing.assert_close(
                replayed, alone(stack, windows, inputs), atol=1e-4, rtol=1e-4
            )


def test_packed_windows_take_less_time_than_full_blocks(record_property) -> None:
    """64 requests that verify 2 rows each, against the same requests padded to 8 rows each."""
    device = torch.device("cuda")
    grid = TierGrid.choose(REQUESTS, WIDTH - 1, 12)
    pool = make_pool(SmallStack(LARGE, device), LARGE, grid, device)
    windows = windows_of(2 * REQUESTS, REQUESTS, WIDTH, seed=0)
    inputs = batch(windows, LARGE, device)
    packed = grid.fit(2 * REQUESTS, REQUESTS).tokens
    times = {
        tier.tokens: replay_ms(pool, tier.tokens, inputs, passes=50)
        for tier in grid.tiers
        if tier.tokens >= 2 * REQUESTS
    }
    small = batch(windows_of(1, 1, WIDTH, seed=0), LARGE, device)
    times |= {
        tier.tokens: replay_ms(pool, tier.tokens, small, passes=50)
        for tier in grid.tiers
        if tier.tokens < 2 * REQUESTS
    }
    full = grid.tiers[-1].tokens
    record_property("replay_ms", json.dumps(dict(sorted(times.items()))))
    record_property("packed_over_full", json.dumps(round(times[packed] / times[full], 3)))
    assert times[packed] < times[full]
