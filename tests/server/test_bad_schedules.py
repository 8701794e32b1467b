"""A cost table or confidences that are wrong: an error at start, or full windows.

Good files are used in test_verify_modes.py; what is said of bad ones: unit/test_config.py and
unit/schedule.
"""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file

from cost_tables import CostModel, Fingerprint, save_table
from servers import generate_all, info, metric, serve, speculative
from trained import ARGS, DRAFT, REQUESTS, TARGET, mode

pytestmark = pytest.mark.server

MODEL = CostModel(0.01, (1.0, 16.0), (0.0, 0.001), (1.0, 128.0), (0.0, 0.02))
TABLE = "--speculative-dspark-sps-table-path"


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


def test_confidences_that_are_no_numbers_mean_full_windows(trained_greedy, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(DRAFT, draft)
    (file,) = draft.glob("*.safetensors")
    weights = load_file(file)
    (name,) = [name for name in weights if name.endswith("confidence_head.proj.weight")]
    weights[name] = weights[name] * float("nan")
    save_file(weights, file, {"format": "pt"})
    with serve(TARGET, [*ARGS, *speculative(draft), *mode("compact")], tmp_path / "log") as server:
        assert generate_all(server, REQUESTS, 8) == trained_greedy
        seen = info(server)
        # It takes the results of two rounds until the host knows.
        assert {w for batch in seen["windows_of_rounds"][3:] for w in batch} == {8}
        assert seen["broken_confidences"] == seen["windows"]
        assert metric(server, "sglang_dspark:fallbacks_total") == seen["windows"]
