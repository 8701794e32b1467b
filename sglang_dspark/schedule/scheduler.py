"""The host's part of sizing windows: to draft or not, how many tokens to verify, in which tier.

Everything here is numpy on a handful of numbers a request. What it knows of the requests comes from
rounds whose results SGLang has processed, so that deciding never waits for the device: under
overlap these are two rounds old. That is also what keeps the decision lossless (see `budget`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cost_tables.model import Floats, RoundCost
from cost_tables.profiling import forcing
from cost_tables.refine import RefinedCost, Refinement
from cuda_graph.tiers import TierGrid
from sglang_dspark.config import ScheduleConfig
from sglang_dspark.schedule.budget import Budget, choose_budget, early_stop

Ints = npt.NDArray[np.int64]

# After a round without a draft the confidences are those of before: look again after so many
# (twice as many each time), and no sooner than a look is worth this share of the time until then.
# The last number also says how often the far end of blocks is looked at that are drafted in part.
FIRST_PROBE, LAST_PROBE = 16, 128
PROBE_SHARE = 0.02
# What is usual is the mean of the last so many blocks (one of each request and drafted round), and
# of so many that survived whole, with which it starts.
USUAL_BLOCKS, FIRST_BLOCKS = 64, 4
# After so many drafted rounds in one tier whose time is off its table's by this much (as a
# logarithm), one that has not been run lately may be tried: nothing else tells whether it is the
# tier or the machine that is slow.
TIER_ROUNDS, TIER_OFF = 24, 0.1
# Weight of a request's new block against what was thought of it before. One block tells little of
# the next: see docs/verify_modes.md for what predicts best.
NEWS_OF_REQUEST = 0.2
# Tokens that the round before did not draft are known less well, and news of them weigh more.
NEWS_OF_FAR_END = 0.6
# The same for accepted tokens, which differ between kinds of text: the last 10 rounds or so.
NEWS_OF_TRUST = 0.1
# A draft must promise this much more throughput than plain decoding: it is the best of many
# estimates, and the best of many is overestimated.
DRAFT_GAIN = 1.05
# By how much the survivals of one new request may exceed what is usual (two standard deviations);
# the mean of many exceeds it by less, in proportion to the root of their number.
HOPE = 0.4


@dataclass(frozen=True)
class Decision:
    """What is fixed before a round is drafted.

    depth: D, tokens to draft for each request; 0: none, every window is the anchor alone.
    budget: K, draft tokens to verify over the whole batch.
    tier: index into the grid; None: the batch is larger than the grid, which verifies everything
    without a graph. expected_tokens: committed by the round; seconds: its step time by the table;
    both predicted (0 if there is nothing to predict from).
    """

    depth: int
    budget: int
    tier: int | None
    expected_tokens: float = 0.0
    seconds: float = 0.0

    @property
    def drafts(self) -> bool:
        return self.depth > 0


class BudgetScheduler:
    """Decides about rounds, and learns from those that are over.

    rows: of SGLang's request table. gamma: draft tokens proposed a round. captured: whether rounds
    without a draft are padded to a tier too, since only tiers have graphs.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        gamma: int,
        grid: TierGrid,
        cost: RoundCost,
        rows: int,
        captured: bool = True,
    ) -> None:
        self.config, self.gamma, self.grid, self.cost = config, gamma, grid, cost
        self._captured = captured
        # "auto", or what is forced; a running server can be told another (see the worker).
        self.share = config.budget
        # What the request in each row is thought to survive, and whether a block was drafted to
        # find out; valid while its generation is the row's.
        self._asked = np.full(rows, -1, dtype=np.int64)
        self._survivals = np.ones((rows, gamma))
        self._generations = np.full(rows, -1, dtype=np.int64)
        self._broken = np.full(rows, -1, dtype=np.int64)  # generation whose confidences are broken
        # What a request of which nothing is known is taken to survive; at first, everything.
        self._usual, self._usual_blocks = np.ones(gamma), FIRST_BLOCKS
        self._depth = gamma  # of the last drafted round
        self._trust = 1.0
        self.refinement = Refinement(grid.sizes, enabled=config.refine)
        self._tier, self._tier_rounds = -1, 0  # of the drafted rounds before, and how many
        self._drafted_cost = RefinedCost(cost.drafted, self.refinement, drafted=True)
        self._plain_rounds, self._patience = 0, FIRST_PROBE
        self._shallow = 0  # rounds since the whole block was drafted
        self._random = random.Random(0)

    def seed(self, seed: int) -> None:
        """Of random budgets."""
        self._random.seed(seed)

    def decide(self, rows: Ints, generations: Ints, context: float) -> Decision:
        """About the round of the requests in `rows`, which attends to `context` KV tokens."""
        requests = len(rows)
        full = requests * self.gamma
        if requests > self.grid.max_requests:
            return Decision(self.gamma, full, None)
        if self.share != "auto":
            return self.forced(requests, *self._told(requests))
        if (self._broken[rows] == generations).any():
            return self.forced(requests, full)
        known = self._known(rows, generations)
        budget = self._best(known, context, hopeful=self._runs_off())
        plain = self._plain(requests, context)
        if plain is not None and DRAFT_GAIN * self._rate(plain) > budget.throughput:
            self._plain_rounds += 1
            asked = 2 * np.count_nonzero(self._asked[rows] == generations) >= requests
            asks = not asked and self._worth_asking(known, plain, context)
            due = self._plain_rounds > self._patience
            if not (asks or due):
                return plain
            probe = self._best(known[:, :1], context)  # one token each tells enough to go on
            due = due and self._plain_rounds > min(self._rarity(probe, plain), LAST_PROBE)
            if not (asks or due):
                return plain
            if due:
                self._plain_rounds, self._patience = 0, min(2 * self._patience, LAST_PROBE)
            budget = probe
        else:
            self._plain_rounds, self._patience = 0, FIRST_PROBE
            if budget.depth < self.gamma and self._shallow >= LAST_PROBE:
                budget = self._best(known, context, depths=())
        self._shallow = self._shallow + 1 if budget.depth < self.gamma else 0
        self._asked[rows] = generations
        worn = self._tier_rounds >= TIER_ROUNDS
        self._tier_rounds = self._tier_rounds + 1 if budget.tier == self._tier and not worn else 0
        self._tier = budget.tier
        return self._drafted(budget, requests, context)

    def _best(
        self,
        known: Floats,
        context: float,
        depths: tuple[int, ...] | None = None,
        hopeful: bool = False,
    ) -> Budget:
        cost = replace(self._drafted_cost, hopeful=hopeful)
        min_gain = self.config.min_gain
        return choose_budget(known, self.grid, cost, context, min_gain, self._trust, depths)

    def _rarity(self, probe: Budget, plain: Decision) -> float:
        """Rounds without a draft for one probe, so that it takes PROBE_SHARE of them at most."""
        lost = probe.seconds * self._rate(plain) - probe.expected_tokens
        return lost / plain.expected_tokens / PROBE_SHARE

    def _worth_asking(self, known: Floats, plain: Decision, context: float) -> bool:
        """Whether new requests could turn out so good that drafts for them pay."""
        hoped = np.minimum(known + HOPE / len(known) ** 0.5, 1.0)
        return self._best(hoped, context).throughput >= DRAFT_GAIN * self._rate(plain)

    def _runs_off(self) -> bool:
        """Whether this round tries a tier of which little is known."""
        if self._tier_rounds < TIER_ROUNDS:
            return False
        return abs(float(self.refinement.corrections(True)[self._tier])) > TIER_OFF

    def forced(self, requests: int, budget: int, depth: int | None = None) -> Decision:
        """A round with a given budget and depth (None: γ). Nothing is predicted: there may be no
        table."""
        depth = self.gamma if depth is None else depth
        return Decision(depth, budget, self.grid.index(requests + budget, requests))

    def _told(self, requests: int) -> tuple[int, int]:
        """Budget and depth that `share` stands for, which is not "auto"."""
        share, full = self.share, requests * self.gamma
        if share == "random":
            return int(self._random.random() * full + 1e-9), self.gamma
        if isinstance(share, str):  # profile, and nothing told yet
            return full, self.gamma
        if self.config.budget == "profile":
            depth, budget = forcing.decode(share, requests, self.gamma)
            return budget, depth
        return int(share * full + 1e-9), self.gamma

    def stop_early(self, survivals: Floats, context: float) -> Decision:
        """Algorithm 1 over this round's own survivals [R, D], for where they can be waited for."""
        budget = early_stop(survivals, self.grid, self._drafted_cost, context, self._trust)
        return self._drafted(budget, len(survivals), context)

    def learn_broken(self, rows: Ints, generations: Ints) -> None:
        """Requests whose confidences are not finite: batches with one of them are not trimmed."""
        self._broken[rows] = generations

    def learn(
        self, rows: Ints, generations: Ints, survivals: Floats, windows: Ints, accepted: Ints
    ) -> None:
        """From a drafted round that is over: survivals [R, D], the windows and what they took."""
        depth = survivals.shape[1]
        far_end = np.arange(depth) >= self._depth
        self._depth = depth
        before = max(self._usual[depth - 1], 1e-9)
        self._usual_blocks = min(self._usual_blocks + len(rows), USUAL_BLOCKS + len(rows))
        news = np.where(far_end, NEWS_OF_FAR_END, len(rows) / self._usual_blocks)
        self._usual[:depth] += news * (survivals.mean(axis=0) - self._usual[:depth])
        self._usual[:depth] = np.minimum.accumulate(self._usual[:depth])
        # What was not drafted is taken to fall from there on as it did before, or usually does.
        self._usual[depth:] *= self._usual[depth - 1] / before
        thought = self._known(rows, generations)
        falls = thought[:, depth:] / np.maximum(thought[:, depth - 1 : depth], 1e-9)
        news = np.where(far_end, NEWS_OF_FAR_END, NEWS_OF_REQUEST)
        seen = thought[:, :depth] + news * (survivals - thought[:, :depth])
        seen = np.minimum.accumulate(seen, axis=1)  # no token is likelier than the one before
        rest = np.minimum(falls, 1.0) * seen[:, -1:]
        self._survivals[rows] = np.concatenate([seen, rest], axis=1)
        self._generations[rows] = self._asked[rows] = generations
        self._broken[rows] = -1
        verified = np.arange(depth) < windows[:, None] - 1
        promised = float(survivals[verified].sum())
        # One window says little; a batch is as good as its tokens are many.
        weight = NEWS_OF_TRUST * min(1.0, promised / 8)
        if promised > 0:
            kept = float(accepted.sum()) / promised
            self._trust += weight * (min(max(kept, 0.25), 2.0) - self._trust)

    def learn_time(self, decision: Decision, seconds: float) -> None:
        """What the round of `decision` took, from its start to that of the next."""
        if decision.seconds > 0 and decision.tier is not None:
            self.refinement.learn(decision.tier, decision.drafts, decision.seconds, seconds)

    def _known(self, rows: Ints, generations: Ints) -> Floats:
        known = self._generations[rows] == generations
        found: Floats = np.where(known[:, None], self._survivals[rows], self._usual)
        return found

    def _plain(self, requests: int, context: float) -> Decision | None:
        if self.cost.plain is None:
            return None
        tier = self.grid.index(requests, requests)
        size = self.grid.tiers[tier].tokens if self._captured else requests
        seconds = float(self.cost.plain.seconds(requests, np.array([float(size)]), context)[0])
        return Decision(0, 0, tier, float(requests), seconds)

    def _rate(self, plain: Decision) -> float:
        """Tokens a second of a round without a draft."""
        assert plain.tier is not None
        seconds = plain.seconds * self.refinement.factor(plain.tier, drafted=False)
        return plain.expected_tokens / seconds

    def _drafted(self, budget: Budget, requests: int, context: float) -> Decision:
        tokens = np.array([float(self.grid.tiers[budget.tier].tokens)])
        drafted = float(requests * budget.depth)
        by_table = float(self.cost.drafted.seconds(requests, tokens, context, drafted)[0])
        return Decision(budget.depth, budget.tokens, budget.tier, budget.expected_tokens, by_table)
