"""The report as numbers. What is not known is `Missing` and says why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from sglang_dspark.report.distribution import Distribution
from sglang_dspark.report.refinement import Refinement
from sglang_dspark.report.reliability import Calibration
from sglang_dspark.report.steps import StepTimes
from sglang_dspark.report.tally import Totals

T = TypeVar("T")
FORMAT, VERSION = "sglang-dspark report", 1
MODES = STATIC, COMPACT, CAP_ACCEPT = "static", "compact", "cap-accept"


@dataclass(frozen=True)
class Missing:
    """There is no such figure. why: one clause that also says what would help."""

    missing: str


@dataclass(frozen=True)
class Run:
    """What the figures are of. covers: which rounds. facts: more of the server, by topic."""

    source: str
    covers: str
    algorithm: str
    mode: str
    gamma: int
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Report:
    """Over R requests and many rounds; a window is one request's in one round.

    requests: windows. committed, verified, computed: tokens, of commits (bonus included), of
    windows (anchor included), and of verify forwards (padding included).
    accept_length: committed a window. verify_cost: verified tokens for a committed one.
    accept_rate: accepted for a verified draft token, None if there was none.
    utilisation: committed tokens for one that full windows would have committed.
    padding: share of computed tokens that belong to no window. plain: share of rounds without a
    draft. commits, windows, ceilings: windows by tokens. budgets: rounds by verified draft tokens.
    forwards: rounds by tokens of the verify forward.
    """

    run: Run
    rounds: int
    requests: int
    committed: int
    verified: int
    computed: int
    accept_length: float
    verify_cost: float
    accept_rate: float | None
    utilisation: float | Missing
    padding: float | Missing
    plain: float | Missing
    commits: Distribution
    windows: Distribution
    ceilings: Distribution | Missing
    budgets: Distribution | Missing
    forwards: Distribution | Missing
    steps: StepTimes | Missing
    refinement: Refinement | Missing
    calibration: Calibration | Missing
    notes: tuple[str, ...]

    def to_json(self) -> str:
        fields: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def summarise(
    run: Run,
    totals: Totals,
    steps: StepTimes | None,
    refinement: Refinement | None,
    calibration: Calibration | Missing,
    *,
    utilisation: float | None = None,
    notes: tuple[str, ...] = (),
) -> Report:
    """totals: of one round at least. utilisation: as the server says, for where it keeps no
    ceilings."""
    commits, windows = lengths(totals.commits), lengths(totals.windows)
    # In static what is committed is what full windows allow.
    ceilings = commits if run.mode == STATIC else Distribution.of_counts(totals.ceilings, gaps=True)
    if ceilings is not None:
        utilisation = commits.mean / ceilings.mean
    offered = totals.verified - totals.requests
    return Report(
        run=run,
        rounds=totals.rounds,
        requests=totals.requests,
        committed=totals.committed,
        verified=totals.verified,
        computed=totals.computed,
        accept_length=commits.mean,
        verify_cost=totals.verified / totals.committed,
        accept_rate=(totals.committed - totals.requests) / offered if offered else None,
        utilisation=_known(run, "utilisation", utilisation, NO_CEILINGS),
        padding=_known(run, "padding", totals.padding / max(totals.computed, 1), ""),
        plain=_known(run, "plain", totals.plain / totals.rounds, ""),
        commits=commits,
        windows=windows,
        ceilings=_known(run, "ceilings", ceilings, NO_CEILINGS),
        budgets=_known(run, "budgets", totals.budgets, NO_ROUNDS),
        forwards=_known(run, "forwards", totals.forwards, NO_ROUNDS),
        steps=_known(run, "steps", steps, NO_TIMES),
        refinement=_known(run, "refinement", refinement, NO_TIMES),
        calibration=calibration,
        notes=notes,
    )


def lengths(counts: dict[int, int]) -> Distribution:
    """Of windows by tokens, of which there are some."""
    found = Distribution.of_counts(counts, gaps=True)
    assert found is not None
    return found


NO_CEILINGS = (
    "which tokens full windows would have committed is counted only with --enable-metrics: add it "
    "to the server"
)
NO_ROUNDS = "no round was counted"
NO_TIMES = (
    "no round has both a predicted and a measured time: only a budget that a cost table chose "
    "(--speculative-verify-budget auto) predicts any"
)
_NO_CEILINGS_IN_COMPACT = (
    "compact mode does not run full windows; --speculative-verify-mode cap-accept does, to measure"
)
_NOT_IN_MODE = {
    STATIC: {
        "padding": "static mode runs full windows, which are not packed",
        "plain": "static mode drafts in every round",
        "budgets": "static mode has no budget: it verifies whole blocks",
        "steps": "static mode has no cost table to predict step times by",
        "refinement": "static mode has no cost table to correct",
    },
    CAP_ACCEPT: {
        "padding": "cap-accept mode runs full windows, which are not packed",
        "steps": "cap-accept mode runs full windows, but its cost table predicts trimmed ones",
        "refinement": "cap-accept mode learns no step times: it runs full windows",
    },
    COMPACT: {"utilisation": _NO_CEILINGS_IN_COMPACT, "ceilings": _NO_CEILINGS_IN_COMPACT},
}


def _known(run: Run, name: str, value: T | None, otherwise: str) -> T | Missing:
    """The value, if the mode has such a thing and there is one."""
    if name in _NOT_IN_MODE[run.mode]:
        return Missing(_NOT_IN_MODE[run.mode][name])
    return Missing(otherwise) if value is None else value
