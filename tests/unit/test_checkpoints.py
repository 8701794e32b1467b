"""Draft checkpoints of every published layout, and what their numbers mean to us.

The traps are numbers that are one off in one layout and not in another: a draft that is read wrong
loads and serves, and only fewer of its tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import layouts
from layout_shapes import edit
from sglang_dspark.config import TargetModel
from sglang_dspark.drafters.checkpoints import check_algorithm, check_weights, read_checkpoint
from sglang_dspark.errors import ConfigError

TARGET = TargetModel(layouts.TARGET_HIDDEN, layouts.VOCAB, layouts.TARGET_LAYERS)
SHIPPED = sorted((Path(__file__).parents[2] / "sglang_dspark" / "drafts").iterdir())

# What each layout's checkpoint of `layouts` has to be read as.
BLOCK = {"algorithm": "DFLASH", "block_size": 7, "target_layer_ids": (0, 3, 6)}
SPARK = {**BLOCK, "algorithm": "DSPARK", "markov_rank": 8, "has_confidence_head": True}
CHAIN = {"algorithm": "EAGLE3", "target_layer_ids": (0, 2, 5), "draft_vocab_size": 40}
OWN_HEAD = {"own_head": True, "draft_vocab_size": 40, "style": "qwen3"}
DEEPSPEC_CHAIN = {"algorithm": "EAGLE3", "block_size": 7, "target_layer_ids": (0, 2, 3, 5, 6)}
EXPECTED = {
    "qwen3_dspark": {**SPARK, "style": "qwen3", "own_head": False, "sample_from_anchor": True},
    "qwen3_dflash": {**BLOCK, "style": "qwen3", "own_head": False, "sample_from_anchor": True},
    "qwen3_eagle3": {**DEEPSPEC_CHAIN, "style": "qwen3", "own_head": False},
    "gemma4_dspark": {**SPARK, "style": "gemma4", "own_head": False, "sample_from_anchor": True},
    "gemma4_dflash": {**BLOCK, "style": "gemma4", "own_head": False, "sample_from_anchor": True},
    "gemma4_eagle3": {**DEEPSPEC_CHAIN, "style": "gemma4", "own_head": False},
    "specforge_eagle3": {**CHAIN, "style": "llama", "own_head": True, "block_size": 5},
    "safeailab_eagle3": {**CHAIN, "target_layer_ids": (1, 3, 4), "num_layers": 1, "head_dim": 16},
    "sglang_eagle3": {**CHAIN, "num_layers": 2},
    "specforge_peagle": {**CHAIN, "target_layer_ids": (1, 3, 4), "parallel": True, "block_size": 7},
    "specforge_dspark": {**SPARK, "markov_head_type": "gated", "confidence_with_markov": False},
    "zlab_dflash": {**BLOCK, "sample_from_anchor": False, "own_head": False},
    "speculators_eagle3": {**CHAIN, **OWN_HEAD, "block_size": 7, "own_embedding": False},
    "speculators_peagle": {**CHAIN, **OWN_HEAD, "parallel": True, "own_embedding": True},
    "speculators_dflash": {**BLOCK, **OWN_HEAD, "sample_from_anchor": False},
    "speculators_dspark": {**SPARK, **OWN_HEAD, "sample_from_anchor": True},
}
WRITERS: dict[str, Callable[..., Path]] = {
    name.removeprefix("write_"): writer
    for name, writer in vars(layouts).items()
    if name.startswith("write_")
}


def read(folder: Path, layers: int | None = layouts.TARGET_LAYERS):
    return read_checkpoint(str(folder), flag="--draft", num_target_layers=layers)


def error(folder: Path, check: Callable = read) -> str:
    with pytest.raises(ConfigError) as caught:
        check(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- every layout --------------------------------------------------------------------------------


def test_every_layout_has_an_expectation():
    assert WRITERS.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", WRITERS)
def test_a_layout_is_read(name, tmp_path):
    folder = WRITERS[name](tmp_path / "draft")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 450_000
    draft = read(folder)
    found = {field: getattr(draft, field) for field in EXPECTED[name]}
    assert found == EXPECTED[name]
    check_weights(draft)
    assert draft.misfits(TARGET) == []
    check_algorithm(draft, draft.algorithm)


@pytest.mark.parametrize("size", layouts.SIZES)
@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
def test_deepspec_sizes(size, kind, tmp_path):
    draft = read(WRITERS[f"qwen3_{kind}"](tmp_path / "draft", size))
    check_weights(draft)
    assert draft.head_dim == layouts.SIZES[size]["head_dim"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_translated_field_is_not_lost(name, tmp_path):
    """What every layout names as transformers does, wherever the layout keeps it."""
    draft = read(WRITERS[name](tmp_path / "draft"))
    assert (draft.vocab_size, draft.hidden_size, draft.intermediate_size) == (96, 64, 96)
    assert (draft.rms_norm_eps, draft.max_position_embeddings) == (1e-5, 512)
    assert draft.dtype == "float32"
    assert draft.rope_theta == (1e6 if "gemma4" in name else 5000.0)


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_drafts(folder):
    draft = read(folder, layers=None)
    check_weights(draft)
    assert draft.algorithm.lower() in folder.name and draft.block_size == 7
    assert draft.layout == ("SpecForge" if folder.name == "smollm2-135m-eagle3" else "DeepSpec")


def test_unknown_layouts_are_told_the_known_ones(tmp_path):
    folder = edit(layouts.write_zlab_dflash(tmp_path / "a"), architectures=["DominoDraftModel"])
    message = error(folder)
    assert "DominoDraftModel" in message and "Gemma4Eagle3Model" in message
    assert "eagle3, peagle, dflash, dspark" in message
    folder = layouts.write_speculators_dflash(tmp_path / "b", speculators_model_type="mtp")
    assert "speculators_model_type is 'mtp'" in error(folder)


def test_a_llama_model_is_no_draft(tmp_path):
    folder = layouts.write_safeailab_eagle3(tmp_path / "draft", draft_vocab_size=None)
    assert "LlamaForCausalLM" in error(folder) and "draft_vocab_size" in error(folder)


# --- numbers that are one off: layers of the target ----------------------------------------------


def test_layer_ids_are_outputs_except_in_speculators(tmp_path):
    """speculators counts what goes into layer k, so its 1 is the output of layer 0."""
    ids = [1, 4, 6]
    deepspec = layouts.write_qwen3_dflash(tmp_path / "a", target_layer_ids=ids)
    zlab = layouts.write_zlab_dflash(tmp_path / "b", dflash_config={"target_layer_ids": ids})
    eagle = {"eagle_aux_hidden_state_layer_ids": ids}
    specforge = layouts.write_specforge_eagle3(tmp_path / "c", eagle_config=eagle)
    assert {read(folder).target_layer_ids for folder in (deepspec, zlab, specforge)} == {(1, 4, 6)}
    block = {"aux_hidden_state_layer_ids": ids}
    for i, (name, field) in enumerate(
        (("eagle3", eagle), ("peagle", eagle), ("dflash", block), ("dspark", block))
    ):
        folder = WRITERS[f"speculators_{name}"](tmp_path / str(i), **field)
        assert read(folder).target_layer_ids == (0, 3, 5), name


@pytest.mark.parametrize("layers", [8, 16, 33])
def test_default_layers_of_eagle3(tmp_path, layers):
    """SGLang, and the code of the paper, capture what goes into layers 2, n // 2 and n - 3."""
    wanted = (2 - 1, layers // 2 - 1, layers - 3 - 1)
    none = {"eagle_aux_hidden_state_layer_ids": None}
    for i, folder in enumerate(
        (
            layouts.write_specforge_eagle3(tmp_path / "a", eagle_config=none),
            layouts.write_specforge_eagle3(tmp_path / "b", eagle_config=None),
            layouts.write_safeailab_eagle3(tmp_path / "c"),
            layouts.write_speculators_eagle3(tmp_path / "d", **none),
        )
    ):
        draft = read(folder, layers=None)
        assert draft.target_layer_ids == (), i
        check_weights(draft)
        assert (
            read(folder, layers).target_layer_ids
            == wanted
            == draft.for_target(layers).target_layer_ids
        )
        assert draft.misfits(replace(TARGET, num_layers=layers)) == []


def test_default_layers_of_a_target_without_so_many(tmp_path):
    draft = read(layouts.write_safeailab_eagle3(tmp_path / "draft"), layers=4)
    (problem,) = draft.misfits(replace(TARGET, num_layers=4))
    assert "target_layer_ids is [1, 1, 0]" in problem


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (28, 5, (1, 7, 13, 19, 25)), (8, 1, (4,)), (12, 4, (1, 4, 6, 9))],
)
def test_default_layers_of_zlab(tmp_path, target_layers, draft_layers, ids):
    folder = layouts.write_zlab_dflash(
        tmp_path / "draft",
        num_hidden_layers=draft_layers,
        layer_types=None,
        num_target_layers=target_layers,
        dflash_config={"target_layer_ids": None},
    )
    draft = read(folder)
    assert draft.target_layer_ids == ids
    check_weights(draft)


