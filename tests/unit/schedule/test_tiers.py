"""Tier choice against brute force, and packing against a loop."""

from __future__ import annotations

import itertools

import pytest
import torch

from cuda_graph import TierGrid, pack_windows


def padding(tokens: tuple[int, ...], weights: dict[int, float]) -> float:
    return sum(w * (min(t for t in tokens if t >= m) - m) for m, w in weights.items())


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_choice_equals_brute_force(count: int) -> None:
    weights = {m: float((7 * m) % 11) for m in range(1, 13)}
    grid = TierGrid.choose(4, 2, count, histogram=weights)
    found = tuple(tier.tokens for tier in grid.tiers)
    every = ((*rest, 12) for rest in itertools.combinations(range(1, 12), count - 1))
    assert len(found) == count and found[-1] == 12
    assert padding(found, weights) == min(padding(tokens, weights) for tokens in every)


def test_without_a_workload_padding_is_small_at_every_size() -> None:
    grid = TierGrid.choose(64, 7, 12)
    assert len(grid.tiers) == 12 and grid.tiers[-1].tokens == 512
    assert grid.expected_padding() < 0.2
    few = TierGrid.choose(64, 7, 4)
    assert grid.expected_padding() < few.expected_padding()


def test_multiples_and_memory() -> None:
    grid = TierGrid.choose(10, 7, 6, multiple_of=8)
    assert all(tier.tokens % 8 == 0 for tier in grid.tiers)
    bounded = TierGrid.choose(10, 7, 6, max_bytes=150.0, bytes_per_token=1.0)
    assert sum(tier.tokens for tier in bounded.tiers) <= 150 and len(bounded.tiers) < 6
    # One graph there must be, whatever it takes.
    assert len(TierGrid.choose(10, 7, 6, max_bytes=1.0, bytes_per_token=1.0).tiers) == 1


def test_every_batch_has_a_tier_that_holds_it() -> None:
    """All R and M of a small grid, however few graphs."""
    for graphs in (1, 2, 5, 40):
        grid = TierGrid.choose(5, 3, graphs)
        for requests in range(1, 6):
            for tokens in range(requests, requests * 4 + 1):
                tier = grid.fit(tokens, requests)
                assert tier.tokens >= tokens and tier.slots >= requests
                smaller = [t for t in grid.tiers if t < tier]
                assert all(t.tokens < tokens or t.slots < requests for t in smaller)


def test_a_grid_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"largest tier has 31 tokens; 4 requests .* need 32"):
        TierGrid.of([8, 31], 4, 7)
    with pytest.raises(ValueError, match="exceed the largest tier"):
        TierGrid.of([8, 32], 4, 7).index(33, 4)
    with pytest.raises(ValueError, match="must be different, ascending"):
        TierGrid.of([8, 8, 32], 4, 7)


@pytest.mark.parametrize("windows", [[1], [3, 1, 4], [1, 1, 1], [4, 4, 4, 4]])
def test_packing_equals_a_loop(windows: list[int]) -> None:
    rows = pack_windows(torch.tensor(windows), tokens=20, slots=6)
    expected = [(r, k, True) for r, window in enumerate(windows) for k in range(window)]
    real = len(expected)
    expected += [(len(windows) - 1, 0, False)] * (20 - real)
    found = zip(rows.request.tolist(), rows.offset.tolist(), rows.valid.tolist(), strict=True)
    assert list(found) == expected
    starts = [sum(windows[:r]) for r in range(len(windows) + 1)]
    assert rows.starts.tolist() == starts + [real] * (7 - len(starts))


def test_more_windows_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="3 windows do not fit into 2 slots"):
        pack_windows(torch.tensor([1, 1, 1]), 8, 2)
