"""benchmarks/gpu.py --tiny: every stage once, on a CPU, and whether what it writes makes sense."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cost_tables.files import load_table

pytestmark = pytest.mark.server

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of a run, with the exit status of one that found nothing wrong."""
    file = tmp_path_factory.mktemp("gpu") / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + file.read_text()
    return file


@pytest.fixture(scope="module")
def results(out: Path) -> dict[str, Any]:
    """What each stage found."""
    report = json.loads(out.read_text())
    assert report["tiny"] is True
    stages: dict[str, Any] = report["stages"]
    assert list(stages) == [
        *("environment", "kernels", "identity", "profile", "throughput", "train")
    ]
    for name, stage in stages.items():
        assert stage["status"] == "ok" and stage["problems"] == [], name
        assert 0 < stage["seconds"] < stage["box_s"]
    return {name: stage["result"] for name, stage in stages.items()}


def test_environment(results: dict[str, Any]) -> None:
    found = results["environment"]
    assert found["versions"]["sglang"] == "0.5.23" and found["versions"]["torch"]
    assert found["machine"]["gpu"] is None and found["machine"]["cores"] >= 1
    assert found["sglang_dspark"].startswith("0.")
    imports = {entry["name"]: entry["imports"] for entry in found["backends"]}
    assert imports["torch_native"] == "yes" and len(imports) == 6


def test_kernels(results: dict[str, Any]) -> None:
    """Tests that need a GPU are counted as skipped; Triton's kernels ran in its interpreter."""
    found = results["kernels"]
    assert found["failed"] == 0 and found["skipped"] > 0 and found["run"] > 10
    (times,) = [m["value"] for m in found["measured"] if m["name"] == "replay_ms_eager"]
    assert min(times.values()) > 0


def test_identity(results: dict[str, Any]) -> None:
    found = results["identity"]
    (entry,) = found["combinations"]
    assert (entry["algorithm"], entry["mode"], entry["graphs"]) == ("DSPARK", "compact", True)
    assert entry["same"] is True
    assert [case["budget"] for case in entry["cases"]] == ["auto", 0.5, 1.0]
    assert all(case["different"] == 0 and case["rounds"] > 0 for case in entry["cases"])
    assert entry["cases"][1]["windows_below_full"] > 0 == entry["cases"][2]["windows_below_full"]
    assert entry["cases"][2]["accept_length"] > 1.1, "a draft that knows nothing has 1"
    assert "measured now" in entry["cost_table"]
    assert len(found["not_run"]) == 17


def test_profile(results: dict[str, Any], out: Path) -> None:
    found = results["profile"]
    table = load_table(out.parent / found["table"])
    assert table.fingerprint is not None and table.fingerprint.gamma == 7
    assert table.cost.plain is not None and table.median_error == found["median_error"]
    assert found["table"].endswith("qwen3-tiny-hostattention-g7.json")
    for entry in found["step_ms"]:
        assert 0 < entry["anchors"] <= entry["whole"] and entry["plain"] > 0
    assert found["cells"] > 6 and found["start_up"] == {"skipped": "--tiny: one start less"}


def test_throughput(results: dict[str, Any]) -> None:
    found = results["throughput"]
    assert set(found["arms"]) == {"none", "ours compact"}
    assert set(found["left_out"]) == {"SGLang static", "SGLang compact", "ours static"}
    assert {(row["arm"], row["concurrency"]) for row in found["medians"]} == {
        (arm, count) for arm in found["arms"] for count in (1, 4)
    }
    for load in found["loads"]:
        assert load["tokens_per_s"] > 0 and load["user_tokens_per_s"] > 0
        assert load["right"] == load["requests"] > 0
    assert len(found["ratios"]) == 2 and all(entry["ratio"] > 0 for entry in found["ratios"])
    (server,) = found["servers"]
    assert found["cost_table"] in server["cost table"], "it serves with the table just made"


def test_train(results: dict[str, Any]) -> None:
    """It begins, is interrupted, and says how far it came; test_train_demo.py goes to the end."""
    found = results["train"]
    assert found["drafts"] == ["dspark"] and found["finished"] is False
    assert set(found) == {"command", "drafts", "finished", "figures", "last_steps", "exported"}


def test_nothing_is_told_of_where_it_ran(out: Path) -> None:
    text = out.read_text()
    assert sys.prefix not in text and str(SCRIPT.parents[1]) not in text
