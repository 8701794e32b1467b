"""The graph tiers of a server."""

from __future__ import annotations

from cuda_graph.tiers import TierGrid
from sglang_dspark import flags
from sglang_dspark.errors import ConfigError


def make_grid(
    tiers: int | tuple[int, ...], max_requests: int, gamma: int, multiple_of: int = 1
) -> TierGrid:
    """tiers: how many graphs, or their token counts. Raises ConfigError if these do not do.

    multiple_of: what the token counts have to be multiples of.
    """
    if isinstance(tiers, int):
        histogram = expected_tokens(max_requests, gamma)
        return TierGrid.choose(
            max_requests, gamma, tiers, histogram=histogram, multiple_of=multiple_of
        )
    largest = max_requests * (gamma + 1)
    if odd := [tokens for tokens in tiers if tokens % multiple_of]:
        raise ConfigError(
            f"{flags.TIERS.name}: {odd[0]} is no multiple of {multiple_of}, the tokens of a full "
            "window, but SGLang captures verify graphs for such token counts only"
        )
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
