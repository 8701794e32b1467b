"""The rounds that a batch can choose from, and which of them a table calls the best.

Both are asked of the schedule that serves (`sglang_dspark.schedule.budget`), so that what is judged
is what decides. Beside `launch` the one place here that knows sglang-dspark.
"""

from __future__ import annotations

import numpy as np

from cost_tables.measure import Cell
from cost_tables.model import Floats, RoundCost
from cost_tables.profiling.facts import Facts, budget_of
from cuda_graph.tiers import TierGrid


def rounds_to_choose(facts: Facts, requests: int, context: int) -> list[Cell]:
    """A round without a draft, and those of every depth whose budget fills a tier."""
    from sglang_dspark.schedule.budget import candidates

    options = candidates(_grid(facts), requests, facts.gamma, None)
    depths = (int(drafted) // requests for drafted in options.drafted)
    drafted = [
        Cell(requests, int(size), depth, context)
        for size, depth, budget in zip(options.sizes, depths, options.budgets, strict=True)
        if budget or depth == 1  # to verify nothing, one token is drafted as well as seven
    ]
    return [Cell(requests, facts.plain_tokens(requests), 0, context), *drafted]


def choice_of_table(
    cost: RoundCost, facts: Facts, survivals: Floats, kv_tokens: float, context: int
) -> Cell:
    """The round of the greatest Θ by the table. survivals: [R, γ]; kv_tokens: of the whole batch.

    Without the margins by which a server keeps to whole blocks and to plain decoding: they are
    there to steady it, and not the table's.
    """
    from sglang_dspark.schedule.budget import choose_budget

    requests, grid = len(survivals), _grid(facts)
    best = choose_budget(survivals, grid, cost.drafted, kv_tokens, min_gain=0.0)
    tokens = facts.plain_tokens(requests)
    if cost.plain is not None:
        seconds = cost.plain.seconds(requests, np.array([float(tokens)]), kv_tokens)
        if requests / float(seconds[0]) > best.throughput:
            return Cell(requests, tokens, 0, context)
    return Cell(requests, grid.tiers[best.tier].tokens, best.depth, context)


def committed(survivals: Floats, cell: Cell) -> float:
    """R · τ, tokens that a round commits on average: one a request, and the K greatest survivals
    of what it drafts. survivals: [R, γ]."""
    offered = np.sort(survivals[:, : cell.depth], axis=None)[::-1]
    return cell.requests + float(offered[: budget_of(cell)].sum())


def _grid(facts: Facts) -> TierGrid:
    return TierGrid.of(facts.tiers, facts.max_requests, facts.gamma)
