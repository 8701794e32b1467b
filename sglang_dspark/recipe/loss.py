"""The DSpark training loss (arXiv 2607.05147), over a candidate vocabulary.

For row k = 1 .. γ of a block, with target distribution p and draft distribution q:

    w_k  = exp(-(k - 1) / γ)
    loss = Σ w_k [ 0.1 · -log q(x_k) + 0.9 · ‖p - q‖₁ + 1.0 · BCE(c_k, 1 - ½‖p - q‖₁) ] / Σ w_k

1 - ½‖p - q‖₁ is the probability that a token drawn from q is accepted; as the confidence's label
it carries no gradient.

The whole vocabulary (49k for SmolLM2) would cost more than the draft itself. So logits are
computed for c candidate ids (frequent ids, this batch's labels and likely target tokens) and for s
ids drawn uniformly from the rest, whose logits get + log((V - c) / s): the rest's share of the
partition function is estimated without bias, and pushed down as training with all of V would.
‖p - q‖₁ then takes everything outside the candidates as one bucket, in both distributions; with
every id a candidate (s = 0) it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dspark.recipe.batches import round_up


@dataclass(frozen=True)
class LossWeights:
    """The paper's weights of cross-entropy, L1 distance and confidence.

    soft_cross_entropy weighs -Σ p log q, which the paper does not have: with little data, p says
    more about a position than the one token that was drawn from it."""

    soft_cross_entropy: float = 0.0
    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0


@dataclass(frozen=True)
class Vocabulary:
    """Ids whose logits are computed: candidates [c], then a sample [s] of all others."""

    ids: Tensor  # int64 [c + s]
    num_candidates: int
    sample_shift: float  # log((V - c) / s), added to the sampled logits
    column: Tensor  # int64 [V]; candidate id -> its column, others -> c (the bucket)


@dataclass(frozen=True)
class LossTerms:
    total: Tensor
    accept: Tensor  # float32 [R]; 1 - ½‖p - q‖₁ of every row, without gradient
    parts: dict[str, Tensor]  # weighted means to look at, without gradient


def choose_vocabulary(
    vocab_size: int,
    frequent: Tensor,  # int64 [f]
    wanted: Tensor,  # int64 [...]; labels and likely target tokens of the batch
    num_sampled: int,
    generator: torch.Generator,
) -> Vocabulary:
    """Candidates are frequent ∪ wanted; at least num_sampled others are drawn (with replacement),
    and as many more as make the sum a multiple of 256 (see round_up in batches.py)."""
    device = wanted.device
    column = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
    column[frequent] = 0
    column[wanted.flatten()] = 0
    candidates = (column == 0).nonzero().squeeze(1)
    count = len(candidates)
    column.fill_(count)
    column[candidates] = torch.arange(count, device=device)
    others = (column == count).nonzero().squeeze(1)
    if num_sampled == 0 or len(others) == 0:
        return Vocabulary(candidates, count, 0.0, column)
    num_sampled = round_up(count + num_sampled, 256) - count
    drawn = torch.randint(len(others), (num_sampled,), generator=generator).to(device)
    shift = math.log(len(others) / num_sampled)
    return Vocabulary(torch.cat([candidates, others[drawn]]), count, shift, column)


def position_weights(rows: Tensor, gamma: int) -> Tensor:
    """rows int64 [...], k - 1 of each row -> w_k float32 [...]"""
    return torch.exp(-rows.float() / gamma)


def dspark_loss(
    logits: Tensor,  # [R, c + s], of vocabulary.ids, without the sample shift
    confidence: Tensor | None,  # [R], logits; None: no head, no such term
    labels: Tensor,  # int64 [R]
    topk_ids: Tensor,  # int64 [R, k]
    topk_probs: Tensor,  # float32 [R, k]; what they lack of 1 goes into the bucket
    weights: Tensor,  # float32 [R], w_k
    vocabulary: Vocabulary,
    loss_weights: LossWeights,
) -> LossTerms:
    """The loss over R rows; rows of weight 0 need valid ids, and do not count."""
    count = vocabulary.num_candidates
    has_rest = logits.shape[1] > count
    logits = logits.float()
    if vocabulary.sample_shift:
        logits = torch.cat([logits[:, :count], logits[:, count:] + vocabulary.sample_shift], dim=1)
    log_q = logits.log_softmax(dim=-1)
    cross_entropy = F.nll_loss(log_q, vocabulary.column[labels], reduction="none")

    p = log_q.new_zeros(len(logits), count + 1)
    p.scatter_add_(1, vocabulary.column[topk_ids], topk_probs)
    p[:, count] += (1 - topk_probs.sum(dim=-1)).clamp(min=0)
    q = log_q.exp()
    distance = (q[:, :count] - p[:, :count]).abs().sum(dim=-1)
    distance = distance + (q[:, count:].sum(dim=-1) - p[:, count]).abs()

    accept = (1 - 0.5 * distance.detach()).clamp(0, 1)
    share = weights / weights.sum()
    means = {"ce": (cross_entropy * share).sum(), "L1": (distance * share).sum()}
    total = loss_weights.cross_entropy * means["ce"] + loss_weights.distance * means["L1"]
    if confidence is not None:
        bce = F.binary_cross_entropy_with_logits(confidence.float(), accept, reduction="none")
        means["bce"] = (bce * share).sum()
        total = total + loss_weights.confidence * means["bce"]
    if loss_weights.soft_cross_entropy:
        log_rest = log_q[:, count:].logsumexp(dim=-1, keepdim=True) if has_rest else log_q[:, :0]
        known = torch.cat([log_q[:, :count], log_rest], dim=1)
        soft = -(p[:, : known.shape[1]] * known).sum(dim=-1)
        total = total + loss_weights.soft_cross_entropy * (soft * share).sum()
    return LossTerms(total, accept, {name: mean.detach() for name, mean in means.items()})
