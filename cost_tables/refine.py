"""Step times measured while serving correct a table: slowly, by tier, within bounds.

A table is made on a quiet machine or at start-up; while serving, other work shares the machine, and
a round pays for the scheduler too. What a step takes is then taken to be

    T'(tier) = T(tier) · exp(c(tier)),  c(tier) = (Σ_i w_i r_i + PRIOR · c_all) / (Σ_i w_i + PRIOR)

over observations i of the tier, r_i = log(measured / T), w_i falling with the age of i by DECAY a
round; c_all is the running mean of r over all tiers. So a tier that is not used is taken to be off
by as much as the others, and what was learnt of it is forgotten: if it was slow for a while, it is
tried again. Rounds with and without a draft have corrections of their own. Of the two the one that
is not run is thought to be as fast as it was, or as the other is compared to its table, if that is
faster: only what is hoped for is tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_tables.model import Floats, StepCost

DECAY = 0.98  # the last 50 rounds or so count
PRIOR = 2.0  # rounds
COMMON_NEWS, HOPE = 0.05, 0.02
# No table is believed to be further off than this.
BOUND = math.log(4.0)
# A step that takes this many times what was thought was disturbed, and counts as so many; the
# second is for tiers that have not been run lately, of which nothing better is known.
DISTURBED, SURPRISE = math.log(1.5), math.log(3.0)


class Refinement:
    """sizes: token counts of the tiers, ascending. enabled: False keeps every correction at 1."""

    def __init__(self, sizes: npt.ArrayLike, *, enabled: bool = True) -> None:
        self.sizes = np.asarray(sizes, dtype=np.float64)
        self.enabled = enabled
        # All by whether the round was drafted.
        self.common = {True: 0.0, False: 0.0}
        self._sums = {drafted: np.zeros(len(self.sizes)) for drafted in (True, False)}
        self._weights = {drafted: np.zeros(len(self.sizes)) for drafted in (True, False)}

    def learn(self, tier: int, drafted: bool, expected: float, measured: float) -> None:
        """A round of this tier took `measured` seconds, where the table says `expected`."""
        if not self.enabled:
            return
        known = float(self.corrections(drafted)[tier])
        most = DISTURBED if self._weights[drafted][tier] > 1 else SURPRISE
        off = min(max(math.log(measured / expected), known - most), known + most)
        off = min(max(off, -BOUND), BOUND)
        for values in (*self._sums.values(), *self._weights.values()):
            values *= DECAY
        self._sums[drafted][tier] += off
        self._weights[drafted][tier] += 1.0
        self.common[drafted] += COMMON_NEWS * (off - self.common[drafted])
        hope = min(0.0, self.common[drafted] - self.common[not drafted])
        self.common[not drafted] += HOPE * hope

    def corrections(self, drafted: bool, hopeful: bool = False) -> Floats:
        """c of every tier, float64 [tiers]. hopeful: what is not known is as fast as its table."""
        common = min(0.0, self.common[drafted]) if hopeful else self.common[drafted]
        weights = self._weights[drafted] + PRIOR
        corrections: Floats = (self._sums[drafted] + PRIOR * common) / weights
        return corrections

    def factor(self, tier: int, drafted: bool) -> float:
        """Seconds for one that the table says."""
        return math.exp(self.corrections(drafted)[tier])


@dataclass(frozen=True)
class RefinedCost:
    """A table's costs of drafted or of plain rounds, as corrected. hopeful: see `Refinement`."""

    table: StepCost
    refinement: Refinement
    drafted: bool
    hopeful: bool = False

    def seconds(
        self, requests: int, tokens: Floats, context: float, drafted: Floats | float = 0.0
    ) -> Floats:
        """As in `StepCost`; between two tiers, corrections are interpolated."""
        corrections = self.refinement.corrections(self.drafted, self.hopeful)
        by_table = self.table.seconds(requests, tokens, context, drafted)
        refined: Floats = by_table * np.exp(np.interp(tokens, self.refinement.sizes, corrections))
        return refined
