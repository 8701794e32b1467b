"""The tiers of a server: what cannot be filled up to a tier gets one."""

from __future__ import annotations

import pytest

from sglang_dspark.errors import ConfigError
from sglang_dspark.schedule.grid import expected_tokens, make_grid


def test_single_anchors_and_full_windows_of_usual_batches_are_not_padded() -> None:
    grid = make_grid(12, max_requests=32, gamma=7)
    tokens = {tier.tokens for tier in grid.tiers}
    batches = {1, 2, 4, 8, 16, 32}
    assert len(grid.tiers) == 12 and batches | {8 * count for count in batches} <= tokens


def test_a_list_is_taken_as_it_is() -> None:
    grid = make_grid((4, 24, 100), max_requests=12, gamma=7)
    assert [(tier.tokens, tier.slots) for tier in grid.tiers] == [(4, 4), (24, 12), (100, 12)]


@pytest.mark.parametrize("requests", [1, 2, 3, 7, 32, 33])
@pytest.mark.parametrize("gamma", [1, 7])
def test_every_token_count_is_expected_and_usual_ones_most(requests: int, gamma: int) -> None:
    weights = expected_tokens(requests, gamma)
    assert sorted(weights) == list(range(1, requests * (gamma + 1) + 1))
    assert all(weight >= 1 / tokens for tokens, weight in weights.items())
    assert all(weights[usual] > 8.9 / usual for usual in (1, requests, requests * (gamma + 1)))


def test_a_list_too_small_for_the_batch_says_what_is_needed() -> None:
    with pytest.raises(ConfigError) as caught:
        make_grid((8, 64, 255), max_requests=32, gamma=7)
    message = str(caught.value)
    assert "\n" not in message
    for word in ("--speculative-verify-tiers", "255 tokens", "32 requests of 8", "need 256"):
        assert word in message