@pytest.mark.parametrize("ids", [[0, 2, 5], [1, 3, 8], [3, 1, 6], [1, 1, 3]])
def test_speculators_layers_that_cannot_be_captured(tmp_path, ids):
    """0 is the embedding, 8 the last layer of 8."""
    draft = read(layouts.write_speculators_dflash(tmp_path / "d", aux_hidden_state_layer_ids=ids))
    (problem,) = draft.misfits(TARGET)
    assert str([i - 1 for i in ids]) in problem and "0 to 6" in problem


def test_layer_ids_have_to_be_stated_for_block_drafts(tmp_path):
    folder = layouts.write_speculators_dflash(tmp_path / "draft")
    edit(folder, aux_hidden_state_layer_ids=None)
    assert "field aux_hidden_state_layer_ids is missing" in error(folder)


def test_as_many_features_as_layers(tmp_path):
    folder = layouts.write_sglang_eagle3(tmp_path / "draft", num_aux_hidden_states=4)
    assert "num_aux_hidden_states is 4" in error(folder) and "3 layers" in error(folder)


# --- numbers that are one off: the anchor's row and gamma ----------------------------------------


@pytest.mark.parametrize("rows", [2, 8, 16])
def test_gamma_of_a_block(tmp_path, rows):
    """Only where the anchor's row proposes is gamma the number of rows."""
    blocks = {
        "zlab_dflash": (rows - 1, False),
        "speculators_dflash": (rows - 1, False),
        "speculators_dspark": (rows, True),
        "specforge_dspark": (rows, True),
        "qwen3_dspark": (rows, True),
        "qwen3_dflash": (rows, True),
        "gemma4_dflash": (rows, True),
    }
    for name, expected in blocks.items():
        draft = read(WRITERS[name](tmp_path / name, block_size=rows))
        assert (draft.block_size, draft.sample_from_anchor) == expected, name


