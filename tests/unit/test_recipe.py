"""The training recipe on a random target of a few thousand parameters."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from sglang_dspark.demo.model import write_tokenizer
from sglang_dspark.recipe import batches, cli, evaluate, export, features, generate, loss, train
from sglang_dspark.recipe.draft import DraftConfig, DraftModel
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.generate import Conversation
from sglang_dspark.recipe.initialise import init_from_target, init_markov
from sglang_dspark.recipe.target import FastLlama, left_padded_mask

LAYER_IDS = (0, 2)
GAMMA = 3
VOCAB = 40


@pytest.fixture(scope="module")
def hf_target() -> object:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target(hf_target: object) -> FastLlama:
    return FastLlama(hf_target)


@pytest.fixture(scope="module")
def conversations(target: FastLlama) -> list[Conversation]:
    generator = torch.Generator().manual_seed(1)
    prompts = [[1, *range(5 + i, 9 + 2 * i)] for i in range(6)]
    temperatures = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.7, 0.0])
    answers = generate.decode(target, prompts, temperatures, 12, -1, generator)
    return [
        Conversation("chat", float(t), prompt + answer, len(prompt))
        for t, prompt, answer in zip(temperatures, prompts, answers, strict=True)
    ]


@pytest.fixture(scope="module")
def examples(target: FastLlama, conversations: list[Conversation]) -> list[Example]:
    return [features.extract(target, c, LAYER_IDS, VOCAB) for c in conversations]


@pytest.fixture
def draft(target: FastLlama, examples: list[Example]) -> DraftModel:
    config = DraftConfig.for_target(target, LAYER_IDS, 3, block_size=GAMMA, markov_rank=4)
    draft = init_from_target(config, target, examples[0].features, seed=0)
    # Random heads: zeros would hide a wrong index.
    torch.manual_seed(5)
    for parameter in (*draft.markov_head.parameters(), *draft.confidence_head.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    return draft


def shared_of(target: FastLlama) -> train.Shared:
    return train.Shared(target.embed, target.head)


def small_config(**values: object) -> train.TrainConfig:
    defaults: dict[str, object] = {
        "total_steps": 6,
        "sequences_per_step": 2,
        "anchors_per_sequence": 3,
        "warmup_steps": 2,
        "frequent_ids": 8,
        "likely_per_row": 4,
        "sampled_ids": 6,
        "autocast": False,
    }
    return train.TrainConfig(**{**defaults, **values})  # type: ignore[arg-type]


# --- target ------------------------------------------------------------------------------------


def test_target_equals_transformers(hf_target: object, target: FastLlama) -> None:
    """Padded rows, decoded in two pieces, against transformers row by row."""
    torch.manual_seed(2)
    rows = [torch.randint(3, VOCAB, (length,)) for length in (1, 5, 9)]
    longest, pads = 9, torch.tensor([8, 4, 0])
    ids = torch.stack([F.pad(row, (longest - len(row), 0)) for row in rows])
    positions = (torch.arange(longest) - pads[:, None]).clamp(min=0)
    cache = target.new_cache(3, longest)
    hidden, captured = [], []
    for start, end in ((0, 6), (6, 9)):
        mask = left_padded_mask(pads, end - start, end)
        h, c = target.forward(ids[:, start:end], positions[:, start:end], mask, cache, LAYER_IDS)
        hidden.append(h)
        captured.append(torch.cat(c, dim=-1))
    logits, states = target.logits(torch.cat(hidden, dim=1)), torch.cat(captured, dim=1)
    for i, row in enumerate(rows):
        with torch.no_grad():
            expected = hf_target(row[None], output_hidden_states=True)  # type: ignore[operator]
        torch.testing.assert_close(logits[i, pads[i] :], expected.logits[0], atol=1e-4, rtol=1e-4)
        layers = torch.cat([expected.hidden_states[k + 1][0] for k in LAYER_IDS], dim=-1)
        torch.testing.assert_close(states[i, pads[i] :], layers, atol=1e-4, rtol=1e-4)


def test_greedy_rows_of_a_batch_equal_transformers(
    hf_target: object, conversations: list[Conversation]
) -> None:
    """Also where sampled rows share the batch, and where rows finish and are dropped."""
    for c in conversations:
        if c.temperature == 0:
            prompt = torch.tensor([c.ids[: c.answer_start]])
            out = hf_target.generate(  # type: ignore[attr-defined]
                prompt, max_new_tokens=12, do_sample=False, eos_token_id=None
            )
            assert out[0].tolist() == c.ids


def test_finished_rows_do_not_disturb_the_others(target: FastLlama) -> None:
    prompts = [[1, 5, 6], [1, 9, 8, 7], [1, 30], [1, 12, 13, 14, 15]]
    alone = [
        generate.decode(target, [p], torch.zeros(1), 16, 11, torch.Generator())[0] for p in prompts
    ]
    together = generate.decode(target, prompts, torch.zeros(4), 16, 11, torch.Generator())
    assert together == alone
    assert all(row[-1] == 11 or len(row) == 16 for row in alone)


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1e9]]).repeat(40000, 1)
    generator = torch.Generator().manual_seed(0)
    drawn = generate.sample(logits, torch.full((40000,), 0.7), generator, top_k=0)
    expected = (logits[0] / 0.7).softmax(dim=0)
    # 4 standard errors of a share near one half.
    torch.testing.assert_close(drawn.bincount(minlength=4) / 40000, expected, atol=0.01, rtol=0)
    drawn = generate.sample(logits, torch.full((40000,), 0.7), generator, top_k=2)
    assert drawn.unique().tolist() == [1, 2]


# --- features ----------------------------------------------------------------------------------


def test_shards_read_back(examples: list[Example], tmp_path: Path) -> None:
    features.write_shard(tmp_path / "a.safetensors", examples[:4])
    features.write_shard(tmp_path / "b.safetensors", examples[4:])
    for before, after in zip(examples, features.read_features(tmp_path), strict=True):
        assert after.answer_start == before.answer_start
        assert torch.equal(after.ids, before.ids)
        assert torch.equal(after.features, before.features)
        assert torch.equal(after.topk_ids, before.topk_ids)
        torch.testing.assert_close(after.topk_probs, before.topk_probs, atol=0, rtol=2**-8)


# --- attention mask ----------------------------------------------------------------------------


def test_mask_equals_a_per_anchor_loop() -> None:
    anchors, length = torch.tensor([2, 3, 7, -1]), 9
    mask = batches.block_mask(anchors, length, GAMMA)
    for j, anchor in enumerate(anchors.tolist()):
        for k in range(GAMMA):
            row = mask[j * GAMMA + k].tolist()
            context = [t < anchor for t in range(length)]
            block = [j2 == j for j2 in range(len(anchors)) for _ in range(GAMMA)]
            assert row == context + block


def test_packed_blocks_equal_blocks_alone(
    draft: DraftModel, target: FastLlama, examples: list[Example]
) -> None:
    """Two padded sequences with several anchors in one call = one call per anchor, no mask."""
    anchors = [torch.tensor([8, 10, 15]), torch.tensor([12, 13])]
    batch = batches.make_batch(examples[1:3], anchors, GAMMA, draft.mask_id)
    context = draft.project_context(batch.features.float())
    embeds = F.embedding(batch.block_ids, target.embed)
    packed = draft(embeds, batch.positions, context, batch.mask).unflatten(1, (-1, GAMMA))
    for i, example in enumerate(examples[1:3]):
        for j, anchor in enumerate(anchors[i].tolist()):
            before = draft.project_context(example.features[:anchor].float())[None]
            ids = torch.tensor([[int(example.ids[anchor])] + [draft.mask_id] * (GAMMA - 1)])
            positions = anchor + torch.arange(GAMMA)[None]
            alone = draft(F.embedding(ids, target.embed), positions, before)
            torch.testing.assert_close(packed[i, j], alone[0], atol=1e-4, rtol=1e-4)


def test_batch_rows_line_up(examples: list[Example]) -> None:
    example = examples[0]
    last = len(example.ids) - 2
    batch = batches.make_batch([example], [torch.tensor([last - 1, last])], GAMMA, 3)
    assert batch.valid.tolist() == [[True, True, False, True, False, False]]
    assert batch.labels[batch.valid].tolist() == example.ids[[last, last + 1, last + 1]].tolist()
    assert batch.previous[batch.valid].tolist() == example.ids[[last - 1, last, last]].tolist()
    row = last - example.answer_start
    assert torch.equal(batch.topk_ids[0, 3], example.topk_ids[row])


# --- loss --------------------------------------------------------------------------------------


def literal_loss(
    logits: torch.Tensor, confidence: torch.Tensor, labels: torch.Tensor, p: torch.Tensor
) -> float:
    """The formula in loss.py's head with Python loops. logits, p [blocks, γ, V]."""
    total = weight_sum = 0.0
    for block in range(len(logits)):
        for k in range(1, GAMMA + 1):
            q = torch.softmax(logits[block, k - 1], dim=0)
            target_p = p[block, k - 1]
            weight = math.exp(-(k - 1) / GAMMA)
            distance = sum(abs(float(a) - float(b)) for a, b in zip(q, target_p, strict=True))
            label = 1 - distance / 2
            c = 1 / (1 + math.exp(-float(confidence[block, k - 1])))
            bce = -(label * math.log(c) + (1 - label) * math.log(1 - c))
            cross_entropy = -math.log(float(q[labels[block, k - 1]]))
            total += weight * (0.1 * cross_entropy + 0.9 * distance + 1.0 * bce)
            weight_sum += weight
    return total / weight_sum


