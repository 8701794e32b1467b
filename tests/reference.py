"""DSPARK in plain PyTorch, written from the paper's equations: one request, no cache, no engine.

The target is the transformers model. Everything is recomputed from the whole prefix in every
round, so that nothing here can share a mistake with the worker's bookkeeping.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

EPS = 1e-6


@dataclass
class Generation:
    tokens: list[int]
    accept_lens: list[int]
    # confidence logits of every round, [gamma] each
    confidences: list[torch.Tensor]


class ReferenceDraft:
    """The draft of arXiv 2607.05147, section 3, with weights named as DeepSpec names them."""

    def __init__(self, path: Path, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.w = {k: v.float() for k, v in load_file(path / "model.safetensors").items()}
        self.embedding = embedding
        self.lm_head = lm_head
        self.gamma = self.config["block_size"]

    def propose(
        self, anchor: int, features: torch.Tensor, gamma: int | None = None
    ) -> tuple[list[int], torch.Tensor]:
        """Greedy block behind an anchor; features [L, F * H] of the tokens before it.

        Returns gamma tokens and their confidence logits [gamma].
        """
        gamma = gamma or self.gamma
        context = _rms_norm(features @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])
        start = len(features)
        ids = [anchor] + [self.config["mask_token_id"]] * (gamma - 1)
        hidden = self.embedding[torch.tensor(ids)]
        for layer in range(self.config["num_hidden_layers"]):
            hidden = self._layer(f"layers.{layer}.", hidden, context, start)
        hidden = _rms_norm(hidden, self.w["norm.weight"])
        return self._heads(anchor, hidden)

    def _layer(
        self, name: str, hidden: torch.Tensor, context: torch.Tensor, start: int
    ) -> torch.Tensor:
        w = {k.removeprefix(name): v for k, v in self.w.items() if k.startswith(name)}
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim = self.config["head_dim"]
        normed = _rms_norm(hidden, w["input_layernorm.weight"])
        kv_input = torch.cat([context, normed])
        key_positions = torch.arange(len(kv_input))
        query_positions = torch.arange(start, start + len(hidden))

        def project(x: torch.Tensor, kind: str, num: int) -> torch.Tensor:
            return (x @ w[f"self_attn.{kind}_proj.weight"].T).view(len(x), num, dim)

        q = _rms_norm(project(normed, "q", heads), w["self_attn.q_norm.weight"])
        k = _rms_norm(project(kv_input, "k", kv_heads), w["self_attn.k_norm.weight"])
        v = project(kv_input, "v", kv_heads)
        q, k = self._rotate(q, query_positions), self._rotate(k, key_positions)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5  # no mask: the block is not causal
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(hidden), -1)
        hidden = hidden + attended @ w["self_attn.o_proj.weight"].T
        normed = _rms_norm(hidden, w["post_attention_layernorm.weight"])
        gate = F.silu(normed @ w["mlp.gate_proj.weight"].T)
        return hidden + (gate * (normed @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE on [N, heads, dim], halves paired as in Llama."""
        dim = x.shape[-1]
        theta = self.config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angle = (positions[:, None] * theta)[:, None, :]
        a, b = x.chunk(2, dim=-1)
        return torch.cat(
            [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1
        )

    def _heads(self, anchor: int, hidden: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        w1, w2 = self.w["markov_head.markov_w1.weight"], self.w["markov_head.markov_w2.weight"]
        kind = self.config["markov_head_type"]
        rank = w1.shape[1]
        state = torch.zeros(rank)
        previous, tokens, confidences = anchor, [], []
        for h in hidden:
            latent = w1[previous]
            confidence_input = torch.cat([h, latent])
            if kind == "gated":
                gate = self._linear("gate_proj", torch.cat([h, latent])).sigmoid()
                latent = gate * latent
            elif kind == "rnn":
                joint = self._linear("joint_proj", torch.cat([state, latent, h]))
                gate, candidate, output = joint.chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                latent = output.tanh()
            logits = h @ self.lm_head.T + latent @ w2.T
            previous = int(logits.argmax())
            tokens.append(previous)
            head = self.w["confidence_head.proj.weight"][0], self.w["confidence_head.proj.bias"][0]
            confidences.append(confidence_input @ head[0] + head[1])
        return tokens, torch.stack(confidences)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.w[f"markov_head.{name}.weight"] @ x + self.w[f"markov_head.{name}.bias"]


def load_target(path: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(target: AutoModelForCausalLM, prompt: list[int], length: int) -> list[int]:
    """transformers' own greedy generation, end-of-text ignored."""
    out = target.generate(
        torch.tensor([prompt]),
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=False,
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def speculate(
    target: AutoModelForCausalLM,
    draft_path: Path,
    prompt: list[int],
    length: int,
    gamma: int | None = None,
) -> Generation:
    """Greedy speculative decoding of one request until `length` tokens are committed."""
    draft = ReferenceDraft(
        draft_path, target.get_input_embeddings().weight, target.get_output_embeddings().weight
    )
    layers = draft.config["target_layer_ids"]
    logits, _ = _run(target, prompt, layers)
    committed = [*prompt, int(logits[-1].argmax())]
    accept_lens, confidences = [], []
    while len(committed) - len(prompt) < length:
        _, features = _run(target, committed[:-1], layers)
        block, confidence = draft.propose(committed[-1], features, gamma)
        logits, _ = _run(target, committed + block, layers)
        target_tokens = logits[len(committed) - 1 :].argmax(-1).tolist()
        accepted = 0
        while accepted < len(block) and block[accepted] == target_tokens[accepted]:
            accepted += 1
        committed += target_tokens[: accepted + 1]
        accept_lens.append(accepted + 1)
        confidences.append(confidence)
    return Generation(committed[len(prompt) :][:length], accept_lens, confidences)


def _run(
    target: AutoModelForCausalLM, tokens: list[int], layers: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [N, V] and features [N, F * H]; the output of layer k is hidden_states[k + 1]."""
    out = target(torch.tensor([tokens]), output_hidden_states=True)
    features = torch.cat([out.hidden_states[k + 1][0] for k in layers], dim=-1)
    return out.logits[0], features


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
