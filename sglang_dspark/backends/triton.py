"""SGLang's Triton attention backend, reading ragged verify windows.

In a verify forward Triton's extend kernel reads the committed tokens of a request from the KV
cache and the rows of its window from the forward itself, where `qo_indptr` says which rows belong
to which *sequence* of the kernel. Only that depends on the windows' lengths. SGLang's class puts
the sequences W rows apart, here they come from the layout; all else is SGLang's.

A forward has a tier's number of rows, so rows without a request are left behind the windows. They
are given to *ghosts*: sequences without a prefix and with at most W rows, like any window, which
see each other and nobody else. Left to no sequence, they would be memory that nobody wrote; NaN
there would count as the target's, and go through the rest of the model.

    sequences   requests         | slots without a request | ghosts
    rows        their windows    | none                    | W each, until the tier is full
    prefix      committed tokens | not read                | none
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.attention import triton_backend
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, resolve_ragged_verify_layout


class TritonAttnBackend(triton_backend.TritonAttnBackend):
    """SGLang's class, with ragged verify forwards, in graphs too.

    It has SGLang's name because SGLang knows by the name of a class that a linear chain needs no
    custom mask on it. (`dflash_utils.resolve_dflash_verify_mask_policy`)
    """

    supports_ragged_verify_graph = True
    forward_metadata: Any

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Metadata of a forward without a graph."""
        super().init_forward_metadata(forward_batch)
        layout = _ragged_layout(forward_batch)
        if layout is not None:
            bounds = self._bounds(layout, forward_batch.batch_size)
            self.forward_metadata = replace(self.forward_metadata, **bounds)

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        """SGLang's static buffers and our own: bounds of the sequences of any tier."""
        super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
        places = max_bs + num_ghosts(max_num_tokens, self.num_draft_tokens) + 1
        names = ["qo_indptr", "kv_indptr"]
        if self.window_kv_indptr is not None:
            names.append("window_kv_indptr")
        self._graph_bounds = {
            name: torch.zeros(places, dtype=torch.int64, device=self.device) for name in names
        }

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Refresh what a graph reads, in place and without a host sync; at capture also say where
        that is. forward_batch: padded to the tier's slots, its layout is not when replayed."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        layout = _ragged_layout(forward_batch)
        if layout is None:
            return
        views = {}
        for name, bounds in self._bounds(layout, forward_batch.batch_size).items():
            views[name] = self._graph_bounds[name][: len(bounds)]
            views[name].copy_(bounds)
        if in_capture:
            self.forward_metadata = replace(self.forward_metadata, **views)

    def _bounds(self, layout: RaggedVerifyLayout, slots: int) -> dict[str, torch.Tensor]:
        """The fields of SGLang's metadata that ghosts and lengths change, [sequences + 1] each."""
        width, tier = self.num_draft_tokens, layout.graph_num_tokens
        ghosts = num_ghosts(tier, width)
        bounds = {
            "qo_indptr": row_bounds(layout.qo_indptr_device, slots, tier, width),
            # SGLang has just filled these: the committed tokens of each slot.
            "kv_indptr": _without_prefix(self.kv_indptr[: slots + 1], ghosts),
        }
        if self.window_kv_indptr is not None:
            window = self.window_kv_indptr[: slots + 1]
            bounds["window_kv_indptr"] = _without_prefix(window, ghosts)
        return bounds


def num_ghosts(tier: int, width: int) -> int:
    """Ghosts that a tier's rows can need at most."""
    return -(-tier // width)


def row_bounds(ends: torch.Tensor, slots: int, tier: int, width: int) -> torch.Tensor:
    """Sequence s has the rows bounds[s] to bounds[s + 1]. int64 [slots + ghosts + 1].

    ends: int [R + 1], bounds of the requests' windows. slots: sequences for requests, R of them
    taken. tier: rows of the forward. width: W, rows of a sequence at most.
    """
    total = ends[-1:].to(torch.int64)
    free = total.expand(slots + 1 - len(ends))
    up_to = torch.arange(1, num_ghosts(tier, width) + 1, device=ends.device) * width
    return torch.cat([ends.to(torch.int64), free, (total + up_to).clamp(max=tier)])


def _without_prefix(indptr: torch.Tensor, more: int) -> torch.Tensor:
    """indptr, int [N], with `more` sequences that have no tokens."""
    return torch.cat([indptr, indptr[-1:].expand(more)])


def _ragged_layout(forward_batch: Any) -> RaggedVerifyLayout | None:
    if not forward_batch.forward_mode.is_target_verify():
        return None
    layout: RaggedVerifyLayout | None = resolve_ragged_verify_layout(forward_batch)
    return layout
