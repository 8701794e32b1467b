"""Which token counts to capture a graph for.

A verify forward of M tokens runs in the smallest captured tier that holds it, and pays for the
tier's tokens, not for its own. With few graphs the choice of tiers decides how much is padding.

Symbols: R requests in the batch, γ draft tokens a round, M = Σ windows with R <= M <= R * (γ + 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, order=True)
class Tier:
    """A captured graph: rows of tokens and of requests that it has room for."""

    tokens: int
    slots: int


@dataclass(frozen=True)
class TierGrid:
    """Captured tiers, by ascending tokens; the last one holds the largest batch at full windows.

    Every window has at least one token, so a tier of t tokens never needs more than t slots; ours
    have min(t, max_requests), and a batch that fits by its tokens always fits by its requests.
    """

    tiers: tuple[Tier, ...]
    max_requests: int
    gamma: int

    def __post_init__(self) -> None:
        tokens = [tier.tokens for tier in self.tiers]
        largest = self.max_requests * (self.gamma + 1)
        if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
            raise ValueError(f"tiers are {tokens}; must be different, ascending and above 0")
        if tokens[-1] < largest:
            raise ValueError(
                f"the largest tier has {tokens[-1]} tokens; {self.max_requests} requests with "
                f"γ = {self.gamma} need {largest}"
            )
        for tier in self.tiers:
            if tier.slots < min(tier.tokens, self.max_requests):
                raise ValueError(
                    f"the tier of {tier.tokens} tokens has {tier.slots} slots; needs "
                    f"{min(tier.tokens, self.max_requests)}"
                )

    @classmethod
    def of(cls, tokens: Sequence[int], max_requests: int, gamma: int) -> TierGrid:
        """A grid with the given token counts."""
        tiers = tuple(Tier(count, min(count, max_requests)) for count in tokens)
        return cls(tiers, max_requests, gamma)

    @classmethod
    def choose(
        cls,
        max_requests: int,
        gamma: int,
        num_graphs: int,
        *,
        histogram: Mapping[int, float] | None = None,
        multiple_of: int = 1,
        max_bytes: float | None = None,
        bytes_per_token: float = 0.0,
    ) -> TierGrid:
        """The grid of at most num_graphs tiers with the least expected padding.

        histogram: how often each M occurs (any scale). Without one, M is taken to be log-uniform:
            small batches are as frequent as large ones, and what counts is padding relative to M.
        multiple_of: tokens of a tier, but for the largest, are multiples of it.
        max_bytes, bytes_per_token: the static buffers of all graphs together stay below the first,
            at the second for a token; fewer tiers are chosen if need be, never less than one.
        """
        if max_requests < 1 or gamma < 1 or num_graphs < 1 or multiple_of < 1:
            raise ValueError(
                f"max_requests {max_requests}, gamma {gamma}, num_graphs {num_graphs} and "
                f"multiple_of {multiple_of} must each be at least 1"
            )
        largest = max_requests * (gamma + 1)
        ends = sorted({*range(multiple_of, largest, multiple_of), largest})
        weights = _weights(largest, histogram)
        for count in range(min(num_graphs, len(ends)), 0, -1):
            tokens = _least_padding(ends, weights, count)
            if max_bytes is None or count == 1 or sum(tokens) * bytes_per_token <= max_bytes:
                break
        return cls.of(tokens, max_requests, gamma)

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Tokens of every tier, int64 [n]."""
        return np.array([tier.tokens for tier in self.tiers], dtype=np.int64)

    def index(self, tokens: int, requests: int) -> int:
        """The smallest tier that holds both."""
        first = int(np.searchsorted(self.sizes, tokens))
        for i in range(first, len(self.tiers)):
            if self.tiers[i].slots >= requests:
                return i
        raise ValueError(
            f"{tokens} tokens of {requests} requests exceed the largest tier "
            f"({self.tiers[-1].tokens} tokens, {self.tiers[-1].slots} requests)"
        )

    def fit(self, tokens: int, requests: int) -> Tier:
        """As `index`, the tier itself."""
        return self.tiers[self.index(tokens, requests)]

    def describe(self) -> str:
        """The token counts, as in a log line."""
        return ", ".join(str(tier.tokens) for tier in self.tiers)

    def expected_padding(self, histogram: Mapping[int, float] | None = None) -> float:
        """Padding tokens as a share of all computed tokens, under the histogram of `choose`."""
        largest = self.max_requests * (self.gamma + 1)
        weights = _weights(largest, histogram)
        tokens = torch.arange(1, largest + 1)
        sizes = torch.tensor([tier.tokens for tier in self.tiers])
        computed = sizes[torch.searchsorted(sizes, tokens)]
        return float(1 - (weights * tokens).sum() / (weights * computed).sum())


def _weights(largest: int, histogram: Mapping[int, float] | None) -> torch.Tensor:
    """How often M = 1 .. largest occurs, float64 [largest]."""
    if histogram is None:
        return 1 / torch.arange(1, largest + 1, dtype=torch.float64)
    weights = torch.zeros(largest, dtype=torch.float64)
    for tokens, count in histogram.items():
        if not 1 <= tokens <= largest or count < 0:
            raise ValueError(
                f"histogram has {count} at {tokens} tokens; tokens must be in 1..{largest} and "
                "counts not negative"
            )
        weights[tokens - 1] += count
    if float(weights.sum()) == 0:
        raise ValueError("histogram is empty")
    return weights


def _least_padding(ends: list[int], weights: torch.Tensor, count: int) -> list[int]:
    """`count` of `ends`, the last among them, that minimise Σ weight(M) * (tier(M) - M).

    Dynamic programming over the tiers from the smallest: best[j] is the least padding of all M up
    to ends[j] if a tier ends there.
    """
    sizes = torch.tensor(ends, dtype=torch.float64)
    tokens = torch.arange(1, len(weights) + 1, dtype=torch.float64)
    mass = weights.cumsum(0)[sizes.long() - 1]
    moment = (weights * tokens).cumsum(0)[sizes.long() - 1]
    best = sizes * mass - moment
    # between[i, j]: padding of the M in (ends[i], ends[j]], all of which run at ends[j].
    between = sizes[None] * (mass[None] - mass[:, None]) - (moment[None] - moment[:, None])
    between = between.masked_fill(torch.ones_like(between, dtype=torch.bool).tril(), torch.inf)
    choices = []
    for _ in range(count - 1):
        best, previous = (best[:, None] + between).min(dim=0)
        choices.append(previous)
    chosen = [len(ends) - 1]
    for previous in reversed(choices):
        chosen.append(int(previous[chosen[-1]]))
    return [ends[i] for i in reversed(chosen)]
