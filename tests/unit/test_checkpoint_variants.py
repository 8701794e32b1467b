"""Variants of draft checkpoints: fields that are served or refused, and what weights have to be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import layouts
from layout_shapes import edit
from sglang_dspark.drafters.checkpoints import (
    check_ranks,
    check_weights,
    read_checkpoint,
    weight_shapes,
)
from sglang_dspark.errors import ConfigError


def read(folder: Path):
    return read_checkpoint(str(folder), flag="--draft")


def error(folder: Path, check: Callable = read) -> str:
    with pytest.raises(ConfigError) as caught:
        check(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def weights_error(folder: Path) -> str:
    return error(folder, lambda folder: check_weights(read(folder)))


def with_weights(folder: Path, change: Callable) -> Path:
    """Put the weights through `change`."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    return folder


# --- EAGLE3 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"norm_before_fc": True}, "feature_norm", "whole"),
        ({"eagle_config": {"norm_before_fc": True}}, "feature_norm", "whole"),
        ({"fc_norm": True}, "feature_norm", "each"),
        ({"bias": True}, "fc_bias", True),
        ({"norm_before_residual": True}, "norm_before_residual", True),
        ({"norm_output": True}, "norm_output", True),
        ({"attention_bias": True}, "attention_bias", False),  # of the target's config.json
        ({"draft_vocab_size": None}, "own_head", False),
        ({"draft_vocab_size": layouts.VOCAB}, "maps_vocabulary", False),
        ({"target_hidden_size": 128}, "own_embedding", True),
        ({"target_hidden_size": 64}, "own_embedding", False),
        ({"num_hidden_layers": 40}, "num_layers", 1),
    ],
    ids=str,
)
def test_variants_of_specforge(tmp_path, changes, field, value):
    draft = read(layouts.write_specforge_eagle3(tmp_path / "draft", **changes))
    assert getattr(draft, field) == value
    check_weights(draft)


def test_norms_by_their_older_names(tmp_path):
    folder = layouts.write_specforge_eagle3(tmp_path / "draft", fc_norm=True, use_aux_norm=True)

    def older(weights):
        for i, name in enumerate(("low", "mid", "high")):
            weights[f"aux_norm_{name}.weight"] = weights.pop(f"fc_norm.{i}.weight")

    check_weights(read(with_weights(folder, older)))
    edit(folder, fc_norm=None)
    assert read(folder).feature_norm == "each"


@pytest.mark.parametrize("style", ["qwen3", "llama"])
@pytest.mark.parametrize(
    ("changes", "feature_norm"),
    [({}, "none"), ({"norm_before_fc": True}, "whole"), ({"fc_norm": True}, "each")],
)
def test_variants_of_speculators(tmp_path, style, changes, feature_norm):
    changes = {"transformer_layer_config": {"model_type": style}, **changes}
    for kind in ("eagle3", "peagle"):
        writer = getattr(layouts, f"write_speculators_{kind}")
        draft = read(writer(tmp_path / kind, **changes))
        assert (draft.style, draft.feature_norm) == (style, feature_norm)
        check_weights(draft)


def test_embeddings_and_heads_of_speculators(tmp_path):
    """P-EAGLE trains the embedding unless it says otherwise, EAGLE3 only if it says so."""
    for kind, trained in (("eagle3", False), ("peagle", True)):
        writer = getattr(layouts, f"write_speculators_{kind}")
        for stated in (None, True, False):
            draft = read(writer(tmp_path / f"{kind}-{stated}", embed_requires_grad=stated))
            assert draft.own_embedding == (trained if stated is None else stated)
    folder = layouts.write_speculators_eagle3(tmp_path / "all", draft_vocab_size=layouts.VOCAB)
    draft = read(folder)
    assert draft.own_head and not draft.maps_vocabulary
    check_weights(draft)
    with_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    assert not read(folder).own_head
    check_weights(read(folder))


def test_llama4_has_its_dense_size_in_another_field(tmp_path):
    folder = layouts.write_specforge_eagle3(tmp_path / "draft")
    edit(folder, model_type="llama4_text", intermediate_size=640, intermediate_size_mlp=96)
    assert read(folder).intermediate_size == 96


def test_both_norms_at_once(tmp_path):
    for i, writer in enumerate((layouts.write_specforge_eagle3, layouts.write_speculators_eagle3)):
        folder = writer(tmp_path / str(i), norm_before_fc=True, fc_norm=True)
        assert "fc_norm is True" in error(folder)


