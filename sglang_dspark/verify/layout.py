"""Which rows a verify forward has: full windows in order, or trimmed ones packed into a tier."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from cuda_graph.packing import pack_windows
from cuda_graph.tiers import Tier


@dataclass(frozen=True)
class VerifyRows:
    """The rows of one verify forward. R requests, W = gamma + 1, M rows, padding included.

    windows:   [R] int64, rows of each request that may be committed; None: all W
    tokens:    [M] int64, anchor and drafts of each window; 0 in padding rows
    positions: [M] int64; 0 in padding rows
    request:   [M] int64, the request of each row; padding rows say the last one
    index:     [R, W] int64, the row of each place of a window; a place behind it names its last row
    columns:   [M] int64, the row's place in the R * W slots of the round, -1 in padding rows, which
               write to SGLang's reserved slot 0; None: all R * W in order
    ragged:    SGLang's layout for graphs and attention; None: every window has W rows
    """

    windows: torch.Tensor | None
    tokens: torch.Tensor
    positions: torch.Tensor
    request: torch.Tensor
    index: torch.Tensor
    columns: torch.Tensor | None
    ragged: RaggedVerifyLayout | None


def full_rows(
    window_tokens: torch.Tensor, positions: torch.Tensor, windows: torch.Tensor | None
) -> VerifyRows:
    """Every row of window_tokens [R, W] at positions [R, W], whatever may be committed of them."""
    index, request = _full_index(*window_tokens.shape, window_tokens.device)
    return VerifyRows(
        windows=windows,
        tokens=window_tokens.flatten(),
        positions=positions.flatten(),
        request=request,
        index=index,
        columns=None,
        ragged=None,
    )


@lru_cache(maxsize=1024)  # as many as there are batch sizes
def _full_index(
    requests: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """`VerifyRows.index` and `request` of full windows."""
    rows = torch.arange(requests * width, device=device)
    return rows.view(requests, width), rows // width


def packed_rows(
    window_tokens: torch.Tensor, positions: torch.Tensor, windows: torch.Tensor, tier: Tier
) -> VerifyRows:
    """The first windows[r] rows of every request, laid into the tier. No host sync."""
    requests, width = window_tokens.shape
    packed = pack_windows(windows, tier.tokens, requests)
    columns = packed.request * width + packed.offset
    places = torch.arange(width, device=windows.device)
    index = packed.starts[:-1, None] + torch.minimum(places, windows[:, None] - 1)
    return VerifyRows(
        windows=windows,
        tokens=torch.where(packed.valid, window_tokens.flatten()[columns], 0),
        positions=torch.where(packed.valid, positions.flatten()[columns], 0),
        request=packed.request,
        index=index,
        columns=torch.where(packed.valid, columns, -1),
        ragged=RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=windows, graph_num_tokens=tier.tokens
        ),
    )
