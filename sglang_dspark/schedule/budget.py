"""How many draft tokens to verify over the whole batch: the budget K. Numpy, on the host.

Throughput of a round with budget K is expected to be (DSpark, arXiv 2607.05147, section 4)

    Θ(K) = (R + Σ of the K greatest survivals) / T(R, tier(R + K), C)

since every request commits one token anyhow and an admitted draft token with its survival
probability. Survival falls along a block, so the K greatest are prefixes of the blocks. T is flat
inside a tier, so only budgets that fill a tier are looked at.

K must not depend on this round's draft tokens, or acceptance is no longer lossless (the paper's
appendix A): the survivals here are those of an earlier round, or `early_stop` is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_tables.model import Floats, StepCost
from cuda_graph.tiers import TierGrid


@dataclass(frozen=True)
class Budget:
    """tokens: K. tier: index into the grid. expected_tokens: R + Σ survivals. seconds: T."""

    tokens: int
    tier: int
    expected_tokens: float
    seconds: float

    @property
    def throughput(self) -> float:
        """Θ(K), tokens a second."""
        return self.expected_tokens / self.seconds


def choose_budget(
    survivals: Floats,  # [R, γ], not increasing along a row
    grid: TierGrid,
    cost: StepCost,
    context: float,
    min_gain: float = 0.02,
    trust: float = 1.0,
) -> Budget:
    """The budget of the greatest Θ; every draft token, unless another is better by min_gain.

    trust: accepted tokens for one that the survivals promise, as observed.
    Survivals that are not finite count as 1: a broken confidence must not trim anything.
    """
    requests, gamma = survivals.shape
    sums = sorted_sums(survivals)
    full = requests * gamma
    last = grid.index(requests + full, requests)
    first = grid.index(requests, requests)
    sizes = np.array([tier.tokens for tier in grid.tiers[first : last + 1]])
    budgets = np.minimum(sizes - requests, full)
    seconds = cost.seconds(requests, sizes.astype(np.float64), context)
    expected = requests + trust * sums[budgets]
    rates = expected / seconds
    best = int(rates.argmax())
    if rates[best] < rates[-1] * (1 + min_gain):
        best = len(rates) - 1
    return Budget(int(budgets[best]), first + best, float(expected[best]), float(seconds[best]))


def early_stop(
    survivals: Floats, grid: TierGrid, cost: StepCost, context: float, trust: float = 1.0
) -> Budget:
    """Algorithm 1 of the DSpark paper: admit by falling survival, stop before the first drop of Θ.

    Θ is taken at the exact token count, since a tier's step would end the search at its foot; the
    tier of what was admitted is then filled with the next tokens in order. A token's admission so
    depends on tokens that come before it in this order only, never on itself or on what follows it
    in its block, which keeps the rule lossless with this round's own survivals.
    """
    requests, gamma = survivals.shape
    sums = sorted_sums(survivals)
    counts = requests + np.arange(requests * gamma + 1, dtype=np.float64)
    rates = (requests + trust * sums) / cost.seconds(requests, counts, context)
    falls = np.flatnonzero(np.diff(rates) < 0)
    admitted = int(falls[0]) if len(falls) else len(rates) - 1
    tier = grid.index(requests + admitted, requests)
    size = grid.tiers[tier].tokens
    budget = min(size - requests, requests * gamma)
    seconds = cost.seconds(requests, np.array([float(size)]), context)
    return Budget(budget, tier, float(requests + trust * sums[budget]), float(seconds[0]))


def sorted_sums(survivals: Floats) -> Floats:
    """[R * γ + 1]: sums of the K greatest survivals, K from 0."""
    clean = np.where(np.isfinite(survivals), survivals, 1.0).ravel()
    clean.sort()
    sums = np.empty(len(clean) + 1)
    sums[0] = 0.0
    np.cumsum(clean[::-1], out=sums[1:])
    return sums