def test_two_readers_take_the_absence_of_a_field_in_opposite_ways(tmp_path):
    folder = layouts.write_speculators_eagle3(tmp_path / "a", norm_before_residual=None)
    assert "norm_before_residual is missing" in error(folder)
    folder = layouts.write_speculators_peagle(tmp_path / "b", norm_before_residual=None)
    assert read(folder).norm_before_residual is False


def test_the_norm_of_later_layers(tmp_path):
    """hidden_norm in SGLang's files, input_layernorm in others'; never both are read."""
    draft = read(layouts.write_sglang_eagle3(tmp_path / "a", num_hidden_layers=3))
    check_weights(draft)
    assert draft.rename("model.layers.2.hidden_norm.weight") == "layers.2.input_layernorm.weight"
    assert draft.rename("model.layers.2.input_layernorm.weight") not in draft.weights()
    assert draft.rename("model.layers.0.hidden_norm.weight") == "layers.0.hidden_norm.weight"
    draft = read(layouts.write_speculators_eagle3(tmp_path / "b"))
    assert draft.rename("layers.1.input_layernorm.weight") == "layers.1.input_layernorm.weight"


def test_midlayer_is_layer_0(tmp_path):
    draft = read(layouts.write_specforge_eagle3(tmp_path / "draft"))
    name = "midlayer.self_attn.q_proj.weight"
    assert draft.rename(name) == "layers.0.self_attn.q_proj.weight"
    assert draft.name_in_files("layers.0.self_attn.q_proj.weight") == name


def test_deepspec_chains_of_one_layer_only(tmp_path):
    folder = layouts.write_qwen3_eagle3(tmp_path / "draft", num_hidden_layers=2)
    assert "num_hidden_layers is 2" in error(folder)


# --- Gemma 4, RoPE -------------------------------------------------------------------------------


@pytest.mark.parametrize(("k_eq_v", "kv_heads"), [(True, 1), (False, 2)])
def test_gemma4_heads_are_those_of_full_attention(tmp_path, k_eq_v, kv_heads):
    draft = read(layouts.write_gemma4_dspark(tmp_path / "draft", attention_k_eq_v=k_eq_v))
    assert (draft.k_eq_v, draft.num_kv_heads, draft.head_dim) == (k_eq_v, kv_heads, 32)
    assert (draft.logit_softcap, draft.embed_scale) == (30.0, 8.0)
    assert draft.hidden_act == "gelu_pytorch_tanh"
    assert draft.rope_scaling == {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    check_weights(draft)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 5000.0, None),
        ({"rope_theta": None}, 10000.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 5000.0, {"factor": 2.0}),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5000.0, LLAMA3),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, 5000.0, None),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [8]}}, 5000.0, None),
        ({"partial_rotary_factor": 1.0}, 5000.0, None),
    ],
    ids=str,
)
def test_rope(tmp_path, changes, theta, scaling):
    draft = read(layouts.write_zlab_dflash(tmp_path / "draft", **changes))
    found = {k: v for k, v in (draft.rope_scaling or {}).items() if k != "rope_type"}
    assert (draft.rope_theta, found or None) == (theta, scaling)


def test_speculators_takes_the_rope_of_sliding_layers(tmp_path):
    """Of a target with two sets, even for a draft without such layers."""
    sets = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
        "full_attention": {"rope_type": "default", "rope_theta": 9.0},
        "rope_type": None,
        "rope_theta": None,
    }
    folder = layouts.write_speculators_dflash(
        tmp_path / "draft", transformer_layer_config={"rope_parameters": sets}
    )
    assert read(folder).rope_theta == 7.0


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nested",
    [
        {"conv_kernel_size": 4, "conv_group_size": 8},
        {"selector_rank": 64, "selector_top_k": 8},
        {"projector_type": "domino"},
        {"gru_hidden_dim": 128},
        {"shift_label": True},
        {"output_multiplier": 0.5},
        {"attention_sink_bias": True},
        {"attention_value_scale": 0.7},
        {"causal": True},
        {"swa_window_size": 32},
    ],
    ids=str,
)
def test_variants_of_dflash(tmp_path, nested):
    for i, changes in enumerate(({"dflash_config": nested}, nested)):
        message = error(layouts.write_zlab_dflash(tmp_path / str(i), **changes))
        name, value = next(iter(nested.items()))
        assert f"{name} is {value!r}" in message


