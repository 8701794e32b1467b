"""Drafts in plain PyTorch, for every layout: one request, no cache, no engine.

Written from the papers' equations, over the weights by the names that the layout gives them. What
a layout means is said by the caller (`BlockDraft`, `ChainDraft`), not by the product's readers, and
everything is recomputed from the whole prefix in every round: so that nothing here can share a
mistake with what it is compared to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

EPS = 1e-5


@dataclass
class Layer:
    """A decoder layer of Llama's or, with norms on queries and keys, Qwen3's kind."""

    weights: dict[str, Tensor]
    heads: int
    kv_heads: int
    head_dim: int
    theta: float

    def qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, width] -> q [N, heads, D], k and v [N, KV heads, D]"""
        q, k, v = (
            (x @ self.weights[f"self_attn.{kind}_proj.weight"].T).view(len(x), -1, self.head_dim)
            for kind in "qkv"
        )
        if "self_attn.q_norm.weight" in self.weights:
            q = rms_norm(q, self.weights["self_attn.q_norm.weight"])
            k = rms_norm(k, self.weights["self_attn.k_norm.weight"])
        return self._rotate(q, positions), self._rotate(k, positions), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """seen: [queries, keys] bool; None: everything."""
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.head_dim**0.5
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(q), -1)
        return out @ self.weights["self_attn.o_proj.weight"].T

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        x = residual + attended
        normed = rms_norm(x, self.weights["post_attention_layernorm.weight"])
        gate = F.silu(normed @ self.weights["mlp.gate_proj.weight"].T)
        up = normed @ self.weights["mlp.up_proj.weight"].T
        return x + (gate * up) @ self.weights["mlp.down_proj.weight"].T

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE on [N, heads, D], halves paired as in Llama."""
        inverse = self.theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angle = (positions[:, None] * inverse)[:, None, :]
        a, b = x.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass
class Draft:
    """What all layouts have. first_layer: its name in the files. features: outputs of these layers
    of the target. gamma: tokens of a block."""

    folder: Path
    target: PreTrainedModel
    features: tuple[int, ...]
    gamma: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    theta: float = 5000.0
    num_layers: int = 2
    first_layer: str = "layers.0."

    def __post_init__(self) -> None:
        raw = load_file(self.folder / "model.safetensors")
        self.w = {name.removeprefix("model."): weight for name, weight in raw.items()}
        self.embedding = self.target.get_input_embeddings().weight.detach()
        self.head = self.target.get_output_embeddings().weight.detach()
        self.ids = torch.arange(len(self.head))
        if "d2t" in self.w:
            self.head = self.w["lm_head.weight"]
            self.ids = self.w["d2t"] + torch.arange(len(self.w["d2t"]))
        self.layers = [
            self._layer(self.first_layer if i == 0 else f"layers.{i}.")
            for i in range(self.num_layers)
        ]

    def _layer(self, prefix: str) -> Layer:
        weights = {n.removeprefix(prefix): w for n, w in self.w.items() if n.startswith(prefix)}
        return Layer(weights, self.heads, self.kv_heads, self.head_dim, self.theta)


@dataclass
class BlockDraft(Draft):
    """DFLASH, and DSPARK where there is a sequential head.

    mask: the token of the rows behind the anchor's. anchor_proposes: whether the anchor's row
    proposes the first token; otherwise the mask at position L + 1 proposes the token of L + 1.
    """

    mask: int = 0
    anchor_proposes: bool = True
    markov: str = ""

    def propose(self, tokens: list[int], features: Tensor) -> list[int]:
        """tokens: all that is committed, the anchor last; features of all but the anchor."""
        context = rms_norm(features @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])
        start, anchor = len(features), tokens[-1]
        rows = self.gamma if self.anchor_proposes else self.gamma + 1
        x = self.embedding[torch.tensor([anchor] + [self.mask] * (rows - 1))]
        for layer in self.layers:
            source = torch.cat([context, rms_norm(x, layer.weights["input_layernorm.weight"])])
            q, k, v = layer.qkv(source, torch.arange(len(source)))
            x = layer.finish(x, layer.attend(q[start:], k, v, None))
        hidden = rms_norm(x, self.w["norm.weight"])
        if not self.anchor_proposes:
            hidden = hidden[1:]
        return self._tokens(anchor, hidden)

    def _tokens(self, anchor: int, hidden: Tensor) -> list[int]:
        previous, tokens = anchor, []
        state = torch.zeros(self.w["markov_head.markov_w1.weight"].shape[1] if self.markov else 0)
        for h in hidden:
            logits = h @ self.head.T
            if self.markov:
                latent = self.w["markov_head.markov_w1.weight"][previous]
                if self.markov == "gated":
                    latent = self._linear("gate_proj", torch.cat([h, latent])).sigmoid() * latent
                elif self.markov == "rnn":
                    joint = self._linear("joint_proj", torch.cat([state, latent, h]))
                    gate, candidate, output = joint.chunk(3)
                    state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                    latent = output.tanh()
                logits = logits + latent @ self.w["markov_head.markov_w2.weight"].T
            previous = int(self.ids[logits.argmax()])
            tokens.append(previous)
        return tokens

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"markov_head.{name}.weight"] @ x + self.w[f"markov_head.{name}.bias"]


@dataclass
class ChainDraft(Draft):
    """EAGLE3: slot t pairs the features of position t with the token behind it.

    norms: "whole" or "each", the features' norm before fc. normed_residual: speculators'
    norm_before_residual. later_norm: name of the norm that opens layers behind the first.
    mask: the token of a parallel draft's masked rows; None: it is a chain.
    """

    num_layers: int = 1
    norms: str = ""
    normed_residual: bool = False
    normed_output: bool = False
    later_norm: str = "input_layernorm"
    own_embedding: bool = False
    mask: int | None = None

    def propose(self, tokens: list[int], features: Tensor) -> list[int]:
        """As in `BlockDraft`."""
        if self.own_embedding:
            self.embedding = self.w["embed_tokens.weight"]
        pairs = list(tokens[1:])  # the anchor is beside the features of the position before it
        states = self._project(features)
        if self.mask is not None:
            masked = self._project(self.w["mask_hidden"].view(1, -1))
            pairs += [self.mask] * (self.gamma - 1)
            states = torch.cat([states, masked.expand(self.gamma - 1, -1)])
            rows = self._run(pairs, states)[-self.gamma :]
            return [int(self.ids[(self._out(row) @ self.head.T).argmax()]) for row in rows]
        proposed: list[int] = []
        for _ in range(self.gamma):
            y = self._run(pairs, states)[-1]
            proposed.append(int(self.ids[(self._out(y) @ self.head.T).argmax()]))
            pairs.append(proposed[-1])
            fed_back = self._out(y) if self.normed_output else y
            states = torch.cat([states, fed_back[None]])
        return proposed

    def _project(self, features: Tensor) -> Tensor:
        if self.norms == "whole":
            features = rms_norm(features, self.w["input_norm.weight"])
        if self.norms == "each":
            parts = features.chunk(len(self.features), dim=-1)
            normed = [rms_norm(p, self.w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)]
            features = torch.cat(normed, dim=-1)
        return features @ self.w["fc.weight"].T

    def _out(self, y: Tensor) -> Tensor:
        return rms_norm(y, self.w["norm.weight"])

    def _run(self, pairs: list[int], states: Tensor) -> Tensor:
        """Every slot's output, [slots, H]."""
        positions = torch.arange(len(states))
        seen = positions[:, None] >= positions
        x = states
        for i, layer in enumerate(self.layers):
            if i == 0:
                normed = rms_norm(x, layer.weights["hidden_norm.weight"])
                embeds = self.embedding[torch.tensor(pairs)]
                embeds = rms_norm(embeds, layer.weights["input_layernorm.weight"])
                source = torch.cat([embeds, normed], dim=-1)
                residual = normed if self.normed_residual else x
            else:
                source, residual = rms_norm(x, layer.weights[f"{self.later_norm}.weight"]), x
            q, k, v = layer.qkv(source, positions)
            x = layer.finish(residual, layer.attend(q, k, v, seen))
        return x


@torch.inference_mode()
def speculate(
    target: PreTrainedModel,
    propose: Callable[[list[int], Tensor], list[int]],
    features: tuple[int, ...],
    prompt: list[int],
    length: int,
) -> tuple[list[int], list[int]]:
    """Greedy speculative decoding: the tokens, and the accept length of every round."""

    def run(tokens: list[int]) -> tuple[list[int], Tensor]:
        """Argmax behind every token, and the outputs of the layers `features`."""
        out = target(torch.tensor([tokens]), output_hidden_states=True)
        captured = torch.cat([out.hidden_states[k + 1][0] for k in features], dim=-1)
        return out.logits[0].argmax(-1).tolist(), captured

    committed = [*prompt, run(prompt)[0][-1]]
    accept_lens = []
    while len(committed) - len(prompt) < length:
        block = propose(committed, run(committed)[1][:-1])
        wanted = run(committed + block)[0][len(committed) - 1 :]
        accepted = 0
        while accepted < len(block) and block[accepted] == wanted[accepted]:
            accepted += 1
        committed += wanted[: accepted + 1]
        accept_lens.append(accepted + 1)
    return committed[len(prompt) :][:length], accept_lens


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
