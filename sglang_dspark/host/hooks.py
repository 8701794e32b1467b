"""The functions of SGLang that must differ on the host platform.

Both launch Triton kernels with no platform seam in 0.5.23 (`is_cpu()` is False here).
"""

from __future__ import annotations

import torch

from sglang_dspark.hooking import Hook


def write_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Writes each request's new slots into its row of the table.

    req_pool_indices, start_offset, end_offset: int [R]; req_to_token: int32 [rows, width];
    out_cache_loc: int [sum(end - start)], the requests' slots one after the other.
    """
    counts = end_offset - start_offset
    rows = req_pool_indices.repeat_interleave(counts)
    first = counts.cumsum(0) - counts  # where each request begins in out_cache_loc
    shift = (start_offset - first).repeat_interleave(counts)
    columns = torch.arange(rows.numel(), device=rows.device) + shift
    slots = out_cache_loc[: rows.numel()].to(req_to_token.dtype)
    req_to_token[rows.long(), columns.long()] = slots


def last_slots(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
) -> torch.Tensor:
    """Slot of each request's last token, -1 for an empty one. int64 [R]."""
    slots = req_to_token[req_pool_indices, (prefix_lens - 1).clamp(min=0)].to(prefix_lens.dtype)
    return slots.masked_fill(prefix_lens <= 0, -1)


def window_slots(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    draft_token_num: int,
    **_: object,
) -> torch.Tensor:
    """Slots of positions start..end of each request, packed in request order. int64 flat.

    draft_token_num is the longest window. Not a hook: the platform method that SGLang asks.
    """
    columns = start_offset.unsqueeze(1) + torch.arange(draft_token_num)
    slots = req_to_token[req_pool_indices.unsqueeze(1), columns].long()
    return slots[columns < end_offset.unsqueeze(1)]


HOST_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        "REPLACE",
        write_req_to_token,
        "launches a Triton kernel unless is_cpu(); runs in every speculative decode step",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        "REPLACE",
        last_slots,
        "launches a Triton kernel unless the backend is named torch_native; page size > 1",
    ),
)
