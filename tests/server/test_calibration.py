"""Record a real server and calibrate its draft: the trained pair of the tiny target, whose
confidence head is far off for sampled requests. test_verify_modes.py serves with a calibration."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servers import generate_all, info, serve, speculative
from sglang_dspark import cli
from sglang_dspark.observe.record_file import RecordedRound, read_records
from sglang_dspark.serving import Server
from trained import ARGS, DRAFT, REQUESTS, TARGET, mode

pytestmark = pytest.mark.server

LONG = [(prompt, 48) for prompt, _ in REQUESTS]


def recorded(server: Server, path: Path) -> tuple[dict[str, Any], list[RecordedRound]]:
    """What the server says of its rounds, once the file holds as many."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        said, rounds = info(server), list(read_records(path)[1])
        if len(rounds) == said["rounds"]:
            return said, rounds
        time.sleep(0.2)
    raise AssertionError(f"{len(rounds)} of {said['rounds']} rounds are on disk after 10 s")


def test_a_server_is_recorded_and_calibrated(tmp_path):
    path, calibration = tmp_path / "rounds.jsonl", tmp_path / "calibration.json"
    common = [*ARGS, *speculative(DRAFT)]
    flags = [*common, *mode("cap-accept"), "--speculative-verify-records", str(path)]
    with serve(TARGET, flags, tmp_path / "recorded.log") as server:
        generate_all(server, LONG, concurrency=8)
        generate_all(server, 2 * LONG, concurrency=8, temperature=1.0)
        said, rounds = recorded(server, path)
    assert sum(len(done.windows) for done in rounds) == said["windows"]
    assert sum(int(done.accepted.sum()) for done in rounds) == said["accepted"]
    assert sum(int((done.windows - 1).sum()) for done in rounds) == said["offered"]
    for done in rounds:
        assert done.ceiling is not None and (done.accepted <= done.ceiling).all()
        assert done.logits is not None and np.isfinite(done.logits).all()
    assert {bool(flag) for done in rounds for flag in done.sampled} == {False, True}

    assert cli.main(["calibrate", str(path), "-o", str(calibration)]) == 0
    found = json.loads(calibration.read_text())
    assert np.mean(found["ece_after"]) < np.mean(found["ece_before"]) / 2, found
