"""Boxes of time, results that survive, and what a stage leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpu_stages import runner
from gpu_stages.runner import Options, box_seconds, exit_status, run_stage, without_paths
from gpu_stages.settings import Result, Settings, one_line

import gpu

# A stage as the runner starts it, without our modules: settings and result are its last arguments.
HEAD = "import json, pathlib, subprocess, sys, time\nout = pathlib.Path(sys.argv[-1])\n"
FINE = HEAD + "out.write_text(json.dumps({'problems': [], 'result': {'x': 1}}))"
WRONG = HEAD + "out.write_text(json.dumps({'problems': ['a b'], 'result': {'x': 1}})); sys.exit(1)"
BROKEN = HEAD + "print('the last words'); sys.exit(3)"
# Starts something in another session, as a server is, that ignores being asked to end.
ENDLESS = (
    HEAD
    + """
code = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)'
child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)
out.write_text(json.dumps({'problems': [], 'result': {'child': child.pid}}))
time.sleep(99)
"""
)


def options(folder: Path, **changes: Any) -> Options:
    values: dict[str, Any] = {
        "stages": ("environment",),
        "minutes": 1.0,
        "out": folder / "out.json",
        "work": folder,
        "tiny": True,
        "serve_flags": (),
        "identity_flags": (),
        "builtin_flags": (),
        "parallel": 1,
        "simulate": None,
    }
    return Options(**values | changes)


def ran(folder: Path, code: str, box_s: float = 30.0) -> dict[str, Any]:
    """The entry of a stage that runs this code."""
    entry: dict[str, Any] = {}
    run_stage(
        [sys.executable, "-c", code], "environment", options(folder), box_s, entry, lambda: None
    )
    return entry


def test_what_a_stage_finds_is_in_its_entry(tmp_path: Path) -> None:
    entry = ran(tmp_path, FINE)
    assert (entry["status"], entry["result"], entry["problems"]) == ("ok", {"x": 1}, [])
    assert "log_tail" not in entry


def test_a_stage_with_problems_has_failed_and_keeps_its_results(tmp_path: Path) -> None:
    entry = ran(tmp_path, WRONG)
    assert (entry["status"], entry["result"], entry["problems"]) == ("failed", {"x": 1}, ["a b"])


def test_a_stage_that_breaks_leaves_its_last_lines(tmp_path: Path) -> None:
    entry = ran(tmp_path, BROKEN)
    assert entry["status"] == "failed"
    assert entry["problems"] == ["the stage ended with status 3"]
    assert entry["log_tail"] == ["the last words"]


def test_a_box_that_is_over_ends_all_processes_of_the_stage(tmp_path: Path) -> None:
    began = time.monotonic()
    entry = ran(tmp_path, ENDLESS, box_s=2.0)
    assert time.monotonic() - began < 20
    assert entry["status"] == "cut off" and "not at its end after 2 s" in entry["problems"][0]
    child = entry["result"]["child"]
    # Its parent is dead, so it may wait for init as a zombie; it does not run.
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_a_process_of_another_mark_is_left_alone() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        runner.end_marked("a mark that nobody carries")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_stages_share_the_time_that_is_left() -> None:
    names = runner.NAMES
    left, boxes = 600.0, []
    for i, name in enumerate(names):
        boxes.append(box_seconds(name, names[i + 1 :], left))
        left -= boxes[-1]
    assert left == pytest.approx(0) and min(boxes) > 30
    assert boxes.index(max(boxes)) == names.index("throughput")
    # What a stage leaves is there for the others.
    assert box_seconds("train", (), 500.0) == 500.0
    assert box_seconds("profile", ("throughput",), -1.0) == 0.0


def test_the_exit_status_says_whether_every_stage_is_fine() -> None:
    def report(*statuses: str) -> dict[str, Any]:
        return {"stages": {str(i): {"status": status} for i, status in enumerate(statuses)}}

    assert exit_status(report("ok", "ok")) == 0
    for bad in ("failed", "cut off", "not run", "running"):
        assert exit_status(report("ok", bad)) == 1


def test_results_name_no_folder_of_the_machine(tmp_path: Path) -> None:
    text = f"{tmp_path}/a {sys.prefix}/lib {Path(gpu.__file__).parents[1]}/tests"
    assert without_paths(text, tmp_path) == "WORK/a VENV/lib REPOSITORY/tests"


def test_settings_come_back_as_they_were(tmp_path: Path) -> None:
    settings = options(tmp_path, serve_flags=("--a", "b c"), simulate=(0.5, 0.25)).settings(9.0)
    settings.save(tmp_path / "s.json")
    assert Settings.load(tmp_path / "s.json") == settings
    assert 0 < settings.left_s <= 9


def test_a_result_is_on_disk_after_every_change(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    result = Result(file)
    result.append("loads", 1)
    result.append("loads", 2)
    assert json.loads(file.read_text()) == {"problems": [], "result": {"loads": [1, 2]}}
    result.problem("no")
    result.set(a=None)
    assert json.loads(file.read_text())["problems"] == ["no"]


def test_errors_are_told_in_one_line() -> None:
    assert one_line(ValueError("a")) == "a"
    assert one_line(ValueError("the server stopped:\n x\n why \n")) == "the server stopped: ... why"
    assert one_line(TimeoutError()) == "TimeoutError"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "identity,nothing"], "'nothing' is none of environment, kernels, identity"),
        (["--minutes", "0"], "'0' is not a number above 0"),
        (["--simulate", "0.5,2"], "'0.5,2' must be numbers from 0 to 1"),
        (["--tiny", "--out", "/nowhere/at/all.json"], "--out is /nowhere/at/all.json: the folder"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_without_a_gpu_says_how_to_try_it(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "_has_cuda", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path / "o.json")])
    assert "no CUDA device is visible; --tiny tries" in capsys.readouterr().err
