"""Our Gemma 4 draft models against DeepSpec's in plain PyTorch, in one process without a server.

SGLang's layers are the real ones; only its attention backend is replaced, by a few lines over
whatever keys and values were put before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.distributed import parallel_state
from sglang.srt.runtime_context import reset_context
from sglang.test.test_utils import publish_build_topology
from torch import nn

import gemma4
import gemma4_reference
from sglang_dspark.drafters.checkpoints import read_checkpoint
from sglang_dspark.host.hooks import keep_heads, softcap
from sglang_dspark.models.block import context_kv
from sglang_dspark.models.chain import SparkChainDraft
from sglang_dspark.models.gemma4_block import SparkGemma4BlockDraft
from sglang_dspark.models.layers import TiedHead
from sglang_dspark.serving import free_port

CONTEXT, ROWS = 9, 4
KINDS = ["dspark", "dflash", "eagle3"]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """SGLang's parallel groups, of this process alone."""
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{free_port()}",
    )
    publish_build_topology(tp_size=1)
    parallel_state.initialize_model_parallel(backend="gloo")
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    reset_context()


class FakeAttention(nn.Module):
    """In place of SGLang's layer: attention to `context`, then to the rows themselves."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.scaling, self.causal = layer.scaling, layer.attn_type.value == "decoder"
        self.heads, self.kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        self.context: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> Any:
        rows = len(q)
        q, k, v = (x.view(rows, n, -1) for x, n in ((q, self.heads), (k, self.kv_heads), (v, 1)))
        v = v.view(k.shape)
        if self.context is not None:
            k, v = torch.cat([self.context[0], k]), torch.cat([self.context[1], v])
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scaling
        if self.causal:
            mask = torch.ones(rows, len(k), dtype=torch.bool).triu(len(k) - rows + 1)
            scores = scores.masked_fill(mask, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(rows, -1)


class Target:
    """What a draft has of its target: a scaled embedding, which is the head too."""

    def __init__(self) -> None:
        from sglang.srt.models.gemma3_causal import Gemma3TextScaledWordEmbedding

        self.embedding = Gemma3TextScaledWordEmbedding(
            gemma4.VOCAB, gemma4.HIDDEN, None, embed_scale=gemma4.HIDDEN**0.5
        )
        nn.init.normal_(self.embedding.weight, generator=torch.Generator().manual_seed(5))
        self.embedding.requires_grad_(False)


def build(folder: Path, target: Target) -> Any:
    """Our model of a draft folder, as SGLang's loader makes it, with the fake attention."""
    draft = read_checkpoint(str(folder), flag="draft")
    config = SimpleNamespace(
        sglang_dspark=draft.as_dict(),
        vocab_size=draft.vocab_size,
        hidden_size=draft.hidden_size,
        markov_rank=draft.markov_rank,
        markov_head_type=draft.markov_head_type,
    )
    model: Any = SparkChainDraft(config) if draft.chain else SparkGemma4BlockDraft(config)
    weights = load_file(folder / "model.safetensors")
    model.load_weights(weights.items())
    model.attach_shared_modules(embed_tokens=target.embedding, lm_head=target.embedding)
    for layer in model.layers:
        layer.self_attn.attn = FakeAttention(layer.self_attn.attn)
    return model.eval()


def features(count: int, width: int = gemma4.HIDDEN * len(gemma4.FEATURES)) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("k_eq_v", [True, False])
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_block_draft_is_deepspecs(tmp_path: Path, kind: str, k_eq_v: bool) -> None:
    target = Target()
    folder = gemma4.write_draft(tmp_path / "draft", kind, k_eq_v=k_eq_v)
    model = build(folder, target)
    seen = features(CONTEXT)
    with torch.inference_mode():
        for attention, k, v in context_kv(model, seen, torch.arange(CONTEXT)):
            attention.context = (k, v)
        ids = torch.tensor([7] + [gemma4.MASK] * (ROWS - 1))
        positions = torch.arange(CONTEXT, CONTEXT + ROWS)
        hidden = model(ids, positions, None).hidden_states
        expected = gemma4_reference.BlockDraft(folder, target.embedding.weight).hidden(
            7, seen, ROWS
        )
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    assert (model.markov_head is None) == (kind == "dflash")


@pytest.mark.parametrize("k_eq_v", [True, False])
def test_chain_draft_is_deepspecs(tmp_path: Path, k_eq_v: bool) -> None:
    target = Target()
    folder = gemma4.write_draft(tmp_path / "draft", "eagle3", k_eq_v=k_eq_v)
    model = build(folder, target)
    reference = gemma4_reference.ChainDraft(folder, target.embedding.weight)
    seen, tokens = features(CONTEXT), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    following = torch.tensor(tokens[1:])
    with torch.inference_mode():
        hidden = model.project(seen)
        expected = reference.states(tokens, seen @ reference.w["fc.weight"].T)
        # All pairs at once, and the last one behind the slots of those before it.
        with model.reading(hidden):
            at_once = model(following, torch.arange(CONTEXT), None).hidden_states
        before = slice(0, CONTEXT - 1)
        attention, k, v = model.context_kv(
            following[before], hidden[before], torch.arange(CONTEXT - 1)
        )
        attention.context = (k, v)
        with model.reading(hidden[-1:]):
            last = model(following[-1:], torch.tensor([CONTEXT - 1]), None).hidden_states
        normed = model.to_head(last)
    torch.testing.assert_close(at_once, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, expected[-1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normed, reference.norm("norm", expected[-1:]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_of_the_model_is_loaded(tmp_path: Path, kind: str) -> None:
    folder = gemma4.write_draft(tmp_path / "draft", kind)
    model = build(folder, Target())
    shared = ("embed_tokens.", "lm_head.")
    loaded = [*model.named_parameters(), *model.named_buffers()]
    for name, weight in loaded:
        if not name.startswith(shared) and "rotary" not in name and "v_norm" not in name:
            assert not (weight == 1).all() and not (weight == 0).all(), name


def test_the_hosts_softcap_is_gemmas() -> None:
    logits = torch.randn(3, 7) * 40
    expected = 30.0 * torch.tanh(logits / 30.0)
    assert softcap(logits, 30.0) is logits
    torch.testing.assert_close(logits, expected)


def test_the_host_pads_mlps_but_no_heads_for_tensor_parallelism() -> None:
    text = SimpleNamespace(num_key_value_heads=1, swa_num_key_value_heads=2, intermediate_size=96)
    model = SimpleNamespace(num_key_value_heads=1, hf_config=SimpleNamespace(), hf_text_config=text)

    def pad(model: Any, load_config: Any, ranks: int) -> Any:
        model.num_key_value_heads = text.num_key_value_heads = text.swa_num_key_value_heads = ranks
        text.intermediate_size = 32 * ranks
        return model

    assert keep_heads(pad, model, None, 4) is model
    assert model.num_key_value_heads == text.num_key_value_heads == 1
    assert text.swa_num_key_value_heads == 2
    assert text.intermediate_size == 128


def test_a_tied_embedding_serves_as_head() -> None:
    from sglang.srt.models.dspark import gather_and_crop_vocab, project_through_lm_head

    target = Target()
    head = TiedHead(target.embedding)
    hidden = torch.randn(3, gemma4.HIDDEN)
    logits = gather_and_crop_vocab(project_through_lm_head(hidden, head), head)
    torch.testing.assert_close(logits, hidden @ target.embedding.weight.T)
