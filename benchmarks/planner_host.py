"""Host time of deciding a round's budget, tier and windows' size: ours against SGLang's planner.

    python benchmarks/planner_host.py

Both get the confidences of 256 requests with blocks of 7 and a measured-looking additive table, and
take turns. SGLang's decides the budget (HostConfidenceBudgetPlanner.compute_budget); ours decides
whether to draft, how deep, budget and tier (BudgetScheduler.decide). What both leave to the device,
the windows by top-K, is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from host_attention import describe_machine, versions
from sglang.srt.speculative.dspark_components.dspark_planner import (
    DSparkScheduleConfig,
    HostConfidenceBudgetPlanner,
)
from sglang.srt.speculative.dspark_components.dspark_sps import SpsAdditiveCostTable

from cost_tables import CostModel, RoundCost
from sglang_dspark.config import ScheduleConfig
from sglang_dspark.schedule.grid import make_grid
from sglang_dspark.schedule.scheduler import BudgetScheduler

RESULTS = Path(__file__).parent / "results" / "planner_host.json"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    requests, gamma = args.requests, args.gamma
    generator = torch.Generator().manual_seed(0)
    confidences = torch.rand(64, requests, gamma, generator=generator) * 0.6 + 0.4
    rows = torch.arange(requests)
    generations = torch.ones(requests, dtype=torch.int64)

    tokens = [1, 64, 256, 512, 1024, 2048]
    theta = [0.0, 0.0005, 0.002, 0.004, 0.009, 0.02]
    table = SpsAdditiveCostTable(0.01, [1, 256], [0.0, 0.004], tokens, theta)
    theirs = HostConfidenceBudgetPlanner(
        sps_table=table,
        cfg=DSparkScheduleConfig(gamma=gamma),
        model_runner=SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(requests + 1, 1))
        ),
        relay_lag_steps=2,
    )
    cost = CostModel(
        0.01, (1, 256), (0.0, 0.002), tuple(tokens), tuple(theta), 1e-9, (0.0, 1792.0), (0.0, 0.002)
    )
    plain = CostModel(0.0095, (1, 256), (0.0, 0.001), (1, 256), (0.0, 0.0015))
    ours = BudgetScheduler(
        ScheduleConfig(), gamma, make_grid(12, requests, gamma), RoundCost(cost, plain), requests
    )
    survivals = confidences.cumprod(dim=2).double().numpy()
    rows_np, generations_np = rows.numpy(), generations.numpy()
    windows = np.full(requests, gamma + 1)

    times: dict[str, list[float]] = {"sglang": [], "decide": [], "learn": []}
    for i in range(args.rounds):
        began = time.perf_counter()
        theirs.compute_budget(
            confidence=confidences[i % 64],
            generation=generations,
            current_generation=generations,
            req_pool_indices_cpu=rows,
        )
        middle = time.perf_counter()
        ours.decide(rows_np, generations_np, 1e5)
        decided = time.perf_counter()
        accepted = np.full(requests, i % 4)
        learning = time.perf_counter()
        ours.learn(rows_np, generations_np, survivals[i % 64], windows, accepted)
        ended = time.perf_counter()
        times["sglang"].append(middle - began)
        times["decide"].append(decided - middle)
        times["learn"].append(ended - learning)
    us = {name: round(1e6 * statistics.median(t), 1) for name, t in times.items()}
    report = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": describe_machine(),
        "versions": versions(),
        "requests": requests,
        "gamma": gamma,
        "rounds": args.rounds,
        "median_us": us,
        "decide_over_sglang": round(us["decide"] / us["sglang"], 3),
        "decide_and_learn_over_sglang": round((us["decide"] + us["learn"]) / us["sglang"], 3),
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
