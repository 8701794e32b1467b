"""Stage train: the demo's drafts, with the time that is left; `train-demo` goes on from there.

Its command is interrupted as a user would, so that it saves a checkpoint. All of its work is below
`train` of the work folder: with --work a later run goes on with it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_stages.settings import Result, Settings

END_S = 20.0  # to save a checkpoint and to end a server
EXIT_INTERRUPTED = 130
MAIN = "import sys; from sglang_dspark import cli; sys.exit(cli.main())"
TINY_SIZES = ("--target", "tiny", "--tokens", "400", "--steps", "100000", "--eval-prompts", "1")
TINY_S = 25.0  # enough to begin; it is interrupted then, as by the end of a box
DRAFTS, TINY_DRAFTS = ("dspark", "dflash", "eagle3"), ("dspark",)


def run(settings: Settings, result: Result) -> None:
    folder = settings.work / "train"
    drafts = TINY_DRAFTS if settings.tiny else DRAFTS
    command = ["train-demo", "--work-dir", str(folder / "work"), "--out", str(folder / "drafts")]
    command += [*(TINY_SIZES if settings.tiny else ()), "--drafts", *drafts]
    result.set(command=" ".join(["sglang-dspark", *command]), drafts=list(drafts))
    folder.mkdir(parents=True, exist_ok=True)
    if settings.left_s < END_S:
        result.set(finished=False, reason=f"{settings.left_s:.0f} s were left")
        return
    limit = settings.left_s - END_S
    process = subprocess.Popen([sys.executable, "-c", MAIN, *command], stdin=subprocess.DEVNULL)
    try:
        status = process.wait(min(limit, TINY_S) if settings.tiny else limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        status = process.wait()
    result.set(finished=status == 0, **progress(folder / "work", folder / "drafts"))
    if status not in (0, EXIT_INTERRUPTED):
        result.problem(f"train-demo ended with status {status}; see the log")


def progress(work: Path, out: Path) -> dict[str, Any]:
    """What was measured so far, the last logged step of every draft, and which are exported."""
    figures = work / "figures.json"
    logs = {log.stem: log.read_text().splitlines() for log in sorted(work.glob("*.jsonl"))}
    return {
        "figures": json.loads(figures.read_text()) if figures.exists() else None,
        "last_steps": {name: json.loads(lines[-1]) for name, lines in logs.items() if lines},
        "exported": sorted(config.parent.name for config in out.glob("*/config.json")),
    }