def test_loss_equals_the_formula() -> None:
    """With every id a candidate and all of p given."""
    torch.manual_seed(3)
    logits = torch.randn(2, GAMMA, VOCAB)
    confidence = torch.randn(2, GAMMA)
    labels = torch.randint(VOCAB, (2, GAMMA))
    p = (2 * torch.randn(2, GAMMA, VOCAB)).softmax(dim=-1)
    everything = torch.arange(VOCAB)
    vocabulary = loss.choose_vocabulary(VOCAB, everything, labels, 4, torch.Generator())
    assert vocabulary.num_candidates == VOCAB
    topk = p.flatten(0, 1).topk(VOCAB, dim=-1)
    terms = loss.dspark_loss(
        logits.flatten(0, 1),
        confidence.flatten(),
        labels.flatten(),
        topk.indices,
        topk.values,
        loss.position_weights(torch.arange(GAMMA).repeat(2), GAMMA),
        vocabulary,
        loss.LossWeights(),
    )
    assert float(terms.total) == pytest.approx(
        literal_loss(logits, confidence, labels, p), rel=1e-5
    )


def test_soft_cross_entropy_equals_its_formula() -> None:
    """-Σ p log q over the candidates and one bucket for the rest."""
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    vocabulary = loss.Vocabulary(
        ids=torch.arange(4), num_candidates=2, sample_shift=0.0, column=torch.tensor([0, 1, 2, 2])
    )
    terms = loss.dspark_loss(
        q.log(),
        torch.zeros(1),
        torch.tensor([0]),
        torch.tensor([[0, 3]]),
        torch.tensor([[0.5, 0.3]]),
        torch.ones(1),
        vocabulary,
        loss.LossWeights(1.0, cross_entropy=0.0, distance=0.0, confidence=0.0),
    )
    assert float(terms.total) == pytest.approx(-(0.5 * math.log(0.4) + 0.5 * math.log(0.3)))


