"""What a drafter is, and the two values that cross its border.

A drafter proposes a block of gamma tokens per request and keeps its own state in step with what
was committed. It knows nothing of verify windows, modes or graph tiers; the worker knows nothing
of the drafter's model. A new algorithm is one new file beside this one.

Symbols of all shapes: R requests, gamma draft tokens per round, W = gamma + 1, V vocabulary,
H hidden size, F captured target layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

    from sglang_dspark.config import SpecConfig
    from sglang_dspark.drafters.served import ServedDraft
    from sglang_dspark.verify.accept import Verdict
    from sglang_dspark.verify.layout import VerifyRows
    from sglang_dspark.verify.sampling import SamplingParams


@dataclass(frozen=True)
class RoundState:
    """One decode round as it stands before drafting.

    The anchor of request r sits at position seq_lens[r]; its KV is not yet written.
    """

    # [R] int64, rows of SGLang's req_to_token table
    req_rows: torch.Tensor
    # [R] int64, committed KV length, the anchor not counted
    seq_lens: torch.Tensor
    # [R] int64 on the host, an upper bound of seq_lens; None if no attention backend reads it
    seq_lens_cpu: torch.Tensor | None
    # [R] int64
    anchors: torch.Tensor
    # [R, W] int64
    positions: torch.Tensor
    # KV slots of the R x W window tokens, in the id spaces of target and draft pool
    kv_plan: KVLocPlan
    # how each request samples; None: every request is greedy
    sampling: SamplingParams | None
    # KV tokens that the batch attends to, as far as the host knows
    context: float


@dataclass(frozen=True)
class DraftBlock:
    """What a drafter proposes: D tokens per request, at most gamma."""

    # [R, D] int64
    tokens: torch.Tensor
    # [R, D, V] float32, the distribution that each token was drawn from (one-hot where it was
    # chosen greedily); None: every request is greedy
    probs: torch.Tensor | None
    # [R, D, F] float32, what q_k says of itself (see `evidence`)
    evidence: torch.Tensor | None
    # [R, D] float32, the confidence head's logit of P(token k survives | all before survived);
    # None: no head, or nobody asks
    confidence_logits: torch.Tensor | None

    def part(self, requests: int, depth: int) -> DraftBlock:
        """The first `depth` tokens of the first requests."""

        def cut(whole: torch.Tensor | None) -> torch.Tensor | None:
            return None if whole is None else whole[:requests, :depth]

        return DraftBlock(
            tokens=self.tokens[:requests, :depth],
            probs=cut(self.probs),
            evidence=cut(self.evidence),
            confidence_logits=cut(self.confidence_logits),
        )


class Drafter(Protocol):
    """The protocol between the worker and an algorithm.

    Made before the KV pools exist.
    """

    def __init__(
        self, config: SpecConfig, served: ServedDraft, generator: torch.Generator
    ) -> None: ...

    # SGLang's worker, runner and model of the draft
    served: ServedDraft

    def start(self) -> None:
        """The KV pools exist, the graphs do not yet."""

    def capture(self) -> None:
        """SGLang has captured the draft's graphs: the place for graphs of the drafter's own."""

    def prefill(
        self,
        batch: ScheduleBatch,
        aux_hidden: torch.Tensor,
        kv_plan: KVLocPlan,
        next_tokens: torch.Tensor,
    ) -> None:
        """Take in a prefill. aux_hidden: [tokens of the batch, F * H], in batch order.

        next_tokens: [R] int64, sampled behind each prompt; of a chunk that is not its prompt's
        last, they mean nothing.
        """

    def propose(self, state: RoundState, depth: int) -> DraftBlock:
        """Draft one block of `depth` tokens, 1 to gamma, per request."""

    def commit(
        self,
        state: RoundState,
        verdict: Verdict,
        aux_hidden: torch.Tensor,
        rows: VerifyRows,
        *,
        drafted: bool,
        replayed: bool,
    ) -> None:
        """Catch up with what was committed. aux_hidden: [M, F * H], of the forward's rows.

        drafted: False in a round without a draft: then the next may be one too, and the work may
        wait until a draft needs it. replayed: whether the target's forward was the replay of a
        graph, in which the drafter may have captured its work."""
