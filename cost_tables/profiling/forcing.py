"""How a profiled server is told which round to run: one number between 0 and 1.

SGLang's /set_internal_state takes `dspark_force_budget_frac`, a number above 0 and up to 1. In
profiling mode (`--speculative-verify-budget profile`) it stands for a depth D and a budget K:

    v = (D + (K + 1/2) / (R · D + 1)) / (γ + 1),   0 <= D <= γ,   0 <= K <= R · D

The interval (0, 1) is cut into γ + 1 equal parts, one for each depth, and each of these into
R · D + 1, one for each budget; v is the middle of one. So D and K are read back exactly, whatever
the last bits of v are, and a batch of another size reads the same depth and about the same share.
D = 0 is a round without a draft.
"""

from __future__ import annotations

import math


def encode(depth: int, budget: int, requests: int, gamma: int) -> float:
    """v for a round of `requests` with draft depth D and budget K."""
    if not (0 <= depth <= gamma and 0 <= budget <= requests * depth):
        raise ValueError(
            f"depth {depth} and budget {budget}; must be 0 to γ = {gamma}, and 0 to R · D = "
            f"{requests * depth}"
        )
    return (depth + (budget + 0.5) / (requests * depth + 1)) / (gamma + 1)


def decode(told: float, requests: int, gamma: int) -> tuple[int, int]:
    """(D, K) of a told v in (0, 1]."""
    place = told * (gamma + 1)
    depth = min(math.floor(place), gamma)
    drafted = requests * depth
    return depth, min(math.floor((place - depth) * (drafted + 1)), drafted)