def test_block_size_may_be_nested(tmp_path):
    folder = layouts.write_zlab_dflash(
        tmp_path / "d", block_size=4, dflash_config={"block_size": 9}
    )
    assert read(folder).block_size == 8


@pytest.mark.parametrize("name", ["dflash", "dspark"])
@pytest.mark.parametrize(("stated", "gamma"), [(True, 9), (False, 8)])
def test_speculators_says_whether_the_anchor_proposes(tmp_path, name, stated, gamma):
    writer = WRITERS[f"speculators_{name}"]
    draft = read(writer(tmp_path / "draft", block_size=9, sample_from_anchor=stated))
    assert (draft.sample_from_anchor, draft.block_size) == (stated, gamma)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_speculators_of_before_that_field(tmp_path, name):
    """Then only the number of tokens that a block gives tells the two apart; DSpark's default is
    another one today."""
    writer = WRITERS[f"speculators_{name}"]
    for tokens, from_anchor in ((7, False), (8, True)):
        methods = [
            {"proposal_type": "other", "speculative_tokens": 3},
            {"proposal_type": "greedy", "speculative_tokens": tokens},
        ]
        folder = writer(
            tmp_path / str(tokens),
            block_size=8,
            sample_from_anchor=None,
            speculators_config={"proposal_methods": methods},
        )
        draft = read(folder)
        assert (draft.block_size, draft.sample_from_anchor) == (tokens, from_anchor)
    message = error(edit(folder, block_size=12))
    assert "block_size is 12" in message and "sample_from_anchor is missing" in message