def test_plain_values_of_variants(tmp_path):
    plain = {"conv_kernel_size": 0, "output_multiplier": 1.0, "projector_type": "dflash"}
    folder = layouts.write_zlab_dflash(tmp_path / "a", dflash_config=plain)
    assert read(folder).logit_softcap is None
    softcap = {"final_logit_softcapping": 30.0}
    folder = layouts.write_zlab_dflash(tmp_path / "b", dflash_config=softcap)
    assert read(folder).logit_softcap == 30.0


WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}


@pytest.mark.parametrize(
    ("writer", "changes", "words"),
    [
        (layouts.write_zlab_dflash, WINDOW, ["layer_types is", "sliding_attention"]),
        (layouts.write_qwen3_dspark, WINDOW, ["layer_types is", "full_attention"]),
        (
            layouts.write_speculators_dspark,
            {"transformer_layer_config": WINDOW},
            ["transformer_layer_config.layer_types is", "sliding_attention"],
        ),
        (
            layouts.write_zlab_dflash,
            {"layer_types": None, "use_sliding_window": True},
            ["use_sliding_window is True"],
        ),
        (layouts.write_zlab_dflash, {"block_size": 1}, ["block_size is 1", "at least 2"]),
        (layouts.write_zlab_dflash, {"hidden_act": "relu"}, ["hidden_act is 'relu'", "silu"]),
        (
            layouts.write_zlab_dflash,
            {"partial_rotary_factor": 0.5},
            ["partial_rotary_factor is 0.5"],
        ),
        (
            layouts.write_zlab_dflash,
            {"rope_scaling": {"rope_type": "su", "factor": 2.0}},
            ["rope_scaling.rope_type is 'su'", "llama3"],
        ),
        (
            layouts.write_specforge_eagle3,
            {"eagle_config": {"use_aux_hidden_state": False}},
            ["eagle_config.use_aux_hidden_state is False"],
        ),
        (
            layouts.write_specforge_eagle3,
            {"quantization_config": {"bits": 4}},
            ["quantization_config", "not served"],
        ),
        (layouts.write_gemma4_dspark, {"enable_moe_block": True}, ["enable_moe_block is True"]),
        (
            layouts.write_gemma4_eagle3,
            {"hidden_size_per_layer_input": 8},
            ["hidden_size_per_layer_input is 8"],
        ),
        (layouts.write_speculators_peagle, {"mask_token_id": None}, ["mask_token_id is missing"]),
        (
            layouts.write_speculators_eagle3,
            {"speculators_config": {"default_proposal_method": "tree"}},
            ["speculators_config.proposal_methods is", "'tree'"],
        ),
        (
            layouts.write_speculators_eagle3,
            {"transformer_layer_config": {"model_type": "qwen3_next"}},
            ["transformer_layer_config.model_type is 'qwen3_next'", "llama, qwen3"],
        ),
        (layouts.write_speculators_dflash, {"block_size": "8"}, ["block_size is '8'", "int"]),
    ],
)
def test_a_field_that_is_refused(tmp_path, writer, changes, words):
    message = error(writer(tmp_path / "draft", **changes))
    assert "config.json: " in message
    assert all(word in message for word in words), message


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writer", "name"),
    [
        (layouts.write_specforge_eagle3, "midlayer.hidden_norm.weight"),
        (layouts.write_specforge_eagle3, "lm_head.weight"),
        (layouts.write_specforge_eagle3, "d2t"),
        (layouts.write_speculators_peagle, "mask_hidden"),
        (layouts.write_speculators_peagle, "embed_tokens.weight"),
        (layouts.write_speculators_dspark, "markov_head.joint_proj.bias"),
        (layouts.write_qwen3_dspark, "confidence_head.proj.weight"),
        (layouts.write_gemma4_dspark, "layers.1.layer_scalar"),
    ],
)
def test_a_weight_that_is_missing(tmp_path, writer, name):
    folder = with_weights(writer(tmp_path / "draft"), lambda weights: weights.pop(name))
    message = weights_error(folder)
    assert f"weight {name} (" in message and message.endswith("is missing")