def test_confidence_label_carries_no_gradient() -> None:
    logits = torch.randn(4, VOCAB, requires_grad=True)
    p = torch.randn(4, VOCAB).softmax(dim=-1)
    ids = torch.arange(VOCAB)
    vocabulary = loss.choose_vocabulary(VOCAB, ids, ids, 0, torch.Generator())
    terms = loss.dspark_loss(
        logits,
        torch.zeros(4, requires_grad=True),
        torch.zeros(4, dtype=torch.int64),
        ids.expand(4, -1),
        p,
        torch.ones(4),
        vocabulary,
        loss.LossWeights(cross_entropy=0.0, distance=0.0),
    )
    terms.total.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and float(logits.grad.abs().max()) == 0.0


def test_sampled_rest_estimates_the_partition_function() -> None:
    """Averaged over draws, candidates + shifted sample have the mass of the whole vocabulary."""
    torch.manual_seed(4)
    size, frequent = 400, torch.arange(10)
    logits = torch.randn(size)
    masses, generator = [], torch.Generator().manual_seed(0)
    for _ in range(2000):
        v = loss.choose_vocabulary(size, frequent, torch.tensor([17]), 20, generator)
        shift = torch.zeros(len(v.ids))
        shift[v.num_candidates :] = v.sample_shift
        masses.append(float((logits[v.ids] + shift).exp().sum()))
        assert v.num_candidates == 11 and int(v.column[17]) == 10 and int(v.column[30]) == 11
    assert sum(masses) / len(masses) == pytest.approx(float(logits.exp().sum()), rel=0.02)


