"""What is minimised: one class a family of drafts, from a batch to a loss.

An objective is all that `train.train` knows of the draft: its parameters, γ and a loss. Its
`accept` is the same figure for all of them, 1 - ½‖p - q‖₁ per row: the probability that the draft
token at that place is accepted at temperature 1, were those before it accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.recipe.batches import Batch
from sglang_dspark.recipe.draft import DraftModel
from sglang_dspark.recipe.eagle3 import STEP_DECAY, Eagle3Model, eagle3_loss
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.loss import (
    LossTerms,
    LossWeights,
    Vocabulary,
    choose_vocabulary,
    dspark_loss,
    position_weights,
)


@dataclass(frozen=True)
class Shared:
    """What the draft borrows from the target, frozen, on the training device."""

    embed: Tensor  # [V, H]
    head: Tensor  # [V, H]


class Objective(Protocol):
    """model: what is trained. config: its shape."""

    @property
    def model(self) -> DraftModel | Eagle3Model: ...

    def loss(self, batch: Batch, progress: float, generator: torch.Generator) -> LossTerms:
        """The loss of a batch on the training device. progress: share of the training that is
        over, 0 to 1. generator: on the CPU, a new one every step."""


# A draft that knows little learns from soft cross-entropy, while the gradient of |p - q| vanishes
# where q is near zero.
EARLY_LOSS = LossWeights(soft_cross_entropy=1.0, cross_entropy=0.0, distance=0.9, confidence=0.3)
PAPER_LOSS = LossWeights(cross_entropy=0.1, distance=0.9, confidence=1.0)
CE_LOSS = LossWeights(soft_cross_entropy=1.0, cross_entropy=0.0, distance=0.0, confidence=0.0)


@dataclass(frozen=True)
class BlockObjective:
    """DSPARK and DFLASH: a block of rows in one forward.

    early, final: loss weights, the latter over the last final_share of the training.
    frequent int64 [f], likely_per_row, num_sampled: the candidate vocabulary, see loss.py.
    """

    model: DraftModel
    shared: Shared
    frequent: Tensor
    early: LossWeights = EARLY_LOSS
    final: LossWeights = PAPER_LOSS
    final_share: float = 0.2
    likely_per_row: int = 8
    num_sampled: int = 1024

    def loss(self, batch: Batch, progress: float, generator: torch.Generator) -> LossTerms:
        likely = batch.topk_ids[batch.valid][:, : self.likely_per_row]
        wanted = torch.cat([batch.labels[batch.valid], likely.flatten()])
        vocabulary = choose_vocabulary(
            self.model.config.vocab_size, self.frequent, wanted, self.num_sampled, generator
        )
        weights = self.final if progress >= 1 - self.final_share else self.early
        return self.loss_over(batch, vocabulary, weights)

    def loss_over(self, batch: Batch, vocabulary: Vocabulary, weights: LossWeights) -> LossTerms:
        """One forward of the draft over `batch` and its loss over a given vocabulary."""
        draft, gamma = self.model, self.model.config.block_size
        context = draft.project_context(batch.features.float())
        embeds = F.embedding(batch.block_ids, self.shared.embed).float()
        hidden = draft(embeds, batch.positions, context, batch.mask).flatten(0, 1)
        logits = F.linear(hidden, self.shared.head[vocabulary.ids].to(hidden.dtype)).float()
        previous = batch.previous.flatten()
        latent = draft.latent(previous)
        if draft.markov_head is not None:
            logits = logits + draft.markov_head.bias(previous, vocabulary.ids).float()
        confidence = None
        if draft.confidence_head is not None:
            confidence = draft.confidence_head(hidden, latent)
        return dspark_loss(
            logits,
            confidence,
            batch.labels.flatten(),
            batch.topk_ids.flatten(0, 1),
            batch.topk_probs.flatten(0, 1),
            position_weights(row_numbers(batch, gamma), gamma) * batch.valid.flatten(),
            vocabulary,
            weights,
        )


@dataclass(frozen=True)
class Eagle3Objective:
    """EAGLE3 over its own steps; step k counts step_decay^(k - 1), DeepSpec's step_loss_decay."""

    model: Eagle3Model
    shared: Shared
    step_decay: float = STEP_DECAY
    column: Tensor = field(init=False)  # int64 [V], Eagle3Model.column

    def __post_init__(self) -> None:
        object.__setattr__(self, "column", self.model.column())

    def loss(self, batch: Batch, progress: float, generator: torch.Generator) -> LossTerms:
        hidden = self.model.train_forward(batch, self.shared.embed)
        logits = self.model.lm_head(hidden).flatten(0, 2)
        rows = row_numbers(batch, self.model.config.block_size)
        weights = self.step_decay**rows * batch.valid.flatten()
        total, accept = eagle3_loss(
            logits,
            batch.topk_ids.flatten(0, 1),
            batch.topk_probs.flatten(0, 1),
            weights,
            self.column,
        )
        return LossTerms(total, accept, {"ce": total.detach()})


def row_numbers(batch: Batch, gamma: int) -> Tensor:
    """k - 1 of every row of the batch, int64 [S * N]."""
    return torch.arange(gamma, device=batch.valid.device).repeat(batch.valid.numel() // gamma)


def frequent_ids(examples: Iterable[Example], count: int, vocab_size: int) -> Tensor:
    """The `count` most frequent answer tokens, int64 [count]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        counts += example.ids[example.answer_start :].bincount(minlength=vocab_size)
    return counts.topk(min(count, vocab_size)).indices
