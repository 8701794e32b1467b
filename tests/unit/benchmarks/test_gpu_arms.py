"""What the stages throughput and profile make of a table: arms, SGLang's form of it, figures."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from gpu_stages import arms, profile, throughput
from gpu_stages.pair import QWEN3_8B, Pair
from gpu_stages.servers import without_us
from gpu_stages.settings import Settings

from cost_tables.files import Fingerprint, load_table, save_table
from cost_tables.measure import Cell
from cost_tables.model import CostModel
from cost_tables.profiling.cell_file import CellFile, Header, Row

HERE = Fingerprint("NVIDIA H200", "hidden 4096", "bfloat16", 1, 7, "FlashAttentionBackend")
PAIR = Pair(QWEN3_8B, Path("/target"), Path("/draft"))


def settings(folder: Path, **changes: Any) -> Settings:
    values = {"tiny": False, "work": folder, "out": folder / "o.json", "ends": 2e9}
    return Settings(**values | changes)


def seconds(requests: int, tokens: int, depth: int = 7, context: int = 64) -> float:
    whole = 0.005 + 1e-5 * requests + 2e-5 * tokens
    return whole * (1.0 if depth else 0.5) + 4e-6 * (context - 64)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table as the profiler leaves it, with its cells beside it."""
    model = CostModel(0.005, (1.0, 64.0), (0.0, 0.001), (1.0, 512.0), (0.0, 0.01))
    save_table(tmp_path / "t.json", model, HERE, 0.03, 40)
    rows = [
        Row(cell := Cell(requests, tokens, depth, context), 100.0, (seconds(*astuple(cell)),) * 3)
        for requests in (1, 8, 64)
        for tokens in (requests, requests * 4, requests * 8)
        for depth in (0, 7)
        for context in (64, 512)
    ]
    CellFile(tmp_path / "t.csv", Header(HERE, 0), rows).close()
    return tmp_path / "t.json"


# --- arms of the throughput ----------------------------------------------------------------------


def test_sglangs_arms_run_without_us_and_ours_with_the_table(tmp_path: Path, table: Path) -> None:
    known, _ = arms.sglang_table(table, tmp_path / "known.json")
    made, left_out = arms.arms_of(settings(tmp_path), PAIR, table, known)
    by_name = {arm.name: arm for arm in made}
    assert list(by_name) == [
        *("none", "SGLang static", "SGLang compact", "ours static", "ours compact")
    ]
    assert left_out == {}
    assert by_name["none"].flags == [] and by_name["none"].environ == {}
    for name, mode in (("SGLang static", "static"), ("SGLang compact", "compact")):
        assert by_name[name].environ == {**without_us(), "SGLANG_RAGGED_VERIFY_MODE": mode}
        assert "--speculative-verify-mode" not in by_name[name].flags
    assert "sglang_dspark" not in without_us()["SGLANG_PLUGINS"].split(",")
    assert by_name["SGLang compact"].flags[-2:] == [arms.TABLE_FLAG, str(known)]
    assert by_name["ours compact"].flags[-2:] == [arms.TABLE_FLAG, str(table)]
    assert "SGLANG_PLUGINS" not in by_name["ours compact"].environ


def test_sglangs_table_is_its_own_fit_of_our_cells(tmp_path: Path, table: Path) -> None:
    """Whole blocks at the shortest context only, in a form that both can read."""
    from sglang.srt.speculative.dspark_components import dspark_sps

    known, reason = arms.sglang_table(table, tmp_path / "known.json")
    assert known is not None and reason == ""
    theirs = dspark_sps.load_sps_table_from_path(str(known))
    assert not dspark_sps.is_uninitialized_sps_table(theirs)
    assert theirs.step_time(num_reqs=64, budget=448) == pytest.approx(seconds(64, 512), rel=0.02)
    assert load_table(known).cost.plain is None


def test_without_cells_sglangs_compact_arm_is_left_out(tmp_path: Path) -> None:
    known, reason = arms.sglang_table(None, tmp_path / "known.json")
    made, left_out = arms.arms_of(settings(tmp_path), PAIR, None, known, reason)
    assert "SGLang compact" not in {arm.name for arm in made}
    assert list(left_out) == ["SGLang compact"] and "verifies everything" in reason
    assert left_out["SGLang compact"] == reason
    assert arms.TABLE_FLAG not in made[-1].flags


