"""The recipe end to end on the tiny target: its data comes from a real SGLang server."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sglang_dspark import cli
from sglang_dspark.recipe import evaluate
from sglang_dspark.recipe.generate import read_conversations

DRAFTS = ("dspark", "dflash", "eagle3")


def train(work: Path, out: Path) -> None:
    arguments = ["--target", "tiny", "--work-dir", str(work), "--out", str(out)]
    arguments += ["--tokens", "4000", "--steps", "12", "--eval-prompts", "1"]
    with pytest.MonkeyPatch.context() as patch:
        # Of 128 tokens, and twice for three drafts, this would be most of the time.
        short = partial(evaluate.evaluate, max_new_tokens=16)
        patch.setattr(evaluate, "evaluate", short)
        assert cli.main(["train-demo", *arguments]) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    work, out = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("out")
    train(work, out)
    return work, out


def test_the_server_writes_greedy_and_sampled_answers(trained: tuple[Path, Path]) -> None:
    conversations = read_conversations(trained[0] / "data")
    assert sum(len(c.ids) - c.answer_start for c in conversations) >= 4000
    assert {c.temperature for c in conversations} == {0.0, 0.6, 1.0}


@pytest.mark.parametrize("name", DRAFTS)
def test_each_draft_is_exported_with_its_figures(trained: tuple[Path, Path], name: str) -> None:
    work, out = trained
    text = (out / name / "README.md").read_text()
    assert "| help |" in text and "Temperature 1:" in text and str(work) not in text
    config = json.loads((out / name / "config.json").read_text())
    expected = "Qwen3Eagle3Model" if name == "eagle3" else "Qwen3DSparkModel"
    assert config["architectures"] == [expected]
    assert (work / f"{name}.pt").exists()


def test_same_data_and_seed_give_the_same_weights(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    """Data and features are kept; no server starts."""
    work, out = trained
    for part in ("data", "features"):
        shutil.copytree(work / part, tmp_path / "work" / part)
    train(tmp_path / "work", tmp_path / "out")
    for name in DRAFTS:
        first, again = (
            (folder / name / "model.safetensors").read_bytes() for folder in (out, tmp_path / "out")
        )
        assert first == again, name


def test_eval_reads_the_export(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(trained[1] / "dspark"), "--target", "tiny", "--limit", "1"]
    arguments += ["--max-new-tokens", "24", "--json", str(tmp_path / "e.json")]
    assert cli.main(["eval", *arguments, "--plot", str(tmp_path / "e.png")]) == 0
    assert "| all |" in capsys.readouterr().out
    figures = json.loads((tmp_path / "e.json").read_text())
    assert figures["gamma"] == 7 and figures["results"]["all"]["confidence"] is not None
    assert (tmp_path / "e.png").stat().st_size > 1000


def test_a_draft_of_another_target_is_refused(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(trained[1] / "dflash", folder)
    config = json.loads((folder / "config.json").read_text())
    config["target_layer_ids"] = [0, 1, 5]
    config["num_target_layers"] = 9
    (folder / "config.json").write_text(json.dumps(config))
    assert set(load_file(folder / "model.safetensors"))
    assert cli.main(["eval", str(folder), "--target", "tiny"]) == 1
    assert "target_layer_ids [0, 1, 5]; the target" in capsys.readouterr().err
    assert cli.main(["eval", str(tmp_path), "--target", "tiny"]) == 1
    assert "holds no config.json" in capsys.readouterr().err
    assert cli.main(["eval", str(folder), "--target", "nowhere"]) == 1
    assert "--target is 'nowhere'; allowed: smollm2, tiny" in capsys.readouterr().err
