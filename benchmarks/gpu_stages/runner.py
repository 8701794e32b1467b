"""Runs stages one after the other, each for a limited time, and keeps one JSON up to date.

A stage may start servers, in sessions of their own. All its processes carry a mark in their
environment, by which whatever is left of it is found and ended, one process id at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gpu_stages.settings import Settings
from sglang_dspark.files import replace_file

FORMAT, VERSION = "sglang-dspark gpu run", 1
MARK = "GPU_STAGE_MARK"
POLL_S, FAREWELL_S = 0.2, 10.0
TAIL_LINES = 15
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
# In order of value. The share is of the time that is left when the stage starts.
SHARES = {
    "environment": 2,
    "kernels": 3,
    "identity": 6,
    "profile": 9,
    "throughput": 10,
    "train": 2,
}
NAMES = tuple(SHARES)


@dataclass(frozen=True)
class Options:
    """What the command line says; see `Settings`. minutes: of all stages together."""

    stages: tuple[str, ...]
    minutes: float
    out: Path
    work: Path
    tiny: bool
    serve_flags: tuple[str, ...]
    identity_flags: tuple[str, ...]
    builtin_flags: tuple[str, ...]
    parallel: int
    simulate: tuple[float, ...] | None

    def settings(self, box_s: float) -> Settings:
        return Settings(
            tiny=self.tiny,
            work=self.work,
            out=self.out,
            ends=time.time() + box_s,
            serve_flags=self.serve_flags,
            identity_flags=self.identity_flags,
            builtin_flags=self.builtin_flags,
            parallel=self.parallel,
            simulate=self.simulate,
        )


def run_stages(options: Options) -> int:
    """The exit status of the command."""
    report = {
        "format": FORMAT,
        "version": VERSION,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "arguments": sys.argv[1:],
        "tiny": options.tiny,
        "minutes": options.minutes,
        "stages": {name: {"status": "not run"} for name in options.stages},
    }

    def save() -> None:
        text = without_paths(json.dumps(report, indent=1) + "\n", options.work)
        replace_file(options.out, text.encode())

    # As a Ctrl-C: what is sent by whoever lends the machine, and ends our processes too.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    ends = time.monotonic() + 60 * options.minutes
    try:
        for i, name in enumerate(options.stages):
            box_s = box_seconds(name, options.stages[i + 1 :], ends - time.monotonic())
            print(f"{name}: up to {box_s:.0f} s", flush=True)
            entry: dict[str, Any] = report["stages"][name]
            run_stage(stage_command(name), name, options, box_s, entry, save)
            print(f"{name}: {entry['status']} after {entry['seconds']:.0f} s", flush=True)
            for text in entry["problems"]:
                print(f"  {text}", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted; {options.out} keeps what was found", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(f"written: {options.out}")
    return exit_status(report)


def without_paths(text: str, work: Path) -> str:
    """Where things lie on the machine is nobody's business who reads the results."""
    root = Path(__file__).parents[2]
    for path, name in ((str(work), "WORK"), (sys.prefix, "VENV"), (str(root), "REPOSITORY")):
        text = text.replace(path, name)
    return text


def exit_status(report: dict[str, Any]) -> int:
    return 0 if all(stage["status"] == "ok" for stage in report["stages"].values()) else 1


def box_seconds(name: str, later: Sequence[str], left_s: float) -> float:
    """Of the time that is left, the stage's share beside those of the stages behind it."""
    total = SHARES[name] + sum(SHARES[other] for other in later)
    return max(0.0, left_s) * SHARES[name] / total


def stage_command(name: str) -> list[str]:
    """Behind which the paths of settings and result follow."""
    return [sys.executable, "-m", "gpu_stages", name]


def run_stage(
    command: Sequence[str],
    name: str,
    options: Options,
    box_s: float,
    entry: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Run a stage for at most box_s seconds; fills its entry of the report and saves often."""
    began, mark = time.monotonic(), uuid.uuid4().hex
    paths = {kind: options.work / f"{name}.{kind}" for kind in ("settings", "result", "log")}
    paths["result"].unlink(missing_ok=True)  # of an earlier run in the same folder
    options.settings(box_s).save(paths["settings"])
    entry |= {"status": "running", "box_s": round(box_s, 1), "problems": []}
    save()
    with paths["log"].open("wb") as log:
        process = subprocess.Popen(
            [*command, str(paths["settings"]), str(paths["result"])],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environ(mark, options.tiny),
            start_new_session=True,  # a Ctrl-C is for us, and we end all of it
        )
        try:
            while process.poll() is None and time.monotonic() - began < box_s:
                time.sleep(POLL_S)
                if _merge(paths["result"], entry):
                    entry["seconds"] = round(time.monotonic() - began, 1)
                    save()
            in_time = process.poll() is not None
        finally:
            end_marked(mark)
            process.wait()
    _merge(paths["result"], entry)
    entry["seconds"] = round(time.monotonic() - began, 1)
    entry["status"] = "ok"
    if not in_time:
        entry["status"] = "cut off"
        entry["problems"].append(f"not at its end after {box_s:.0f} s; what is there stays")
    elif process.returncode or entry["problems"]:
        entry["status"] = "failed"
        if not entry["problems"]:
            entry["problems"].append(f"the stage ended with status {process.returncode}")
    if entry["status"] != "ok":
        lines = paths["log"].read_text(errors="replace").splitlines()
        entry["log_tail"] = lines[-TAIL_LINES:]
    save()


def _environ(mark: str, tiny: bool) -> dict[str, str]:
    """Of a stage's processes."""
    path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = {
        **os.environ,
        MARK: mark,
        # SGLang renames its processes; without this the new name overwrites their environment,
        # and the mark in it.
        "SPT_NOENV": "1",
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
    }
    if tiny:
        # A number that no device has: SGLang's profiler, of which a stage uses the fit, reads the
        # first digit when it is imported, and stumbles over nothing.
        environ["CUDA_VISIBLE_DEVICES"] = "99"
    return environ


def _merge(result: Path, entry: dict[str, Any]) -> bool:
    """Take over what the stage has found so far; whether there is anything new."""
    if not result.exists():
        return False
    found = json.loads(result.read_text())
    if found.items() <= entry.items():
        return False
    entry |= found
    return True


def end_marked(mark: str) -> None:
    """End every process that carries the mark, and see that none is left."""
    deadline = time.monotonic() + FAREWELL_S
    while marked := _marked(mark):
        for process in marked:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {[process.pid for process in marked]} do not end")
        time.sleep(0.05)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(MARK) == mark
                and process.status() != psutil.STATUS_ZOMBIE  # is dead, and waits for its parent
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
