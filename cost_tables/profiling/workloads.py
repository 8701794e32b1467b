"""Kinds of text that a table is judged by: how likely their draft tokens are to be accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_tables.model import Floats


@dataclass(frozen=True)
class Workload:
    """chances: that a draft token is accepted, given that all before it were; a request has one for
    its whole block, and requests take turns."""

    name: str
    chances: tuple[float, ...]

    def survivals(self, requests: int, gamma: int) -> Floats:
        """a_k = chance^k, float64 [R, γ]."""
        chances = np.resize(np.array(self.chances), requests)
        survivals: Floats = chances[:, None] ** np.arange(1, gamma + 1)
        return survivals

    def accept_length(self, gamma: int) -> float:
        """Tokens that full windows commit for a request on average, bonus included."""
        return 1 + float(self.survivals(len(self.chances), gamma).sum(axis=1).mean())


WORKLOADS = (
    Workload("low", (0.4,)),
    Workload("middle", (0.65,)),
    Workload("high", (0.85,)),
    Workload("mixed", (0.85, 0.4)),
)
