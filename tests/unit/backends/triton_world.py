"""A few requests in a KV pool, SGLang's and our Triton backend over them, and plain references.

Sizes: H query heads, KVH heads of K and V, D their size, W = 4 rows of a window at most. Slots of
the pool that nobody owns hold NaN, so reading one shows, and so does a row that nobody wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from transformers import PretrainedConfig

from sglang_dspark.backends.triton import TritonAttnBackend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-2 if DEVICE == "cuda" else 2e-6  # of float32; a GPU multiplies in TF32
W, D = 4, 16
CONTEXT, MAX_REQUESTS = 40, 4
SGLANGS, OURS = triton_backend.TritonAttnBackend, TritonAttnBackend


class Pool:
    """K and V of every layer, [slots, KVH, D]; slot 0 is where padding rows write."""

    start_layer = 0

    def __init__(self, slots: int, layers: int, kv_heads: int) -> None:
        empty = torch.full((layers, slots, kv_heads, D), math.nan)
        self.k, self.v = empty, empty.clone()

    def set_kv_buffer(self, layer: Any, loc: Any, k: Any, v: Any, *_: Any) -> None:
        self.k[layer.layer_id, loc.loc], self.v[layer.layer_id, loc.loc] = k, v

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v[layer]


@dataclass
class World:
    """prefixes: committed tokens of each request, in the rows 1, 2, ... of the slot table."""

    prefixes: Sequence[int]
    heads: int = 2
    kv_heads: int = 1
    window: int | None = None  # sliding, of every layer
    layers: int = 1
    pool: Pool = field(init=False)
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        rng = torch.Generator(DEVICE).manual_seed(sum(self.prefixes))
        slots = 1 + (MAX_REQUESTS + 1) * CONTEXT
        self.pool = Pool(slots, self.layers, self.kv_heads)
        order = torch.randperm(slots - 1, generator=rng) + 1
        self.table = order.view(MAX_REQUESTS + 1, CONTEXT).int()
        for row, tokens in enumerate(self.prefixes, start=1):
            mine = self.table[row, :tokens].long()
            shape = (self.layers, tokens, self.kv_heads, D)
            self.pool.k[:, mine] = torch.randn(shape, generator=rng)
            self.pool.v[:, mine] = torch.randn(shape, generator=rng)

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.prefixes)

    @property
    def rows(self) -> torch.Tensor:
        return torch.arange(1, len(self.prefixes) + 1)

    def layer(self, layer: int = 0) -> RadixAttention:
        return RadixAttention(
            self.heads,
            D,
            scaling=0.3,
            num_kv_heads=self.kv_heads,
            layer_id=layer,
            sliding_window_size=-1 if self.window is None else self.window,
        )

    def runner(self) -> SimpleNamespace:
        """What a Triton backend reads of SGLang's ModelRunner."""
        model_config = SimpleNamespace(
            attention_arch=AttentionArch.MHA,
            context_len=CONTEXT,
            get_max_num_attention_heads=lambda: self.heads,
            get_num_kv_heads=lambda tp, dcp=1: self.kv_heads,
            head_dim=D,
            hf_config=PretrainedConfig(),
            hf_text_config=PretrainedConfig(),
            is_encoder_decoder=False,
            linear_attn_registry_result=None,
            qk_nope_head_dim=0,
            qk_rope_head_dim=0,
            kv_lora_rank=0,
            v_head_dim=D,
            swa_v_head_dim=D,
        )
        return SimpleNamespace(
            decode_num_tokens_per_req=lambda: W,
            device=DEVICE,
            gpu_id=0,
            is_draft_worker=False,
            kv_cache_dtype=torch.float32,
            kv_index_translator=KVIndexTranslator(
                req_to_token=self.table,
                token_to_kv_pool_allocator=None,
                token_to_kv_pool=self.pool,
                page_size=1,
                device=DEVICE,
            ),
            model_config=model_config,
            page_size=1,
            req_to_token_pool=SimpleNamespace(size=MAX_REQUESTS, req_to_token=self.table),
            sliding_window_size=self.window,
            spec_algorithm=SpeculativeAlgorithm.DSPARK,
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=None,
        )

    def backend(self, kind: type = OURS) -> Any:
        return kind(self.runner())

    def slots(self, windows: Sequence[int], tier: int) -> torch.Tensor:
        """Where the rows of a forward write: [tier] int64, 0 in padding rows."""
        live = [
            self.table[row, prefix : prefix + window]
            for row, prefix, window in zip(self.rows, self.prefixes, windows, strict=True)
        ]
        return torch.nn.functional.pad(torch.cat(live).long(), (0, tier - sum(windows)))

    def batch(self, windows: Sequence[int], tier: int, ragged: bool = True) -> ForwardBatch:
        """A verify forward of the requests' windows, packed into a tier."""
        layout = RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=torch.tensor(windows), graph_num_tokens=tier
        )
        return verify_batch(
            self.rows, self.seq_lens, self.slots(windows, tier), layout if ragged else None
        )

    def expected(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, windows: Sequence[int]
    ) -> torch.Tensor:
        """Attention of layer 0, [sum(windows), H, D] in float64, one row and one head at a time."""
        out, start = [], 0
        for row, prefix, window in zip(self.rows, self.prefixes, windows, strict=True):
            mine, own = self.table[row, :prefix].long(), slice(start, start + window)
            keys = torch.cat([self.pool.k[0, mine], k[own]]).double()
            values = torch.cat([self.pool.v[0, mine], v[own]]).double()
            for j in range(window):
                position = prefix + j
                low = 0 if self.window is None else max(0, position - self.window)
                for head in range(self.heads):
                    kv_head = head // (self.heads // self.kv_heads)
                    scores = keys[low : position + 1, kv_head] @ q[start + j, head].double() * 0.3
                    out.append(scores.softmax(0) @ values[low : position + 1, kv_head])
            start += window
        return torch.stack(out).view(-1, self.heads, D)


