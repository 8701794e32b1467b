"""Everything that looks at rounds that are over: records, metrics, the self-check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_dspark.observe.metrics import RoundMetrics
from sglang_dspark.observe.records import RoundRecords
from sglang_dspark.observe.selfcheck import AcceptanceCheck

if TYPE_CHECKING:
    from sglang_dspark.config import SpecConfig
    from sglang_dspark.observe.record_writer import RecordWriter
    from sglang_dspark.schedule.rounds import FinishedRound
    from sglang_dspark.schedule.windows import WindowScheduler


class Observer:
    """labels: of every metric, as SGLang has them; None: the server exports none. writer: writes
    every round to a file."""

    def __init__(
        self,
        config: SpecConfig,
        windows: WindowScheduler,
        max_tokens: int,
        labels: dict[str, str] | None,
        writer: RecordWriter | None = None,
    ) -> None:
        self._windows = windows
        self._check = AcceptanceCheck(config.describe())
        self._records = RoundRecords(config)
        self._writer = writer
        self._metrics = (
            None if labels is None else RoundMetrics(max_tokens, config.mode.schedules, labels)
        )

    def add(self, done: FinishedRound) -> None:
        if done.decision.drafts:
            self._check.add(done.accepted.tolist())
        self._records.add(done)
        if self._writer is not None:
            self._writer.add(done)
        if self._metrics is not None:
            self._metrics.add(done)
            if (factor := self._windows.correction(done.decision)) is not None:
                self._metrics.corrected(done.tokens, done.decision.drafts, factor)

    def dump(self) -> dict[str, Any]:
        """What /server_info shows of a DSPARK worker, as `dspark_info_record`."""
        return {**self._records.dump(), "schedule": self._windows.describe()}

    def clear(self) -> None:
        self._records.clear()
