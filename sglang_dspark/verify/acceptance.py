"""The acceptance that a round needs: from the graph that just ran, greedy, sampled, or made up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_dspark.drafters.base import DraftBlock
from sglang_dspark.verify.accept import (
    Verdict,
    accept_greedy,
    accept_nothing,
    accept_sampled,
    accept_simulated,
)
from sglang_dspark.verify.captured import CapturedAccept, capture_acceptance
from sglang_dspark.verify.layout import VerifyRows
from sglang_dspark.verify.sampled_graphs import SampledAccept
from sglang_dspark.verify.sampling import SamplingParams, distribution
from sglang_dspark.verify.simulated import SimulatedAcceptance

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dspark.config import SpecConfig


def make_acceptance(
    config: SpecConfig, runner: ModelRunner, generator: torch.Generator
) -> Acceptance:
    """runner: of the target, before its graphs are captured."""
    simulated = None
    if (survival := config.simulated_survival) is not None:
        simulated = SimulatedAcceptance(survival, generator.device, generator)
    captured = capture_acceptance(runner, config.width, generator.device, simulated)
    return Acceptance(generator, simulated, captured)


class Acceptance:
    """simulated: None if acceptance is real. captured: None if the target runs without graphs."""

    def __init__(
        self,
        generator: torch.Generator,
        simulated: SimulatedAcceptance | None = None,
        captured: CapturedAccept | None = None,
    ) -> None:
        self._generator, self._simulated, self._captured = generator, simulated, captured
        self._sampled: SampledAccept | None = None

    def capture(self, sizes: list[int], width: int, vocab_size: int, kernels: bool) -> None:
        """Graphs for sampled batches of these sizes; with none the steps run one by one."""
        if sizes and self._simulated is None:
            with torch.no_grad():  # as rounds run: they could not write inference tensors
                self._sampled = SampledAccept(width, vocab_size, sizes, self._generator, kernels)

    def stage(self, rows: VerifyRows, block: DraftBlock) -> None:
        """Before the target's forward."""
        if self._captured is not None:
            self._captured.stage(rows, block.tokens.shape[1])

    def verdict(
        self,
        block: DraftBlock,
        window_tokens: torch.Tensor,
        logits: torch.Tensor,
        sampling: SamplingParams | None,
        rows: VerifyRows,
        replayed: int | None,
    ) -> Verdict:
        """window_tokens: [R, W] int64; logits: [M, V], whose rows are where `rows` says.

        replayed: rows of the target's graph, if it ran and its logits were not changed since.
        """
        greedy = sampling is None or self._simulated is not None
        if self._captured is not None and replayed is not None and greedy:
            return self._captured.verdict(replayed, len(window_tokens))
        drafts = window_tokens[:, 1:]
        if self._simulated is not None:
            coins = torch.empty(drafts.shape, device=drafts.device)
            self._simulated.toss(coins, block.tokens.shape[1])
            target = logits.argmax(dim=-1)[rows.index]
            return accept_simulated(drafts, target, self._simulated.survives(coins), rows.windows)
        if sampling is None:
            return accept_greedy(drafts, logits.argmax(dim=-1)[rows.index], rows.windows)
        if self._sampled is not None and rows.ragged is None:
            found = self._sampled.verdict(block, logits, sampling, rows.windows)
            if found is not None:
                return found
        probs = distribution(logits, sampling.of_rows(rows.request))
        if block.probs is None:
            return accept_nothing(drafts, probs[rows.index[:, 0]], self._generator)
        index = rows.index[:, : block.tokens.shape[1] + 1]
        verdict = accept_sampled(
            block.tokens, block.probs, probs, self._generator, rows.windows, index
        )
        return verdict.padded(window_tokens.shape[1])
