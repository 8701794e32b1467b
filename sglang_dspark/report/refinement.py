"""How far rounds were from their cost table, by tier, and how the server corrects it for that.

A server multiplies the table's step times by a factor for every tier, for rounds with and without a
draft apart (`cost_tables.refine`). A running server exports these factors. Records hold what they
are learnt from: the table's time and the measured one of every round.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_dspark.report.distribution import bucket_end
from sglang_dspark.report.steps import MOST_TIERS
from sglang_dspark.report.tally import Round

Kind = tuple[int, bool]  # tokens of the verify forward, whether the round was drafted


@dataclass(frozen=True)
class Correction:
    """Rounds with or without a draft whose verify forward had from low to high tokens.

    Both are seconds for one that the table says. measured: median over `rounds`, None if there are
    none with both times. in_force: what the server takes it to be now, the median where it is of
    several tiers; None if it does not say.
    """

    low: int
    high: int
    drafted: bool
    rounds: int
    measured: float | None
    in_force: float | None

    @property
    def label(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Refinement:
    """corrections: drafted rounds first, ascending by tokens. covers: of which rounds `measured`
    is. in_force: whether the server's own corrections are known."""

    corrections: tuple[Correction, ...]
    covers: str
    in_force: bool


class RatioTally:
    """Keeps measured over predicted step time of every round that has both."""

    def __init__(self) -> None:
        self._ratios: dict[Kind, array[float]] = {}

    def add(self, done: Round) -> None:
        if done.predicted_s > 0 and done.measured_s is not None:
            kept = self._ratios.setdefault((done.tokens, done.drafted), array("d"))
            kept.append(done.measured_s / done.predicted_s)

    def result(self, covers: str, in_force: Mapping[Kind, float]) -> Refinement | None:
        """None: nothing is known. in_force: the server's factors; empty: it does not say."""
        kinds = {*self._ratios, *in_force}
        if not kinds:
            return None
        corrections = [
            self._correction(group, in_force)
            for drafted in (True, False)
            for group in _groups(sorted(kind for kind in kinds if kind[1] == drafted))
        ]
        return Refinement(tuple(corrections), covers, bool(in_force))

    def _correction(self, kinds: Sequence[Kind], in_force: Mapping[Kind, float]) -> Correction:
        ratios = np.concatenate([np.array(self._ratios.get(kind, ())) for kind in kinds])
        factors = [in_force[kind] for kind in kinds if kind in in_force]
        return Correction(
            low=kinds[0][0],
            high=kinds[-1][0],
            drafted=kinds[0][1],
            rounds=len(ratios),
            measured=float(np.median(ratios)) if len(ratios) else None,
            in_force=float(np.median(factors)) if factors else None,
        )


def _groups(kinds: Sequence[Kind]) -> list[list[Kind]]:
    """Each token count alone, or buckets of powers of two if there are many. kinds: ascending."""
    many = len(kinds) > MOST_TIERS
    groups: dict[int, list[Kind]] = {}
    for tokens, drafted in kinds:
        groups.setdefault(bucket_end(tokens) if many else tokens, []).append((tokens, drafted))
    return list(groups.values())
