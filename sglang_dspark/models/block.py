"""Block drafts that SGLang 0.5.23 does not load: no sequential head, a vocabulary of their own.

SGLang's own DSpark model is the base: its layers, its context KV and its sequential heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.dspark import DSparkDraftMixin, build_markov_head
from torch import nn

from sglang_dspark.drafters.checkpoints import DraftCheckpoint
from sglang_dspark.models.layers import DraftAttention, as_head
from sglang_dspark.models.loading import load_weights


class SparkBlockDraft(DSparkDraftMixin, DFlashDraftModel):
    """markov_head: None for DFLASH. The confidence head is the drafter's."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        # Not the mixin's, which refuses a draft without a sequential head.
        DFlashDraftModel.__init__(self, config, quant_config, prefix)
        self.draft = draft = DraftCheckpoint.from_dict(config.sglang_dspark)
        self._fused_kv_write_cache = None
        self.logits_mup_width_multiplier = None
        self.gamma = draft.block_size
        self.sample_from_anchor = draft.sample_from_anchor
        self.markov_head = build_markov_head(config) if draft.markov_rank else None
        if self.markov_head is not None and draft.maps_vocabulary:
            # It biases what can be proposed, given any token of the target.
            self.markov_head.markov_w2 = nn.Linear(
                draft.markov_rank, draft.draft_vocab_size, bias=False
            )
        self.confidence_head = None
        self.lm_head: Any = None
        if draft.own_head:
            self.lm_head = ParallelLMHead(
                draft.draft_vocab_size, draft.hidden_size, quant_config=quant_config
            )
        size = draft.draft_vocab_size
        self.register_buffer("draft_ids", torch.arange(size) if draft.maps_vocabulary else None)
        # Read by SGLang's runner of the draft, to size its KV pool.
        self.num_stages = draft.num_layers

    def attach_shared_modules(self, *, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """The target's, which are used in place of what the draft does not have."""
        self.embed_tokens = embed_tokens
        if self.lm_head is None:
            self.lm_head = as_head(lm_head)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_weights(self, self.draft, weights)


def context_kv(
    model: Any, aux_hidden: torch.Tensor, positions: torch.Tensor
) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    """Each layer's keys and values of context. aux_hidden [N, F * H], positions [N].

    model: any block draft, SGLang's own DSpark model too.
    Yields SGLang's attention layer, k and v [N, KV heads, head size].
    """
    context = model.project_target_hidden(aux_hidden)
    for layer in model.layers:
        attn = layer.self_attn
        if isinstance(attn, DraftAttention):
            yield (attn.attn, *attn.keys_values(context, positions))
            continue
        k, v = attn.kv_proj_only(context)
        k = attn.apply_k_rope(positions, attn.apply_k_norm(k))
        shape = (-1, attn.num_kv_heads, attn.head_dim)
        yield attn.attn, k.view(shape), v.view(shape)


EntryClass = [SparkBlockDraft]
