"""SGLang attention backend in plain torch, vectorised over the batch.

One gather of K and V through the slot table per group of requests and layer, then one
scaled dot product for the whole group. The query heads that share a KV head are folded
into the rows, so K and V are never repeated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout
from torch.nn.functional import scaled_dot_product_attention

from sglang_dspark.host.reads import LONG_ROWS, Group, Kind, Read, ReadPlan, padded_rows


class HostAttention(AttentionBackend):
    """Extend, decode and speculative verify (uniform or ragged) on the CPU."""

    forward_metadata: ReadPlan | None

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.forward_metadata = None
        self.workspace = Workspace()
        self.swa_loc: torch.Tensor | None = None  # out_cache_loc in the sliding-window pool
        pool = self.token_to_kv_pool
        self.swa_layers = {
            layer for layer, (_, is_swa) in getattr(pool, "layers_mapping", {}).items() if is_swa
        }
        if runner.model_config.attention_arch.name != "MHA":
            raise ValueError(
                f"--attention-backend host: the model's attention is "
                f"{runner.model_config.attention_arch.name}, only MHA, GQA and MQA are supported."
            )

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self.forward_metadata = self._plan(forward_batch)
        self.swa_loc = None
        if self.swa_layers and forward_batch.out_cache_loc is not None:
            self.swa_loc = self.token_to_kv_pool.translate_loc_from_full_to_swa(
                forward_batch.out_cache_loc
            )

    def _plan(self, batch: ForwardBatch) -> ReadPlan | None:
        mode = batch.forward_mode
        if mode.is_idle():
            return None
        if mode.is_decode():
            q_lens, kv_lens = torch.ones_like(batch.seq_lens), batch.seq_lens
        elif mode.is_target_verify():
            layout = resolve_ragged_verify_layout(batch)
            if layout is None:
                q_lens = torch.full_like(batch.seq_lens, int(batch.spec_info.draft_token_num))
            else:
                q_lens = layout.verify_lens
            kv_lens = batch.seq_lens + q_lens  # seq_lens leaves the window out
        else:
            q_lens, kv_lens = batch.extend_seq_lens, batch.seq_lens
        pool = self.token_to_kv_pool
        return ReadPlan(
            req_to_token=self.req_to_token_pool.req_to_token,
            requests=batch.req_pool_indices,
            q_lens=q_lens,
            kv_lens=kv_lens,
            token_bytes=2 * pool.head_num * pool.head_dim * pool.dtype.itemsize,
        )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q [M, H*D], k and v [M, KVH, D] -> [M, H*Dv]; rows past the plan's are zero."""
        _reject_unsupported(layer, kwargs)
        if save_kv_cache and k is not None and v is not None:
            # Written first: a row of a verify window reads the rows beside it.
            loc = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=self.swa_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)
        plan = self.forward_metadata
        assert plan is not None
        swa_pool = layer.layer_id in self.swa_layers
        kind = Kind(
            causal=layer.attn_type != AttentionType.ENCODER_ONLY,
            window=layer.sliding_window_size,
            swa_pool=swa_pool,
        )
        return attend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            plan,
            kind,
            self.workspace,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            full_to_swa=self.token_to_kv_pool.full_to_swa_index_mapping if swa_pool else None,
        )


def _reject_unsupported(layer: RadixAttention, kwargs: dict[str, Any]) -> None:
    if layer.is_cross_attention:
        raise NotImplementedError(
            f"layer {layer.layer_id}: cross attention is not supported by the host backend."
        )
    given = sorted(name for name, value in kwargs.items() if value is not None)
    if given:
        raise NotImplementedError(
            f"layer {layer.layer_id} passes {', '.join(given)} to attention, which the host "
            "backend does not support."
        )


