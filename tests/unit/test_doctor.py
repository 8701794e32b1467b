"""`sglang-dspark doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import layouts
from layout_shapes import edit
from sglang_dspark import cli

TEXT = {
    "hidden_size": layouts.TARGET_HIDDEN,
    "vocab_size": layouts.VOCAB,
    "num_hidden_layers": layouts.TARGET_LAYERS,
}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def write_target(folder: Path, config: dict) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def doctor(capsys, *argv: str) -> tuple[int, str]:
    code = cli.main(["doctor", *argv])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("nested", [False, True])
def test_a_draft_that_fits(tmp_path, capsys, nested):
    draft = str(layouts.write_zlab_dflash(tmp_path / "draft"))
    target = write_target(tmp_path / "target", {"text_config": TEXT} if nested else TEXT)
    code, out = doctor(capsys, draft, "--target", target)
    assert code == 0 and "problem" not in out
    assert "z-lab, DFlashDraftModel" in out and "7 draft tokens a round" in out
    assert "first mask row" in out and "from the draft distribution" in out
    assert (
        f"launch: python -m sglang.launch_server --model-path {target} --speculative-algorithm "
        f"DFLASH --speculative-draft-model-path {draft}\n"
    ) in out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3_dspark", ["DSPARK", "the anchor's row", "its head", "vanilla, rank 8"]),
        ("gemma4_dflash", ["DFLASH", "like gemma4's", "[0, 3, 6] of 8"]),
        ("specforge_eagle3", ["EAGLE3", "40 of the target's 96 (d2t)", "[0, 2, 5]"]),
        ("safeailab_eagle3", ["EAGLE3's usual three", "5 draft tokens a round; one a forward"]),
        ("speculators_peagle", ["EAGLE3", "P-EAGLE", "mask token", "95"]),
    ],
)
def test_what_a_draft_is(tmp_path, capsys, name, words):
    draft = getattr(layouts, f"write_{name}")(tmp_path / "draft")
    code, out = doctor(capsys, str(draft))
    assert code == 0
    assert all(word in out for word in [*words, "--model-path TARGET"]), out


def test_the_layers_that_a_target_decides(tmp_path, capsys):
    draft = str(layouts.write_safeailab_eagle3(tmp_path / "draft"))
    target = write_target(tmp_path / "target", TEXT)
    assert "target layers [1, 3, 4]" in doctor(capsys, draft, "--target", target)[1]


def test_every_problem_has_a_line(tmp_path, capsys):
    draft = layouts.write_qwen3_dspark(tmp_path / "draft")
    edit(draft, markov_rank=4)
    target = write_target(tmp_path / "t", {**TEXT, "hidden_size": 128, "num_hidden_layers": 6})
    code, out = doctor(capsys, str(draft), "--target", target)
    assert code == 1 and "launch:" not in out
    problems = [line for line in out.splitlines() if line.startswith("problem: ")]
    words = ["has shape", "hidden_size is 64", "num_target_layers is 8", "target_layer_ids is"]
    assert len(problems) == len(words)
    assert all(word in line for word, line in zip(words, problems, strict=True)), problems


def test_a_checkpoint_that_cannot_be_read(tmp_path, capsys):
    target = write_target(tmp_path / "target", {"hidden_size": 64})
    code, out = doctor(capsys, "./nowhere", "--target", target)
    assert code == 1
    assert "problem: CHECKPOINT is './nowhere': no such folder" in out
    assert "config.json: field vocab_size is missing" in out


def test_a_target_that_is_not_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    draft = str(layouts.write_zlab_dflash(tmp_path / "draft"))
    code, out = doctor(capsys, draft, "--target", "nobody/no-such-model")
    assert code == 1 and "--target is 'nobody/no-such-model'" in out
