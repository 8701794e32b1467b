"""A first attention layer that looks at the latest context from the first step on.

Everything a block can know beyond its anchor comes through attention, and left alone, training
spends its first thousands of steps on finding out that the last context slots matter most. This
start gives it that: whatever the row holds, its query is the constant pattern u; so is the key of
every context slot, and the key of a block row is -u. RoPE makes the score a sum of cosines,

    score(Δ) = 8 G² · mean_i cos(θ_i Δ)        Δ: distance in tokens, θ_i: frequencies in u

which falls with Δ as far as a block is long, if the θ_i are in the middle of the range. Values and
output are identities, so the row's residual stream becomes its embedding plus the last feature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.recipe.draft import DraftConfig, DraftModel

# Widths of 1 rad / token over which a head's cosines run: sharp heads see the last slot or two,
# soft ones the last ten. Spread over the heads in turn.
ANGLE_RANGES = ((0.24, 0.75), (0.16, 0.52), (0.05, 0.36))
SHARPNESS = 12.0  # the greatest score, nats
SHARE = 1.0  # size of what attention adds beside the residual's


@torch.no_grad()
def init_recency(
    draft: DraftModel, embeds: Tensor, mask_embed: Tensor, features: Tensor, seed: int
) -> None:
    """Set the first layer's attention.

    embeds [n, H]: embeddings of frequent answer tokens. mask_embed [H]. features [m, F * H].
    """
    config, layer = draft.config, draft.decoder_layers[0]
    attention = layer.self_attn
    context = draft.project_context(features.float())
    rows = layer.input_layernorm(embeds.float())
    # The mask is in γ - 1 of γ rows.
    masks = layer.input_layernorm(mask_embed.float()[None]).expand(len(rows) // 4, -1)
    blocks = torch.cat([rows, masks])
    ones = torch.ones(len(blocks), device=blocks.device)
    to_query = ridge_direction(blocks, ones)
    to_key = ridge_direction(
        torch.cat([context, blocks]), torch.cat([ones.new_ones(len(context)), -ones])
    )

    query, key = recency_patterns(config)
    generator = torch.Generator().manual_seed(seed)
    set_constant(attention.q_proj.weight, query, to_query, generator)
    set_constant(attention.k_proj.weight, key, to_key, generator)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_((SHARPNESS / config.head_dim**0.5) ** 0.5)
    down, up = carry(config, context)
    attention.v_proj.weight.copy_(down)
    scale = embeds.float().square().mean().sqrt() / context.square().mean().sqrt()
    attention.o_proj.weight.copy_(up * scale * SHARE)


def recency_patterns(config: DraftConfig) -> tuple[Tensor, Tensor]:
    """u of every query head [heads, D] and of every KV head [KV heads, D]: ones at the frequencies
    of the KV head's range, else zeros."""
    heads, kv_heads, half = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    half //= 2
    angles = config.rope_theta ** (-torch.arange(half) / half)
    key = torch.zeros(kv_heads, config.head_dim)
    for head in range(kv_heads):
        low, high = ANGLE_RANGES[head * len(ANGLE_RANGES) // kv_heads]
        chosen = (angles >= low) & (angles <= high)
        if not chosen.any():  # few frequencies, far apart
            chosen[(angles - high).abs().argmin()] = True
        key[head, :half] = chosen.float()
    return key.repeat_interleave(heads // kv_heads, dim=0), key


def set_constant(
    weight: Tensor, patterns: Tensor, direction: Tensor, generator: torch.Generator
) -> None:
    """Every input with input · direction = 1 maps to `patterns`; a little noise breaks ties."""
    weight.copy_(torch.outer(patterns.flatten().to(weight.device), direction))
    noise = torch.randn(weight.shape, generator=generator).to(weight.device)
    weight.add_(noise * weight.abs().mean() * 0.1)


def carry(config: DraftConfig, rows: Tensor) -> tuple[Tensor, Tensor]:
    """v_proj and o_proj that carry what matters most of `rows` [n, H] through the KV heads.

    The greatest principal directions that the KV heads have room for; with as many as H, all.
    Returns [KV heads * D, H] and [H, heads * D], whose product projects onto them.
    """
    size, head_dim = config.hidden_size, config.head_dim
    width = config.num_key_value_heads * head_dim
    copies = config.num_attention_heads // config.num_key_value_heads
    down = torch.zeros(width, size, device=rows.device)
    if width == size:
        down.copy_(torch.eye(size))
    else:
        values, vectors = torch.linalg.eigh((rows.double().T @ rows.double()) / len(rows))
        kept = vectors[:, values.argsort(descending=True)[:width]].T.float()
        down[: len(kept)] = kept
    per_head = down.unflatten(0, (-1, head_dim)).repeat_interleave(copies, dim=0) / copies
    return down, per_head.flatten(0, 1).T.contiguous()


def ridge_direction(inputs: Tensor, wanted: Tensor) -> Tensor:
    """w with inputs · w ≈ wanted. inputs [n, H], wanted [n] -> [H]"""
    x, y = inputs.double(), wanted.double()
    gram = x.T @ x
    ridge = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), device=x.device)
    solution: Tensor = torch.linalg.solve(gram + ridge, x.T @ y)
    return solution.float()
