"""Ragged windows laid end to end at the front of a tier, padding behind them.

All shapes are those of the tier, so the same code runs inside a captured graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedRows:
    """Where every row of a tier comes from. T rows, S slots, R <= S requests.

    request:  [T] int64, the request of each row; padding rows say the last request
    offset:   [T] int64, place of the row in its window, 0 is the anchor; padding rows say 0
    valid:    [T] bool, False on padding rows
    starts:   [S + 1] int64, first row of each window; behind the last request, the number of
              real rows: windows of padding slots are empty
    """

    request: torch.Tensor
    offset: torch.Tensor
    valid: torch.Tensor
    starts: torch.Tensor


def pack_windows(windows: torch.Tensor, tokens: int, slots: int) -> PackedRows:
    """Lay windows [R] (int64, each at least 1, on any device) into a tier. No host sync.

    The caller has made sure that Σ windows <= tokens and R <= slots; `TierGrid.fit` does.
    """
    device, requests = windows.device, len(windows)
    if requests > slots:
        raise ValueError(f"{requests} windows do not fit into {slots} slots")
    ends = windows.cumsum(0)
    starts = torch.zeros(slots + 1, dtype=torch.int64, device=device)
    starts[1 : requests + 1] = ends
    starts[requests + 1 :] = ends[-1]
    rows = torch.arange(tokens, device=device)
    request = torch.searchsorted(ends, rows, right=True).clamp(max=requests - 1)
    valid = rows < ends[-1]
    offset = torch.where(valid, rows - starts[request], 0)
    return PackedRows(request, offset, valid, starts)
