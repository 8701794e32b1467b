"""What the draft knows before training: the target's last layers and the corpus's bigrams."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.recipe.draft import DraftConfig, DraftModel
from sglang_dspark.recipe.target import FastLlama


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
    kv_rows = config.num_key_value_heads * head_dim
    sources = target.layers[len(target.layers) - config.num_hidden_layers :]
    for layer, source in zip(draft.decoder_layers, sources, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        layer.input_layernorm.weight.copy_(shared)
        layer.post_attention_layernorm.weight.copy_(source.mlp_norm)
        qkv = source.qkv.float() * (source.input_norm.float() / shared)
        q, k, v = qkv.split([q_rows, kv_rows, kv_rows])
        attention.q_proj.weight.copy_(q)
        attention.k_proj.weight.copy_(k)
        attention.v_proj.weight.copy_(v)
        attention.o_proj.weight.copy_(source.output)
        for norm, weight in ((attention.q_norm, q), (attention.k_norm, k)):
            # RMSNorm forgets the scale of q and k, and with it how sharp the attention is.
            norm.weight.fill_((context @ weight.T).square().mean().sqrt().item())
        gate, up = source.gate_up.chunk(2)
        mlp.gate_proj.weight.copy_(gate)
        mlp.up_proj.weight.copy_(up)
        mlp.down_proj.weight.copy_(source.down)
    draft.markov_head.markov_w2.weight.zero_()
    draft.markov_head.markov_w1.weight.normal_(std=config.markov_rank**-0.5)
    draft.confidence_head.proj.weight.zero_()
    draft.confidence_head.proj.bias.zero_()
    return draft


@torch.no_grad()
def init_markov(draft: DraftModel, previous: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> None:
    """Set W1 and W2 from a truncated SVD of the corpus's bigram log ratios.

    previous int64 [n]: the token at each position; topk_ids int64 and topk_probs float [n, k]: the
    target's distribution of the next one, averaged over all positions with the same token.
    Entry (x, y) = log(P(y | x) / P(y)), positive part only (PPMI), damped by how often x was
    seen: a token seen twice has said little about what follows.
    """
    vocab, rank = draft.config.vocab_size, draft.config.markov_rank
    tokens, rows = previous.unique(return_inverse=True)
    columns_seen, columns = topk_ids.unique(return_inverse=True)
    if min(len(tokens), len(columns_seen)) <= rank:
        return  # too little text to say anything; W2 stays zero
    shape = (len(tokens), len(columns_seen))
    flat = rows[:, None] * shape[1] + columns
    joint = torch.zeros(shape[0] * shape[1])
    joint = joint.index_add_(0, flat.flatten(), topk_probs.float().flatten()).view(shape)
    count = joint.sum(dim=1, keepdim=True)
    marginal = joint.sum(dim=0, keepdim=True) / joint.sum()
    ratio = (joint / (count * marginal).clamp(min=1e-9)).clamp(min=1.0).log()
    ratio *= count / (count + 5.0)
    u, s, v = torch.svd_lowrank(ratio, q=rank, niter=3)
    root = s.sqrt()
    w1 = torch.zeros(vocab, rank)
    w2 = torch.zeros(vocab, rank)
    w1[tokens] = u * root
    w2[columns_seen] = v * root
    draft.markov_head.markov_w1.weight.copy_(w1)
    draft.markov_head.markov_w2.weight.copy_(w2)