def test_a_weight_of_another_shape(tmp_path):
    folder = edit(layouts.write_specforge_eagle3(tmp_path / "draft"), intermediate_size=128)
    message = weights_error(folder)
    assert "midlayer.mlp." in message and "(96, 64)" in message.replace("(64, 96)", "(96, 64)")


@pytest.mark.parametrize(
    ("writer", "name", "has"),
    [
        (layouts.write_qwen3_dflash, "confidence_head.proj.weight", "no sequential head"),
        (layouts.write_zlab_dflash, "layers.0.conv.weight", "no confidence head"),
        (layouts.write_specforge_eagle3, "midlayer.self_attn.q_norm.weight", "1 layers"),
    ],
)
def test_a_weight_without_a_place(tmp_path, writer, name, has):
    folder = with_weights(
        writer(tmp_path / "draft"), lambda weights: weights.update({name: torch.zeros(4)})
    )
    message = weights_error(folder)
    assert f"weight {name} has no place" in message and has in message


def test_a_weight_by_two_names(tmp_path):
    def twice(weights):
        weights["model.fc.weight"] = weights["fc.weight"].clone()

    folder = with_weights(layouts.write_zlab_dflash(tmp_path / "draft"), twice)
    assert "fc.weight and model.fc.weight are one" in weights_error(folder)


def test_copies_of_the_targets_weights_are_no_matter(tmp_path):
    def copies(weights):
        for name in ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq"):
            weights[name] = torch.zeros(3)
        del weights["embed_tokens.weight"]

    folder = with_weights(layouts.write_speculators_dflash(tmp_path / "draft"), copies)
    check_weights(read(folder))


def test_d2t_holds_offsets(tmp_path):
    """Target id minus draft id; a file with the ids themselves maps tokens wrongly, silently."""

    def absolute(weights):
        weights["d2t"] += torch.arange(layouts.DRAFT_VOCAB)
        assert weights["t2d"][weights["d2t"]].all()

    for i, writer in enumerate((layouts.write_specforge_eagle3, layouts.write_speculators_dspark)):
        folder = with_weights(writer(tmp_path / str(i)), absolute)
        message = weights_error(folder)
        assert "weight d2t" in message and "target id - draft id" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d2t: d2t.fill_(60), "names tokens 60 to 99 of the target, which has 96"),
        (lambda d2t: d2t[1:2].sub_(d2t[1] + 1).add_(d2t[0]), "names a token of the target twice"),
        (lambda d2t: d2t.fill_(1), "names tokens that t2d does not"),
    ],
)
def test_d2t_that_makes_no_sense(tmp_path, change, words):
    folder = layouts.write_specforge_eagle3(tmp_path / "draft")
    with_weights(folder, lambda weights: change(weights["d2t"]))
    assert words in weights_error(folder)


def test_weights_in_pytorchs_format(tmp_path):
    folder = layouts.write_safeailab_eagle3(tmp_path / "draft")
    check_weights(read(folder))
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    del weights["norm.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    assert "weight norm.weight (64,) is missing" in weights_error(folder)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert "pytorch_model.bin: is not a readable PyTorch file" in error(folder)


def test_no_weights_at_all(tmp_path):
    folder = layouts.write_zlab_dflash(tmp_path / "draft")
    shapes = weight_shapes(folder)
    assert shapes["fc.weight"] == (64, 192)
    (folder / "model.safetensors").write_bytes(b"{")
    assert "model.safetensors: is not a readable safetensors file" in weights_error(folder)
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors file" in weights_error(folder)


def test_config_json_is_checked_first(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": "DFlashDraftModel"}))
    assert "architectures is 'DFlashDraftModel'" in error(tmp_path)
    (tmp_path / "config.json").unlink()
    assert f"--draft {tmp_path}: holds no config.json" in error(tmp_path)


def test_ranks_that_a_draft_cannot_be_split_over(tmp_path):
    draft = read_checkpoint(str(layouts.write_specforge_eagle3(tmp_path / "d")), flag="--draft")
    for ranks in (1, 2, 4):  # 4 heads, 2 KV heads, 96 wide
        check_ranks(draft, ranks)
    for ranks, name in ((3, "num_attention_heads is 4"), (8, "num_attention_heads is 4")):
        with pytest.raises(ConfigError, match=rf"--tp-size is {ranks}, .*{name}"):
            check_ranks(draft, ranks)
