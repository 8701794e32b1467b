"""A cost table, a calibration or confidences that are wrong: an error at start, or full windows."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from cost_tables import CostModel, Fingerprint, save_table
from servers import MICRO, generate_all, info, launch, metric, serve, speculative
from trained import ARGS, DRAFT, REQUESTS, TARGET, mode

pytestmark = pytest.mark.server

MODEL = CostModel(0.01, (1.0, 16.0), (0.0, 0.001), (1.0, 128.0), (0.0, 0.02))
TABLE = "--speculative-dspark-sps-table-path"
CALIBRATION = "--speculative-dspark-confidence-sts-path"


def test_a_calibration_of_another_length_ends_the_launch(tmp_path):
    path = tmp_path / "sts.json"
    path.write_text(json.dumps({"temperatures": [1.0] * 5}))
    flags = [*mode("compact"), CALIBRATION, str(path)]
    ended = launch(TARGET, *ARGS[len(MICRO) :], *speculative(DRAFT), *flags)
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(f"sglang-dspark: error: {CALIBRATION}"), ended.stderr[-2000:]
    assert "5 entries; must be 7 numbers" in last


def test_a_table_measured_elsewhere_stops_the_server_and_says_why(tmp_path):
    """Known only once the model is loaded, but before a request is taken."""
    path = tmp_path / "table.json"
    save_table(path, MODEL, Fingerprint("H200", "x", "bfloat16", 1, 5, "fa3"), 0.02, cells=9)
    args = [*ARGS, *speculative(DRAFT), *mode("compact"), TABLE, str(path)]
    with pytest.raises(Exception, match="the server stopped"), serve(TARGET, args, tmp_path / "l"):
        pass
    log = (tmp_path / "l").read_text()
    assert "was measured elsewhere" in log and "gamma: 5 against 7" in log
    assert "device: H200 against" in log


def test_a_grid_below_the_largest_batch_stops_the_server(tmp_path):
    args = [*ARGS, *speculative(DRAFT), *mode("compact", "--speculative-verify-tiers", "16,64")]
    with pytest.raises(Exception, match="the server stopped"), serve(TARGET, args, tmp_path / "l"):
        pass
    assert "the largest tier has 64 tokens, but 16 requests" in (tmp_path / "l").read_text()


def test_a_table_and_a_calibration_of_files_are_used(tmp_path):
    """The table says that a row costs much: nearly everything is trimmed. SGLang's own forms."""
    table, calibration = tmp_path / "table.json", tmp_path / "sts.json"
    steep = {
        "sample_batch_tokens": [1, 9, 17, 33, 65],
        "sample_steps_per_sec": [100.0, 60.0, 30.0, 10.0, 2.0],
    }
    table.write_text(json.dumps({**steep, "max_batch_tokens": 128}))
    calibration.write_text(json.dumps({"temperatures": [1.5] * 7}))
    flags = [TABLE, str(table), CALIBRATION, str(calibration)]
    args = [*ARGS, *speculative(DRAFT), *mode("compact", *flags)]
    with serve(TARGET, args, tmp_path / "log") as server:
        generate_all(server, REQUESTS[4:12], 8)
        seen = info(server)
        assert seen["schedule"]["cost table"].startswith(str(table))
        assert seen["schedule"]["calibration"] == str(calibration)
        assert seen["plain_rounds"] == 0, "SGLang's tables say nothing of rounds without a draft"
        assert seen["verified"] < 0.5 * 8 * seen["windows"]


def test_confidences_that_are_no_numbers_mean_full_windows(tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(DRAFT, draft)
    (file,) = draft.glob("*.safetensors")
    weights = load_file(file)
    (name,) = [name for name in weights if name.endswith("confidence_head.proj.weight")]
    weights[name] = weights[name] * float("nan")
    save_file(weights, file, {"format": "pt"})
    with serve(TARGET, ARGS, tmp_path / "base.log") as server:
        expected = generate_all(server, REQUESTS, 8)
    with serve(TARGET, [*ARGS, *speculative(draft), *mode("compact")], tmp_path / "log") as server:
        assert generate_all(server, REQUESTS, 8) == expected
        seen = info(server)
        # It takes the results of two rounds until the host knows.
        assert {w for batch in seen["windows_of_rounds"][3:] for w in batch} == {8}
        assert seen["broken_confidences"] == seen["windows"]
        assert metric(server, "sglang_dspark:fallbacks_total") == seen["windows"]
