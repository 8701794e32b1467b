"""The other stages, as far as they need no server: comparisons, flags, reports of commands."""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from gpu_stages import arms, identity, kernels, profile, throughput, train
from gpu_stages.identity import Answer, Combination, combinations, first_difference
from gpu_stages.pair import QWEN3_8B, Pair
from gpu_stages.servers import device_flags
from gpu_stages.settings import Settings

import gpu

EVERY = combinations(tiny=False)
PAIR = Pair(QWEN3_8B, Path("/target"), Path("/draft"))


def settings(folder: Path, **changes: Any) -> Settings:
    values = {"tiny": False, "work": folder, "out": folder / "o.json", "ends": 2e9}
    return Settings(**values | changes)


# --- identity ------------------------------------------------------------------------------------


def test_every_algorithm_runs_in_every_mode_with_and_without_graphs() -> None:
    assert len(EVERY) == len(set(EVERY)) == 18
    assert combinations(tiny=True) == [Combination("DSPARK", "compact", True)]
    # The first third is what a run that is cut off should have.
    assert {(c.mode, c.graphs) for c in EVERY[:6]} == {("compact", True), ("static", True)}


def test_graphs_are_switched_off_by_a_flag() -> None:
    on, off = (Combination("EAGLE3", "cap-accept", graphs) for graphs in (True, False))
    switch = ["--cuda-graph-backend-decode", "disabled"]
    assert identity.combination_flags(off) == [*identity.combination_flags(on), *switch]
    assert identity.budgets(on) == (None, 0.5, 1.0)
    assert identity.budgets(Combination("DSPARK", "static", True)) == (None,)


def test_the_first_difference_says_how_sure_the_target_was() -> None:
    plain = Answer([5, 6, 7], [3.0, 0.25, 2.0])
    assert first_difference(plain, [5, 9, 7]) == {"place": 1, "gap": 0.25}
    assert first_difference(plain, [5, 6]) == {"place": 2, "gap": 2.0}
    assert first_difference(plain, [5, 6, 7, 8]) == {"place": 3, "gap": None}


def test_a_combination_is_not_started_without_anything_to_compare_with(tmp_path: Path) -> None:
    plain: Future[list[Answer]] = Future()
    plain.set_exception(RuntimeError("no server"))
    with pytest.raises(RuntimeError, match="no server"):
        identity.check(settings(tmp_path), Combination("DSPARK", "static", True), [], plain)


# --- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [True, False])
def test_sglang_knows_every_flag(tmp_path: Path, tiny: bool, monkeypatch) -> None:
    from sglang.srt.server_args import ServerArgs

    from sglang_dspark import flags

    monkeypatch.setattr(os, "environ", dict(os.environ))  # our own flags write into it
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if flags.MODE.name not in parser._option_string_actions:  # in a server our hook adds them
        flags.add_flags(parser)
    here = settings(tmp_path, tiny=tiny, identity_flags=tuple(gpu.IDENTITY_FLAGS.split()))
    made, _ = arms.arms_of(here, PAIR, tmp_path / "t.json", tmp_path / "k.json")
    for words in (
        *([*identity.server_flags(here), *identity.combination_flags(c)] for c in EVERY),
        profile.server_flags(here, PAIR),
        *([*throughput.server_flags(here, PAIR), *arm.flags] for arm in made),
    ):
        assert parser.parse_known_args(words)[1] == []


def test_servers_on_a_gpu_leave_each_other_room(tmp_path: Path) -> None:
    assert "--mem-fraction-static" in device_flags(settings(tmp_path), 8)
    assert "--mem-fraction-static" not in device_flags(settings(tmp_path, tiny=True), 8)


# --- reports of commands -------------------------------------------------------------------------

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="t1"><properties>
  <property name="replay_ms" value='{"8": 0.5}'/></properties></testcase>
<testcase classname="tests.a" name="t2"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="tests.a" name="t3"><skipped message="no"/></testcase>
<testcase classname="tests.a" name="t4"><error message="broken"/></testcase>
</testsuite></testsuites>"""


def test_what_pytest_reports(tmp_path: Path) -> None:
    (tmp_path / "r.xml").write_text(JUNIT)
    found = kernels.read_report(tmp_path / "r.xml")
    assert (found["run"], found["skipped"], found["failed"]) == (3, 1, 2)
    assert found["failures"][0] == {"test": "tests.a.t2", "message": "assert 1 == 2"}
    assert found["measured"] == [{"test": "tests.a.t1", "name": "replay_ms", "value": {"8": 0.5}}]


def test_the_paths_that_pytest_is_given_exist() -> None:
    for path in ("tests/gpu", *kernels.UNIT):
        assert (kernels.ROOT / path.split("::")[0]).exists()


def test_progress_of_a_training_that_was_interrupted(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    (out / "dspark").mkdir(parents=True)
    work.mkdir()
    assert train.progress(work, out) == {"figures": None, "last_steps": {}, "exported": []}
    (out / "dspark" / "config.json").write_text("{}")
    (work / "dspark.jsonl").write_text('{"step": 1}\n{"step": 9, "loss": 2.5}\n')
    (work / "figures.json").write_text(json.dumps({"answer_tokens": 7}))
    assert train.progress(work, out) == {
        "figures": {"answer_tokens": 7},
        "last_steps": {"dspark": {"step": 9, "loss": 2.5}},
        "exported": ["dspark"],
    }
