"""The made-up pair does what it is made for, by plain arithmetic on its weights."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from gpu_stages.pair import (
    QWEN3_8B,
    TINY,
    Pair,
    accept_length,
    mixed_accept_length,
    prepare_pair,
    requests,
)
from gpu_stages.pair_weights import FAINT, HIGH, LOW, MARKOV, OFF_BY
from gpu_stages.settings import Settings
from safetensors.torch import load_file

from sglang_dspark.drafters.checkpoints import check_weights, read_checkpoint

HALF = TINY.vocab // 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    work = tmp_path_factory.mktemp("pair")
    return prepare_pair(Settings(tiny=True, work=work, out=work / "o.json", ends=0.0))


@pytest.fixture(scope="module")
def target(pair: Pair) -> dict[str, torch.Tensor]:
    return torch.load(pair.target / "pytorch_model.bin", weights_only=True)


@pytest.fixture(scope="module")
def draft(pair: Pair) -> dict[str, torch.Tensor]:
    return load_file(pair.draft / "model.safetensors")


def says(draft: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the draft proposes behind every token."""
    w1, w2 = (draft[name] for name in MARKOV)
    return (w1 @ w2.T).argmax(dim=1)


def test_behind_every_token_comes_the_next(target: dict[str, torch.Tensor]) -> None:
    embedding, head = target["model.embed_tokens.weight"], target["lm_head.weight"]
    logits = embedding @ head.T
    assert torch.equal(logits.argmax(dim=1), (torch.arange(TINY.vocab) + 1) % TINY.vocab)
    best, second = logits.topk(2, dim=1).values.T
    assert (best - second > 0.2 * best).all(), "no rounding decides"


def test_no_layer_moves_what_the_head_sees(target: dict[str, torch.Tensor]) -> None:
    """What a layer adds is far below an embedding's elements, whatever it is given (about 1)."""
    size = target["model.embed_tokens.weight"].abs().mean()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weight = target[f"model.layers.0.{name}.weight"]
        bound = 2 * FAINT * weight.shape[1]
        assert weight.abs().sum(dim=1).max() < bound < 0.01 * size
        assert weight.std() > 0.9 * FAINT, "but it is not nothing: a chip is to have work"


def test_layers_share_their_memory_so_that_the_file_is_small(
    pair: Pair, target: dict[str, torch.Tensor]
) -> None:
    file = (pair.target / "pytorch_model.bin").stat().st_size
    assert file < 0.6 * sum(weight.nbytes for weight in target.values())


def test_the_draft_is_right_behind_the_stated_share_of_tokens(
    draft: dict[str, torch.Tensor],
) -> None:
    tokens = torch.arange(TINY.vocab)
    found, right = says(draft), (tokens + 1) % TINY.vocab
    wrong = found != right
    assert torch.equal(found[wrong], (right[wrong] + OFF_BY) % TINY.vocab)
    for half, chance in ((slice(HALF), HIGH), (slice(HALF, None), LOW)):
        # Four standard deviations of so many tokens.
        tolerance = 4 * (chance * (1 - chance) / HALF) ** 0.5
        assert float((~wrong[half]).float().mean()) == pytest.approx(chance, abs=tolerance)


def test_the_backbone_has_no_say(draft: dict[str, torch.Tensor]) -> None:
    """The final norm's output times a row of lm_head, at most, against the head's lead."""
    w1, w2 = (draft[name] for name in MARKOV)
    best, second = (w1 @ w2.T).topk(2, dim=1).values.T
    most = draft["norm.weight"].max() * TINY.hidden * 0.02
    assert float((best - second).min()) > 100 * float(most)


