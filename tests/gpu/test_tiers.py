"""On a real GPU only: kernels against their references, and captured tiers against direct calls."""

from __future__ import annotations

import pytest
import torch

from cuda_graph import Buffer, GraphPool, TierGrid
from sglang_dspark.kernels.top_windows import top_windows, top_windows_reference


@pytest.mark.parametrize(("requests", "gamma"), [(1, 1), (7, 5), (40, 7), (256, 7), (512, 15)])
def test_windows_equal_the_reference(requests: int, gamma: int) -> None:
    generator = torch.Generator("cuda").manual_seed(requests)
    values = torch.rand(requests, gamma, generator=generator, device="cuda").cumprod(dim=1)
    values[requests // 2] = values[0]  # ties
    for budget in (0, 1, requests * gamma // 3, requests * gamma):
        expected = top_windows_reference(values, budget)
        assert torch.equal(top_windows(values, budget), expected)


def test_every_tier_replays_what_a_direct_call_computes() -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        *(torch.nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    )
    grid = TierGrid.choose(64, 7, 12)
    device = torch.device("cuda")
    pool = GraphPool(
        grid,
        lambda views: layers(views["hidden"]),
        {"hidden": Buffer(torch.bfloat16, (512,))},
        device,
    )
    with torch.inference_mode():
        pool.capture()
        for tier in (*grid.tiers, *reversed(grid.tiers)):
            rows = max(1, tier.tokens - 3)
            hidden = torch.randn(rows, 512, device=device, dtype=torch.bfloat16)
            replayed = pool.replay(tier.tokens, {"hidden": hidden})[:rows]
            torch.testing.assert_close(replayed, layers(hidden), atol=2e-2, rtol=2e-2)