def test_too_few_cells_are_a_reason(tmp_path: Path, table: Path) -> None:
    rows = [Row(Cell(1, tokens, 7, 64), 64.0, (0.01,)) for tokens in (1, 8)]
    CellFile(table.with_suffix(".csv"), Header(HERE, 0), rows).close()
    known, reason = arms.sglang_table(table, tmp_path / "known.json")
    assert known is None and reason == "2 cells of whole blocks; SGLang's fit needs 4"


def test_simulated_acceptance_is_what_each_side_knows(tmp_path: Path) -> None:
    simulating = settings(tmp_path, simulate=(0.5, 0.5))
    made, left_out = arms.arms_of(simulating, PAIR, None, None, "")
    by_name = {arm.name: arm for arm in made}
    for name in ("ours static", "ours compact"):
        flags = by_name[name].flags
        assert flags[flags.index("--speculative-simulate-acceptance") + 1] == "0.5,0.5"
    assert by_name["SGLang static"].environ["SGLANG_SIMULATE_ACC_LEN"] == "1.7500"
    assert "SGLANG_SIMULATE_ACC_LEN" not in by_name["ours static"].environ
    assert list(left_out) == ["SGLang compact"]


def test_a_cpu_runs_two_arms_and_says_which_not(tmp_path: Path) -> None:
    made, left_out = arms.arms_of(settings(tmp_path, tiny=True), PAIR, None, None, "x")
    assert [arm.name for arm in made] == ["none", "ours compact"]
    assert set(left_out) == {"SGLang static", "SGLang compact", "ours static"}


def test_medians_and_ratios() -> None:
    def load(arm: str, speed: float, length: float | None = None) -> dict[str, Any]:
        return {
            "arm": arm,
            "concurrency": 8,
            "tokens_per_s": speed,
            "user_tokens_per_s": speed / 8,
            "accept_length": length,
        }

    speeds = {"none": (100, 120, 200), "ours compact": (300, 360, 999)}
    lengths = {"none": (None,) * 3, "ours compact": (3.0, 3.5, 4.0)}
    loads = [
        load(arm, *pair) for arm in speeds for pair in zip(speeds[arm], lengths[arm], strict=True)
    ]
    found = throughput.summary(loads)
    none, ours = sorted(found["medians"], key=lambda row: row["arm"])
    assert (none["tokens_per_s"], none["runs"], none["accept_length"]) == (120, 3, None)
    assert (ours["tokens_per_s"], ours["accept_length"]) == (360, 3.5)
    assert found["ratios"] == [
        {"concurrency": 8, "of": "ours compact", "over": "none", "ratio": 3.0}
    ]


# --- profile -------------------------------------------------------------------------------------


def test_a_table_is_named_by_gpu_model_backend_and_gamma() -> None:
    name = profile.table_name(HERE, "qwen3-8b")
    assert name == "nvidia-h200-qwen3-8b-flashattentionbackend-g7.json"


def test_step_times_of_a_table(table: Path) -> None:
    (one, many) = profile.step_times(load_table(table), 7, {64, 1})
    assert one["requests"] == 1 and many["requests"] == 64
    assert one["anchors"] == pytest.approx(5.0, abs=0.01)
    assert many["whole"] == pytest.approx(5 + 1 + 10, abs=0.01)
    assert 0 < many["anchors"] < many["whole"] and "plain" not in one


def test_a_sweep_takes_no_more_than_what_is_left(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("time.time", lambda: 2e9 - 70.0)
    words = profile.sweep_arguments(settings(tmp_path), "http://x", tmp_path / "t.json")
    assert words[words.index("--minutes") + 1] == f"{40 / 60:.2f}"
    monkeypatch.setattr("time.time", lambda: 2e9 - 5.0)
    with pytest.raises(TimeoutError, match="no time is left"):
        profile.sweep_arguments(settings(tmp_path), "http://x", tmp_path / "t.json")


def test_a_table_is_found_by_the_stage_behind(tmp_path: Path, table: Path) -> None:
    assert profile.made_table(settings(tmp_path)) is None
    profile.remember(settings(tmp_path), table)
    assert profile.made_table(settings(tmp_path)) == table
