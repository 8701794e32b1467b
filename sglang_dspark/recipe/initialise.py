"""What the draft knows before training: the target's last layers and the corpus's bigrams."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.recipe.draft import DraftConfig, DraftModel, MarkovHead
from sglang_dspark.recipe.eagle3 import Eagle3Model
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.recency import (
    SHARE,
    SHARPNESS,
    carry,
    init_recency,
    recency_patterns,
    ridge_direction,
    set_constant,
)
from sglang_dspark.recipe.target import FastLlama

# The most frequent ids that the bigram matrix holds: 6000 * 8000 floats are 192 MB.
MAX_TOKENS = 6000
MAX_COLUMNS = 8000


def init_block_draft(
    config: DraftConfig, target: FastLlama, examples: list[Example], seed: int
) -> DraftModel:
    """An untrained DSPARK or DFLASH draft: what follows in this module, one after the other."""
    some = torch.cat([example.features[:64] for example in examples[:64]])
    draft = init_from_target(config, target, some[:1024], seed)
    answers = torch.cat([example.ids[example.answer_start :] for example in examples])
    embeds, mask = target.embed[answers[:20_000]], target.embed[config.mask_token_id]
    init_recency(draft, embeds, mask, some.to(target.device), seed)
    if draft.markov_head is not None:
        ids = torch.cat([example.topk_ids for example in examples])
        probs = torch.cat([example.topk_probs for example in examples])
        init_markov(draft.markov_head, target.embed, answers, ids, probs)
    return draft


@torch.no_grad()
def init_from_target(
    config: DraftConfig, target: FastLlama, sample_features: Tensor, seed: int
) -> DraftModel:
    """A draft whose layers are the target's last ones.

    sample_features [n, F * H]: a few captured features, to scale q_norm and k_norm, which the
    target does not have.

    The last feature passes fc unchanged (an identity block, the rest zero). Every draft layer
    reads the same context vectors, so there is one norm weight g (of the target layer that would
    read the last feature); where a target layer has another weight n, the ratio n / g moves into
    its q, k and v columns, which leaves what it computes from the same input unchanged.

    The first layer's MLP is the target's first: both are the first to read raw embeddings.
    """
    torch.manual_seed(seed)
    draft = DraftModel(config).to(target.device)
    hidden = config.hidden_size
    draft.fc.weight.zero_()
    draft.fc.weight[:, -hidden:] = torch.eye(hidden, device=draft.fc.weight.device)
    reader = min(config.target_layer_ids[-1] + 1, len(target.layers) - 1)
    shared = target.layers[reader].input_norm.float()
    draft.hidden_norm.weight.copy_(shared)
    draft.norm.weight.copy_(target.final_norm)
    context = draft.project_context(sample_features.to(target.device).float())
    head_dim, q_rows = config.head_dim, config.num_attention_heads * config.head_dim
    kv_rows = target.kv_heads * head_dim
    copies = config.num_key_value_heads // target.kv_heads
    sources = target.layers[len(target.layers) - config.num_hidden_layers :]
    mlps = [target.layers[0], *sources[1:]]
    for layer, source, mlp_source in zip(draft.decoder_layers, sources, mlps, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        layer.input_layernorm.weight.copy_(shared)
        layer.post_attention_layernorm.weight.copy_(mlp_source.mlp_norm)
        qkv = source.qkv.float() * (source.input_norm.float() / shared)
        q, k, v = qkv.split([q_rows, kv_rows, kv_rows])
        k, v = (
            w.unflatten(0, (-1, head_dim)).repeat_interleave(copies, dim=0).flatten(0, 1)
            for w in (k, v)
        )
        attention.q_proj.weight.copy_(q)
        attention.k_proj.weight.copy_(k)
        attention.v_proj.weight.copy_(v)
        attention.o_proj.weight.copy_(source.output)
        for norm, weight in ((attention.q_norm, q), (attention.k_norm, k)):
            # RMSNorm forgets the scale of q and k, and with it how sharp the attention is.
            norm.weight.fill_((context @ weight.T).square().mean().sqrt().item())
        gate, up = mlp_source.gate_up.chunk(2)
        mlp.gate_proj.weight.copy_(gate)
        mlp.up_proj.weight.copy_(up)
        mlp.down_proj.weight.copy_(mlp_source.down)
    if draft.markov_head is not None:
        draft.markov_head.markov_w2.weight.zero_()
        draft.markov_head.markov_w1.weight.normal_(std=config.markov_rank**-0.5)
    if draft.confidence_head is not None:
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.bias.zero_()
    return draft


@torch.no_grad()
def init_markov(
    head: MarkovHead, embed: Tensor, previous: Tensor, topk_ids: Tensor, topk_probs: Tensor
) -> None:
    """Set W1 and W2 from a truncated SVD of the corpus's bigram log ratios.

    embed [V, H]: the target's embedding. previous int64 [n]: the token at each position; topk_ids
    int64 and topk_probs float [n, k]: the target's distribution of the next one.

    With P(y | x) the mean over all positions that hold x, entry (x, y) is log(P(y | x) / P(y)),
    its positive part only (PPMI), damped by how often x was seen: a token seen twice has said
    little about what follows. Tokens that the corpus hardly has get the row that a linear map of
    their embedding predicts.
    """
    vocab, rank = head.markov_w1.weight.shape
    seen = previous.bincount(minlength=vocab).float()
    likely = torch.zeros(vocab).index_add_(0, topk_ids.flatten(), topk_probs.float().flatten())
    tokens, columns = (
        mass.topk(min(limit, int((mass > 0).sum()))).indices
        for mass, limit in ((seen, MAX_TOKENS), (likely, MAX_COLUMNS))
    )
    if min(len(tokens), len(columns)) <= rank:
        return  # too little text to say anything; W2 stays zero
    # Ids outside the two lists go to one more row and column, which are cut off again.
    row_of, column_of = (torch.full((vocab,), len(ids)) for ids in (tokens, columns))
    row_of[tokens] = torch.arange(len(tokens))
    column_of[columns] = torch.arange(len(columns))
    width = len(columns) + 1
    flat = row_of[previous][:, None] * width + column_of[topk_ids]
    joint = torch.zeros((len(tokens) + 1) * width)
    joint.index_add_(0, flat.flatten(), topk_probs.float().flatten())
    joint = joint.view(-1, width)[:-1, :-1]
    count = joint.sum(dim=1, keepdim=True)
    marginal = joint.sum(dim=0, keepdim=True) / joint.sum()
    ratio = (joint / (count * marginal).clamp(min=1e-9)).clamp(min=1.0).log()
    ratio *= count / (count + 5.0)
    u, s, v = torch.svd_lowrank(ratio, q=rank, niter=3)
    root = s.sqrt()
    embed = embed.float().cpu()
    w1 = _extend(embed, tokens, u * root, count.squeeze(1))
    w2 = _extend(embed, columns, v * root, joint.sum(dim=0))
    head.markov_w1.weight.copy_(w1)
    head.markov_w2.weight.copy_(w2)


def _extend(embed: Tensor, ids: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Rows for the whole vocabulary from those of `ids`, by ridge regression on the embedding.

    embed [V, H], ids int64 [n], rows [n, r], counts [n] -> [V, r]. A row that was seen c times
    keeps c / (c + 3) of itself.
    """
    weight = counts.clamp(max=50.0).sqrt()[:, None]
    x, y = embed[ids] * weight, rows * weight
    ridge = 0.1 * x.square().sum() / x.shape[1]
    eye = torch.eye(x.shape[1])
    result: Tensor = embed @ torch.linalg.solve(x.T @ x + ridge * eye, x.T @ y)
    kept = (counts / (counts + 3.0))[:, None]
    result[ids] = kept * rows + (1 - kept) * result[ids]
    return result


