"""What the last rounds did, kept on the host and shown by /server_info."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sglang_dspark.config import SpecConfig
    from sglang_dspark.schedule.rounds import FinishedRound

KEPT_ROUNDS = 1024
KEPT_CONFIDENCES = 8


class RoundRecords:
    """The most recent rounds, and totals since the start or the last clear."""

    def __init__(self, config: SpecConfig) -> None:
        self._config = config
        self.clear()

    def clear(self) -> None:
        self._recent: deque[FinishedRound] = deque(maxlen=KEPT_ROUNDS)
        self._totals: dict[str, float] = dict.fromkeys(
            ("rounds", "plain_rounds", "windows", "accepted", "offered", "verified", "computed"), 0
        )
        self._ceiling = self._reached = self._broken = 0

    def add(self, done: FinishedRound) -> None:
        self._recent.append(done)
        requests = len(done.windows)
        for name, value in (
            ("rounds", 1),
            ("plain_rounds", not done.decision.drafts),
            ("windows", requests),
            ("accepted", int(done.accepted.sum())),
            ("offered", int((done.windows - 1).sum())),
            ("verified", int(done.windows.sum())),
            ("computed", done.tokens),
        ):
            self._totals[name] += value
        if done.full and done.drafted:
            self._ceiling += int(done.ceiling.sum()) + requests
            self._reached += int(done.accepted.sum()) + requests
        self._broken += int(done.broken.sum())

    def dump(self) -> dict[str, Any]:
        """The resolved configuration, totals, and the last rounds one by one.

        accept_rate: accepted draft tokens for one in a verify window. padding: share of the verify
        forward's tokens that belonged to no window (compact). utilisation: committed tokens for one
        that a full window would have committed (where full windows are run).
        accept_lens, windows: one list per round, oldest first, an entry per request.
        tokens, budgets, depths, predicted_ms, measured_ms: one entry per round; a time is None
        where nothing was predicted or measured.
        confidences: survivals [R][gamma] of each of the last rounds.
        """
        config, totals = self._config, self._totals
        recent = list(self._recent)
        compact = config.mode == "compact"
        drafted = [done for done in recent if done.survivals is not None][-KEPT_CONFIDENCES:]
        return {
            "plugin": "sglang-dspark",
            "algorithm": str(config.algorithm),
            "mode": str(config.mode),
            "gamma": config.gamma,
            "resolved": config.describe(),
            **{name: int(value) for name, value in totals.items()},
            "accept_length": _ratio(totals["accepted"] + totals["windows"], totals["windows"]),
            "accept_rate": _ratio(totals["accepted"], totals["offered"]),
            "padding": _ratio(totals["computed"] - totals["verified"], totals["computed"])
            if compact
            else 0.0,
            "utilisation": _ratio(self._reached, self._ceiling),
            "broken_confidences": self._broken,
            "accept_lens": [(done.accepted + 1).tolist() for done in recent],
            "windows_of_rounds": [done.windows.tolist() for done in recent],
            "tokens": [done.tokens for done in recent],
            "budgets": [done.decision.budget for done in recent],
            "depths": [done.decision.depth for done in recent],
            "predicted_ms": [_milliseconds(done.decision.seconds or None) for done in recent],
            "measured_ms": [_milliseconds(done.seconds) for done in recent],
            "confidences": [
                np.round(done.survivals, 6).tolist()
                for done in drafted
                if done.survivals is not None
            ],
        }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
