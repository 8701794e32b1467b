"""The published layouts: what is written, and that it reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_dspark.recipe import export
from sglang_dspark.recipe.export import AnyDraft
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.target import FastLlama
from toy import GAMMA, LAYER_IDS, VOCAB, new_draft

MLP = tuple(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
ATTENTION = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
NORMS = ("self_attn.q_norm", "self_attn.k_norm")
BLOCK_LAYER = (*MLP, *ATTENTION, *NORMS, "input_layernorm", "post_attention_layernorm")
EAGLE_LAYER = (*MLP, *ATTENTION, "input_layernorm", "post_attention_layernorm", "hidden_norm")
BLOCK = {
    *("fc.weight", "hidden_norm.weight", "norm.weight"),
    *(f"layers.{i}.{name}.weight" for i in range(2) for name in BLOCK_LAYER),
}
NAMES = {
    "dspark": BLOCK
    | {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    | {"confidence_head.proj.weight", "confidence_head.proj.bias"},
    "dflash": BLOCK,
    "eagle3": {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    | {f"midlayer.{name}.weight" for name in EAGLE_LAYER},
    "eagle3-deepspec": {"fc.weight", "norm.weight"}
    | {f"layers.0.{name}.weight" for name in (*EAGLE_LAYER, *NORMS)},
}


def test_export_reads_back(draft: AnyDraft, target: FastLlama, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    for _ in range(2):  # the second replaces the first
        export.export(draft, folder, readme="how it was made\n")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    loaded = export.load_draft(folder, target)
    assert type(loaded) is type(draft)
    skipped = {"mask_token_id": 0} if hasattr(draft, "d2t") else {}
    assert {**vars(loaded.config), **skipped} == {**vars(draft.config), **skipped}
    for name, value in draft.state_dict().items():
        expected = value.bfloat16().float() if value.is_floating_point() else value
        if name == "lm_head.weight" and "lm_head.weight" not in load_file(
            folder / "model.safetensors"
        ):
            expected = target.head
        assert torch.equal(loaded.state_dict()[name], expected), name


@pytest.mark.parametrize("name", NAMES)
def test_names_and_fields(
    name: str, target: FastLlama, examples: list[Example], tmp_path: Path
) -> None:
    draft = new_draft(name, target, examples)
    export.export(draft, tmp_path / "draft")
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    assert set(weights) == NAMES[name]
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    if name in ("dspark", "dflash"):
        assert config["architectures"] == ["Qwen3DSparkModel"]
        assert config["block_size"] == GAMMA and config["target_layer_ids"] == list(LAYER_IDS)
        assert config["num_target_layers"] == 4 and config["mask_token_id"] == 3
        assert config["markov_rank"] == (4 if name == "dspark" else 0)
        assert config["enable_confidence_head"] is (name == "dspark")
    if name == "eagle3":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert ids == list(LAYER_IDS) and config["draft_vocab_size"] == 30
        d2t = weights["d2t"] + torch.arange(30)
        assert weights["t2d"].nonzero().squeeze(1).tolist() == d2t.tolist()
        # The most frequent answer tokens are all there.
        answers = torch.cat([e.ids[e.answer_start :] for e in examples])
        assert bool(weights["t2d"][answers.bincount(minlength=VOCAB).topk(10).indices].all())
    if name == "eagle3-deepspec":
        assert config["architectures"] == ["Qwen3Eagle3Model"]
        assert config["ttt_length"] == GAMMA and config["target_layer_ids"] == list(LAYER_IDS)


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    torch.save({}, tmp_path / "x")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"architectures is \['Other'\]; allowed: Qwen3DSpark"):
        export.load_draft(tmp_path)
