"""A report on the rounds that a server wrote down."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sglang_dspark.errors import ConfigError
from sglang_dspark.observe.record_file import Header, RecordedRound, read_records
from sglang_dspark.report.refinement import RatioTally
from sglang_dspark.report.reliability import ReliabilityTally
from sglang_dspark.report.steps import StepTally
from sglang_dspark.report.summary import MODES, Missing, Report, Run, summarise
from sglang_dspark.report.tally import Ints, Round, RoundTally

NO_LOGITS = (
    "the records hold no confidence logits: no round was drafted without penalties or grammars"
)
COVERED = "all rounds of the file with both times"
NOTHING_REACHED = "no verify window held a draft token whose logit is known"


def report_on_records(path: Path) -> Report:
    """Raises ConfigError if it is not a records file, or holds no round."""
    header, rounds = read_records(path)
    if header.mode not in MODES:
        raise ConfigError(
            f"records {path}: config.mode is {header.mode!r}; must be one of {', '.join(MODES)}"
        )
    tally, times, ratios = RoundTally(), StepTally(), RatioTally()
    reliability = ReliabilityTally(header.gamma)
    logits_seen = False
    for recorded in rounds:
        done = _round(recorded)
        tally.add(done)
        times.add(done)
        ratios.add(done)
        if recorded.logits is not None:
            logits_seen = True
            reliability.add(recorded.logits, *_outcomes(recorded, recorded.logits.shape[1]))
    if not tally.windows:
        raise ConfigError(f"records {path}: holds no decode round yet; send the server a request")
    return summarise(
        _run(path, header, tally.rounds),
        tally.totals(),
        times.result(COVERED),
        ratios.result(COVERED, in_force={}),
        reliability.result() or Missing(NOTHING_REACHED if logits_seen else NO_LOGITS),
    )


def _round(recorded: RecordedRound) -> Round:
    return Round(
        windows=recorded.windows,
        commits=recorded.accepted + 1,
        ceiling=None if recorded.ceiling is None else recorded.ceiling + 1,
        tokens=recorded.tokens,
        full=recorded.full,
        drafted=recorded.depth > 0,
        predicted_s=recorded.predicted_s,
        measured_s=recorded.measured_s,
    )


def _outcomes(recorded: RecordedRound, depth: int) -> tuple[Ints, Ints]:
    """Windows that were run, [R], and drafts that the target took in them, [R]."""
    if recorded.ceiling is None:
        return recorded.windows, recorded.accepted
    return np.full_like(recorded.windows, depth + 1), recorded.ceiling


def _run(path: Path, header: Header, rounds: int) -> Run:
    head = "yes" if header.has_confidence_head else "no"
    return Run(
        source=str(path),
        covers=f"all {rounds} rounds of the file",
        algorithm=header.algorithm,
        mode=header.mode,
        gamma=header.gamma,
        facts=(("confidence head", head), *header.schedule.items()),
    )
