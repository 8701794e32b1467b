"""The folder that SGLang opens in place of a draft whose layout it does not know."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig

import layouts
from layout_shapes import edit
from sglang_dspark.drafters.checkpoints import (
    DraftCheckpoint,
    read_checkpoint,
    weight_shapes,
)
from sglang_dspark.drafters.checkpoints.translate import (
    default_root,
    is_translated,
    served_folder,
)
from sglang_dspark.errors import ConfigError

WRITERS = {
    name.removeprefix("write_"): writer
    for name, writer in vars(layouts).items()
    if name.startswith("write_") and name != "write_qwen3_dspark"
}


def read(folder: Path) -> DraftCheckpoint:
    return read_checkpoint(str(folder), flag="--draft", num_target_layers=layouts.TARGET_LAYERS)


@pytest.fixture
def draft(tmp_path) -> DraftCheckpoint:
    return read(layouts.write_zlab_dflash(tmp_path / "draft"))


@pytest.mark.parametrize("name", WRITERS)
def test_a_translated_folder_is_the_same_draft(name, tmp_path):
    draft = read(WRITERS[name](tmp_path / "draft"))
    folder = served_folder(draft, tmp_path / "root")
    assert folder.parent == tmp_path / "root" and folder.name.startswith("draft-")
    assert is_translated(str(folder)) and not is_translated(draft.path)
    assert read(folder) == draft
    assert draft.path == str(tmp_path / "draft")
    assert weight_shapes(folder) == weight_shapes(draft.path)

    config = AutoConfig.from_pretrained(folder)
    block = "SparkGemma4BlockDraft" if draft.style == "gemma4" else "SparkBlockDraft"
    assert config.architectures == ["SparkChainDraft" if draft.chain else block]
    assert DraftCheckpoint.from_dict(config.sglang_dspark) == draft
    assert (config.head_dim, config.num_key_value_heads) == (draft.head_dim, draft.num_kv_heads)
    assert config.num_hidden_layers == draft.num_layers == len(config.layer_types)
    assert config.rope_parameters["rope_theta"] == draft.rope_theta
    assert (config.block_size, config.vocab_size) == (draft.block_size, layouts.VOCAB)
    assert tuple(config.target_layer_ids) == draft.target_layer_ids
    assert config.sample_from_anchor == draft.sample_from_anchor
    assert config.markov_rank == (draft.markov_rank or 1)
    assert config.mask_token_id == (draft.mask_token_id or 0)
    assert config.tie_word_embeddings is False


def test_scaled_rope_is_kept(tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0}
    draft = read(layouts.write_zlab_dflash(tmp_path / "draft", rope_scaling=scaling))
    config = AutoConfig.from_pretrained(served_folder(draft, tmp_path / "root"))
    assert config.rope_parameters["rope_type"] == "linear"
    assert (config.rope_parameters["factor"], config.rope_parameters["rope_theta"]) == (4.0, 5000.0)


def test_what_sglang_knows_is_not_translated(tmp_path):
    draft = read(layouts.write_qwen3_dspark(tmp_path / "draft"))
    assert served_folder(draft, tmp_path / "root") == tmp_path / "draft"
    assert not (tmp_path / "root").exists()


def test_weights_are_links(draft, tmp_path):
    link = served_folder(draft, tmp_path / "root") / "model.safetensors"
    assert link.is_symlink() and link.samefile(tmp_path / "draft" / "model.safetensors")


def test_weights_are_copied_where_there_are_no_links(draft, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = served_folder(draft, tmp_path / "root")
    assert not (folder / "model.safetensors").is_symlink()
    assert weight_shapes(folder) == weight_shapes(draft.path)


def test_a_folder_is_written_once(draft, tmp_path):
    folder = served_folder(draft, tmp_path / "root")
    written = (folder / "config.json").stat().st_mtime_ns
    assert served_folder(draft, tmp_path / "root") == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "root").iterdir()] == [folder.name]


def test_a_changed_draft_is_another_folder(draft, tmp_path):
    original = tmp_path / "draft"
    first = served_folder(draft, tmp_path / "root")
    os.utime(original / "model.safetensors", ns=(1, 1))
    second = served_folder(draft, tmp_path / "root")
    third = served_folder(read(edit(original, block_size=4)), tmp_path / "root")
    assert len({first, second, third}) == 3
    # Of EAGLE3 drafts that leave the layers to the target, each target has a folder.
    chain = read_checkpoint(str(layouts.write_safeailab_eagle3(tmp_path / "chain")), flag="--draft")
    folders = {served_folder(chain.for_target(n), tmp_path / "root") for n in (8, 16)}
    assert len(folders) == 2


def test_a_folder_whose_links_are_broken_is_written_again(draft, tmp_path):
    folder = served_folder(draft, tmp_path / "root")
    link = folder / "model.safetensors"
    link.unlink()
    link.symlink_to(tmp_path / "gone")
    assert served_folder(draft, tmp_path / "root") == folder
    assert link.samefile(tmp_path / "draft" / "model.safetensors")


def test_another_process_may_be_faster(draft, tmp_path, monkeypatch):
    finished = served_folder(draft, tmp_path / "root")
    aside = tmp_path / "aside"
    finished.rename(aside)
    rename = os.rename

    def late(source, target):
        if not Path(target).exists():
            shutil.copytree(aside, target, symlinks=True)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert served_folder(draft, tmp_path / "root") == finished
    assert [path.name for path in (tmp_path / "root").iterdir()] == [finished.name]


def test_nothing_is_left_of_a_failure(draft, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(json, "dumps", fail)
    with pytest.raises(RuntimeError):
        served_folder(draft, tmp_path / "root")
    monkeypatch.undo()
    assert not (tmp_path / "root").exists() or not list((tmp_path / "root").iterdir())


def test_a_root_that_cannot_be_written(draft, tmp_path):
    (tmp_path / "root").write_text("a file")
    with pytest.raises(ConfigError, match=r"root: cannot be written \(.*XDG_CACHE_HOME"):
        served_folder(draft, tmp_path / "root")


def test_the_root_is_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "sglang-dspark" / "drafts"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_root() == Path.home() / ".cache" / "sglang-dspark" / "drafts"


def test_a_description_of_another_release(draft, tmp_path):
    folder = served_folder(draft, tmp_path / "root")
    config = json.loads((folder / "config.json").read_text())
    config["sglang_dspark"]["flux"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="was not written by this release"):
        read(folder)


def test_a_relative_path_is_made_absolute(draft, tmp_path, monkeypatch):
    """A folder in the cache is reused from anywhere."""
    monkeypatch.chdir(tmp_path)
    assert read(Path("draft")).path == draft.path


def test_a_draft_of_fewer_positions_than_the_target_is_translated_to_as_many(tmp_path):
    for name, write in (("z-lab", layouts.write_zlab_dflash), ("d", layouts.write_qwen3_dspark)):
        draft = read_checkpoint(str(write(tmp_path / name)), flag="--draft")
        folder = served_folder(draft, tmp_path / "cache", positions=4096)
        assert folder.parent == tmp_path / "cache"
        assert read_checkpoint(str(folder), flag="--draft").max_position_embeddings == 4096
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 4096
        kept = served_folder(draft, tmp_path / "cache", positions=100)
        assert read_checkpoint(str(kept), flag="--draft").max_position_embeddings == 512
