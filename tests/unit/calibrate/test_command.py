"""`sglang-dspark calibrate`: from records files to a calibration that a server takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from sglang.srt.speculative.dspark_components.dspark_sts import load_sts_calibration_from_path

from sglang_dspark import cli
from sglang_dspark.calibrate.blocks import load_blocks
from sglang_dspark.errors import ConfigError
from sglang_dspark.observe.record_writer import first_line, line_of
from sglang_dspark.schedule.calibration import Scaling, read_calibration
from sglang_dspark.schedule.rounds import FinishedRound
from sglang_dspark.schedule.scheduler import Decision

GAMMA = 3
TRUTH = np.array([2.0, 1.5, 1.0])


def header(**changes: Any) -> bytes:
    values = {"algorithm": "DSPARK", "mode": "cap-accept", "gamma": GAMMA, **changes}
    head = values.pop("has_confidence_head", True)
    config: Any = SimpleNamespace(**values, draft=SimpleNamespace(has_confidence_head=head))
    return first_line(config, {})


def done(logits: np.ndarray | None, ceiling: np.ndarray, **changes: Any) -> FinishedRound:
    requests = len(ceiling)
    values = {
        "decision": Decision(GAMMA, requests * GAMMA, None),
        "rows": np.arange(requests),
        "generations": np.zeros(requests, dtype=np.int64),
        "seconds": None,
        "tokens": 8,
        "full": True,
        "survivals": None,
        "windows": np.full(requests, GAMMA + 1),
        "accepted": ceiling,
        "ceiling": ceiling,
        "broken": np.zeros(requests, dtype=bool),
        "evidence": None,
        "head_logits": logits,
        "sampled": np.zeros(requests, dtype=bool),
        **changes,
    }
    return FinishedRound(**values)


def write(path: Path, *rounds: FinishedRound, **changes: Any) -> Path:
    path.write_bytes(header(**changes) + b"".join(map(line_of, rounds)))
    return path


def rounds(count: int, seed: int = 0, requests: int = 8, **changes: Any) -> list[FinishedRound]:
    """Rounds of a cap-accept server whose confidences have the temperatures TRUTH; requests change
    every 20 rounds."""
    rng, made = np.random.default_rng(seed), []
    for i in range(count):
        logits = rng.normal(0.8, 1.5, (requests, GAMMA)) * TRUTH
        kept = rng.random(logits.shape) < expit(logits / TRUTH)
        ceiling = kept.cumprod(axis=1).sum(axis=1)
        windows = rng.integers(1, GAMMA + 2, requests)
        made.append(
            done(
                logits,
                ceiling,
                generations=np.full(requests, i // 20),
                windows=windows,
                accepted=np.minimum(ceiling, windows - 1),
                **changes,
            )
        )
    return made


def run(*argv: Any) -> int:
    return cli.main(["calibrate", *map(str, argv)])


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return write(tmp_path / "r.jsonl", *rounds(400))


# --- what it makes -------------------------------------------------------------------------------


def test_a_calibration_is_made(records, tmp_path, capsys):
    out, png = tmp_path / "c.json", tmp_path / "c.png"
    assert run(records, "-o", out, "--png", png) == 0
    found = json.loads(out.read_text())
    assert (found["format"], found["version"]) == ("sglang-dspark calibration", 1)
    assert (found["algorithm"], found["gamma"], found["blocks"]) == ("DSPARK", GAMMA, 3200)
    assert np.log(found["temperatures"]) == pytest.approx(np.log(TRUTH), abs=0.5)
    before, after = np.array(found["ece_before"]), np.array(found["ece_after"])
    assert len(before) == len(after) == GAMMA and after.mean() < before.mean() / 2
    held_out, fitted = np.array(found["blocks_held_out"]), np.array(found["blocks_fitted"])
    assert (held_out + fitted).tolist() == [3200] * GAMMA  # ceilings know what windows hide
    assert held_out[0] == round(0.3 * 160) * 20  # 160 requests of 20 blocks each
    assert png.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    for shown in ("position", "temperature", "by chance", f"{found['temperatures'][0]:.3f}"):
        assert shown in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "c.png", "r.jsonl"]


def test_servers_read_it(records, tmp_path):
    out = tmp_path / "c.json"
    run(records, "-o", out)
    temperatures = json.loads(out.read_text())["temperatures"]
    same = {"algorithm": "DSPARK", "has_confidence_head": True}
    assert read_calibration(out, GAMMA, same) == Scaling(tuple(temperatures), (0.0,) * GAMMA)
    sglangs = load_sts_calibration_from_path(str(out))
    assert sglangs.temperatures == temperatures and len(sglangs.ece_after) == GAMMA


def test_a_shift_is_asked_for(records, tmp_path, capsys):
    """Servers of ours read it; the command says that SGLang's does not."""
    out = tmp_path / "c.json"
    assert run(records, "-o", out, "--shift", "--png", tmp_path / "c.png") == 0
    said, found = capsys.readouterr(), json.loads(out.read_text())
    assert found["shifts"] == pytest.approx([0.0] * GAMMA, abs=0.3)  # the records need none
    assert np.log(found["temperatures"]) == pytest.approx(np.log(TRUTH), abs=0.5)
    expected = Scaling(tuple(found["temperatures"]), tuple(found["shifts"]))
    assert read_calibration(out, GAMMA) == expected and expected.shifted
    assert "shift" in said.out and f"{found['shifts'][0]:+.3f}" in said.out
    assert "SGLang's own worker reads the latter alone" in said.err and said.err.count("\n") == 1
    assert run(records, "-o", out) == 0
    assert "shifts" not in json.loads(out.read_text())
    said = capsys.readouterr()
    assert "shift" not in said.out.split("written")[0] and said.err == ""


