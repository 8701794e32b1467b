"""What rounds did, as /metrics shows it. Every test has a registry of its own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import prometheus_client
import pytest

from sglang_dspark.config import VerifyMode
from sglang_dspark.observe.observer import Observer
from sglang_dspark.schedule.rounds import FinishedRound
from sglang_dspark.schedule.scheduler import Decision

LABELS = {"model_name": "tiny"}


class Exported:
    """Metrics, and the values that a scrape of them finds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: VerifyMode) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        for kind in ("Counter", "Gauge", "Histogram"):
            original = getattr(prometheus_client, kind)
            monkeypatch.setattr(prometheus_client, kind, partial(original, registry=self.registry))
        config: Any = SimpleNamespace(mode=mode, describe=lambda: "")
        windows: Any = SimpleNamespace(correction=lambda decision: self.correction)
        self.correction: float | None = None
        self.observer = Observer(config, windows, max_tokens=256, labels=LABELS)

    def add(self, windows: list[int], accepted: list[int], **changes: Any) -> None:
        values = {
            "decision": Decision(7, sum(windows) - len(windows), 2, 6.0, 0.004),
            "rows": np.arange(len(windows)),
            "generations": np.arange(len(windows)),
            "seconds": 0.005,
            "tokens": 16,
            "full": False,
            "survivals": np.ones((len(windows), 7)),
            "windows": np.array(windows),
            "accepted": np.array(accepted),
            "ceiling": np.array(accepted),
            "broken": np.zeros(len(windows), dtype=bool),
            "evidence": None,
            "head_logits": None,
            "sampled": np.zeros(len(windows), dtype=bool),
            **changes,
        }
        self.observer.add(FinishedRound(**values))

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value("sglang_dspark:" + name, {**LABELS, **labels})

    def lengths(self, name: str) -> dict[int, float]:
        """A counter by length."""
        return {
            int(sample.labels["tokens"]): sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == f"sglang_dspark:{name}_total"
        }


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    return Exported(monkeypatch, VerifyMode.COMPACT)


def test_every_name_is_ours_and_carries_the_servers_labels(exported):
    exported.add([3], [1], full=True, broken=np.array([True]))
    samples = [sample for metric in exported.registry.collect() for sample in metric.samples]
    assert len(samples) > 50
    for sample in samples:
        assert sample.name.startswith("sglang_dspark:") and sample.labels["model_name"] == "tiny"


def test_windows_and_what_they_committed_are_counted_by_length(exported):
    exported.add([1, 4, 4, 8], [0, 3, 1, 1], tokens=24)
    exported.add([4], [3])
    assert exported.lengths("verify_windows") == {1: 1, 4: 3, 8: 1}
    assert exported.lengths("accept_lengths") == {1: 1, 2: 2, 4: 2}  # the bonus is one of them
    assert exported.lengths("accept_ceilings") == {}  # windows were cut: nobody knows
    assert exported.value("verify_budget_sum") == (17 - 4) + 3
    assert exported.value("verify_budget_count") == 2
    assert exported.value("rounds_total", drafted="true") == 2


def test_ceilings_are_counted_where_full_windows_were_run(exported):
    exported.add([2, 8], [1, 2], ceiling=np.array([5, 2]), full=True)
    assert exported.lengths("accept_ceilings") == {6: 1, 3: 1}
    assert exported.lengths("accept_lengths") == {2: 1, 3: 1}


def test_rounds_without_a_draft(exported):
    plain = Decision(0, 0, 0, 2.0, 0.001)
    exported.add([1, 1], [0, 0], decision=plain, survivals=None, tokens=2, full=True)
    assert exported.value("rounds_total", drafted="false") == 1
    assert exported.value("rounds_total", drafted="true") is None
    assert exported.lengths("accept_lengths") == {1: 2}
    assert exported.lengths("accept_ceilings") == {}


def test_a_ceiling_is_that_of_the_block_even_if_it_was_not_to_be_drafted(exported):
    """In cap-accept all blocks are drafted and verified, also where compact would do without."""
    plain = Decision(0, 0, 0, 2.0, 0.001)
    exported.add([1, 1], [0, 0], decision=plain, tokens=16, full=True, ceiling=np.array([3, 0]))
    assert exported.lengths("accept_ceilings") == {4: 1, 1: 1}
    assert exported.value("rounds_total", drafted="false") == 1


def test_padding_is_what_no_window_asked_for(exported):
    exported.add([1, 4, 6], [0, 0, 0], tokens=16)
    exported.add([8, 8], [0, 0], tokens=16)
    assert exported.value("verified_tokens_total") == 11 + 16
    assert exported.value("padding_tokens_total") == 5
    assert exported.value("verify_tier_sum") == 32 and exported.value("verify_tier_count") == 2
    exported.add([2, 2], [0, 0], tokens=16, full=True)  # all rows are run, none is padding
    assert exported.value("padding_tokens_total") == 5


def test_times_are_compared_only_where_both_are_known(exported):
    exported.add([2], [0], decision=Decision(7, 1, 0, 1.5, 0.004), seconds=0.006)
    exported.add([2], [0], decision=Decision(7, 1, 0, 1.5, 0.004), seconds=None)
    exported.add([2], [0], decision=Decision(7, 1, 0), seconds=0.5)
    for name, total in (("predicted", 0.004), ("measured", 0.006)):
        labels = {"predicted": "true"} if name == "measured" else {}
        assert exported.value(f"{name}_step_seconds_count", **labels) == 1
        assert exported.value(f"{name}_step_seconds_sum", **labels) == pytest.approx(total)


def test_what_nobody_predicted_is_measured_all_the_same(exported):
    exported.add([8], [0], decision=Decision(7, 7, 0), seconds=0.5)  # static: there is no table
    assert exported.value("measured_step_seconds_sum", predicted="false") == 0.5
    assert exported.value("measured_step_seconds_count", predicted="true") is None
    assert exported.value("predicted_step_seconds_count") == 0


def test_fallbacks_are_counted_by_their_reason(exported):
    exported.add([2], [0])
    assert exported.value("fallbacks_total", reason="confidence") is None
    exported.add([8, 8, 2], [0, 0, 0], broken=np.array([True, True, False]), tokens=18)
    exported.add([8, 8], [0, 0], decision=Decision(7, 14, None), full=True)
    assert exported.value("fallbacks_total", reason="confidence") == 2
    assert exported.value("fallbacks_total", reason="batch_above_grid") == 1


@pytest.mark.parametrize("mode", list(VerifyMode))
def test_only_where_windows_are_sized_a_batch_can_be_too_large_for_it(monkeypatch, mode):
    exported = Exported(monkeypatch, mode)
    exported.add([8, 8], [0, 0], decision=Decision(7, 14, None), full=True)
    found = exported.value("fallbacks_total", reason="batch_above_grid")
    assert found == (None if mode is VerifyMode.STATIC else 1)


def test_corrections_of_the_table_are_shown_by_tier_and_kind(exported: Exported) -> None:
    exported.add([1, 8], [0, 3])
    assert exported.value("step_time_correction", tier="16", drafted="true") is None
    exported.correction = 1.25
    exported.add([1, 8], [0, 3])
    exported.correction = 0.5
    exported.add([1], [0], decision=Decision(0, 0, 0, 1.0, 0.004), tokens=1, survivals=None)
    assert exported.value("step_time_correction", tier="16", drafted="true") == 1.25
    assert exported.value("step_time_correction", tier="1", drafted="false") == 0.5
