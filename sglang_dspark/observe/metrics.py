"""What rounds did, as Prometheus metrics on the server's own /metrics.

Every name starts with `sglang_dspark:`. They are made only if the server was started with
--enable-metrics; SGLang then collects the metrics of all its processes in one place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sglang_dspark.schedule.rounds import FinishedRound
    from sglang_dspark.schedule.scheduler import Ints

PREFIX = "sglang_dspark:"


class RoundMetrics:
    """Counters and histograms of one scheduler process. labels: put on every metric.
    max_tokens: of a verify forward. scheduled: whether windows are sized at all.

    Imports prometheus_client here, since SGLang first has to say where processes meet.
    """

    def __init__(self, max_tokens: int, scheduled: bool, labels: dict[str, str]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        names = list(labels)

        def counter(name: str, about: str, *more: str) -> Any:
            made = Counter(PREFIX + name, about, [*names, *more])
            return made if more else made.labels(**labels)

        def histogram(name: str, about: str, buckets: list[float], *more: str) -> Any:
            made = Histogram(PREFIX + name, about, [*names, *more], buckets=buckets)
            return made if more else made.labels(**labels)

        sizes = [0.0, *(2.0**i for i in range(max_tokens.bit_length() + 1))]
        seconds = [0.001 * 2**i for i in range(14)]
        self._labels, self._scheduled = labels, scheduled
        self.rounds = counter("rounds", "Decode rounds, by whether they were drafted", "drafted")
        # By length rather than as histograms: exact, and a round costs gamma steps, not R.
        self.windows = counter(
            "verify_windows", "Verify windows, by their tokens (anchor included)", "tokens"
        )
        self.accepts = counter(
            "accept_lengths", "Windows, by the tokens they committed (bonus included)", "tokens"
        )
        self.ceilings = counter(
            "accept_ceilings",
            "Windows, by the tokens a full window would have committed (static, cap-accept)",
            "tokens",
        )
        self.budget = histogram("verify_budget", "Draft tokens verified in a round", sizes)
        self.tier = histogram("verify_tier", "Tokens of a round's verify forward", sizes)
        self.verified = counter("verified_tokens", "Tokens of verify windows, anchors included")
        self.padding = counter("padding_tokens", "Tokens of verify forwards that were padding")
        self.predicted = histogram("predicted_step_seconds", "Step time by the table", seconds)
        self.measured = histogram(
            "measured_step_seconds",
            "Step time, round to round, by whether the table predicted it",
            seconds,
            "predicted",
        )
        self.corrections = Gauge(
            PREFIX + "step_time_correction",
            "Step time that is expected for one of the table's, as measured while serving",
            [*names, "tier", "drafted"],
            multiprocess_mode="mostrecent",
        )
        self.fallbacks = counter(
            "fallbacks",
            "Rounds (or requests: confidence) that could not be served as planned",
            "reason",
        )

    def add(self, done: FinishedRound) -> None:
        """Count a round that is over."""
        windows = int(done.windows.sum())
        self.rounds.labels(**self._labels, drafted=str(done.decision.drafts).lower()).inc()
        self._count(self.windows, done.windows)
        self._count(self.accepts, done.accepted + 1)
        if done.full and done.drafted:
            self._count(self.ceilings, done.ceiling + 1)
        self.budget.observe(int(np.maximum(done.windows - 1, 0).sum()))
        self.tier.observe(done.tokens)
        self.verified.inc(windows)
        self.padding.inc(0 if done.full else done.tokens - windows)
        if done.seconds is not None:
            predicted = done.decision.seconds > 0
            labels = {**self._labels, "predicted": str(predicted).lower()}
            self.measured.labels(**labels).observe(done.seconds)
            if predicted:
                self.predicted.observe(done.decision.seconds)
        if done.broken.any():
            self.fallbacks.labels(**self._labels, reason="confidence").inc(int(done.broken.sum()))
        if self._scheduled and done.decision.tier is None:
            self.fallbacks.labels(**self._labels, reason="batch_above_grid").inc()

    def corrected(self, tier: int, drafted: bool, factor: float) -> None:
        """tier: its tokens."""
        labels = {**self._labels, "tier": tier, "drafted": str(drafted).lower()}
        self.corrections.labels(**labels).set(factor)

    def _count(self, counter: Any, lengths: Ints) -> None:
        for length, count in enumerate(np.bincount(lengths).tolist()):
            if count:
                counter.labels(**self._labels, tokens=length).inc(count)
