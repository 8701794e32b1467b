"""Drafting in plain PyTorch, one sequence at a time: what the served drafters are measured against.

A session follows one sequence. Committed are positions 0 .. L-1, whose target features it has
seen; the anchor at position L is known but not yet run through the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.recipe.draft import DraftModel
from sglang_dspark.recipe.eagle3 import Eagle3Model
from sglang_dspark.recipe.target import FastLlama


@dataclass(frozen=True)
class Chooser:
    """How tokens are drawn. temperature 0 is greedy; generator: on the device of the logits."""

    temperature: float
    generator: torch.Generator | None = None

    def distribution(self, logits: Tensor) -> Tensor:
        """logits [..., V] -> float32 [..., V]; one-hot at the first greatest if greedy."""
        if self.temperature == 0:
            return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
        return (logits.float() / self.temperature).softmax(dim=-1)

    def draw(self, probs: Tensor) -> int:
        """One token of probs [V], which need not sum to 1."""
        if self.temperature == 0:
            return int(probs.argmax())
        return int(torch.multinomial(probs, 1, generator=self.generator))

    def accepts(self, probability: float) -> bool:
        """True with the given probability."""
        if self.temperature == 0:
            return probability >= 1
        device = self.generator.device if self.generator is not None else None
        return float(torch.rand((), generator=self.generator, device=device)) < probability


@dataclass(frozen=True)
class Proposal:
    """tokens [γ]; probs [γ, V], what each was drawn from; confidences [γ], or None: no head.
    logits: float32 [γ, V'], before any temperature, over the draft's own vocabulary."""

    tokens: list[int]
    probs: Tensor
    confidences: list[float] | None
    logits: Tensor | None = None


class Session(Protocol):
    """See the module. Every draft family has one."""

    def propose(self, anchor: int, chooser: Chooser) -> Proposal: ...

    def commit(self, tokens: list[int], features: Tensor) -> None:
        """The n tokens behind the old anchor, the last of which is the new one, and the target's
        features [n, F * H] of the n positions from the old anchor on."""


def begin(
    draft: DraftModel | Eagle3Model, target: FastLlama, prompt: list[int], features: Tensor
) -> Session:
    """A session after the prefill. features [L, F * H] of the prompt's L tokens."""
    if isinstance(draft, Eagle3Model):
        return Eagle3Session(draft, target, prompt, features)
    return BlockSession(draft, target, features)


class BlockSession:
    """DSPARK and DFLASH."""

    def __init__(self, draft: DraftModel, target: FastLlama, features: Tensor) -> None:
        self.draft, self.target = draft, target
        self.context = draft.project_context(features.float())

    def propose(self, anchor: int, chooser: Chooser) -> Proposal:
        draft, target, device = self.draft, self.target, self.context.device
        gamma = draft.config.block_size
        ids = draft.block_ids(torch.tensor([anchor], device=device))
        positions = len(self.context) + torch.arange(gamma, device=device)[None]
        embeds = F.embedding(ids, target.embed).to(self.context.dtype)
        hidden = draft(embeds, positions, self.context[None])[0]
        logits = target.logits(hidden.to(target.dtype)).float()
        tokens, probs, confidences, rows = [], [], [], []
        previous = torch.tensor(anchor, device=device)
        for k in range(gamma):
            latent = draft.latent(previous)
            row = logits[k]
            if draft.markov_head is not None:
                row = row + draft.markov_head.bias(previous).float()
            if draft.confidence_head is not None:
                confidences.append(float(draft.confidence_head(hidden[k], latent).sigmoid()))
            rows.append(row)
            probs.append(chooser.distribution(row))
            tokens.append(chooser.draw(probs[-1]))
            previous = torch.tensor(tokens[-1], device=device)
        return Proposal(tokens, torch.stack(probs), confidences or None, torch.stack(rows))

    def commit(self, tokens: list[int], features: Tensor) -> None:
        self.context = torch.cat([self.context, self.draft.project_context(features.float())])


class Eagle3Session:
    """Keys and values are kept of every slot whose token is known: all but the last."""

    def __init__(
        self, draft: Eagle3Model, target: FastLlama, prompt: list[int], features: Tensor
    ) -> None:
        self.draft, self.target = draft, target
        config = draft.config
        shape = (1, config.num_attention_heads, 0, config.head_dim)
        self.keys = self.values = torch.zeros(shape, device=features.device)
        self.length = 0  # slots in keys and values
        g = draft.fc(features.float())
        self._append(prompt[1:], g[:-1])
        self.last = g[-1:]  # features of the last committed position, [1, H]

    def _append(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """Slots of `tokens` [n] beside `hidden` [n, H]; returns their attention inputs."""
        layer = self.draft.midlayer
        ids = torch.tensor(tokens, dtype=torch.int64, device=hidden.device)
        embeds = F.embedding(ids, self.target.embed).float()
        x = layer.pair(embeds, hidden)[None]
        positions = self.length + torch.arange(len(tokens), device=hidden.device)[None]
        k, v = layer.self_attn.key_value(x, self.draft.rope(positions))
        self.keys = torch.cat([self.keys, k], dim=2)
        self.values = torch.cat([self.values, v], dim=2)
        self.length += len(tokens)
        return x

    def propose(self, anchor: int, chooser: Chooser) -> Proposal:
        draft, layer = self.draft, self.draft.midlayer
        config = draft.config
        hidden, token = self.last, anchor
        tokens, probs, rows = [], [], []
        kept = (self.keys, self.values, self.length)
        for k in range(config.block_size):
            x = self._append([token], hidden)
            if k == 0:
                kept = (self.keys, self.values, self.length)
            rope = draft.rope(torch.tensor([[self.length - 1]], device=hidden.device))
            query = layer.self_attn.query(x, rope)
            attended = F.scaled_dot_product_attention(query, self.keys, self.values)
            hidden = layer.finish(hidden[None], attended)[0]
            rows.append(draft.lm_head(draft.norm(hidden))[0].float())
            q = chooser.distribution(rows[-1])
            probs.append(q.new_zeros(config.vocab_size).index_copy_(0, draft.d2t, q))
            token = chooser.draw(probs[-1])
            tokens.append(token)
        self.keys, self.values, self.length = kept
        return Proposal(tokens, torch.stack(probs), None, torch.stack(rows))

    def commit(self, tokens: list[int], features: Tensor) -> None:
        g = self.draft.fc(features.float())
        self._append(tokens[:-1], g[:-1])
        self.last = g[-1:]
