"""Budget and depth against brute force over all of both, and windows against their reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cost_tables import CostModel, FlatCost
from cuda_graph import TierGrid
from sglang_dspark.errors import ConfigError
from sglang_dspark.kernels.top_windows import top_windows_reference
from sglang_dspark.schedule.budget import Budget, choose_budget, early_stop
from sglang_dspark.schedule.calibration import Rescale, Scaling, read_calibration, survivals

GAMMA = 5
STEEP = CostModel(0.01, (1.0,), (0.0,), (1.0, 8.0, 200.0), (0.0, 0.001, 0.2))


def random_survivals(requests: int, seed: int) -> np.ndarray:
    """Every fourth seed is that of a bad draft, every fourth that of a very good one."""
    chances = np.random.default_rng(seed).random((requests, GAMMA))
    return (chances ** (1 / (1 + seed % 4))).cumprod(axis=1)


def rate(
    values: np.ndarray, budget: int, grid: TierGrid, cost: CostModel, trust: float = 1.0
) -> float:
    """Θ of a budget for a draft that is as deep as there are values."""
    requests = len(values)
    best = min(trust * np.sort(values.ravel())[::-1][:budget].sum(), budget)
    tokens = np.array([float(grid.fit(requests + budget, requests).tokens)])
    return float((requests + best) / cost.seconds(requests, tokens, 0.0, float(values.size))[0])


def best_rate(
    values: np.ndarray, depth: int, grid: TierGrid, cost: CostModel, trust: float = 1.0
) -> float:
    cut = values[:, :depth]
    return max(rate(cut, budget, grid, cost, trust) for budget in range(cut.size + 1))


EVERY_DEPTH = tuple(range(1, GAMMA + 1))
# Drafted tokens cost about as much as verified ones: every depth is the best for some seed.
STEEP_DRAFT = replace(STEEP, draft_knots=(0.0, 120.0), draft_seconds=(0.0, 0.01))


@pytest.mark.parametrize("trust", [0.5, 1.0, 1.8])
@pytest.mark.parametrize("cost", [STEEP, STEEP_DRAFT], ids=["free draft", "draft"])
def test_budget_and_depth_are_the_best_of_all(cost: CostModel, trust: float) -> None:
    grid, depths = TierGrid.choose(24, GAMMA, 7), set()
    for seed in range(24):
        requests = 1 + seed
        values = random_survivals(requests, seed)
        budget = choose_budget(values, grid, cost, 0.0, 0.0, trust, EVERY_DEPTH)
        every = [best_rate(values, depth, grid, cost, trust) for depth in EVERY_DEPTH]
        assert budget.throughput == pytest.approx(max(every))
        chosen = rate(values[:, : budget.depth], budget.tokens, grid, cost, trust)
        assert budget.throughput == pytest.approx(chosen)
        # It fills its tier, and the tier holds it.
        tier = grid.tiers[budget.tier]
        assert budget.tokens == min(tier.tokens - requests, requests * budget.depth)
        depths.add(budget.depth)
    assert len(depths) >= 3


@pytest.mark.parametrize(
    ("depths", "options"),
    [(None, {1, 2, 4, 5}), ((), {5}), ((2,), {2, 5}), ((3, 1), {1, 3, 5}), ((5, 4), {4, 5})],
    ids=str,
)
def test_depths_can_be_limited_but_all_of_gamma_is_one_of_them(
    depths: tuple[int, ...] | None, options: set[int]
) -> None:
    grid = TierGrid.choose(24, GAMMA, 7)
    for seed in range(12):
        values = random_survivals(1 + seed, seed)
        budget = choose_budget(values, grid, STEEP_DRAFT, 0.0, min_gain=0.0, depths=depths)
        every = [best_rate(values, depth, grid, STEEP_DRAFT) for depth in options]
        assert budget.depth in options
        assert budget.throughput == pytest.approx(max(every))


def at_price(price: float, min_gain: float) -> Budget:
    """Of one request whose survivals are 0.8, 0.5, 0.2, 0.1 and 0.05, in 1 s a round and `price` s
    for a drafted token. Θ at 0.1, by depth: 1.8 / 1.1, 2.3 / 1.2, 2.5 / 1.3, 2.6 / 1.4, 2.65 / 1.5.
    """
    draft = {"draft_knots": (0.0, 5.0), "draft_seconds": (0.0, 5 * price)}
    cost = CostModel(1.0, (1.0,), (0.0,), (1.0,), (0.0,), **draft)
    values, grid = np.array([[0.8, 0.5, 0.2, 0.1, 0.05]]), TierGrid.choose(1, GAMMA, 6)
    return choose_budget(values, grid, cost, 0.0, min_gain, depths=EVERY_DEPTH)


@pytest.mark.parametrize(("price", "depth"), [(0.01, 5), (0.1, 3), (0.25, 2), (1.0, 1)])
def test_the_dearer_a_drafted_token_the_shallower_the_draft(price: float, depth: int) -> None:
    budget = at_price(price, min_gain=0.0)
    assert (budget.depth, budget.tokens) == (depth, depth)
    assert budget.seconds == pytest.approx(1 + price * depth)


def test_a_small_gain_does_not_shorten_the_draft() -> None:
    """(2.5 / 1.3) / (2.65 / 1.5) is 1.0885."""
    assert at_price(0.1, min_gain=0.088).depth == 3
    assert at_price(0.1, min_gain=0.089).depth == GAMMA


def test_a_free_draft_is_as_deep_as_the_longest_window() -> None:
    grid, depths = TierGrid.choose(6, GAMMA, 36), set()  # a tier for every token count
    for seed in range(20):
        values = random_survivals(6, seed)
        budget = choose_budget(values, grid, STEEP, 0.0, min_gain=0.0, depths=EVERY_DEPTH)
        windows = top_windows_reference(torch.from_numpy(values), budget.tokens)
        assert budget.depth == int(windows.max()) - 1
        depths.add(budget.depth)
    assert len(depths) >= 3


@pytest.mark.parametrize(
    ("gamma", "depths"), [(1, {1}), (2, {1, 2}), (4, {1, 2, 4}), (7, {1, 2, 4, 7})]
)
def test_the_depths_of_choice_are_powers_of_two_and_gamma(gamma: int, depths: set[int]) -> None:
    grid, found = TierGrid.choose(1, gamma, gamma + 1), set()
    for survive in range(1, gamma + 1):  # so many tokens for sure, no other
        values = np.array([[1.0] * survive + [0.0] * (gamma - survive)])
        cost = replace(STEEP, draft_knots=(0.0, 1.0), draft_seconds=(0.0, 1e-4))
        found.add(choose_budget(values, grid, cost, 0.0, min_gain=0.0).depth)
    assert found == depths


def test_no_more_is_expected_than_is_verified() -> None:
    """Survivals that promise too little are scaled up, but a token is accepted once at most."""
    values, grid = np.full((4, GAMMA), 0.9), TierGrid.choose(4, GAMMA, 24)
    full = choose_budget(values, grid, STEEP, 0.0, min_gain=10.0, trust=2.0)
    early = early_stop(values, grid, STEEP, 0.0, trust=2.0)
    for budget in (full, early):
        assert budget.tokens > 4 and budget.expected_tokens == 4 + budget.tokens


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


@pytest.mark.parametrize("depth", [1, 3, GAMMA])
def test_early_stop_equals_a_loop_and_fills_its_tier(depth: int) -> None:
    stopped_early, cost = 0, STEEP_DRAFT
    for seed in range(12):
        values = random_survivals(5, seed)[:, :depth]
        grid = TierGrid.choose(5, GAMMA, 6)
        exact = TierGrid.choose(5, GAMMA, 5 * (GAMMA + 1))  # a tier for every token count
        found = early_stop(values, grid, cost, 0.0)
        admitted = 0
        while admitted < values.size and rate(values, admitted + 1, exact, cost) >= rate(
            values, admitted, exact, cost
        ):
            admitted += 1
        tier = grid.fit(5 + admitted, 5)
        assert grid.tiers[found.tier] == tier
        assert found.depth == depth and found.tokens == min(tier.tokens - 5, values.size)
        assert found.throughput == pytest.approx(rate(values, found.tokens, grid, cost))
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
    temperatures, shifts = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.0, 0.5, -1.0])
    for shift, calibrated in ((None, [1.0, -0.25, 4.0]), (shifts, [1.0, 0.25, 3.0])):
        expected = torch.sigmoid(torch.tensor(calibrated)).cumprod(dim=0)
        found = survivals(Rescale(temperatures, shift, None).head(logits))
        torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_broken_logits_mean_a_full_window(value: float) -> None:
    logits = torch.tensor([[1.0, value, 2.0], [0.0, 0.0, 0.0]])
    found = survivals(logits)
    assert found.tolist() == [[1.0, 1.0, 1.0], [0.5, 0.25, 0.125]]


def test_calibration_files(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"temperatures": [1, 1.5, 2.0]}))
    assert read_calibration(path, 3) == Scaling((1.0, 1.5, 2.0), (0.0, 0.0, 0.0))
    path.write_text(json.dumps({"temperatures": [1, 1.5, 2.0], "shifts": [0, -1, 0.5]}))
    assert read_calibration(path, 3) == Scaling((1.0, 1.5, 2.0), (0.0, -1.0, 0.5))
    for content, message in (
        ({"temperatures": [1, 2]}, "temperatures is 2 entries; must be 3 numbers"),
        ({}, "temperatures is None; must be 3 numbers"),
        ({"temperatures": [1, 0, 2]}, "holds 0; must be a finite number above 0"),
        ({"temperatures": [1, "x", 2]}, "holds 'x'; must be"),
        ({"temperatures": [1, 1, 1], "shifts": [0, 0]}, "shifts is 2 entries; must be 3 numbers"),
        ({"temperatures": [1, 1, 1], "shifts": 0.5}, "shifts is 0.5; must be 3 numbers"),
        (
            {"temperatures": [1, 1, 1], "shifts": [0, float("nan"), 0]},
            "shifts holds nan; must be a finite number$",
        ),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=message):
            read_calibration(path, 3)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not readable JSON"):
        read_calibration(path, 3)
