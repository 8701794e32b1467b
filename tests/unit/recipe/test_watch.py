"""What a watcher of the plain loop is shown."""

from __future__ import annotations

import torch

from sglang_dspark.recipe.eagle3 import Eagle3Model
from sglang_dspark.recipe.evaluate import speculative_decode
from sglang_dspark.recipe.export import AnyDraft
from sglang_dspark.recipe.proposers import Chooser, Proposal
from sglang_dspark.recipe.target import FastLlama
from toy import GAMMA, VOCAB


def test_a_watcher_sees_every_round(draft: AnyDraft, target: FastLlama) -> None:
    seen: list[tuple[int, int]] = []

    def watch(block: Proposal, p: torch.Tensor, length: int, committed: int) -> None:
        assert p.shape == (GAMMA + 1, VOCAB)
        # The logits are those that the tokens were drawn from, over the draft's own vocabulary.
        assert block.logits is not None
        q = block.logits.div(0.7).softmax(dim=-1)
        if isinstance(draft, Eagle3Model):
            q = torch.zeros(GAMMA, VOCAB).index_copy_(1, draft.d2t, q)
        torch.testing.assert_close(q, block.probs)
        seen.append((length, committed))

    chooser = Chooser(0.7, torch.Generator().manual_seed(0))
    _, stats = speculative_decode(draft, target, [1, 5, 6, 7], 24, -1, chooser, watch)
    assert len(seen) == stats.rounds
    assert sum(committed for _, committed in seen) == stats.committed
    assert all(committed == length + 1 for length, committed in seen[:-1])
