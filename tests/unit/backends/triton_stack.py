"""A model of attention layers alone, over the requests of a `World`."""

from __future__ import annotations

from typing import Any

import torch
from triton_world import DEVICE, D, World


class Stack:
    """A model of attention layers alone: h += Wo attend(Wq h, Wk h, Wv h), logits = E h."""

    def __init__(self, world: World, vocabulary: int = 29) -> None:
        rng = torch.Generator(DEVICE).manual_seed(5)
        self.world, self.width = world, world.heads * D
        kv = world.kv_heads * D

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=rng) / columns**0.5

        self.embedding = torch.randn(vocabulary, self.width, generator=rng)
        self.layers = [
            [matrix(rows, self.width) for rows in (self.width, kv, kv, self.width)]
            for _ in range(world.layers)
        ]

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        """tokens, positions [M]; attend(layer, q, k, v) -> [M, H * D]. [M, vocabulary]"""
        hidden = self.embedding[tokens] + 0.3 * torch.sin(positions[:, None] / 3.0)
        for layer, (wq, wk, wv, wo) in enumerate(self.layers):
            q, k, v = (hidden @ w.T for w in (wq, wk, wv))
            hidden = hidden + attend(layer, q, k, v) @ wo.T
        return hidden @ self.embedding.T

    def alone(self, tokens: torch.Tensor, keep_in: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of one request's tokens, in plain torch. keep_in: slots for their K and V."""
        world = self.world

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (x.view(-1, world.kv_heads, D) for x in (k, v))
            if keep_in is not None:
                world.pool.k[layer, keep_in], world.pool.v[layer, keep_in] = k, v
            out = torch.nn.functional.scaled_dot_product_attention(
                q.view(-1, world.heads, D).transpose(0, 1),
                k.transpose(0, 1),
                v.transpose(0, 1),
                is_causal=True,
                scale=0.3,
                enable_gqa=True,
            )
            return out.transpose(0, 1).flatten(1)

        return self.logits(tokens, torch.arange(len(tokens)), attend)

    def greedy(self, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
        """The prompt and what plain decoding adds to it."""
        for _ in range(tokens):
            prompt = torch.cat([prompt, self.alone(prompt)[-1:].argmax(-1)])
        return prompt