def verify_batch(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    layout: RaggedVerifyLayout | None,
) -> ForwardBatch:
    tokens = torch.zeros_like(slots)
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(rows),
        input_ids=tokens,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        out_cache_loc=slots,
        seq_lens_sum=None,
        seq_lens_cpu=None,
        positions=tokens,
        spec_algorithm=SpeculativeAlgorithm.DSPARK,
        spec_info=DFlashVerifyInput(
            draft_token=tokens, positions=tokens, draft_token_num=W, ragged_verify_layout=layout
        ),
    )


def captured_batch(tier: int) -> ForwardBatch:
    """The batch on which SGLang captures a tier: a window of a made-up request in every slot."""
    slots = min(tier, MAX_REQUESTS)
    layout = RaggedVerifyLayout.from_verify_lens(
        verify_lens_cpu=build_capture_verify_lens(
            num_tokens=tier, num_slots=slots, num_draft_tokens=W
        ),
        device=torch.device(DEVICE),
        grid=[tier],
    )
    nothing = torch.zeros(slots, dtype=torch.int64)
    return verify_batch(nothing, nothing + 1, torch.zeros(tier, dtype=torch.int64), layout)


def replayed_batch(live: ForwardBatch) -> ForwardBatch:
    """A live batch as a replay hands it on: requests padded to the tier's slots, its own layout."""
    tier = live.spec_info.ragged_verify_layout.graph_num_tokens
    more = (0, min(tier, MAX_REQUESTS) - live.batch_size)
    return verify_batch(
        torch.nn.functional.pad(live.req_pool_indices, more),
        torch.nn.functional.pad(live.seq_lens, more, value=1),
        live.out_cache_loc,
        live.spec_info.ragged_verify_layout,
    )


@contextmanager
def published() -> Iterator[None]:
    """SGLang's process-wide settings, as far as a Triton backend reads them, and the device."""
    changes = {
        "speculative_num_draft_tokens": W,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
    }
    parallel = get_parallel().override(attn_dcp_rank=0)
    with get_context().override_server_args(**changes), parallel, torch.device(DEVICE):
        yield
