"""Every layout loads, serves, and proposes what plain PyTorch proposes, round by round.

Micro drafts with random weights for a Qwen3 target with random weights. The vocabulary is so small
that drafts are right by chance now and then: one wrong layer, position, norm or token map changes
which, and with it the sequence of accept lengths. What a layout means is written down here again
(see `draft_reference`), so that a reader's misunderstanding shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

import layouts
import reference
from distributions import FALSE_ALARM, g_test, sample_three, three_tokens
from draft_reference import BlockDraft, ChainDraft, Draft, speculate
from servers import MICRO, generate, generate_all, info, serve, speculative, tell
from sglang_dspark.serving import Server

pytestmark = pytest.mark.server

VOCAB, MASK = 6, 5
SMALL = {"vocab_size": VOCAB}
BLOCK = partial(BlockDraft, gamma=7, mask=MASK)
CHAIN = partial(ChainDraft, gamma=7)


@dataclass(frozen=True)
class Layout:
    """write: makes the checkpoint. algorithm: to be asked for. features: outputs of these layers
    of the target. draft: the reference."""

    write: Callable[..., Path]
    algorithm: str
    features: tuple[int, ...]
    draft: Callable[..., Draft]
    changes: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


_SPECULATORS = {"transformer_layer_config": SMALL, "draft_vocab_size": 4, "mask_token_id": MASK}
LAYOUTS = {
    "DeepSpec DFlash": Layout(
        layouts.write_qwen3_dflash, "DFLASH", (0, 3, 6), BLOCK, {**SMALL, "mask_token_id": MASK}
    ),
    "DeepSpec Eagle3": Layout(
        layouts.write_qwen3_eagle3, "EAGLE3", (0, 2, 3, 5, 6), partial(CHAIN, kv_heads=2), SMALL
    ),
    "z-lab DFlash": Layout(
        layouts.write_zlab_dflash,
        "DFLASH",
        (0, 3, 6),
        partial(BLOCK, anchor_proposes=False),
        {**SMALL, "dflash_config": {"mask_token_id": MASK}},
    ),
    "SpecForge EAGLE3": Layout(
        layouts.write_specforge_eagle3,
        "EAGLE3",
        (0, 2, 5),
        partial(CHAIN, first_layer="midlayer.", norms="each"),
        {**SMALL, "draft_vocab_size": 4, "fc_norm": True},
        ("--speculative-num-steps", "7"),
    ),
    "SGLang EAGLE3, two layers": Layout(
        layouts.write_sglang_eagle3,
        "EAGLE3",
        (0, 2, 5),
        partial(CHAIN, num_layers=2, later_norm="hidden_norm"),
        {**SMALL, "draft_vocab_size": 4},
        ("--speculative-num-draft-tokens", "8"),
    ),
    # vLLM's numbers say what goes into a layer: 1, 3, 6 are the outputs of 0, 2, 5.
    "speculators eagle3": Layout(
        layouts.write_speculators_eagle3,
        "EAGLE3",
        (0, 2, 5),
        partial(CHAIN, num_layers=2, normed_residual=True, normed_output=True),
        {**_SPECULATORS, "norm_output": True, "mask_token_id": None},
    ),
    "speculators peagle": Layout(
        layouts.write_speculators_peagle,
        "EAGLE3",
        (0, 2, 5),
        partial(CHAIN, num_layers=2, mask=MASK, own_embedding=True),
        _SPECULATORS,
    ),
    "speculators dflash": Layout(
        layouts.write_speculators_dflash,
        "DFLASH",
        (0, 3, 6),
        partial(BLOCK, anchor_proposes=False),
        _SPECULATORS,
    ),
    "speculators dspark": Layout(
        layouts.write_speculators_dspark,
        "DSPARK",
        (0, 3, 6),
        partial(BLOCK, markov="rnn"),
        _SPECULATORS,
    ),
}
PROMPTS = [[3], [1, 4, 2, 3, 0, 4, 1, 4, 2, 1], [(5 * i * i + i) % MASK for i in range(24)]]
LENGTH = 32


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=layouts.TARGET_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=layouts.TARGET_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.2)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return folder


def strengthen(folder: Path) -> Path:
    """The writers' weights are small, and a draft of them little more than its embedding."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    wide = {n: w * 10 if w.dim() > 1 and w.is_floating_point() else w for n, w in weights.items()}
    save_file(wide, file)
    return folder


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def served(request, target, tmp_path_factory):
    layout = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("draft")
    draft = strengthen(layout.write(folder / "checkpoint", **layout.changes))
    args = [
        *speculative(draft, *layout.flags, algorithm=layout.algorithm),
        *("--speculative-verify-mode", "compact"),
        *("--max-running-requests", "8"),
    ]
    with serve(target, [*MICRO, *args], folder / "log", XDG_CACHE_HOME=str(folder)) as server:
        yield server, layout, draft


def rounds(server: Server, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Output of one request alone, and what a full window would have accepted in every round."""
    tell(server, dspark_clear_info_records=True)
    tokens = generate(server, prompt, LENGTH)["output_ids"]
    return tokens, [batch[0] for batch in info(server)["accept_lens"]]


def test_every_round_proposes_what_plain_pytorch_proposes(served, target):
    server, layout, draft = served
    model = reference.load_target(target)
    plain = layout.draft(folder=draft, target=model, features=layout.features)
    tell(server, dspark_force_budget_frac=1.0)
    accepted = 0
    for prompt in PROMPTS:
        tokens, accept_lens = rounds(server, prompt)
        wanted, wanted_lens = speculate(model, plain.propose, layout.features, prompt, LENGTH)
        assert tokens == wanted
        assert accept_lens[: len(wanted_lens)] == wanted_lens
        accepted += sum(wanted_lens) - len(wanted_lens)
    assert accepted >= 3, "a draft that is never right by chance proves little"


def test_batches_of_trimmed_windows_equal_the_target_alone(served, target):
    server, _, _ = served
    model = reference.load_target(target)
    tell(server, dspark_force_budget_frac=0.5)
    requests = [(prompt, LENGTH - i) for i, prompt in enumerate([*PROMPTS, *PROMPTS])]
    wanted = [reference.greedy(model, *request) for request in requests]
    assert generate_all(server, requests, 4) == wanted


# Reduced vocabularies, whose other tokens can come from the residual only, and a row of masks.
@pytest.mark.parametrize(
    "served", ["SpecForge EAGLE3", "speculators dspark", "z-lab DFlash"], indirect=True
)
def test_sampled_tokens_follow_the_targets_distribution(served, target):
    """Temperature 1, three tokens of 2,000 requests, half of the budget, batches of 8."""
    server, _, _ = served
    tell(server, dspark_clear_info_records=True, dspark_force_budget_frac=0.5)
    p = three_tokens(reference.load_target(target), PROMPTS[1], VOCAB)
    assert g_test(sample_three(server, PROMPTS[1], 2000, temperature=1.0), p) > FALSE_ALARM
    assert 1.05 < info(server)["accept_length"] < 4.0, "acceptance and rejection have to happen"
