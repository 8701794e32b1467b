"""The budget against brute force over every K, and the windows against their reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cost_tables import CostModel, FlatCost
from cuda_graph import TierGrid
from sglang_dspark.errors import ConfigError
from sglang_dspark.kernels.top_windows import top_windows_reference
from sglang_dspark.schedule.budget import choose_budget, early_stop
from sglang_dspark.schedule.calibration import read_temperatures, survivals

GAMMA = 5
STEEP = CostModel(0.01, (1.0,), (0.0,), (1.0, 8.0, 200.0), (0.0, 0.001, 0.2))


def random_survivals(requests: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((requests, GAMMA)).cumprod(axis=1)


def rate(values: np.ndarray, budget: int, grid: TierGrid, cost: CostModel, context: float) -> float:
    requests = len(values)
    best = np.sort(values.ravel())[::-1][:budget].sum()
    tokens = grid.fit(requests + budget, requests).tokens
    return float((requests + best) / cost.seconds(requests, np.array([float(tokens)]), context)[0])


@pytest.mark.parametrize("seed", range(8))
def test_the_budget_is_the_best_of_all(seed: int) -> None:
    requests = 1 + 3 * seed
    grid = TierGrid.choose(24, GAMMA, 7)
    values = random_survivals(requests, seed)
    budget = choose_budget(values, grid, STEEP, 0.0, min_gain=0.0)
    every = [rate(values, k, grid, STEEP, 0.0) for k in range(requests * GAMMA + 1)]
    assert budget.throughput == pytest.approx(max(every))
    tier = grid.tiers[budget.tier]
    # It fills its tier, and the tier holds it.
    assert budget.tokens == min(tier.tokens - requests, requests * GAMMA)


def test_where_tokens_are_free_everything_is_verified() -> None:
    values = random_survivals(6, 0)
    assert choose_budget(values, TierGrid.choose(6, GAMMA, 4), FlatCost(), 0.0).tokens == 30


def test_a_small_gain_does_not_trim() -> None:
    values = np.full((8, GAMMA), 0.30)
    grid = TierGrid.choose(8, GAMMA, 10)
    cost = CostModel(0.02, (1.0,), (0.0,), (1.0, 48.0), (0.0, 0.06))
    assert choose_budget(values, grid, cost, 0.0, min_gain=0.0).tokens < 8 * GAMMA
    assert choose_budget(values, grid, cost, 0.0, min_gain=0.5).tokens == 8 * GAMMA


def test_a_long_context_favours_larger_budgets() -> None:
    """Reading the context is paid once a round, whatever the windows are."""
    cost = CostModel(
        0.001, (1.0,), (0.0,), (1.0, 200.0), (0.0, 0.2), seconds_per_context_token=1e-6
    )
    grid, values = TierGrid.choose(8, GAMMA, 12), random_survivals(8, 3)
    budgets = [choose_budget(values, grid, cost, c, 0.0).tokens for c in (0.0, 1e5, 1e7)]
    assert budgets == sorted(budgets) and budgets[0] < budgets[-1]


def test_broken_confidences_trim_nothing() -> None:
    values = random_survivals(3, 1)
    values[1] = np.nan
    budget = choose_budget(values, TierGrid.choose(3, GAMMA, 18), STEEP, 0.0, 0.0)
    assert budget.expected_tokens >= 3 + GAMMA


def test_early_stop_equals_a_loop_and_fills_its_tier() -> None:
    stopped_early = 0
    for seed in range(12):
        values = random_survivals(5, seed)
        grid = TierGrid.choose(5, GAMMA, 6)
        exact = TierGrid.choose(5, GAMMA, 5 * (GAMMA + 1))  # a tier for every token count
        found = early_stop(values, grid, STEEP, 0.0)
        admitted = 0
        while admitted < values.size and rate(values, admitted + 1, exact, STEEP, 0.0) >= rate(
            values, admitted, exact, STEEP, 0.0
        ):
            admitted += 1
        tier = grid.fit(5 + admitted, 5)
        assert grid.tiers[found.tier] == tier
        assert found.tokens == min(tier.tokens - 5, values.size)
        assert found.throughput == pytest.approx(rate(values, found.tokens, grid, STEEP, 0.0))
        stopped_early += found.tokens < values.size
    assert stopped_early > 3


def test_early_stop_never_looks_behind_where_it_stops() -> None:
    """What decides on a token are those before it: later survivals may be anything."""
    values = np.array([[0.9, 0.8, 0.05, 0.04, 0.03], [0.7, 0.06, 0.05, 0.04, 0.03]])
    grid = TierGrid.choose(2, GAMMA, 12)
    cost = CostModel(0.01, (1.0,), (0.0,), (1.0, 12.0), (0.0, 0.03))
    found = early_stop(values, grid, cost, 0.0)
    assert found.tokens == 3
    later = np.where(values < 0.06, 0.0, values)
    assert early_stop(later, grid, cost, 0.0).tokens == 3


# --- windows -------------------------------------------------------------------------------------


def windows_by_hand(values: list[list[float]], budget: int) -> list[int]:
    order = sorted((-value, k, r) for r, row in enumerate(values) for k, value in enumerate(row))
    windows = [1] * len(values)
    for _, _, r in order[:budget]:
        windows[r] += 1
    return windows


@pytest.mark.parametrize("budget", [0, 1, 7, 34, 35, 99])
def test_windows_are_the_greatest_survivals(budget: int) -> None:
    values = random_survivals(7, budget).astype(np.float32)
    values[2], values[5] = values[4], 1.0  # ties
    found = top_windows_reference(torch.from_numpy(values), budget)
    assert found.tolist() == windows_by_hand(values.tolist(), budget)
    assert int(found.sum()) == 7 + min(budget, 35)


KERNEL = """
import torch
from sglang_dspark.kernels.top_windows import top_windows, top_windows_reference
device = "cuda" if torch.cuda.is_available() else "cpu"
for requests, gamma in ((1, 1), (7, 5), (40, 7), (150, 7)):
    generator = torch.Generator().manual_seed(requests)
    values = torch.rand(requests, gamma, generator=generator).cumprod(dim=1).to(device)
    values[requests // 2] = values[0]
    values[-1] = 1.0
    for budget in (0, requests * gamma // 2, requests * gamma + 9):
        expected = top_windows_reference(values, budget)
        assert torch.equal(top_windows(values, budget), expected), (requests, gamma, budget)
ties = torch.ones(9, 5, device=device)
for budget in (4, 13, 22):
    assert torch.equal(top_windows(ties, budget), top_windows_reference(ties, budget)), budget
print("equal")
"""


def test_the_kernel_equals_its_reference() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environ = {**os.environ}
    if not torch.cuda.is_available():
        environ["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout == "equal\n", done.stderr


# --- survival ------------------------------------------------------------------------------------


def test_survival_is_the_product_of_calibrated_confidences() -> None:
    logits = torch.tensor([[1.0, -0.5, 2.0]])
    temperatures = torch.tensor([1.0, 2.0, 0.5])
    expected = torch.sigmoid(torch.tensor([1.0, -0.25, 4.0])).cumprod(dim=0)
    torch.testing.assert_close(survivals(logits, temperatures)[0], expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_broken_logits_mean_a_full_window(value: float) -> None:
    logits = torch.tensor([[1.0, value, 2.0], [0.0, 0.0, 0.0]])
    found = survivals(logits, torch.ones(3))
    assert found.tolist() == [[1.0, 1.0, 1.0], [0.5, 0.25, 0.125]]


def test_calibration_files(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"temperatures": [1, 1.5, 2.0]}))
    assert read_temperatures(path, 3) == [1.0, 1.5, 2.0]
    for content, message in (
        ({"temperatures": [1, 2]}, "temperatures is 2 entries; must be 3 numbers"),
        ({}, "temperatures is None; must be 3 numbers"),
        ({"temperatures": [1, 0, 2]}, "holds 0; must be a finite number above 0"),
        ({"temperatures": [1, "x", 2]}, "holds 'x'; must be"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=message):
            read_temperatures(path, 3)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not readable JSON"):
        read_temperatures(path, 3)
