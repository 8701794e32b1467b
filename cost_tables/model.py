"""T(R, M, C, N): seconds of a whole round, as a sum of parts that are easy to fit and to read.

    T = bias + α(R) + θ(M) + δ(N) + σ · D + κ · C + λ · M · C / R

R requests, M tokens of the verify forward (padding included: what runs is the tier), N drafted
tokens, D = N / R the depth of the draft, C KV tokens that the round attends to. α, θ and δ are
piecewise linear, start at 0 and never fall; σ, κ and λ are not negative.

κ is there because reading the context does not shrink with the windows: without it, long contexts
look like expensive tokens. λ is for attention that is bound by arithmetic: each of the M tokens
looks at the C / R of its request. σ is what a step of a chain of drafts costs however few requests
take it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Fields of CostModel that are one number each.
SLOPES = ("seconds_per_context_token", "seconds_per_draft_step", "seconds_per_attended_token")
LEAST_BIAS = 0.01  # of a fit, for one second of the shortest measured step


class StepCost(Protocol):
    """What the schedule asks of a table."""

    def seconds(
        self, requests: int, tokens: Floats, context: float, drafted: Floats | float = 0.0
    ) -> Floats:
        """T of every token count, float64 [n]; drafted: tokens, one for all or [n]."""


@dataclass(frozen=True)
class CostModel:
    """The fitted model. Knots ascend; values are seconds, not negative and never falling.

    request_knots, request_seconds: α. token_knots, token_seconds: θ. draft_knots, draft_seconds: δ.
    seconds_per_context_token: κ, _per_attended_token: λ, _per_draft_step: σ.
    Outside of the knots α is constant; θ and δ go on with the slope of their last piece, since more
    tokens cost more.
    """

    bias: float
    request_knots: tuple[float, ...]
    request_seconds: tuple[float, ...]
    token_knots: tuple[float, ...]
    token_seconds: tuple[float, ...]
    seconds_per_context_token: float = 0.0
    draft_knots: tuple[float, ...] = (0.0,)
    draft_seconds: tuple[float, ...] = (0.0,)
    seconds_per_draft_step: float = 0.0
    seconds_per_attended_token: float = 0.0

    def __post_init__(self) -> None:
        for name, knots, values in (
            ("request", self.request_knots, self.request_seconds),
            ("token", self.token_knots, self.token_seconds),
            ("draft", self.draft_knots, self.draft_seconds),
        ):
            if not knots or len(knots) != len(values):
                raise ValueError(
                    f"{name}_knots has {len(knots)} entries and {name}_seconds {len(values)}; "
                    "must be as many, and at least one"
                )
            if not np.isfinite([*knots, *values]).all():
                raise ValueError(f"{name}_knots and {name}_seconds must be finite numbers")
            if list(knots) != sorted(set(knots)) or knots[0] < 0:
                raise ValueError(f"{name}_knots is {list(knots)}; must ascend from 0 or more")
            if min(values) < 0 or list(values) != sorted(values):
                raise ValueError(f"{name}_seconds is {list(values)}; must not be negative nor fall")
        for name in ("bias", *SLOPES):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; must be a finite number, not negative")
        if self.bias + self.request_seconds[0] + self.token_seconds[0] <= 0:
            raise ValueError("a step of the smallest batch takes no time; must take some")

    def seconds(
        self, requests: int, tokens: Floats, context: float, drafted: Floats | float = 0.0
    ) -> Floats:
        alpha, theta, delta = self._parts
        fixed = self.bias + float(np.interp(requests, *alpha))
        fixed += self.seconds_per_context_token * context
        total: Floats = fixed + _part(tokens, *theta)
        if self.seconds_per_attended_token:
            total = total + self.seconds_per_attended_token * context / requests * tokens
        if len(self.draft_knots) > 1:
            total = total + _part(drafted, *delta)
        if self.seconds_per_draft_step:
            total = total + self.seconds_per_draft_step / requests * np.asarray(drafted)
        return total

    @cached_property
    def _parts(self) -> tuple[tuple[Floats, Floats], ...]:
        """Knots and seconds of α, θ and δ as arrays."""
        return tuple(
            (np.array(knots, dtype=np.float64), np.array(seconds, dtype=np.float64))
            for knots, seconds in (
                (self.request_knots, self.request_seconds),
                (self.token_knots, self.token_seconds),
                (self.draft_knots, self.draft_seconds),
            )
        )


@dataclass(frozen=True)
class FlatCost:
    """Every step takes as long: verifying all is always best. The last resort, never silent."""

    step_seconds: float = 1.0

    def seconds(
        self, requests: int, tokens: Floats, context: float, drafted: Floats | float = 0.0
    ) -> Floats:
        return np.full(len(tokens), self.step_seconds)


@dataclass(frozen=True)
class RoundCost:
    """What a round costs: with a draft, and (None: not known) without one, where M = R."""

    drafted: StepCost
    plain: StepCost | None = None


@dataclass(frozen=True)
class Cells:
    """Measured rounds: requests, tokens, drafted tokens, context and seconds, float64 [n] each."""

    requests: Floats
    tokens: Floats
    drafted: Floats
    context: Floats
    seconds: Floats

    def take(self, index: npt.NDArray[np.intp]) -> Cells:
        values = (self.requests, self.tokens, self.drafted, self.context, self.seconds)
        return Cells(*(each[index] for each in values))

    def __len__(self) -> int:
        return len(self.seconds)


def fit(cells: Cells, max_knots: tuple[int, int, int] = (4, 10, 4)) -> CostModel:
    """Least squares of the relative error, every slope not negative (scipy's NNLS).

    max_knots: of requests, tokens and drafted tokens. Knots are values that were measured, spread
    evenly over the distinct ones; few, since the cells of a start-up are few and what lies between
    them is asked for too. With one value of a variable its part is 0 and the bias takes it.
    """
    from scipy.optimize import nnls

    if len(cells) < 2:
        raise ValueError(f"{len(cells)} measured cells; a fit needs at least 2")
    if not (np.isfinite(cells.seconds).all() and (cells.seconds > 0).all()):
        raise ValueError("measured seconds must be finite and above 0")
    variables = (cells.requests, cells.tokens, cells.drafted)
    knots = [_knots(values, most) for values, most in zip(variables, max_knots, strict=True)]
    ramps = [_ramps(values, at) for values, at in zip(variables, knots, strict=True)]
    requests = np.maximum(cells.requests, 1)  # 0 where they are not told apart
    depth, attended = cells.drafted / requests, cells.tokens * cells.context / requests
    slopes = np.stack([cells.context, depth, attended], axis=1)  # in the order of SLOPES
    columns = [np.ones((len(cells), 1)), *ramps, slopes]
    matrix = np.concatenate(columns, axis=1)
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
    weighted = matrix / scale / cells.seconds[:, None]
    solution, _ = nnls(weighted, np.ones(len(cells)))
    solution = solution / scale
    at, parts = 1, []
    for points in knots:
        steps = solution[at : at + len(points) - 1] * np.diff(points)
        parts.append(np.concatenate([[0.0], np.cumsum(steps)]))
        at += len(points) - 1
    fields: dict[str, Any] = dict(zip(SLOPES, map(float, solution[-len(SLOPES) :]), strict=True))
    for name, at_knots, seconds in zip(("request", "token", "draft"), knots, parts, strict=True):
        fields[f"{name}_knots"] = tuple(map(float, at_knots))
        fields[f"{name}_seconds"] = tuple(map(float, seconds))
    # Where contexts grow with the batch, κ can take all of it; but no step takes no time.
    bias = max(float(solution[0]), LEAST_BIAS * float(cells.seconds.min()))
    return CostModel(bias, **fields)


def relative_errors(model: StepCost, cells: Cells) -> Floats:
    """|predicted - measured| / measured of every cell, float64 [n]."""
    rows = zip(cells.requests, cells.tokens, cells.context, cells.drafted, strict=True)
    predicted = np.array(
        [float(model.seconds(int(r), np.array([m]), c, n)[0]) for r, m, c, n in rows]
    )
    errors: Floats = np.abs(predicted - cells.seconds) / cells.seconds
    return errors


def _knots(values: Floats, limit: int) -> Floats:
    distinct: Floats = np.unique(values)
    if len(distinct) <= limit:
        return distinct
    chosen = np.unique(np.linspace(0, len(distinct) - 1, limit).round().astype(int))
    knots: Floats = distinct[chosen]
    return knots


def _ramps(values: Floats, knots: Floats) -> Floats:
    """[n, knots - 1]: how far each value has gone through each piece; θ(v) = ramps · slopes."""
    low, high = knots[:-1], knots[1:]
    ramps: Floats = np.clip(values[:, None], low, high) - low
    return ramps


def _part(values: Floats | float, knots: Floats, seconds: Floats) -> Floats:
    """Piecewise linear; behind the last knot the last slope goes on."""
    part: Floats = np.asarray(np.interp(values, knots, seconds))
    if len(knots) > 1:
        slope = (seconds[-1] - seconds[-2]) / (knots[-1] - knots[-2])
        part = part + slope * np.maximum(np.asarray(values) - knots[-1], 0)
    return part
