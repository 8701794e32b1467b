"""The graph tiers of a server."""

from __future__ import annotations

from cuda_graph.tiers import TierGrid
from sglang_dspark import flags
from sglang_dspark.errors import ConfigError


def make_grid(tiers: int | tuple[int, ...], max_requests: int, gamma: int) -> TierGrid:
    """tiers: how many graphs, or their token counts. Raises ConfigError if these are too few."""
    if isinstance(tiers, int):
        return TierGrid.choose(
            max_requests, gamma, tiers, histogram=expected_tokens(max_requests, gamma)
        )
    largest = max_requests * (gamma + 1)
    if tiers[-1] < largest:
        raise ConfigError(
            f"{flags.TIERS.name}: the largest tier has {tiers[-1]} tokens, but {max_requests} "
            f"requests of {gamma + 1} tokens each need {largest}; add a tier of {largest} or more, "
            "or lower --max-running-requests"
        )
    return TierGrid.of(tiers, max_requests, gamma)


def expected_tokens(max_requests: int, gamma: int) -> dict[int, float]:
    """How often a forward of M tokens is expected: any M, small ones more often (1 / M), and
    full windows and single anchors of 1, 2, 4, 8, ... requests much more often than the rest,
    since these two cannot be filled up to a tier."""
    largest = max_requests * (gamma + 1)
    weights = {tokens: 1.0 / tokens for tokens in range(1, largest + 1)}
    requests = {max_requests, *(2**i for i in range(max_requests.bit_length()))}
    for count in requests:
        if count <= max_requests:
            for tokens in {count, count * (gamma + 1)}:
                weights[tokens] += 8.0 / tokens
    return weights
