"""T(R, M, C): seconds of a whole round, as a sum of parts that are each easy to fit and to read.

    T = bias + α(R) + θ(M) + κ · C

R requests, M tokens of the verify forward (padding included: what runs is the tier), C KV tokens
that it attends to. α and θ are piecewise linear, start at 0 and never fall; κ is not negative. κ is
there because reading the context does not shrink with the windows: without it, long contexts look
like expensive tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class StepCost(Protocol):
    """What the schedule asks of a table."""

    def seconds(self, requests: int, tokens: Floats, context: float) -> Floats:
        """T(requests, tokens, context) of every token count, float64 [n]."""


@dataclass(frozen=True)
class CostModel:
    """The fitted model. Knots ascend; values are seconds, not negative and never falling.

    request_knots, request_seconds: α. token_knots, token_seconds: θ. Outside of the knots α is
    constant; θ goes on with the slope of its last piece, since more tokens cost more.
    """

    bias: float
    request_knots: tuple[float, ...]
    request_seconds: tuple[float, ...]
    token_knots: tuple[float, ...]
    token_seconds: tuple[float, ...]
    seconds_per_context_token: float = 0.0

    def __post_init__(self) -> None:
        for name, knots, values in (
            ("request", self.request_knots, self.request_seconds),
            ("token", self.token_knots, self.token_seconds),
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
        for name, value in (
            ("bias", self.bias),
            ("seconds_per_context_token", self.seconds_per_context_token),
        ):
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; must be a finite number, not negative")
        if self.bias + self.request_seconds[0] + self.token_seconds[0] <= 0:
            raise ValueError("a step of the smallest batch takes no time; must take some")

    def seconds(self, requests: int, tokens: Floats, context: float) -> Floats:
        knots, values = np.asarray(self.token_knots), np.asarray(self.token_seconds)
        theta = np.interp(tokens, knots, values)
        if len(knots) > 1:
            slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
            theta = theta + slope * np.maximum(tokens - knots[-1], 0)
        alpha = float(np.interp(requests, self.request_knots, self.request_seconds))
        total: Floats = self.bias + alpha + theta + self.seconds_per_context_token * context
        return total


@dataclass(frozen=True)
class FlatCost:
    """Every step takes as long: verifying all is always best. The last resort, never silent."""

    step_seconds: float = 1.0

    def seconds(self, requests: int, tokens: Floats, context: float) -> Floats:
        return np.full(len(tokens), self.step_seconds)


@dataclass(frozen=True)
class RoundCost:
    """What a round costs: with a draft, and (None: not known) without one, where M = R."""

    drafted: StepCost
    plain: StepCost | None = None


@dataclass(frozen=True)
class Cells:
    """Measured rounds: requests, tokens, context and seconds, float64 [n] each."""

    requests: Floats
    tokens: Floats
    context: Floats
    seconds: Floats

    def take(self, index: npt.NDArray[np.intp]) -> Cells:
        return Cells(
            self.requests[index], self.tokens[index], self.context[index], self.seconds[index]
        )

    def __len__(self) -> int:
        return len(self.seconds)


def fit(cells: Cells, max_knots: int = 16) -> CostModel:
    """Least squares of the relative error, every slope not negative (scipy's NNLS).

    Knots are the requests and tokens that were measured, thinned to max_knots quantiles. With one
    value of a variable its part is 0 and the bias takes it.
    """
    from scipy.optimize import nnls

    if len(cells) < 2:
        raise ValueError(f"{len(cells)} measured cells; a fit needs at least 2")
    if not (np.isfinite(cells.seconds).all() and (cells.seconds > 0).all()):
        raise ValueError("measured seconds must be finite and above 0")
    request_knots, token_knots = (_knots(v, max_knots) for v in (cells.requests, cells.tokens))
    columns = [
        np.ones((len(cells), 1)),
        _ramps(cells.requests, request_knots),
        _ramps(cells.tokens, token_knots),
        cells.context[:, None],
    ]
    matrix = np.concatenate(columns, axis=1)
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
    weighted = matrix / scale / cells.seconds[:, None]
    solution, _ = nnls(weighted, np.ones(len(cells)))
    solution = solution / scale
    at, widths = 1, (len(request_knots) - 1, len(token_knots) - 1)
    parts = []
    for width, knots in zip(widths, (request_knots, token_knots), strict=True):
        slopes = solution[at : at + width]
        parts.append(np.concatenate([[0.0], np.cumsum(slopes * np.diff(knots))]))
        at += width
    return CostModel(
        bias=float(solution[0]),
        request_knots=tuple(map(float, request_knots)),
        request_seconds=tuple(map(float, parts[0])),
        token_knots=tuple(map(float, token_knots)),
        token_seconds=tuple(map(float, parts[1])),
        seconds_per_context_token=float(solution[-1]),
    )


def relative_errors(model: StepCost, cells: Cells) -> Floats:
    """|predicted - measured| / measured of every cell, float64 [n]."""
    rows = zip(cells.requests, cells.tokens, cells.context, strict=True)
    predicted = np.array([float(model.seconds(int(r), np.array([m]), c)[0]) for r, m, c in rows])
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
