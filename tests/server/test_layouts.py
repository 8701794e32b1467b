"""Every layout loads, serves, and proposes what plain PyTorch proposes, round by round.

Micro drafts with random weights for a Qwen3 target with random weights. The vocabulary is so small
that drafts are right by chance now and then: one wrong layer, position, norm or token map changes
which, and with it the sequence of accept lengths. What a layout means is written down here again
(see `draft_reference`), so that a reader's misunderstanding shows. Gemma 4's drafts and target know
the order of the tokens, which their layers tell only if they are right (`gemma4`).
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

import gemma4
import gemma4_reference
import layouts
import reference
from distributions import FALSE_ALARM, g_test, sample_three, three_tokens
from draft_reference import BlockDraft, ChainDraft, speculate
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
    of the target. draft: the reference. vocab: tokens that prompts are made of."""

    write: Callable[..., Path]
    algorithm: str
    features: tuple[int, ...]
    draft: Callable[..., Any]
    changes: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    vocab: int = MASK

    def prompts(self) -> list[list[int]]:
        """The last shares its first 8 tokens with the one before: they come from the cache."""
        wide = [(5 * i * i + i) % self.vocab for i in range(24)]
        shared = [*wide[:8], (wide[8] + 1) % self.vocab, *wide[2:9]]
        return [[3], [x % self.vocab for x in (1, 4, 2, 3, 0, 4, 1, 4, 2, 1)], wide, shared]


def _gemma4(kind: str, algorithm: str) -> Layout:
    def draft(folder: Path, target: Any, features: tuple[int, ...]) -> Any:
        return gemma4_reference.load(folder, target.get_input_embeddings().weight.detach())

    write = partial(gemma4.write_draft, kind=kind, order=True)
    return Layout(write, algorithm, gemma4.FEATURES, draft, vocab=gemma4.MASK)


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
    "DeepSpec DSpark, Gemma 4": _gemma4("dspark", "DSPARK"),
    "DeepSpec DFlash, Gemma 4": _gemma4("dflash", "DFLASH"),
    "DeepSpec Eagle3, Gemma 4": _gemma4("eagle3", "EAGLE3"),
}
LENGTH = 32
# Servers that first decide about drafting and budgets for themselves.
LEFT_ALONE = ["SpecForge EAGLE3", "speculators dspark", "z-lab DFlash"]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Qwen3's kind and Gemma 4's."""
    gemma = gemma4.write_target(tmp_path_factory.mktemp("gemma4") / "target", order=True)
    return {"qwen3": qwen3_target(tmp_path_factory.mktemp("qwen3")), "gemma4": gemma}


def qwen3_target(folder: Path) -> Path:
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
def served(request, targets, tmp_path_factory):
    layout = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("draft")
    draft = layout.write(folder / "checkpoint", **layout.changes)
    target = targets["gemma4" if "Gemma 4" in request.param else "qwen3"]
    if target is targets["qwen3"]:
        strengthen(draft)
    args = [
        *speculative(draft, *layout.flags, algorithm=layout.algorithm),
        *("--speculative-verify-mode", "compact"),
        *("--max-running-requests", "32"),
    ]
    if request.param not in LEFT_ALONE:
        args += ["--speculative-verify-budget", "1.0"]  # saves measuring a table
    with serve(target, [*MICRO, *args], folder / "log", XDG_CACHE_HOME=str(folder)) as server:
        yield server, layout, draft, reference.load_target(target)


def rounds(server: Server, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Output of one request alone, and what a full window would have accepted in every round."""
    tell(server, dspark_clear_info_records=True)
    tokens = generate(server, prompt, LENGTH)["output_ids"]
    return tokens, [batch[0] for batch in info(server)["accept_lens"]]


@pytest.mark.parametrize("served", LEFT_ALONE, indirect=True)
def test_a_draft_behind_rounds_without_one_knows_all_that_was_committed(served):
    """These drafts are hardly ever right: most rounds go without one, and some probe. Has to be the
    first test of a server, whose budgets nobody has forced yet."""
    server, layout, draft, model = served
    plain = layout.draft(folder=draft, target=model, features=layout.features)
    returns = 0
    for prompt in layout.prompts()[1:]:
        tell(server, dspark_clear_info_records=True)
        tokens = generate(server, prompt, 120)["output_ids"]
        record, done, before = info(server), 1, 1
        for depth, (window,), (committed,) in zip(
            record["depths"], record["windows_of_rounds"], record["accept_lens"], strict=True
        ):
            plain.gamma = depth  # a block of fewer rows is another one
            block = [] if not depth else proposed(model, plain, layout, [*prompt, *tokens[:done]])
            block = block[: window - 1]
            right = [a == b for a, b in zip(block, tokens[done:], strict=False)]
            wanted = right.index(False) if False in right else len(right)
            if done + committed <= len(tokens):  # the last round may be cut
                assert committed == 1 + wanted
            returns += before == 0 and depth > 0
            done, before = done + committed, depth
    assert returns >= 2


@torch.inference_mode()
def proposed(model: Any, draft: Any, layout: Layout, tokens: list[int]) -> list[int]:
    """The reference's block behind these tokens."""
    states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    return draft.propose(tokens, torch.cat([states[k + 1][0] for k in layout.features], dim=-1))


def test_every_round_proposes_what_plain_pytorch_proposes(served):
    server, layout, draft, model = served
    plain = layout.draft(folder=draft, target=model, features=layout.features)
    tell(server, dspark_force_budget_frac=1.0)
    accepted = 0
    for prompt in layout.prompts():
        tokens, accept_lens = rounds(server, prompt)
        wanted, wanted_lens = speculate(model, plain.propose, layout.features, prompt, LENGTH)
        assert tokens == wanted
        assert accept_lens[: len(wanted_lens)] == wanted_lens
        accepted += sum(wanted_lens) - len(wanted_lens)
    assert accepted, "a draft that is never right by chance proves little"


def test_batches_of_trimmed_windows_equal_the_target_alone(served):
    server, layout, _, model = served
    tell(server, dspark_force_budget_frac=0.5)
    requests = [(prompt, LENGTH - i) for i, prompt in enumerate(layout.prompts())]
    wanted = [reference.greedy(model, *request) for request in requests]
    assert generate_all(server, requests, 4) == wanted


# Reduced vocabularies, whose other tokens can come from the residual only, and a row of masks.
@pytest.mark.parametrize("served", LEFT_ALONE, indirect=True)
def test_sampled_tokens_follow_the_targets_distribution(served):
    """Temperature 1, three tokens of 2,000 requests, half of the budget, batches of 32."""
    server, layout, _, model = served
    prompt = layout.prompts()[1]
    tell(server, dspark_clear_info_records=True, dspark_force_budget_frac=0.5)
    p = three_tokens(model, prompt, VOCAB)
    assert g_test(sample_three(server, prompt, 2000, temperature=1.0), p) > FALSE_ALARM
    assert 1.05 < info(server)["accept_length"] < 4.0, "acceptance and rejection have to happen"