def test_confidence_is_the_share_of_right_tokens(draft: dict[str, torch.Tensor]) -> None:
    weight = draft["confidence_head.proj.weight"][0]
    hidden = torch.randn(TINY.vocab, TINY.hidden)
    features = torch.cat([hidden, draft[MARKOV[0]]], dim=1)
    confidence = (features @ weight + draft["confidence_head.proj.bias"]).sigmoid()
    torch.testing.assert_close(confidence[:HALF], torch.full((HALF,), HIGH), atol=1e-3, rtol=0)
    torch.testing.assert_close(confidence[HALF:], torch.full((HALF,), LOW), atol=1e-3, rtol=0)


def test_the_draft_is_a_complete_checkpoint(pair: Pair) -> None:
    checkpoint = read_checkpoint(str(pair.draft), flag="--draft", num_target_layers=TINY.layers)
    assert (checkpoint.algorithm, checkpoint.block_size) == ("DSPARK", TINY.gamma)
    check_weights(checkpoint)


def test_texts_stay_in_their_half_and_are_known() -> None:
    made = requests(TINY, 40, prompt=20, length=30, seed=1)
    assert made == requests(TINY, 40, prompt=20, length=30, seed=1)
    for i, request in enumerate(made):
        assert len(request.prompt) == 20 and request.expected is not None
        tokens = [request.prompt[-1], *request.expected]
        assert tokens == list(range(tokens[0], tokens[0] + 31))
        assert {token // HALF for token in tokens} == {i % 2}


def test_accept_length_is_that_of_a_walk(draft: dict[str, torch.Tensor]) -> None:
    """Rounds of whole windows over a text, counted; against the formula with the share found."""
    right = (says(draft) == (torch.arange(TINY.vocab) + 1) % TINY.vocab).tolist()
    for half, chance in ((0, HIGH), (1, LOW)):
        mine = right[half * HALF : (half + 1) * HALF]
        share, rng = sum(mine) / HALF, random.Random(0)
        shuffled = rng.choices(mine, k=200_000)  # as long a text as it takes
        place = rounds = 0
        while place < len(shuffled) - TINY.gamma:
            accepted = next((k for k in range(TINY.gamma) if not shuffled[place + k]), TINY.gamma)
            place, rounds = place + accepted + 1, rounds + 1
        assert place / rounds == pytest.approx(accept_length([share] * TINY.gamma), rel=0.02)
        assert share == pytest.approx(chance, abs=0.1)


def test_the_mix_has_the_rounds_of_both_halves() -> None:
    high, low = accept_length([HIGH] * 7), accept_length([LOW] * 7)
    assert (high, low) == (pytest.approx(5.6953, abs=1e-4), pytest.approx(1.9922, abs=1e-4))
    tokens = 1000
    assert mixed_accept_length(7) == pytest.approx(2 * tokens / (tokens / high + tokens / low))
    assert accept_length([]) == 1 and accept_length([1.0] * 7) == 8


def test_a_pair_that_is_there_is_not_written_again(pair: Pair) -> None:
    file = pair.draft / "model.safetensors"
    before = file.stat().st_mtime_ns
    work = pair.target.parent
    again = prepare_pair(Settings(tiny=True, work=work, out=work / "o.json", ends=0.0))
    assert again == pair and file.stat().st_mtime_ns == before
    shape = json.loads((work / f"{TINY.name}.json").read_text())
    assert replace(TINY, target_layer_ids=TINY.target_layer_ids).hidden == shape["hidden"]


def test_the_large_shape_is_qwen3_8b() -> None:
    """Its published numbers, and layers whose output SGLang can capture."""
    parameters = (
        QWEN3_8B.layers
        * QWEN3_8B.hidden
        * (
            2 * QWEN3_8B.heads * QWEN3_8B.head_dim
            + 2 * QWEN3_8B.kv_heads * QWEN3_8B.head_dim
            + 3 * QWEN3_8B.intermediate
        )
        + 2 * QWEN3_8B.vocab * QWEN3_8B.hidden
    )
    assert parameters == pytest.approx(8.19e9, rel=0.001)
    assert max(QWEN3_8B.target_layer_ids) <= QWEN3_8B.layers - 2
