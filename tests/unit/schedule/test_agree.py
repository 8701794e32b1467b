"""Ranks whose confidences differ in the last bits still run the same round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.schedule.agree import Alone, decode, encode
from sglang_dspark.schedule.scheduler import Decision


@pytest.mark.parametrize(
    "decision",
    [
        Decision(7, 0, 0),
        Decision(0, 0, 11, 8.0, 0.1 + 0.2),
        Decision(3, 2**31 + 1, None, 1 / 3, 1e-9),
    ],
)
def test_a_decision_arrives_exactly(decision: Decision) -> None:
    found = decode(encode(decision))
    assert found == decision
    assert isinstance(found.depth, int) and isinstance(found.budget, int)
    assert found.tier is None or isinstance(found.tier, int)


def test_a_single_rank_decides_for_itself() -> None:
    decision, windows = Decision(2, 3, 1), object()
    assert Alone().decision(lambda: decision) is decision
    assert Alone().tensor(windows) is windows  # type: ignore[arg-type]


# Both requests survive their first token, and their second in half of the cases, up to 1e-6. What
# these 1e-6 turn over: whether 5 tokens are better than 4, for which two have to be drafted rather
# than one, and which request gets the fifth.
RANK = """
import json, sys
from datetime import timedelta
from types import SimpleNamespace
import numpy as np, torch
import torch.distributed as dist
from cost_tables import CostModel, RoundCost
from cuda_graph import TierGrid
from sglang_dspark.config import ScheduleConfig
from sglang_dspark.kernels.top_windows import top_windows_reference
from sglang_dspark.schedule.agree import FirstRankDecides
from sglang_dspark.schedule.scheduler import BudgetScheduler

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
)
group = SimpleNamespace(
    rank_in_group=rank, ranks=[0, 1], cpu_group=dist.group.WORLD, device_group=dist.group.WORLD
)
cost = RoundCost(CostModel(0.04, (1.0,), (0.0,), (4.0, 5.0, 6.0), (0.0, 0.005000005, 0.02)))
grid = TierGrid.of([4, 5, 6], max_requests=2, gamma=2)
budgets = BudgetScheduler(ScheduleConfig(), 2, grid, cost, rows=4)
survivals = np.array([[1.0, 0.5 + (1e-6 if rank == 0 else -1e-6)], [1.0, 0.5]])
rows = generations = np.arange(2)
for _ in range(120):
    budgets.learn(rows, generations, survivals, windows=np.ones(2, int), accepted=np.zeros(2, int))

def decide():
    return budgets.decide(rows, generations, 0.0)

def report(decision, windows):
    sizes = [decision.depth, decision.budget, decision.tier]
    return [*sizes, decision.expected_tokens, windows.tolist()]

def windows_of(decision):
    return top_windows_reference(values[:, : decision.depth], decision.budget)

values = torch.tensor(survivals, dtype=torch.float32)
alone = decide()
agreement = FirstRankDecides(group)
agreed = agreement.decision(decide)
own = windows_of(agreed)
windows = agreement.tensor(own.clone())
print(json.dumps({
    "alone": report(alone, windows_of(alone)),
    "own windows": own.tolist(),
    "agreed": report(agreed, windows),
}))
dist.barrier()  # a rank that leaves first can take the other one with it
dist.destroy_process_group()
"""


def run_ranks(folder: Path) -> list[dict[str, Any]]:
    """In processes of their own, as the ranks of a server are."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def test_ranks_that_differ_around_a_tie_do_what_the_first_one_decides(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path)
    assert first["alone"][:3] == [2, 3, 1] and second["alone"][:3] == [1, 2, 0]
    assert first["own windows"] == [3, 2] and second["own windows"] == [2, 3]
    assert first["agreed"] == second["agreed"] == first["alone"]
