"""gamma from the flags that SGLang has for it, which do not all count the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from sglang_dspark.drafters.checkpoints import DraftCheckpoint
from sglang_dspark.errors import ConfigError
from sglang_dspark.gamma import resolve_gamma

BLOCK = DraftCheckpoint(
    path="/draft",
    layout="z-lab",
    architecture="DFlashDraftModel",
    algorithm="DFLASH",
    style="qwen3",
    num_layers=1,
    hidden_size=64,
    intermediate_size=64,
    num_heads=1,
    num_kv_heads=1,
    head_dim=64,
    vocab_size=48,
    block_size=7,
    target_layer_ids=(0,),
)
CHAIN = replace(BLOCK, algorithm="EAGLE3", style="llama", block_size=5)


def gamma(draft: DraftCheckpoint, **flags: int) -> int:
    fields = {f"speculative_{name}": value for name, value in flags.items()}
    return resolve_gamma(SimpleNamespace(**fields), draft)


def test_without_flags_it_is_the_checkpoints():
    assert (gamma(BLOCK), gamma(CHAIN)) == (7, 5)


def test_flags_that_count_the_anchor_and_flags_that_do_not():
    assert gamma(BLOCK, num_draft_tokens=4) == 3
    assert gamma(BLOCK, dflash_block_size=4) == 3
    assert gamma(BLOCK, dspark_block_size=4) == 4
    assert gamma(CHAIN, num_steps=4) == 4
    assert gamma(CHAIN, num_steps=4, num_draft_tokens=5, eagle_topk=1) == 4


def test_a_chain_may_be_longer_than_it_was_trained_for():
    assert gamma(CHAIN, num_steps=9) == 9
    assert gamma(CHAIN, num_steps=1) == 1
    with pytest.raises(ConfigError, match=r"--speculative-num-steps is 33, allowed are 1 to 32"):
        gamma(CHAIN, num_steps=33)


def test_a_block_and_a_parallel_chain_may_not():
    for draft in (BLOCK, replace(CHAIN, parallel=True)):
        with pytest.raises(ConfigError, match=rf"trained for blocks of {draft.block_size}"):
            gamma(draft, num_draft_tokens=draft.block_size + 2)


def test_flags_that_disagree():
    with pytest.raises(ConfigError, match=r"--speculative-num-draft-tokens is 4 .*must be 5"):
        gamma(CHAIN, num_steps=4, num_draft_tokens=4)
    with pytest.raises(ConfigError, match=r"--speculative-num-draft-tokens is 5 .*must be 4"):
        gamma(BLOCK, dflash_block_size=4, num_draft_tokens=5)


def test_a_tree_is_refused_with_the_alternatives():
    for draft in (BLOCK, CHAIN):
        with pytest.raises(ConfigError) as caught:
            gamma(draft, eagle_topk=4)
        message = str(caught.value)
        for word in ("--speculative-eagle-topk is 4", "one chain", "SGLANG_PLUGINS=none"):
            assert word in message


def test_steps_of_a_block_draft_are_refused():
    with pytest.raises(ConfigError, match="--speculative-num-steps is 3, but DFLASH"):
        gamma(BLOCK, num_steps=3)


@pytest.mark.parametrize("draft", [BLOCK, CHAIN], ids=["block", "chain"])
def test_what_sglang_is_told_resolves_to_the_same(draft):
    """The worker resolves again, from the fields that the launcher declared."""
    declared = {"num_draft_tokens": 4, "dspark_block_size": 3, "num_steps": 1, "eagle_topk": 1}
    assert gamma(draft, **declared) == 3
