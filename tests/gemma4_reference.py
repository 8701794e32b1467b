"""DeepSpec's Gemma 4 drafts in plain PyTorch: one request, no cache, everything from the start.

Written from the equations, with weights named as DeepSpec names them:
- attention: queries, keys and values normed per head (values without weight), queries and keys
  rotated, scores not scaled; values are the unnormed keys where `attention_k_eq_v`
- layer: x = x + norm(attention(norm(x))); x = (x + norm(mlp(norm(x)))) * scalar
- block draft: each layer's attention reads the projected features of the context, then the block
- EAGLE3: pairs (features of t, token t + 1), causal; a layer reads [norm(token); norm(features)]
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


class _Draft:
    def __init__(self, path: Path, embedding: torch.Tensor) -> None:
        """embedding: the target's, [V, H], not scaled; the LM head too."""
        self.config = json.loads((path / "config.json").read_text())
        self.w = {k: v.float() for k, v in load_file(path / "model.safetensors").items()}
        self.embedding = embedding.float()
        self.gamma = self.config.get("block_size") or self.config["ttt_length"]

    def embed(self, tokens: list[int]) -> torch.Tensor:
        return self.embedding[torch.tensor(tokens)] * self.config["hidden_size"] ** 0.5

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        cap = self.config["final_logit_softcapping"]
        return cap * torch.tanh(hidden @ self.embedding.T / cap)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return _normed(x, self.config["rms_norm_eps"]) * self.w[name + ".weight"]

    def layer(
        self, i: int, residual: torch.Tensor, x: torch.Tensor, context: torch.Tensor, causal: bool
    ) -> torch.Tensor:
        """x: what the layer's attention reads of its own rows; context: of those before them."""
        name = f"layers.{i}."
        attended = self._attention(name + "self_attn.", x, context, causal)
        hidden = residual + self.norm(name + "post_attention_layernorm", attended)
        normed = self.norm(name + "pre_feedforward_layernorm", hidden)
        gate = F.gelu(normed @ self.w[name + "mlp.gate_proj.weight"].T, approximate="tanh")
        mlp = (gate * (normed @ self.w[name + "mlp.up_proj.weight"].T)) @ self.w[
            name + "mlp.down_proj.weight"
        ].T
        out = hidden + self.norm(name + "post_feedforward_layernorm", mlp)
        return out * self.w[name + "layer_scalar"]

    def _attention(
        self, name: str, x: torch.Tensor, context: torch.Tensor, causal: bool
    ) -> torch.Tensor:
        dim, rows, before = self.config["global_head_dim"], len(x), len(context)
        both = torch.cat([context, x])

        def project(kind: str, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.w[f"{name}{kind}_proj.weight"].T).view(len(x), -1, dim)

        keys = project("k", both)
        values = keys if self.config["attention_k_eq_v"] else project("v", both)
        q = self._rotate(self.norm(name + "q_norm", project("q", x)), before)
        k = self._rotate(self.norm(name + "k_norm", keys), 0)
        v = _normed(values, self.config["rms_norm_eps"])
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k)
        if causal:
            later = torch.arange(before + rows) > torch.arange(before, before + rows)[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(rows, -1)
        return out @ self.w[name + "o_proj.weight"].T

    def _rotate(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """RoPE on [N, heads, dim] of positions from `first` on; only some pairs turn."""
        rope = self.config["rope_parameters"]["full_attention"]
        dim = x.shape[-1]
        pairs = torch.arange(dim // 2)
        speed = rope["rope_theta"] ** (-2.0 * pairs / dim)
        speed[pairs >= int(rope["partial_rotary_factor"] * dim) // 2] = 0.0
        angle = (torch.arange(first, first + len(x))[:, None] * speed)[:, None, :]
        a, b = x.chunk(2, dim=-1)
        return torch.cat(
            [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1
        )


class BlockDraft(_Draft):
    """`Gemma4DSparkModel`, with a sequential head or without."""

    def hidden(self, anchor: int, features: torch.Tensor, rows: int) -> torch.Tensor:
        """What the LM head reads [rows, H]; features [L, F * H] of the tokens before the anchor."""
        context = self.norm("hidden_norm", features @ self.w["fc.weight"].T)
        hidden = self.embed([anchor] + [self.config["mask_token_id"]] * (rows - 1))
        for i in range(self.config["num_hidden_layers"]):
            normed = self.norm(f"layers.{i}.input_layernorm", hidden)
            hidden = self.layer(i, hidden, normed, context, causal=False)
        return self.norm("norm", hidden)

    def propose(self, tokens: list[int], features: torch.Tensor, gamma: int = 0) -> list[int]:
        """The greedy block behind the last of the tokens; features [L, F * H] of all others."""
        hidden = self.hidden(tokens[-1], features, gamma or self.gamma)
        previous, block = tokens[-1], []
        for logits in self.logits(hidden):
            if self.config["markov_rank"]:
                bias = self.w["markov_head.markov_w1.weight"][previous]
                logits = logits + self.w["markov_head.markov_w2.weight"] @ bias
            previous = int(logits.argmax())
            block.append(previous)
        return block


class ChainDraft(_Draft):
    """`Gemma4Eagle3Model`."""

    def states(self, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        """y [N, H] of the pairs (states[t] [H], tokens[t + 1]), from the first one on."""
        embeds = self.norm("layers.0.input_layernorm", self.embed(tokens[1:]))
        x = torch.cat([embeds, self.norm("layers.0.hidden_norm", states)], dim=-1)
        return self.layer(0, states, x, x[:0], causal=True)

    def propose(self, tokens: list[int], features: torch.Tensor, gamma: int = 0) -> list[int]:
        """As `BlockDraft.propose`."""
        states, tokens = features @ self.w["fc.weight"].T, list(tokens)
        committed = len(tokens)
        while len(tokens) < committed + (gamma or self.gamma):
            last = self.states(tokens, states)[-1:]
            tokens.append(int(self.logits(self.norm("norm", last)).argmax()))
            states = torch.cat([states, last])
        return tokens[committed:]


def load(path: Path, embedding: torch.Tensor) -> BlockDraft | ChainDraft:
    """The draft of a folder that `gemma4.write_draft` wrote."""
    chain = "ttt_length" in json.loads((path / "config.json").read_text())
    return (ChainDraft if chain else BlockDraft)(path, embedding)


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