@pytest.mark.parametrize("name", ["qwen3_dspark", "specforge_dspark", "zlab_dflash"])
def test_an_anchor_that_the_layout_does_not_have(tmp_path, name):
    other = not EXPECTED[name].get("sample_from_anchor", True)
    message = error(WRITERS[name](tmp_path / "draft", sample_from_anchor=other))
    assert f"sample_from_anchor is {other}" in message


def test_gamma_of_a_chain(tmp_path):
    assert read(layouts.write_qwen3_eagle3(tmp_path / "a", ttt_length=4)).block_size == 4
    assert read(layouts.write_specforge_eagle3(tmp_path / "b", ttt_length=4)).block_size == 4
    assert read(layouts.write_specforge_peagle(tmp_path / "c", num_depths=4)).block_size == 4
    methods = [{"proposal_type": "greedy", "speculative_tokens": 4}]
    for i, kind in enumerate(("eagle3", "peagle")):
        writer = WRITERS[f"speculators_{kind}"]
        folder = writer(tmp_path / str(i), speculators_config={"proposal_methods": methods})
        assert read(folder).block_size == 4


# --- what an algorithm is ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked", "right"),
    [
        ("zlab_dflash", "DSPARK", "DFLASH"),
        ("qwen3_dspark", "dflash", "DSPARK"),
        ("qwen3_dflash", "DSPARK", "DFLASH"),
        ("specforge_eagle3", "EAGLE", "EAGLE3"),
        ("speculators_peagle", "DFLASH", "EAGLE3"),
    ],
)
def test_the_wrong_algorithm_is_told_the_right_flag(tmp_path, name, asked, right):
    draft = read(WRITERS[name](tmp_path / "draft"))
    with pytest.raises(ConfigError, match=f"--speculative-algorithm is {asked}, .* {right}$"):
        check_algorithm(draft, asked)


@pytest.mark.parametrize("name", ["qwen3_dspark", "gemma4_dspark", "specforge_dspark"])
@pytest.mark.parametrize("confidence", [True, False])
def test_without_a_sequential_head_it_is_dflash(tmp_path, name, confidence):
    heads = {
        "markov_rank": 0,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": False,
    }
    if name == "specforge_dspark":
        heads = {"dflash_config": heads}
    draft = read(WRITERS[name](tmp_path / "draft", **heads))
    assert (draft.algorithm, draft.has_confidence_head) == ("DFLASH", confidence)
    check_weights(draft)


def test_a_confidence_head_that_reads_a_head_that_is_not_there(tmp_path):
    folder = edit(layouts.write_qwen3_dspark(tmp_path / "a"), markov_rank=0)
    assert "confidence_head_with_markov is True" in error(folder)
    folder = edit(layouts.write_speculators_dspark(tmp_path / "b"), markov_rank=0)
    assert "confidence_head_with_markov is True" in error(folder)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("with_markov", [True, False])
def test_heads(tmp_path, head, with_markov):
    changes = {"markov_head_type": head, "confidence_head_with_markov": with_markov}
    for name in ("qwen3_dspark", "gemma4_dspark", "speculators_dspark"):
        check_weights(read(WRITERS[name](tmp_path / name, **changes)))
    check_weights(read(layouts.write_specforge_dspark(tmp_path / "sf", dflash_config=changes)))