def test_mass_outside_the_candidates_is_one_bucket() -> None:
    """Two candidates of four ids: ‖p - q‖₁ over (id 0, id 1, rest)."""
    vocabulary = loss.Vocabulary(
        ids=torch.tensor([0, 1, 2, 3]),
        num_candidates=2,
        sample_shift=0.0,
        column=torch.tensor([0, 1, 2, 2]),
    )
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    terms = loss.dspark_loss(
        q.log(),
        torch.zeros(1),
        torch.tensor([0]),
        torch.tensor([[0, 3]]),
        torch.tensor([[0.5, 0.3]]),  # 0.2 more is unknown
        torch.ones(1),
        vocabulary,
        loss.LossWeights(),
    )
    assert float(terms.distance) == pytest.approx(0.1 + 0.3 + abs(0.3 - 0.5))


# --- training ----------------------------------------------------------------------------------


def fresh(draft: DraftModel) -> DraftModel:
    copy = DraftModel(draft.config)
    copy.load_state_dict(draft.state_dict())
    return copy


def assert_same_weights(a: DraftModel, b: DraftModel) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def test_same_seed_same_weights(
    draft: DraftModel, target: FastLlama, examples: list[Example]
) -> None:
    runs = [fresh(draft) for _ in range(3)]
    for run, seed in zip(runs, (0, 0, 1), strict=True):
        train.train(run, shared_of(target), examples, small_config(seed=seed))
    assert_same_weights(runs[0], runs[1])
    assert not torch.equal(runs[0].fc.weight, runs[2].fc.weight)


def test_resume_equals_uninterrupted(
    draft: DraftModel, target: FastLlama, examples: list[Example], tmp_path: Path
) -> None:
    whole, parts = fresh(draft), fresh(draft)
    config, path = small_config(), tmp_path / "checkpoint.pt"
    expected = train.train(whole, shared_of(target), examples, config)
    losses = train.train(parts, shared_of(target), examples, config, path, stop_after=4)
    again = fresh(draft)
    losses += train.train(again, shared_of(target), examples, config, path, resume=True)
    assert losses == expected
    assert_same_weights(whole, again)
    assert_same_weights(whole, train.draft_from_checkpoint(path))


def test_checkpoint_of_another_draft_is_refused(
    draft: DraftModel, target: FastLlama, examples: list[Example], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    train.train(draft, shared_of(target), examples, small_config(total_steps=1), path)
    config = DraftConfig.for_target(target, LAYER_IDS, 3, block_size=GAMMA, markov_rank=5)
    other = DraftModel(config)
    with pytest.raises(ValueError, match="markov_rank is 4, this run has 5"):
        train.train(other, shared_of(target), examples, small_config(), path, resume=True)


def test_schedule() -> None:
    """Up, constant, down to zero; the paper's loss at the end only."""
    config = small_config(total_steps=100, warmup_steps=10, decay_fraction=0.4, final_fraction=0.2)
    rates = [config.rate_at(step) / config.learning_rate for step in (0, 9, 59, 80, 99)]
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.5, 1 / 40])
    assert config.loss_at(79) == config.early_loss
    assert config.loss_at(80) == loss.LossWeights()


