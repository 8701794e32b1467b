"""The functions of SGLang that must differ on the host platform and have no platform seam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Limits logits softly to +-cap, in place, as Gemma does it."""
    return logits.div_(cap).tanh_().mul_(cap)


def keep_heads(original: Callable[..., Any], model_config: Any, *args: Any) -> Any:
    """SGLang's padding of a model for tensor parallelism on a CPU, of its MLPs alone.

    It pads KV heads that are fewer than the ranks too, and then cannot load them: unless is_cpu(),
    such heads are there on several ranks instead, as on any other device.
    """
    of_full = ("num_attention_heads", "num_key_value_heads")
    names = (*of_full, *(f"swa_{name}" for name in of_full))
    places = (model_config, model_config.hf_config, model_config.hf_text_config)
    before = [(at, name, getattr(at, name)) for at in places for name in names if hasattr(at, name)]
    padded = original(model_config, *args)
    for at, name, value in before:
        setattr(at, name, value)
    return padded


def adjust_for_model(original: Callable[[Any], None], server_args: Any) -> None:
    """SGLang's adjustments for a model, with our backend under the name of its own CPU backend.

    For Gemma 4 they end with a list of the backends that are known to serve it.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    from sglang_dspark.host.platform import BACKEND

    view = resolving_view(server_args)
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    ours = [name for name in names if getattr(view, name) == BACKEND]
    if not ours or "Gemma4" not in model_config_of(server_args).hf_config.architectures[0]:
        original(server_args)
        return
    declare_resolution(server_args, "sglang_dspark", **dict.fromkeys(ours, "intel_amx"))
    original(server_args)
    declare_resolution(server_args, "sglang_dspark", **dict.fromkeys(ours, BACKEND))


HOST_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.kernels.ops.activation.softcap.softcap_inplace_logits",
        "REPLACE",
        softcap,
        "launches a Triton kernel unless is_cpu(); every forward of a model that caps its logits",
    ),
    Hook(
        "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        "AROUND",
        adjust_for_model,
        "refuses Gemma 4 on an attention backend that SGLang does not know by name",
    ),
    Hook(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        "AROUND",
        keep_heads,
        "pads KV heads for --tp on device cpu, but can load them only if is_cpu()",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        "REPLACE",
        write_req_to_token,
        "launches a Triton kernel unless is_cpu(), which is False here; every speculative step",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        "REPLACE",
        last_slots,
        "launches a Triton kernel unless the backend is named torch_native; page size > 1",
    ),
)
