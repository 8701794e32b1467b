"""How many draft tokens to verify over the whole batch: the budget K. Numpy, on the host.

Throughput of a round with budget K is expected to be (DSpark, arXiv 2607.05147, section 4)

    Θ(K, D) = (R + Σ of the K greatest survivals) / T(R, tier(R + K), C, R · D)

since every request commits one token anyhow and an admitted draft token with its survival
probability. Survival falls along a block, so the K greatest are prefixes of the blocks. T is flat
inside a tier, so only budgets that fill a tier are looked at. D is the depth of the draft: to draft
less than γ tokens is cheaper, and where few are verified, the last ones are drafted in vain.

K must not depend on this round's draft tokens, or acceptance is no longer lossless (the paper's
appendix A): the survivals here are those of an earlier round, or `early_stop` is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cost_tables.model import Floats, StepCost
from cuda_graph.tiers import TierGrid


@dataclass(frozen=True)
class Budget:
    """tokens: K. tier: index into the grid. depth: D. expected_tokens: R + Σ survivals.
    seconds: T."""

    tokens: int
    tier: int
    depth: int
    expected_tokens: float
    seconds: float

    @property
    def throughput(self) -> float:
        """Θ, tokens a second."""
        return self.expected_tokens / self.seconds


def choose_budget(
    survivals: Floats,  # [R, γ], not increasing along a row
    grid: TierGrid,
    cost: StepCost,
    context: float,
    min_gain: float = 0.02,
    trust: float = 1.0,
    depths: tuple[int, ...] | None = None,
) -> Budget:
    """The budget and depth of the greatest Θ; all of γ, unless another is better by min_gain.

    trust: accepted tokens for one that the survivals promise, as observed. depths: those to choose
    from, beside γ. None: the powers of two below it.
    Survivals that are not finite count as 1: a broken confidence must not trim anything.
    """
    requests, gamma = survivals.shape
    options = candidates(grid, requests, gamma, depths)
    survivals = _finite(survivals).astype(np.float32)  # half the time to sort, in float64 to sum
    promised = [
        greatest_sums(survivals[:, :depth])[filling]
        for depth, filling in zip(options.depths, options.filling, strict=True)
    ]
    seconds = cost.seconds(requests, options.sizes, context, options.drafted)
    expected = requests + np.minimum(trust * np.concatenate(promised), options.budgets)
    rates = expected / seconds
    best = int(rates.argmax())
    if rates[best] < rates[-1] * (1 + min_gain):
        best = len(rates) - 1
    return Budget(
        tokens=int(options.budgets[best]),
        tier=int(options.tiers[best]),
        depth=int(options.drafted[best]) // requests,
        expected_tokens=float(expected[best]),
        seconds=float(seconds[best]),
    )


@dataclass(frozen=True)
class Candidates:
    """Budgets that fill a tier, by ascending depth and size; [n] each but for the first two.

    filling: the budgets of each of `depths`. tiers: into the grid. sizes: tokens of these tiers.
    drafted: R · D.
    """

    depths: tuple[int, ...]
    filling: tuple[npt.NDArray[np.int64], ...]
    tiers: npt.NDArray[np.int64]
    budgets: npt.NDArray[np.int64]
    sizes: Floats
    drafted: Floats


@lru_cache(maxsize=4096)
def candidates(
    grid: TierGrid, requests: int, gamma: int, depths: tuple[int, ...] | None
) -> Candidates:
    """What `choose_budget` chooses from; the same for every batch of so many requests."""
    if depths is None:
        depths = tuple(2**i for i in range((gamma - 1).bit_length()))
    depths = tuple(sorted({*depths, gamma}))
    first = grid.index(requests, requests)
    filling, tiers = [], []
    for depth in depths:
        reached = np.arange(first, grid.index(requests * (1 + depth), requests) + 1)
        filling.append(np.minimum(grid.sizes[reached] - requests, requests * depth))
        tiers.append(reached)
    drafted = [np.full(len(t), float(requests * d)) for d, t in zip(depths, tiers, strict=True)]
    tier = np.concatenate(tiers)
    return Candidates(
        depths=depths,
        filling=tuple(filling),
        tiers=tier,
        budgets=np.concatenate(filling),
        sizes=grid.sizes[tier].astype(np.float64),
        drafted=np.concatenate(drafted),
    )


def early_stop(
    survivals: Floats, grid: TierGrid, cost: StepCost, context: float, trust: float = 1.0
) -> Budget:
    """Algorithm 1 of the DSpark paper: admit by falling survival, stop before the first drop of Θ.

    survivals: [R, D], of a draft of depth D. Θ is taken at the exact token count, since a tier's
    step would end the search at its foot; the tier of what was admitted is then filled with the
    next tokens in order. A token's admission so depends on tokens that come before it in this order
    only, never on itself or on what follows it in its block, which keeps the rule lossless with
    this round's own survivals.
    """
    requests, depth = survivals.shape
    sums = greatest_sums(_finite(survivals))
    drafted = float(requests * depth)
    counts = requests + np.arange(requests * depth + 1, dtype=np.float64)
    expected = requests + np.minimum(trust * sums, counts - requests)
    rates = expected / cost.seconds(requests, counts, context, drafted)
    falls = np.flatnonzero(np.diff(rates) < 0)
    admitted = int(falls[0]) if len(falls) else len(rates) - 1
    tier = grid.index(requests + admitted, requests)
    size = grid.tiers[tier].tokens
    budget = min(size - requests, requests * depth)
    seconds = cost.seconds(requests, np.array([float(size)]), context, drafted)
    return Budget(budget, tier, depth, float(expected[budget]), float(seconds[0]))


def _finite(survivals: Floats) -> Floats:
    if np.isfinite(survivals).all():
        return survivals
    return np.where(np.isfinite(survivals), survivals, 1.0)


def greatest_sums(survivals: npt.NDArray[np.floating]) -> Floats:
    """[n + 1]: sums of the K greatest of n survivals, K from 0."""
    rising = np.sort(survivals, axis=None)  # far faster than argsort
    sums = np.zeros(len(rising) + 1)
    np.cumsum(rising[::-1], out=sums[1:])
    return sums