def test_training_lowers_the_loss(
    draft: DraftModel, target: FastLlama, examples: list[Example]
) -> None:
    config = small_config(total_steps=60, learning_rate=3e-3)
    losses = train.train(draft, shared_of(target), examples, config)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_draft_layers_start_as_the_targets_last(target: FastLlama, examples: list[Example]) -> None:
    """The folded norms leave what a target layer computes from its input unchanged."""
    first = target.layers[0]
    config = DraftConfig.for_target(target, LAYER_IDS, 3)
    draft = init_from_target(config, target, examples[0].features, seed=0)
    x = torch.randn(5, 16)
    for layer, source in zip(draft.decoder_layers, target.layers[-2:], strict=True):
        expected = F.rms_norm(x, (16,), source.input_norm, target.eps) @ source.qkv.T
        normed, attention = layer.input_layernorm(x), layer.self_attn
        found = [p(normed) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        torch.testing.assert_close(torch.cat(found, dim=-1), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(draft.decoder_layers[0].mlp.down_proj.weight, first.down)
    assert torch.equal(draft.decoder_layers[1].mlp.down_proj.weight, target.layers[-1].down)


def test_markov_init_prefers_what_followed(draft: DraftModel, target: FastLlama) -> None:
    """Two groups of tokens, each followed by its own; rank 4 holds that, and no id stays empty."""
    previous = torch.arange(10).repeat(50)
    following = torch.where(previous < 5, 20, 30)[:, None] + torch.arange(5)
    init_markov(draft, target.embed, previous, following, torch.full((500, 5), 0.2))
    bias = draft.markov_head.bias(torch.arange(10))
    assert bool((bias[:5, 20:25].min() > bias[:5, 30:35].max()).all())
    assert bool((bias[5:, 30:35].min() > bias[5:, 20:25].max()).all())
    assert bool((draft.markov_head.markov_w1.weight[10:].abs().sum(dim=1) > 0).all())


# --- evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_id", [-1, 11])
def test_speculative_decoding_is_lossless(
    hf_target: object, draft: DraftModel, target: FastLlama, stop_id: int
) -> None:
    for prompt in ([1, 5, 6, 7], [1, 20, 21, 22, 23, 24]):
        expected = generate.decode(target, [prompt], torch.zeros(1), 24, stop_id, torch.Generator())
        output, stats = evaluate.speculative_decode(draft, target, prompt, 24, stop_id)
        assert output == expected[0]
        assert stats.committed == len(output) - 1


def test_a_draft_that_knows_the_answer_is_accepted_whole(
    draft: DraftModel, target: FastLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [1, 5, 6, 7]
    truth = generate.decode(target, [prompt], torch.zeros(1), 30, -1, torch.Generator())[0]
    done = [1]

    def propose(*_: object) -> tuple[list[int], list[float]]:
        block = truth[done[0] : done[0] + GAMMA]
        done[0] += GAMMA + 1
        return block + [0] * (GAMMA - len(block)), [1.0] * GAMMA

    monkeypatch.setattr(evaluate, "propose", propose)
    output, stats = evaluate.speculative_decode(draft, target, prompt, 21, -1)
    assert output == truth[:21]
    assert stats.accept_length == GAMMA + 1
    assert stats.accept_rates() == [1.0] * GAMMA


def test_acceptance_counts_by_hand() -> None:
    stats = evaluate.Acceptance(GAMMA)
    stats.add_round(0, [0.5, 0.5, 0.5], committed=1)
    stats.add_round(2, [0.5, 0.5, 0.5], committed=3)
    stats.add_round(3, [0.5, 0.5, 0.5], committed=4)
    stats.add_round(3, [0.5, 0.5, 0.5], committed=2)  # a stop token as the second draft token
    assert stats.verified == [4, 3, 2]
    assert stats.accepted == [3, 3, 1]
    assert stats.accept_length == 10 / 4


# --- export ------------------------------------------------------------------------------------


def test_export_reads_back(draft: DraftModel, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    for _ in range(2):  # the second replaces the first
        export.export(draft, folder, readme="how it was made\n")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    loaded = export.load_draft(folder)
    assert loaded.config == draft.config
    for name, value in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16().float()), name


def test_exported_names_and_fields(draft: DraftModel, tmp_path: Path) -> None:
    """What SGLang's Qwen3DSparkModel reads; embedding and head are the target's."""
    export.export(draft, tmp_path / "draft")
    names = set(load_file(tmp_path / "draft" / "model.safetensors"))
    layer = {
        f"layers.{i}.{name}.weight"
        for i in range(2)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            *(f"self_attn.{p}" for p in "q_proj k_proj v_proj o_proj q_norm k_norm".split()),
            *(f"mlp.{p}" for p in ("gate_proj", "up_proj", "down_proj")),
        )
    }
    top = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    markov = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    confidence = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert names == layer | top | markov | confidence
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["block_size"] == GAMMA and config["target_layer_ids"] == list(LAYER_IDS)
    assert config["markov_head_type"] == "vanilla" and config["markov_rank"] == 4
    assert config["num_target_layers"] == 4 and config["mask_token_id"] == 3


# --- the command -------------------------------------------------------------------------------


def test_one_command_runs_every_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a random target with a 16-token vocabulary, then again with --resume."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    tokens = ["<e>", "<s>", "<p>", *"abcdefghijkl", "Ġ"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 13],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "<s>{{ messages[0]['content'] }}<p><s>a",
        "llama.context_length": 1024,
    }
    write_tokenizer(fields, tmp_path / "target")
    small = functools.partial(generate.GenerateConfig, batch_rows=8, max_answer_tokens=24)
    monkeypatch.setattr(generate, "GenerateConfig", small)
    monkeypatch.setattr(evaluate, "PROMPTS", {"chat": ("a bad cab", "feed a")})
    arguments = ["--out", str(tmp_path / "draft"), "--minutes", "0.03", "--threads", "1"]
    arguments += ["--model", str(tmp_path / "target"), "--work-dir", str(tmp_path / "work")]
    assert cli.main([*arguments, "--mask-token", "<e>"]) == 0
    assert "| all |" in capsys.readouterr().out
    draft = export.load_draft(tmp_path / "draft")
    assert draft.config.vocab_size == 16 and draft.config.target_layer_ids == (2,)
    text = (tmp_path / "draft" / "README.md").read_text()
    assert "| chat |" in text and str(tmp_path) not in text

    assert cli.main([*arguments, "--mask-token", "<e>"]) == 1
    assert "is not empty; pass --resume" in capsys.readouterr().err
    assert cli.main([*arguments, "--mask-token", "<e>", "--resume"]) == 0
    again = export.load_draft(tmp_path / "draft")
    assert_same_weights(draft, again)
    assert cli.main([*arguments, "--mask-token", "a b", "--resume"]) == 1
    assert "--mask-token is 'a b', 3 tokens" in capsys.readouterr().err


def test_layer_ids_spread_over_the_target() -> None:
    assert cli.spread_layer_ids(30, 4) == (2, 11, 20, 28)
    assert cli.spread_layer_ids(4, 4) == (2,)
    assert cli.spread_layer_ids(36, 5) == (2, 10, 18, 26, 34)


def test_the_last_target_layer_is_refused(target: FastLlama) -> None:
    with pytest.raises(ValueError, match=r"target_layer_ids is \[0, 3\].*in 0\.\.2"):
        DraftConfig.for_target(target, (0, 3), 3)