def test_another_drafts_calibration_is_not_served(records, tmp_path):
    out = tmp_path / "c.json"
    run(records, "-o", out)
    for name, served, words in (
        ("algorithm", "DFLASH", "algorithm is DSPARK, but the served draft's is DFLASH"),
        ("has_confidence_head", False, "has_confidence_head is True, but"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_calibration(out, GAMMA, {name: served})
        assert words in str(caught.value)


def test_the_same_seed_holds_out_the_same_requests(records, tmp_path):
    made = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run(records, "-o", tmp_path / name, "--seed", seed)
        made.append(json.loads((tmp_path / name).read_text())["temperatures"])
    assert made[0] == made[1] != made[2]


def test_blocks_of_one_request_stay_together(records):
    _, blocks = load_blocks([records])
    fitted, held_out = blocks.split(0.5, seed=1)
    assert not set(fitted.request) & set(held_out.request)
    assert len(fitted) + len(held_out) == len(blocks)


def test_files_are_read_together_and_their_requests_told_apart(tmp_path):
    made = rounds(20)
    paths = [write(tmp_path / name, *made) for name in ("a", "b")]
    _, blocks = load_blocks(paths)
    assert len(blocks) == 2 * 20 * 8 and len(np.unique(blocks.request)) == 2 * 8


def test_greedy_and_sampled_requests_can_be_fitted_alone(tmp_path):
    sampled = np.arange(8) < 3
    path = write(tmp_path / "r", *rounds(400, sampled=sampled))
    for kind, count in (("greedy", 5 * 400), ("sampled", 3 * 400)):
        run(path, "-o", tmp_path / kind, "--only", kind)
        found = json.loads((tmp_path / kind).read_text())
        assert (found["blocks"], found["only"]) == (count, kind)
    greedy = write(tmp_path / "g", *rounds(40))
    with pytest.raises(ConfigError, match="none of the 40 rounds has confidences of sampled"):
        load_blocks([greedy], "sampled")


# --- which outcomes are known --------------------------------------------------------------------

LOGITS = np.array([[1.0, 2.0, 3.0]])


def block(tmp_path: Path, **changes: Any) -> tuple[int, int]:
    """reach and survived of a round of one request."""
    _, blocks = load_blocks([write(tmp_path / "one", done(LOGITS, np.array([2]), **changes))])
    return int(blocks.reach[0]), int(blocks.survived[0])


def test_full_windows_show_all(tmp_path):
    windows, accepted = np.array([2]), np.array([1])
    assert block(tmp_path, windows=windows, accepted=accepted) == (3, 2)  # by the ceiling


@pytest.mark.parametrize(("window", "accepted"), [(4, 1), (3, 2), (2, 0), (1, 0)])
def test_trimmed_windows_show_what_they_verify(tmp_path, window, accepted):
    found = block(tmp_path, full=False, windows=np.array([window]), accepted=np.array([accepted]))
    assert found == (window - 1, accepted)


def test_shallow_blocks_show_what_was_drafted(tmp_path):
    path = write(tmp_path / "one", done(LOGITS[:, :2], np.array([1])))
    _, blocks = load_blocks([path])
    assert blocks.counts() == [1, 1, 0] and np.isnan(blocks.logits[0, 2])


def test_requests_whose_confidences_are_broken_are_left_out(tmp_path):
    logits = np.array([[1.0, 2.0, 3.0], [1.0, np.nan, 3.0], [np.inf, 1.0, 1.0]])
    _, blocks = load_blocks([write(tmp_path / "r", done(logits, np.array([1, 2, 3])))])
    assert len(blocks) == 1 and blocks.survived[0] == 1


# --- what goes wrong -----------------------------------------------------------------------------


def error(capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
    assert run(*argv) == 1
    message = capsys.readouterr().err
    assert message.startswith("sglang-dspark calibrate: error: ") and message.count("\n") == 1
    return message


def test_positions_without_blocks_are_told(tmp_path, capsys):
    cut = [done(r.head_logits[:, :2], np.minimum(r.ceiling, 2)) for r in rounds(400)]
    numbered = [
        done(r.head_logits, r.ceiling, generations=np.full(8, i)) for i, r in enumerate(cut)
    ]
    assert run(write(tmp_path / "r", *numbered), "-o", tmp_path / "c") == 0
    found, said = json.loads((tmp_path / "c").read_text()), capsys.readouterr()
    assert found["temperatures"][2] == 1.0 and len(found["ece_after"]) == 2
    assert "warning: position 3: fewer than 100 blocks" in said.err and "1 (too few)" in said.out


def test_too_few_blocks(tmp_path, capsys):
    path = write(tmp_path / "r", *rounds(12))
    message = error(capsys, path, "-o", tmp_path / "c")
    for words in ("8 requests", "needed are 100 to fit on", "10 requests"):
        assert words in message
    assert not (tmp_path / "c").exists()


def test_records_without_a_round(tmp_path, capsys):
    assert "hold no decode round" in error(capsys, write(tmp_path / "r"), "-o", tmp_path / "c")


def test_records_without_confidences(tmp_path, capsys):
    path = write(tmp_path / "r", done(None, np.array([1, 0])))
    message = error(capsys, path, "-o", tmp_path / "c")
    assert "none of the 1 rounds has confidences" in message and "penalties" in message


@pytest.mark.parametrize(
    ("name", "value"), [("gamma", 4), ("algorithm", "EAGLE3"), ("has_confidence_head", False)]
)
def test_records_of_different_drafts(records, tmp_path, capsys, name, value):
    other = write(tmp_path / "other", *rounds(2), **{name: value})
    message = error(capsys, records, other, "-o", tmp_path / "c")
    assert f"{other}: {name} is {value}, but" in message and str(records) in message


def test_a_file_that_is_no_record(tmp_path, capsys):
    (tmp_path / "x").write_text("hello\n")
    assert "is not a records file" in error(capsys, tmp_path / "x", "-o", tmp_path / "c")
    assert "no such file" in error(capsys, tmp_path / "y", "-o", tmp_path / "c")


@pytest.mark.parametrize("flag", ["-o", "--png"])
def test_outputs_are_checked_before_anything_is_read(tmp_path, capsys, flag):
    unread = tmp_path / "unread"
    more = [] if flag == "-o" else ["-o", tmp_path / "c"]
    missing = error(capsys, unread, *more, flag, tmp_path / "no" / "c")
    assert f"{flag} is " in missing and "does not exist" in missing
    assert "this is a folder" in error(capsys, unread, *more, flag, tmp_path)


def test_records_are_not_overwritten(records, capsys):
    before = records.read_bytes()
    assert "one of the records to read" in error(capsys, records, "-o", records)
    assert records.read_bytes() == before


def test_a_failed_write_leaves_the_older_file(records, tmp_path, monkeypatch, capsys):
    out = tmp_path / "c.json"
    out.write_text("older")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    assert "disk full" in error(capsys, records, "-o", out)
    assert out.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "r.jsonl"]


@pytest.mark.parametrize("share", ["0", "1", "-0.2", "x", "nan"])
def test_a_share_that_is_none(records, tmp_path, capsys, share):
    with pytest.raises(SystemExit):
        run(records, "-o", tmp_path / "c", "--held-out", share)
    assert "--held-out" in capsys.readouterr().err.splitlines()[-1]