class Workspace:
    """Memory reused by every layer and forward.

    Fresh memory for the gathered K and V costs more in page faults than the gather itself.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A tensor of this shape, zero where never written, valid until the next `take`."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # usable in and out of inference mode
                buffer = torch.zeros(size + size // 2, dtype=dtype)
            self._buffers[name, dtype] = buffer
        return buffer[:size].view(shape)


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: ReadPlan,
    kind: Kind,
    workspace: Workspace,
    *,
    scale: float,
    logit_cap: float = 0.0,
    full_to_swa: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of all rows of a forward over the cached tokens that the plan gives them.

    q: [M, H, D] packed rows, possibly padded at the end; k_cache: [slots, KVH, D];
    v_cache: [slots, KVH, Dv]. Returns [M, H*Dv] in q's dtype, zero in padding rows.
    """
    num_rows, num_heads, _ = q.shape
    num_kv_heads, v_dim = v_cache.shape[1:]
    if num_rows < plan.num_rows:
        raise ValueError(f"forward has {num_rows} rows, its requests need {plan.num_rows}.")
    outputs = []
    for group in plan.groups:
        read = plan.read(group, kind, q.dtype, num_heads // num_kv_heads, full_to_swa)
        k = _gather(workspace, "k", k_cache, read, q.dtype)
        v = _gather(workspace, "v", v_cache, read, q.dtype)
        rows = _attend_group(_group_rows(q, group), k, v, read, workspace, scale, logit_cap)
        rows = rows.reshape(-1, num_heads * v_dim)
        outputs.append(rows if group.live is None else rows.index_select(0, group.live))
    if len(outputs) == 1 and num_rows == plan.num_rows:
        return outputs[0]
    out = q.new_zeros(num_rows, num_heads * v_dim)
    for group, rows in zip(plan.groups, outputs, strict=True):
        if group.gather is None:
            out[group.begin : group.begin + rows.shape[0]] = rows
        else:
            to = group.gather if group.live is None else group.gather[group.live]
            out.index_copy_(0, to, rows)
    return out


def _gather(
    workspace: Workspace, name: str, cache: torch.Tensor, read: Read, dtype: torch.dtype
) -> torch.Tensor:
    """cache [slots, KVH, D] -> [R, KVH, N, D] of dtype, strided, valid until the next gather."""
    num_kv_heads, dim = cache.shape[1:]
    width = num_kv_heads * dim
    out = workspace.take(name, cache.dtype, read.slots.numel(), width)
    # Flat rows make this a plain copy of whole tokens.
    torch.index_select(cache.view(-1, width), 0, read.slots, out=out)
    return out.to(dtype).view(-1, read.num_tokens, num_kv_heads, dim).transpose(1, 2)


def _group_rows(q: torch.Tensor, group: Group) -> torch.Tensor:
    """The group's rows, padded: [M, H, D] -> [R, Q, H, D]."""
    if group.gather is not None:
        q = q.index_select(0, group.gather)
    elif (count := group.requests.numel() * group.num_rows) != q.shape[0]:
        q = q[group.begin : group.begin + count]
    return q.view(-1, group.num_rows, *q.shape[1:])


def _attend_group(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    read: Read,
    workspace: Workspace,
    scale: float,
    logit_cap: float,
) -> torch.Tensor:
    """q [R, Q, H, D], k [R, KVH, N, D], v [R, KVH, N, Dv] -> [R, Q, H, Dv].

    The query heads of a KV head become rows of one product, so K and V are not repeated,
    except for a long block of rows, where the repeated mask would cost more.
    """
    num_reqs, num_rows, num_heads, dim = q.shape
    group = num_heads // k.shape[1]
    if num_rows > LONG_ROWS and group > 1:
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    rows = num_rows * group
    q = q.view(num_reqs, num_rows, -1, group, dim).transpose(1, 2)
    if padded_rows(rows) == rows:
        q = q.reshape(num_reqs, -1, rows, dim)
    else:  # what the padding rows hold does not matter, as long as it is finite
        padded = workspace.take("q", q.dtype, num_reqs, k.shape[1], padded_rows(rows), dim)
        padded[:, :, :rows].view(q.shape).copy_(q)
        q = padded
    if logit_cap:
        out = _capped(q, k, v, read.mask, scale, logit_cap)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=read.mask, scale=scale)
    out = out[:, :, :rows].reshape(num_reqs, -1, num_rows, group, v.shape[3])
    return out.transpose(1, 2)


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    logit_cap: float,
) -> torch.Tensor:
    """Attention with logits softly limited to +-logit_cap, as Gemma 2 has it."""
    logits = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    logits = torch.tanh(logits / logit_cap) * logit_cap
    if mask is not None:
        logits = logits + mask
    return torch.matmul(torch.softmax(logits, dim=-1).to(v.dtype), v)