@torch.no_grad()
def init_eagle3(
    draft: Eagle3Model, target: FastLlama, examples: list[Example], seed: int
) -> Eagle3Model:
    """EAGLE3 from the target's last layer, and a recency start of its attention.

    The last feature passes fc unchanged, and with it becomes the residual; attention adds the
    token's embedding (its own slot's, nearly), which the residual lacks. lm_head holds the
    target's rows of the draft vocabulary, the most frequent answer tokens.
    """
    torch.manual_seed(seed)
    config, layer = draft.config, draft.midlayer
    size, head_dim = config.hidden_size, config.head_dim
    source = target.layers[-1]
    answers = torch.cat([example.ids[example.answer_start :] for example in examples])
    counts = answers.bincount(minlength=config.vocab_size)
    chosen = counts.topk(config.draft_vocab_size).indices.sort().values
    draft.d2t.copy_(chosen)
    draft.lm_head.weight.copy_(target.head[chosen])
    draft.fc.weight.zero_()
    draft.fc.weight[:, -size:] = torch.eye(size, device=target.device)
    draft.norm.weight.copy_(target.final_norm)
    layer.hidden_norm.weight.copy_(source.input_norm)
    layer.input_layernorm.weight.copy_(target.layers[0].input_norm)
    layer.post_attention_layernorm.weight.copy_(source.mlp_norm)
    gate, up = source.gate_up.chunk(2)
    layer.mlp.gate_proj.weight.copy_(gate)
    layer.mlp.up_proj.weight.copy_(up)
    layer.mlp.down_proj.weight.copy_(source.down)

    attention = layer.self_attn
    some = [example for example in examples if len(example.ids) > 1][:64]
    features = torch.cat([example.features[:-1] for example in some]).to(target.device).float()
    embeds = target.embed[torch.cat([example.ids[1:] for example in some])].float()
    hidden = draft.fc(features)
    rows = layer.pair(embeds, hidden)
    direction = ridge_direction(rows, rows.new_ones(len(rows)))
    if config.qk_norm:
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_((SHARPNESS / head_dim**0.5) ** 0.5)
    generator = torch.Generator().manual_seed(seed)
    query, key = recency_patterns(config)
    for weight, patterns in ((attention.q_proj.weight, query), (attention.k_proj.weight, key)):
        # Without a norm the length counts: q · k / √D is to be SHARPNESS at most.
        length = (SHARPNESS * head_dim**0.5 / patterns.sum(dim=1, keepdim=True)) ** 0.5
        set_constant(weight, patterns * length, direction, generator)
    normed = rows[:, :size]
    down, up = carry(config, normed)
    attention.v_proj.weight.copy_(torch.cat([down, torch.zeros_like(down)], dim=1))
    scale = hidden.square().mean().sqrt() / normed.square().mean().sqrt()
    attention.o_proj.weight.copy_(up * scale * SHARE)
    return draft
