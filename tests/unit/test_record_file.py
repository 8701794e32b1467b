"""Rounds written down by a server and read back: nothing lost, made up, or in the way."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_dspark import startup
from sglang_dspark.config import VerifyMode
from sglang_dspark.errors import ConfigError
from sglang_dspark.observe import record_writer as module
from sglang_dspark.observe.observer import Observer
from sglang_dspark.observe.record_file import Header, RecordedRound, read_records
from sglang_dspark.observe.record_writer import RecordWriter
from sglang_dspark.schedule.rounds import FinishedRound
from sglang_dspark.schedule.scheduler import Decision

FLAG = "--speculative-verify-records"
GAMMA = 3
CONFIG: Any = SimpleNamespace(
    algorithm="DFLASH",
    mode=VerifyMode.COMPACT,
    gamma=GAMMA,
    draft=SimpleNamespace(has_confidence_head=False),
)
SCHEDULE = {"tiers": "8, 16", "calibration": "none (identity)"}


def done(requests: int = 2, depth: int = GAMMA, **changes: Any) -> FinishedRound:
    values = {
        "decision": Decision(depth, 4, 1, 5.0, 0.02),
        "rows": np.arange(requests) + 5,
        "generations": np.arange(requests) + 2**40,
        "seconds": 0.025,
        "tokens": 8,
        "full": False,
        "survivals": np.ones((requests, depth)),
        "windows": np.full(requests, 3),
        "accepted": np.arange(requests) % 3,
        "ceiling": np.full(requests, 99),  # means nothing unless the round was full
        "broken": np.zeros(requests, dtype=bool),
        "evidence": np.linspace(-3, 3, requests * depth).reshape(requests, depth, 1),
        "head_logits": None,
        "sampled": np.arange(requests) % 2 == 0,
        **changes,
    }
    return FinishedRound(**values)


def write(path: Path, *rounds: FinishedRound) -> Path:
    writer = RecordWriter(path, FLAG, CONFIG, SCHEDULE)
    for each in rounds:
        writer.add(each)
    writer.close()
    return path


def read(path: Path) -> list[RecordedRound]:
    return list(read_records(path)[1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rounds.jsonl"


# --- what is written is what is read -------------------------------------------------------------


@pytest.mark.parametrize(("refinement", "kept"), [("off", True), ("drafted x 1.00 to 1.00", False)])
def test_the_header_leaves_out_what_is_of_the_moment(path, refinement, kept):
    writer = RecordWriter(path, FLAG, CONFIG, {**SCHEDULE, "refinement": refinement})
    writer.close()
    schedule = read_records(path)[0].schedule
    assert schedule == {**SCHEDULE, **({"refinement": "off"} if kept else {})}


def test_the_header_says_what_was_served(path):
    header, rounds = read_records(write(path))
    assert header == Header("DFLASH", "compact", GAMMA, False, SCHEDULE)
    assert list(rounds) == []


def test_a_round_comes_back(path):
    written = done(broken=np.array([False, True]))
    (found,) = read(write(path, written))
    for name in ("rows", "generations", "windows", "accepted", "sampled", "broken"):
        assert np.array_equal(getattr(found, name), getattr(written, name)), name
    assert found.windows.dtype == np.int64 and found.broken.dtype == bool
    assert (found.depth, found.budget, found.tier, found.tokens) == (GAMMA, 4, 1, 8)
    assert (found.predicted_s, found.measured_s, found.full) == (0.02, 0.025, False)
    assert found.ceiling is None
    np.testing.assert_allclose(found.logits, written.evidence[:, :, 0], atol=1e-4)


def test_what_is_not_known_is_none(path):
    plain = Decision(0, 0, None)
    nothing = {"survivals": None, "evidence": None, "seconds": None, "full": True}
    (found,) = read(write(path, done(decision=plain, **nothing)))
    assert (found.depth, found.tier, found.predicted_s) == (0, None, 0.0)
    assert found.measured_s is None and found.logits is None and found.ceiling is None


def test_ceilings_are_those_of_full_windows(path):
    ceiling = np.array([3, 0])
    # In cap-accept blocks are drafted whole, also in rounds that compact would not draft in.
    undrafted = done(full=True, ceiling=ceiling, decision=Decision(0, 0, 0))
    static = done(full=True, ceiling=ceiling, survivals=None, evidence=None)
    for found in read(write(path, undrafted, static)):
        assert found.full and found.ceiling is not None and found.ceiling.tolist() == [3, 0]


def test_logits_are_the_heads_own_where_there_is_one(path):
    head = np.array([[0.5, -1.25, 30.0], [1.0, 2.0, -700.0]])
    (found,) = read(write(path, done(head_logits=head)))
    np.testing.assert_allclose(found.logits, head)


def test_logits_that_are_not_finite_come_back_as_nan(path):
    head = np.array([[0.5, np.nan, np.inf], [1.0, 2.0, -np.inf]])
    (found,) = read(write(path, done(head_logits=head)))
    assert np.isnan(found.logits).tolist() == [[False, True, True], [False, False, True]]
    assert json.loads(path.read_text().splitlines()[1])["logits"][0] == [0.5, None, None]


def test_rounds_of_any_size_keep_their_order(path):
    sizes = [1, 256, 3, 7]
    found = read(write(path, *(done(size, depth=1 + size % GAMMA) for size in sizes)))
    assert [len(each.rows) for each in found] == sizes
    assert [each.logits.shape[1] for each in found] == [1 + size % GAMMA for size in sizes]


# --- while serving -------------------------------------------------------------------------------


def test_rounds_are_on_disk_within_a_second_though_none_follows(path):
    writer = RecordWriter(path, FLAG, CONFIG, SCHEDULE)
    writer.add(done())
    deadline = time.monotonic() + 20 * module.WRITE_SECONDS
    while len(path.read_bytes().splitlines()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert module.WRITE_SECONDS <= 1.0 and len(read(path)) == 1
    writer.close()


class FullDisk:
    """A file on a disk that takes no more."""

    def write(self, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    flush = close = lambda self: self.write(b"")


def test_a_full_disk_ends_the_recording_with_one_warning(path, caplog):
    writer = RecordWriter(path, FLAG, CONFIG, SCHEDULE)
    writer._file.close()
    writer._file = FullDisk()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        writer.add(done())
        writer._thread.join(timeout=20)
        assert not writer._thread.is_alive()
        for _ in range(5):
            writer.add(done())
        writer.close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(path) in message and "No space left" in message and "Serving goes on" in message
    assert writer._lines.qsize() == 0 and read(path) == []


def test_a_disk_that_does_not_keep_up_ends_it_too(path, caplog, monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    monkeypatch.setattr(module, "WRITE_SECONDS", 60.0)
    writer = RecordWriter(path, FLAG, CONFIG, SCHEDULE)
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            writer.add(done())
    assert [record.getMessage().count("does not keep up") for record in caplog.records] == [1]
    writer.close()


def test_the_observer_writes_what_it_sees(path):
    writer = RecordWriter(path, FLAG, CONFIG, SCHEDULE)
    config: Any = SimpleNamespace(mode=VerifyMode.COMPACT, describe=lambda: "")
    windows: Any = None
    observer = Observer(config, windows, max_tokens=64, labels=None, writer=writer)
    for _ in range(3):
        observer.add(done())
    writer.close()
    assert len(read(path)) == 3


@pytest.mark.parametrize(("rank", "asked", "writes"), [(0, True, 1), (1, True, 0), (0, False, 0)])
def test_one_rank_writes_if_asked_to(path, rank, asked, writes):
    windows: Any = SimpleNamespace(rank=rank, describe=lambda: SCHEDULE)
    config: Any = SimpleNamespace(**vars(CONFIG), records=path if asked else None)
    writer = startup.record_writer(config, windows)
    assert (writer is not None) == path.exists() == bool(writes)
    if writer is not None:
        writer.close()


# --- what stops the start ------------------------------------------------------------------------


def start_error(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        RecordWriter(path, FLAG, CONFIG, SCHEDULE)
    message = str(caught.value)
    assert message.startswith(f"{FLAG} is {path}: ") and "\n" not in message
    return message


def test_a_file_that_holds_something_is_left_alone(path):
    path.write_text("precious")
    assert "holds something already" in start_error(path)
    assert path.read_text() == "precious"
    path.write_text("")
    write(path)


@pytest.mark.parametrize(
    ("place", "words"),
    [("nowhere/r.jsonl", "does not exist"), ("file/r.jsonl", "does not exist"), ("", "a folder")],
)
def test_a_place_where_no_file_can_be(tmp_path, place, words):
    (tmp_path / "file").write_text("")
    assert words in start_error(tmp_path / place)


def test_a_folder_that_may_not_be_written(path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *args: False)
    assert "not writable" in start_error(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_is_full_at_the_start():
    assert "No space left" in start_error(Path("/dev/full"))


# --- what cannot be read -------------------------------------------------------------------------


def test_a_line_that_breaks_off_at_the_end_is_skipped(path, caplog):
    write(path, done(), done())
    path.write_bytes(path.read_bytes()[:-20])
    with caplog.at_level(logging.WARNING):
        assert len(read(path)) == 1
    assert "line 3, the last, breaks off" in caplog.text


def test_a_last_line_without_its_end_of_line_counts(path, caplog):
    write(path, done(), done())
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read(path)) == 2 and not caplog.records


def edited(path: Path, line: int, **changes: Any) -> Path:
    """The file with fields of one line changed; ... removes one."""
    lines = write(path, done(), done(), done()).read_text().splitlines()
    fields = {**json.loads(lines[line - 1]), **changes}
    lines[line - 1] = json.dumps({k: v for k, v in fields.items() if v is not ...})
    path.write_text("\n".join(lines) + "\n")
    return path


def read_error(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"windows": ...}, "windows is missing"),
        ({"accepted": [1]}, "accepted is [1]; must be 2 whole numbers"),
        ({"accepted": [1, 4]}, "accepted is [1, 4]; must be whole numbers from 0 to 3"),
        ({"windows": [0, 1]}, "windows is [0, 1]; must be whole numbers from 1 to 4"),
        ({"windows": [1.5, 2]}, "windows is [1.5, 2]; must be n whole numbers"),
        ({"windows": 7}, "windows is 7; must be n whole numbers"),
        ({"ceiling": [9, 0]}, "ceiling is [9, 0]"),
        ({"logits": [[1.0], [2.0, 3.0]]}, "logits is [[1.0], [2.0, 3.0]]; must be 2 x n numbers"),
        ({"logits": [[0.0] * 4] * 2}, "logits has 4 columns; must be at most gamma, 3"),
        ({"logits": ["a", "b"]}, "logits is ['a', 'b']"),
        ({"depth": -1}, "depth is -1; must be a whole number from 0 to 3"),
        ({"tier": "x"}, "tier is 'x'; must be a whole number from 0 on"),
        ({"measured_s": -0.1}, "measured_s is -0.1; must be seconds"),
        ({"full": 1}, "full is 1; must be a bool"),
        ({"sampled": [1, 0]}, "sampled is [1, 0]; must be 2 true or false"),
    ],
    ids=str,
)
def test_a_round_that_cannot_be_is_named_by_its_line(path, changes, words):
    message = read_error(edited(path, 3, **changes))
    assert "line 3: " in message and words in message


def test_a_line_in_the_middle_that_is_no_json(path):
    lines = write(path, done(), done()).read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-9], lines[2]]) + "\n")
    assert "line 2: no JSON" in read_error(path)
    path.write_text("\n".join([lines[0], "[]", lines[2]]) + "\n")
    assert "line 2: holds a list; must be an object" in read_error(path)


@pytest.mark.parametrize("content", ["", "hello\n", "{}\n", "[1]\n", '{"format": "x"}\n', "\x00\n"])
def test_other_files_are_no_records(path, content):
    path.write_text(content)
    assert "is not a records file" in read_error(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version is 2; this release reads 1"),
        ({"config": {"algorithm": "DSPARK"}}, "line 1: mode is missing"),
        ({"config": "x"}, "line 1: config is 'x'; must be a dict"),
        ({"schedule": ...}, "line 1: schedule is missing"),
    ],
    ids=str,
)
def test_a_header_that_cannot_be(path, changes, words):
    assert words in read_error(edited(path, 1, **changes))


def test_a_file_that_is_not_there(path):
    assert "no such file" in read_error(path)


def test_a_folder_is_no_file(tmp_path):
    assert "cannot be read" in read_error(tmp_path)
