"""Training batches: a few sequences, many anchors in each, one attention mask.

All blocks of a sequence go through the draft in one call. Row (j, k) is position a_j + k of the
block of anchor a_j. It may see

    context slot t      where t < a_j          (the anchor's own features do not exist yet)
    block row (j', k')  where j' = j           (its own block, all of it, both directions)

so that each block computes exactly what it would compute alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.recipe.features import Example


@dataclass(frozen=True)
class Batch:
    """S sequences padded to T tokens, A anchors each, blocks of γ rows; N = A * γ."""

    ids: Tensor  # int64 [S, T]; zeros in the padding, as in the features
    features: Tensor  # bfloat16 [S, T, F * H]
    block_ids: Tensor  # int64 [S, N]; anchor token, then mask tokens
    positions: Tensor  # int64 [S, N]
    mask: Tensor  # bool [S, N, T + N]
    valid: Tensor  # bool [S, N]; False: past the end of the sequence, or a padding anchor
    previous: Tensor  # int64 [S, N]; x_{k-1}, the true token before the one to predict
    labels: Tensor  # int64 [S, N]; x_k, the true token; 0 where not valid
    topk_ids: Tensor  # int64 [S, N, k]; the target's distribution after the true prefix
    topk_probs: Tensor  # float32 [S, N, k]

    def to(self, device: torch.device) -> Batch:
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def block_mask(anchors: Tensor, length: int, gamma: int) -> Tensor:
    """anchors int64 [A], of one sequence -> bool [A * γ, length + A * γ]; see the module's head.

    An anchor of -1 is padding: its rows see their own block only.
    """
    of_row = anchors.repeat_interleave(gamma)
    context = torch.arange(length, device=anchors.device)[None] < of_row[:, None]
    index = torch.arange(len(anchors), device=anchors.device).repeat_interleave(gamma)
    return torch.cat([context, index[:, None] == index[None]], dim=1)


def choose_anchors(example: Example, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` different answer positions that have a next token; int64, ascending."""
    first, stop = example.answer_start, len(example.ids) - 1
    order = torch.randperm(stop - first, generator=generator)[:count]
    return order.sort().values + first


def make_batch(
    examples: list[Example], anchors: list[Tensor], gamma: int, mask_token_id: int
) -> Batch:
    """Pad and stack. anchors[i] int64 [A_i]: answer positions of examples[i]."""
    # Few different shapes: a CPU matrix library prepares (and caches) a kernel for each new one.
    length = round_up(max(len(example.ids) for example in examples), 64)
    count = max(len(chosen) for chosen in anchors)
    rows = [
        _one_sequence(example, chosen, length, count, gamma, mask_token_id)
        for example, chosen in zip(examples, anchors, strict=True)
    ]
    return Batch(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _one_sequence(
    example: Example, anchors: Tensor, length: int, count: int, gamma: int, mask_token_id: int
) -> dict[str, Tensor]:
    total = len(example.ids)
    padded = torch.full((count,), -1, dtype=torch.int64)
    padded[: len(anchors)] = anchors
    positions = padded.clamp(min=0)[:, None] + torch.arange(gamma)
    # Row k needs the token at position + 1 as its label.
    valid = (positions + 1 < total) & (padded >= 0)[:, None]
    here = positions.clamp(max=total - 1)
    after = (positions + 1).clamp(max=total - 1)
    block_ids = torch.full((count, gamma), mask_token_id, dtype=torch.int64)
    block_ids[:, 0] = example.ids[here[:, 0]]
    answer_rows = (here - example.answer_start).clamp(min=0)
    features = torch.zeros(length, example.features.shape[1], dtype=example.features.dtype)
    features[:total] = example.features
    ids = torch.zeros(length, dtype=torch.int64)
    ids[:total] = example.ids
    return {
        "ids": ids,
        "features": features,
        "block_ids": block_ids.flatten(),
        "positions": positions.flatten(),
        "mask": block_mask(padded, length, gamma),
        "valid": valid.flatten(),
        "previous": example.ids[here].flatten(),
        "labels": torch.where(valid, example.ids[after], 0).flatten(),
        "topk_ids": example.topk_ids[answer_rows].flatten(0, 1),
        "topk_probs": example.topk_probs[answer_rows].flatten(0, 1),
    }
