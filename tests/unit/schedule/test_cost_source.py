"""Which cost table a server takes, and that it never takes one of another machine in silence."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cost_tables import CostModel, Fingerprint, FlatCost, RoundCost, load_table, save_table
from cost_tables.measure import Measured
from sglang_dspark.config import ScheduleConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.schedule import cost_source
from sglang_dspark.schedule.cost_source import find_cost

HERE = Fingerprint("cpu", "hidden 64", "float32", 1, 7, "HostAttention")
FILE, SHIPPED, MADE = (
    CostModel(bias, (1.0,), (0.0,), (1.0, 8.0), (0.0, 0.01)) for bias in (0.01, 0.02, 0.03)
)


def measured() -> Measured:
    return Measured(RoundCost(MADE, MADE), MADE, MADE, median_error=0.012, cells=48, seconds=6.54)


def never() -> Measured:
    raise AssertionError("it was measured, though there is a table")


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of shipped tables, empty."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(cost_source, "SHIPPED", folder)
    return folder


def config(path: Path, **changes: Any) -> ScheduleConfig:
    return ScheduleConfig(table=load_table(path), **changes)


def test_a_file_made_here_is_taken(tmp_path: Path, shipped: Path) -> None:
    save_table(tmp_path / "t.json", FILE, HERE, 0.034, cells=48)
    save_table(shipped / "a.json", SHIPPED, HERE, 0.01, cells=48)  # the flag wins
    source = find_cost(config(tmp_path / "t.json"), HERE, never)
    assert source.cost == RoundCost(FILE)
    assert "t.json" in source.about and "median error 3.4% on held-out cells" in source.about


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "H200"}, ["device: H200 against cpu"]),
        ({"gamma": 5, "tp": 2}, ["tp: 2 against 1", "gamma: 5 against 7"]),
        ({"backend": "fa3"}, ["backend: fa3 against HostAttention"]),
    ],
    ids=str,
)
def test_a_file_made_elsewhere_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    save_table(tmp_path / "t.json", FILE, replace(HERE, **changes), 0.034, cells=48)
    with pytest.raises(ConfigError) as caught:
        find_cost(config(tmp_path / "t.json"), HERE, never)
    message = str(caught.value)
    assert message.count(" against ") - 1 == len(changes)  # "table against this server"
    for word in ("--speculative-dspark-sps-table-path", "t.json", "measured elsewhere", *words):
        assert word in message


def test_a_file_of_sglang_says_not_where_and_is_taken(tmp_path: Path) -> None:
    content = {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [100.0, 50.0]}
    (tmp_path / "s.json").write_text(json.dumps(content))
    source = find_cost(config(tmp_path / "s.json"), HERE, never)
    assert source.cost.drafted.seconds(1, np.array([9.0]), 0.0)[0] == pytest.approx(0.02)
    assert source.cost.plain is None and "does not say where it was measured" in source.about


@pytest.mark.parametrize("budget", [0.0, 0.5, "random"])
def test_a_fixed_budget_needs_no_table(budget: Any) -> None:
    source = find_cost(ScheduleConfig(budget=budget), HERE, never)
    assert isinstance(source.cost.drafted, FlatCost) and source.cost.plain is None
    assert f"fixed to {budget}" in source.about


def test_without_any_table_it_is_measured() -> None:
    source = find_cost(ScheduleConfig(), HERE, measured)
    assert source.cost == RoundCost(MADE, MADE)
    assert source.about == "measured now, 48 cells in 6.5 s, median error 1.2% on held-out cells"


@pytest.mark.parametrize(
    ("where", "found", "measure"),
    [
        (HERE, RoundCost(SHIPPED), never),
        (replace(HERE, model="hidden 128"), RoundCost(MADE, MADE), measured),
    ],
    ids=["of this server", "of another"],
)
def test_a_shipped_table_serves_only_its_like(
    shipped: Path, where: Fingerprint, found: RoundCost, measure: Callable[[], Measured]
) -> None:
    save_table(shipped / "a.json", FILE, replace(HERE, gamma=3), 0.01, cells=48)
    save_table(shipped / "b.json", SHIPPED, where, 0.01, cells=48)
    source = find_cost(ScheduleConfig(), HERE, measure)
    assert source.cost == found
    assert ("b.json" in source.about) == (measure is never)


# --- a shipped table that is near -----------------------------------------------------------------

BOARD, CHIP = "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"
NEAR = replace(HERE, device=BOARD)
THERE = replace(HERE, device=CHIP)


def test_a_near_one_serves_with_one_warning_of_what_differs(
    shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_table(shipped / "near.json", SHIPPED, NEAR, 0.01, cells=48)
    with caplog.at_level(logging.WARNING):
        source = find_cost(ScheduleConfig(), THERE, never)
    assert source.cost == RoundCost(SHIPPED)
    difference = f"device: {BOARD} against {CHIP}"
    assert "near.json" in source.about and difference in source.about
    (message,) = [record.getMessage() for record in caplog.records]
    for words in ("near.json", difference, "--speculative-dspark-sps-table-path measure"):
        assert words in message


def test_one_of_the_very_same_is_taken_before_a_near_one_and_in_silence(
    shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_table(shipped / "a-near.json", FILE, NEAR, 0.01, cells=48)
    save_table(shipped / "b-same.json", SHIPPED, THERE, 0.01, cells=48)
    assert find_cost(ScheduleConfig(), THERE, never).cost == RoundCost(SHIPPED)
    assert not caplog.records


def test_of_near_ones_that_which_differs_least_is_taken(shipped: Path) -> None:
    for name, model, changes in (
        ("a", FILE, {"device": BOARD, "gamma": 15}),
        ("b", MADE, {"gamma": 15}),
        ("c", SHIPPED, {"gamma": 9}),
    ):
        fingerprint = replace(THERE, **changes)  # type: ignore[arg-type]
        save_table(shipped / f"{name}.json", model, fingerprint, 0.01, cells=48)
    assert find_cost(ScheduleConfig(), THERE, never).cost == RoundCost(SHIPPED)


def test_what_nothing_would_correct_is_measured_instead(shipped: Path) -> None:
    save_table(shipped / "near.json", SHIPPED, NEAR, 0.01, cells=48)
    assert find_cost(ScheduleConfig(refine=False), THERE, measured).cost == RoundCost(MADE, MADE)
    assert find_cost(ScheduleConfig(refine=False), NEAR, never).cost == RoundCost(SHIPPED)


def test_a_measurement_can_be_asked_for(shipped: Path) -> None:
    save_table(shipped / "same.json", SHIPPED, HERE, 0.01, cells=48)
    assert find_cost(ScheduleConfig(measure=True), HERE, measured).cost == RoundCost(MADE, MADE)
