"""Windows from a budget: the K greatest survivals of the batch, on the device.

Order of admission: greater survival first; ties by position in the block (an earlier one first),
then by request. Survival never rises along a block, so what is admitted is a prefix of each block,
whose length ℓ makes the window 1 + ℓ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def top_windows_reference(survivals: torch.Tensor, budget: int) -> torch.Tensor:
    """survivals float32 [R, γ], never rising along a row; budget: K -> windows int64 [R]."""
    requests, gamma = survivals.shape
    by_position = survivals.T.reshape(-1)
    order = by_position.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    admitted = (rank < budget).view(gamma, requests)
    return 1 + admitted.sum(dim=0)


# Budgets and batch sizes change every round: none of their values is worth a compilation.
@triton.jit(do_not_specialize=["budget", "requests"])  # type: ignore[untyped-decorator]
def _rank_kernel(  # type: ignore[no-untyped-def]
    survivals, budget, windows, requests, gamma, TOTAL: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a request: counts, for each of its tokens, those that come before."""
    row = tl.program_id(0)
    admitted = 0
    for k in range(gamma):
        own = tl.load(survivals + row * gamma + k)
        before = 0
        for start in range(0, TOTAL, BLOCK):
            index = start + tl.arange(0, BLOCK)
            inside = index < requests * gamma
            other = tl.load(survivals + index, mask=inside, other=-1.0)
            position = index % gamma
            earlier = (position < k) | ((position == k) & (index // gamma < row))
            first = (other > own) | ((other == own) & earlier)
            before += tl.sum((first & inside).to(tl.int32), axis=0)
        admitted += (before < budget).to(tl.int32)
    tl.store(windows + row, 1 + admitted)


def top_windows(survivals: torch.Tensor, budget: int) -> torch.Tensor:
    """As the reference, in one launch and without a host sync."""
    requests, gamma = survivals.shape
    survivals = survivals.contiguous()
    windows = torch.empty(requests, dtype=torch.int64, device=survivals.device)
    block = 1024
    # A power of two, so that few shapes are compiled.
    total = triton.next_power_of_2(max(requests * gamma, block))
    _rank_kernel[(requests,)](survivals, budget, windows, requests, gamma, TOTAL=total, BLOCK=block)
    return windows
