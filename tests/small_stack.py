"""A few transformer layers over packed windows, to replay in the tiers of a `GraphPool`.

A row attends to the rows of its own window up to itself, and to nothing else: whatever mixes up
rows, offsets or padding changes its result.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from cuda_graph import Buffer, GraphPool, TierGrid, pack_windows


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    heads: int
    layers: int
    dtype: torch.dtype


class SmallStack(torch.nn.Module):
    """Attention without positions and an MLP, `layers` times."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        h, m = sizes.hidden, sizes.intermediate
        self.heads = sizes.heads

        def linear(inside: int, outside: int) -> torch.nn.Linear:
            return torch.nn.Linear(inside, outside, bias=False, device=device, dtype=sizes.dtype)

        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "qkv": linear(h, 3 * h),
                    "out": linear(h, h),
                    "up": linear(h, m),
                    "down": linear(m, h),
                }
            )
            for _ in range(sizes.layers)
        ).requires_grad_(False)

    def forward(
        self, hidden: torch.Tensor, request: torch.Tensor, offset: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, H], request and offset int64 [T] -> [T, H]."""
        sees = (request[:, None] == request) & (offset <= offset[:, None])
        for layer in self.layers:
            hidden = hidden + layer["out"](self._attend(layer["qkv"](hidden), sees))
            hidden = hidden + layer["down"](torch.nn.functional.silu(layer["up"](hidden)))
        return hidden

    def _attend(self, qkv: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        tokens = len(qkv)
        q, k, v = qkv.view(tokens, 3, self.heads, -1).permute(1, 2, 0, 3)  # [heads, T, D] each
        scores = (q @ k.transpose(1, 2)).float() / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~sees, float("-inf")).softmax(dim=-1).to(v.dtype)
        return (weights @ v).transpose(0, 1).reshape(tokens, -1)


def make_pool(stack: SmallStack, sizes: Sizes, grid: TierGrid, device: torch.device) -> GraphPool:
    """Captured on CUDA, eager elsewhere."""
    pool = GraphPool(
        grid,
        lambda views: stack(views["hidden"], views["request"], views["offset"]),
        {
            "hidden": Buffer(sizes.dtype, (sizes.hidden,)),
            "request": Buffer(torch.int64, padding=-1),
            "offset": Buffer(torch.int64),
        },
        device,
        backend="cuda" if device.type == "cuda" else "eager",
    )
    pool.capture()
    return pool


def windows_of(tokens: int, requests: int, width: int, seed: int) -> torch.Tensor:
    """[requests] int64: random windows of 1 to `width` rows, `tokens` in all."""
    rng, windows = random.Random(seed), [1] * requests
    while sum(windows) < tokens:
        short = [i for i, window in enumerate(windows) if window < width]
        windows[rng.choice(short)] += 1
    return torch.tensor(windows)


def batch(windows: torch.Tensor, sizes: Sizes, device: torch.device) -> dict[str, torch.Tensor]:
    """What a replay gets: the real rows only, in order of the requests."""
    tokens = int(windows.sum())
    rows = pack_windows(windows.to(device), tokens, len(windows))
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, sizes.hidden, generator=generator).to(device, sizes.dtype)
    return {"hidden": hidden, "request": rows.request, "offset": rows.offset}


def alone(stack: SmallStack, windows: torch.Tensor, inputs: dict[str, torch.Tensor]) -> Any:
    """[M, H]: every request by itself, one after the other."""
    done = []
    for hidden in inputs["hidden"].split(windows.tolist()):
        places = torch.arange(len(hidden), device=hidden.device)
        done.append(stack(hidden, torch.zeros_like(places), places))
    return torch.cat(done)


def replay_ms(pool: GraphPool, tokens: int, inputs: dict[str, torch.Tensor], passes: int) -> float:
    """Median time of a replay, milliseconds, the copies of its inputs included."""
    times = []
    for _ in range(passes + 3):  # the first ones warm up
        _synchronize()
        began = time.perf_counter()
        pool.replay(tokens, inputs)
        _synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return round(median(times[3:]), 4)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
