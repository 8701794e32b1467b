"""The block draft in Gemma 4's form, DSPARK or DFLASH.

SGLang's block drafts are of Qwen 3's form, and this one differs in every layer (see `layers`).
What it does is the same: all rows of a block see each other and the context, whose keys and values
each layer makes from the projected features of the target, without a norm of its own in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.models.dspark import build_markov_head
from torch import nn

from sglang_dspark.drafters.checkpoints import DraftCheckpoint
from sglang_dspark.models.layers import DraftLayer, as_head
from sglang_dspark.models.loading import load_weights


class SparkGemma4BlockDraft(nn.Module):
    """markov_head: None for DFLASH. The confidence head is the drafter's."""

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.draft = draft = DraftCheckpoint.from_dict(config.sglang_dspark)
        h, eps = draft.hidden_size, draft.rms_norm_eps
        width = (draft.target_hidden_size or h) * draft.num_features
        self.fc = nn.Linear(width, h, bias=draft.fc_bias)
        self.hidden_norm = RMSNorm(h, eps=eps)
        self.layers: Any = nn.ModuleList(
            DraftLayer(draft, i, h, quant_config, causal=False) for i in range(draft.num_layers)
        )
        self.norm = RMSNorm(h, eps=eps)
        self.markov_head = build_markov_head(config) if draft.markov_rank else None
        self.draft_ids: torch.Tensor | None = None  # it proposes the target's whole vocabulary
        self.embed_tokens: Any = None
        self.lm_head: Any = None
        # Read by SGLang's runner of the draft, to size its KV pool.
        self.num_stages = draft.num_layers

    def attach_shared_modules(self, *, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """The target's. Its embedding scales what it reads, as the draft's was trained to."""
        self.embed_tokens = embed_tokens
        self.lm_head = as_head(lm_head)

    def project_target_hidden(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """aux_hidden [N, F * H] of the target -> what the layers read of the context [N, H]"""
        context: torch.Tensor = self.hidden_norm(self.fc(aux_hidden))
        return context

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any
    ) -> LogitsProcessorOutput:
        """hidden_states: [N, H], as the LM head reads them."""
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer.self_attn(layer.input_layernorm(hidden), positions, forward_batch)
            hidden = layer.finish(hidden, x)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=self.norm(hidden))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_weights(self, self.draft, weights)


EntryClass = [SparkGemma4BlockDraft]
