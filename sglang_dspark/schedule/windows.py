"""Sizing the windows of a round: the host's decision, then the windows on the device.

This is the one place where a round's budget, windows and tier are settled, and where the ranks of a
tensor-parallel group come to the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.utils.common import async_h2d

from cuda_graph.tiers import Tier, TierGrid
from sglang_dspark.config import SpecConfig, VerifyMode
from sglang_dspark.drafters.base import DraftBlock, RoundState
from sglang_dspark.drafters.evidence import F
from sglang_dspark.kernels.top_windows import top_windows, top_windows_reference
from sglang_dspark.schedule.agree import Agreement
from sglang_dspark.schedule.calibration import Rescale, Scaling, survivals
from sglang_dspark.schedule.confidence import LOG_ODDS, ConfidenceFit, confidence_logits
from sglang_dspark.schedule.cost_source import CostSource
from sglang_dspark.schedule.rounds import Belief, FinishedRound
from sglang_dspark.schedule.scheduler import BudgetScheduler, Decision, Ints

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class Plan:
    """A round's windows. windows: [R] int64, None: full. belief: None without a draft."""

    decision: Decision
    windows: torch.Tensor | None
    belief: Belief | None


class WindowScheduler:
    """overlap: whether SGLang launches a round before it has seen the one before."""

    def __init__(
        self,
        config: SpecConfig,
        request_pool: Any,
        device: torch.device,
        agreement: Agreement,
        overlap: bool,
    ) -> None:
        self.config, self._pool, self._device = config, request_pool, device
        self._agreement, self._overlap = agreement, overlap
        scaling = config.schedule.scaling or Scaling.identity(config.gamma)
        # A calibration is made for what the draft says, so it comes before the fit, whose prior
        # keeps it as it is: alone, where the fit is frozen.
        self._rescale = _rescale(scaling, lambda values: torch.tensor(values, device=device))
        self._host_rescale = _rescale(scaling, np.array)
        head = config.draft.has_confidence_head
        self._fit = ConfidenceFit(config.gamma, head, frozen=not config.schedule.fits_online)
        self._upload(self._fit.parameters())
        self._budgets: BudgetScheduler | None = None
        self.grid: TierGrid | None = None
        self._captured = False
        self.source: CostSource | None = None

    @property
    def rank(self) -> int:
        """This process's place among those that agree."""
        return self._agreement.rank

    def use_grid(self, grid: TierGrid, captured: bool) -> None:
        """captured: whether there are graphs for the grid, or tiers are run eagerly."""
        self.grid, self._captured = grid, captured

    @property
    def captured(self) -> bool:
        """Whether rounds without a draft are padded to a tier too."""
        return self._captured

    def start(self, source: CostSource) -> None:
        """The table is known too."""
        assert self.grid is not None
        self.source = source
        rows = self._pool.req_to_token.shape[0]
        self._budgets = BudgetScheduler(
            self.config.schedule, self.config.gamma, self.grid, source.cost, rows, self._captured
        )
        # Should two ranks ever decide for themselves, it is to be noticed, not to go well by luck.
        self._budgets.seed(self._agreement.rank)

    def requests(self, batch: ScheduleBatch) -> tuple[Ints, Ints]:
        """Rows of SGLang's request table and their generations, which tell new tenants of a row."""
        rows = batch.req_pool_indices_cpu
        return rows.numpy().astype(np.int64), self._pool.req_generation[rows].numpy().copy()

    def decide(self, rows: Ints, generations: Ints, context: float) -> Decision:
        """Before drafting. context: KV tokens that the batch attends to."""
        budgets = self._budgets
        if budgets is None:
            return Decision(self.config.gamma, len(rows) * self.config.gamma, None)
        return self._agreement.decision(lambda: budgets.decide(rows, generations, context))

    def draft_depth(self, decision: Decision) -> int:
        """Tokens to draft: in cap-accept all of gamma, so that the ceiling is what it says."""
        if self.config.mode is VerifyMode.CAP_ACCEPT:
            return self.config.gamma
        return decision.depth

    def plan(self, decision: Decision, block: DraftBlock, state: RoundState) -> Plan:
        """After drafting. Lossless: window ℓ of a request depends on confidences of its first ℓ
        tokens at most, each of which knows the tokens before its own only."""
        belief = self._believe(block, state)
        if belief is None:
            windows = None if decision.drafts else torch.ones_like(state.anchors)
            return Plan(decision, windows, None)
        if self._budgets is None:
            return Plan(decision, None, belief)
        candidates = belief.survivals[:, : decision.depth]
        if self._stops_early(decision):
            host = candidates.cpu().numpy().astype(np.float64)
            budgets = self._budgets
            decision = self._agreement.decision(lambda: budgets.stop_early(host, state.context))
        if decision.budget >= len(state.anchors) * decision.depth:
            windows = torch.full_like(state.anchors, decision.depth + 1)
        else:
            choose = top_windows_reference if self._device.type == "cpu" else top_windows
            windows = self._agreement.tensor(choose(candidates, decision.budget))
        return Plan(decision, windows, belief)

    def _believe(self, block: DraftBlock, state: RoundState) -> Belief | None:
        evidence, head = block.evidence, block.confidence_logits
        sampled = None if state.sampling is None else state.sampling.top_k > 1
        if evidence is None:
            if head is None or not head.numel():
                return None
            logits = self._rescale.head(head)
        else:
            logits = confidence_logits(
                self._rescale.evidence(evidence),
                None if head is None else self._rescale.head(head),
                self._parameters,
                sampled,
            )
        return Belief(
            survivals=survivals(logits),
            broken=~torch.isfinite(logits).all(dim=-1),
            evidence=evidence,
            head_logits=head,
            sampled=sampled,
        )

    def tier(self, decision: Decision, requests: int) -> Tier | None:
        """Where the round's rows are packed; None: they are not."""
        if self.config.mode is not VerifyMode.COMPACT or self.grid is None:
            return None
        if not decision.drafts and not self._captured:
            return Tier(requests, requests)  # nothing to fill up with, and no graph to fit
        return None if decision.tier is None else self.grid.tiers[decision.tier]

    def force(self, share: float | None) -> None:
        """Verify this share of what is drafted from now on; None: what the start-up flag says."""
        if self._budgets is not None:
            self._budgets.share = self.config.schedule.budget if share is None else share

    def learn(self, done: FinishedRound) -> None:
        """From a round that is over."""
        if self._budgets is None:
            return
        sound = ~done.broken
        self._budgets.learn_broken(done.rows[done.broken], done.generations[done.broken])
        if done.survivals is not None and sound.any():
            self._budgets.learn(
                done.rows[sound],
                done.generations[sound],
                done.survivals[sound],
                done.windows[sound],
                done.accepted[sound],
            )
        self._learn_confidence(done)
        # In cap-accept the forward is that of full windows, and says nothing of the tier's time.
        if done.seconds is not None and self.config.mode is VerifyMode.COMPACT:
            self._budgets.learn_time(done.decision, done.seconds)

    def _learn_confidence(self, done: FinishedRound) -> None:
        if done.evidence is None:
            return
        # Where every row was run, what a trimmed window hides is known too.
        whole = np.full_like(done.windows, done.evidence.shape[1] + 1)
        windows = whole if done.full else done.windows
        accepted = done.ceiling if done.full else done.accepted
        head = None if done.head_logits is None else self._host_rescale.head(done.head_logits)
        evidence = self._host_rescale.evidence(done.evidence)
        self._fit.learn(evidence, head, windows, accepted, done.sampled)
        if (parameters := self._fit.news()) is not None:
            self._upload(parameters)

    def _upload(self, parameters: npt.NDArray[np.float32]) -> None:
        # A list: SGLang cannot pin what was made from numpy.
        self._parameters = async_h2d(parameters.tolist(), dtype=torch.float32, device=self._device)

    def correction(self, decision: Decision) -> float | None:
        """Seconds of its tier for one that the table says; None: nothing was predicted."""
        if self._budgets is None or decision.tier is None or decision.seconds <= 0:
            return None
        return self._budgets.refinement.factor(decision.tier, decision.drafts)

    def describe(self) -> dict[str, str]:
        """What a user should know of it, by topic."""
        if self.grid is None or self.source is None:
            return {"windows": f"full, {self.config.width} tokens"}
        config = self.config.schedule
        when = "two rounds old" if self._overlap else "of the round itself, by early stop"
        return {
            "tiers": f"{self.grid.describe()} tokens, up to {self.grid.max_requests} requests",
            "budget": f"{config.budget}, from confidences {when}, minimum gain {config.min_gain}",
            "cost table": self.source.about,
            "refinement": self._refinement(),
            "calibration": config.calibration,
            "confidence fit": "online" if config.fits_online else "off",
        }

    def _refinement(self) -> str:
        """Seconds for one that the table says, over the tiers, of drafted and plain rounds."""
        budgets = self._budgets
        if budgets is None or not budgets.refinement.enabled:
            return "off"
        ranges = []
        for kind, drafted in (("drafted", True), ("plain", False)):
            factors = np.exp(budgets.refinement.corrections(drafted))
            ranges.append(f"{kind} x {factors.min():.2f} to {factors.max():.2f}")
        return ", ".join(ranges)

    def _stops_early(self, decision: Decision) -> bool:
        """Only a decision of the table (it predicts a time) is made again with better knowledge."""
        return not self._overlap and decision.drafts and decision.seconds > 0


def _rescale(scaling: Scaling, array: Callable[[Any], Any]) -> Rescale:
    """array: from nested tuples of numbers to a tensor or a numpy array."""
    if not scaling.shifted:
        return Rescale(array(scaling.temperatures), None, None)
    of_log_odds = [[shift if f == LOG_ODDS else 0.0 for f in range(F)] for shift in scaling.shifts]
    return Rescale(array(scaling.temperatures), array(scaling.shifts), array(of_log_odds))
