"""`sglang-dspark demo` as a user runs it: a process of its own, with real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.server

TIMEOUT_S = 800  # of a run that takes about a minute on a quiet machine
# Another draft than the shipped one, to be tried with the same tests.
DRAFT = ["--draft", os.environ["DEMO_DRAFT"]] if "DEMO_DRAFT" in os.environ else []


class Demo:
    """A running demo, and every process that was ever seen below it."""

    def __init__(self, output: Path, *args: str) -> None:
        self._output = output
        with output.open("wb") as file:
            # A group of its own, as a shell makes one for a command in the foreground.
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "sglang_dspark.cli", "demo", *args],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.process = psutil.Process(self._popen.pid)
        self.seen: set[psutil.Process] = {self.process}

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait(self, until: Callable[[], bool] = lambda: False) -> int | None:
        """Wait until it says so or the demo ends; the exit status then."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            status = self._popen.poll()
            if status is not None or until():
                return status
            try:
                self.seen.update(self.process.children(recursive=True))
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.2)
        raise AssertionError(f"not done after {TIMEOUT_S} s:\n{self.output()}")

    def left(self) -> list[str]:
        """What still runs of all that was seen."""
        alive = [p for p in self.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        return [f"{p.pid} {' '.join(p.cmdline())[:80]}" for p in alive]


@contextmanager
def started(tmp_path: Path, *args: str) -> Iterator[Demo]:
    demo = Demo(tmp_path / "output.txt", "--repetitions", "1", *DRAFT, *args)
    try:
        yield demo
    finally:
        for process in demo.seen:
            if process.is_running():
                process.kill()


def test_demo_compares_two_servers_and_leaves_no_process(tmp_path):
    file = tmp_path / "out.json"
    prompt = 'It\'s "quoted" $HOME: what is a [bold]tag[/bold]?'
    args = ["--prompt", prompt, "--max-new-tokens", "12", "--json", str(file)]
    with started(tmp_path, *args) as demo:
        assert demo.wait() == 0, demo.output()
        assert len(demo.seen) >= 5  # it, and launcher, scheduler and detokenizer of both servers
        assert demo.left() == []
        shown = demo.output()
    found = json.loads(file.read_text())
    assert found["tokens_equal"] is True
    assert found["output_ids"] == found["baseline_output_ids"]
    assert 1 <= found["num_tokens"] == len(found["output_ids"]) <= 12
    assert (found["algorithm"], found["mode"], found["prompt"]) == ("DSPARK", "static", prompt)
    assert len(found["accept_rate_by_position"]) == found["gamma"] >= 1
    assert 1.0 <= found["accept_length"] <= found["gamma"] + 1
    assert found["tokens_per_s"] > 0 and found["baseline_tokens_per_s"] > 0
    # The rounds of the histogram made all tokens but the first, and at most a window too many.
    made = sum((k + 1) * n for k, n in enumerate(found["correct_drafts_histogram"]))
    assert 0 <= made - (found["num_tokens"] - 1) <= found["gamma"]
    for text in (prompt, found["text"], found["launch_command"], "yes, in every run"):
        assert text in shown
    assert "--speculative-algorithm DSPARK" in found["launch_command"]
    assert "speculative" not in found["baseline_launch_command"]


def test_ctrl_c_amid_the_answer_leaves_no_process_and_no_file(tmp_path):
    file = tmp_path / "out.json"
    args = ["--prompt", "Count to one thousand.", "--max-new-tokens", "4000", "--json", str(file)]
    with started(tmp_path, *args) as demo:
        answer_began = "> Count to one thousand.\n"
        demo.wait(until=lambda: len(demo.output().partition(answer_began)[2]) > 10)
        os.killpg(demo.process.pid, signal.SIGINT)  # as a terminal does
        os.killpg(demo.process.pid, signal.SIGINT)  # an impatient user
        assert demo.wait() == 128 + signal.SIGINT
        assert len(demo.seen) >= 3
        assert demo.left() == []
        assert "interrupted" in demo.output() and "Traceback" not in demo.output()
    assert not file.exists()


def test_sigterm_while_a_server_starts_leaves_no_process(tmp_path):
    with started(tmp_path) as demo:
        demo.wait(until=lambda: len(demo.seen) > 1)
        demo.process.send_signal(signal.SIGTERM)
        assert demo.wait() == 128 + signal.SIGTERM, demo.output()
        assert demo.left() == []
        assert "Traceback" not in demo.output()
