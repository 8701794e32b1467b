"""One layer's attention on a Triton backend, without graphs and as graphs replay it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from triton_world import DEVICE, MAX_REQUESTS, D, W, World, captured_batch, replayed_batch


def rows_of(world: World, tier: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random q [tier, H, D], k and v [tier, KVH, D]."""
    rng = torch.Generator(DEVICE).manual_seed(seed)
    shapes = ((tier, heads, D) for heads in (world.heads, world.kv_heads, world.kv_heads))
    return tuple(torch.randn(shape, generator=rng) for shape in shapes)


def attend(world: World, backend: Any, batch: ForwardBatch, rows: tuple[torch.Tensor, ...]):
    """[tier, H, D], NaN where nobody wrote."""
    q, k, v = rows
    batch._attn_output = torch.full_like(q.flatten(1), math.nan)  # SGLang's place for the output
    out = backend.forward_extend(q.flatten(1), k, v, world.layer(), batch)
    return out.view(-1, world.heads, D)


class Graphs:
    """Tiers captured on one backend: metadata stays where it was at capture, as in a CUDA graph."""

    def __init__(self, backend: Any, tiers: Sequence[int]) -> None:
        self.backend, self.captured = backend, {}
        backend.init_cuda_graph_state(MAX_REQUESTS, max(tiers))
        for tier in tiers:
            backend.init_forward_metadata_out_graph(captured_batch(tier), in_capture=True)
            self.captured[tier] = backend.forward_metadata

    def replay(self, world: World, live: ForwardBatch, rows: tuple[torch.Tensor, ...]):
        batch = replayed_batch(live)
        self.backend.init_forward_metadata_out_graph(batch)
        tier = live.spec_info.ragged_verify_layout.graph_num_tokens
        self.backend.forward_metadata = self.captured[tier]
        return attend(world, self.backend, batch, rows)


def uniform_batches(world: World) -> dict[str, ForwardBatch]:
    """Every other kind of forward: verify without a layout, a prompt, decode."""
    verify = world.batch([W] * len(world.prefixes), W * len(world.prefixes), ragged=False)
    prompt = world.batch([2] * len(world.prefixes), 2 * len(world.prefixes), ragged=False)
    prompt.forward_mode, prompt.spec_info = ForwardMode.EXTEND, None
    prompt.extend_prefix_lens, prompt.seq_lens = prompt.seq_lens, prompt.seq_lens + 2
    prompt.extend_seq_lens = torch.full_like(prompt.seq_lens, 2)
    prompt.extend_seq_lens_cpu = [2] * len(world.prefixes)
    prompt.extend_prefix_lens_cpu = list(world.prefixes)
    decode = world.batch([1] * len(world.prefixes), len(world.prefixes), ragged=False)
    decode.forward_mode, decode.spec_info = ForwardMode.DECODE, None
    return {"verify": verify, "prompt": prompt, "decode": decode}


def metadata_of(backend: Any, batch: ForwardBatch, in_graph: bool) -> dict[str, Any]:
    if in_graph:
        backend.init_cuda_graph_state(MAX_REQUESTS, MAX_REQUESTS * W)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    else:
        backend.init_forward_metadata(batch)
    found = backend.forward_metadata
    return {field.name: getattr(found, field.name) for field in fields(found)}
