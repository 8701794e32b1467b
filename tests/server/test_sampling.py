"""Temperature 1 through the real server: generated tokens follow the target's exact distribution.

A random target over 8 tokens, so that the joint distribution of three generated tokens is known
from transformers' logits. The first token is SGLang's own sample, the others are ours. Error rate:
see `distributions.FALSE_ALARM`; 4,000 samples see a total variation of about 0.05. Windows are full
or trimmed (compact); cap-accept commits what compact commits: test_verify_modes.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import micro
import reference
from distributions import FALSE_ALARM, g_test
from servers import MICRO, assert_no_leak, generate, info, serve, speculative
from trained import budget, mode

pytestmark = pytest.mark.server

VOCAB, SAMPLES = 8, 4000
PROMPT = [1, 5, 2, 6, 0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return micro.write_random(tmp_path_factory.mktemp("pair"), vocab=VOCAB, seed=3, head_scale=0.15)


def started(pair, tmp_path_factory, *flags: str):
    target, draft = pair
    log = tmp_path_factory.mktemp("log") / "server.log"
    return serve(target, [*MICRO, *speculative(draft), *flags], log)


@pytest.fixture(scope="module")
def server(pair, tmp_path_factory):
    with started(pair, tmp_path_factory) as server:
        yield server


@torch.inference_mode()
def exact(target, filters) -> dict[tuple[int, ...], float]:
    """Joint distribution of three tokens; `filters` turns logits into probabilities."""
    model = reference.load_target(target)
    pairs = list(itertools.product(range(VOCAB), repeat=2))
    batch = torch.tensor([[*PROMPT, a, b] for a, b in pairs])
    rows = filters(model(batch).logits[:, len(PROMPT) - 1 :].double())
    return {
        (a, b, c): float(rows[i, 0, a] * rows[i, 1, b] * rows[i, 2, c])
        for i, (a, b) in enumerate(pairs)
        for c in range(VOCAB)
    }


def samples(server, **params) -> list[tuple[int, ...]]:
    """Three tokens from each of SAMPLES requests; they ask for more, so that no window is cut."""
    answers = server.post(
        "/generate",
        {
            "input_ids": [PROMPT] * SAMPLES,
            "sampling_params": {"max_new_tokens": 4, "ignore_eos": True, **params},
        },
        timeout_s=600,
    )
    return [tuple(answer["output_ids"][:3]) for answer in answers]


def check_plain_sampling(pair, server) -> list[list[int]]:
    """Returns the windows of the last rounds."""
    found = samples(server, temperature=1.0)
    p = exact(pair[0], lambda logits: logits.softmax(-1))
    assert g_test(found, p) > FALSE_ALARM
    wrong = exact(pair[0], lambda logits: (logits / 1.5).softmax(-1))
    assert g_test(found, wrong) < FALSE_ALARM, "the check must see a wrong distribution"
    seen = info(server)
    assert 1.05 < seen["accept_length"] < 4.0, "both acceptance and rejection have to happen"
    assert_no_leak(server)
    return seen["windows_of_rounds"]


def test_plain_sampling_with_trimmed_windows(pair, tmp_path_factory):
    """Half of the draft tokens is really trimmed; the batch shares the budget."""
    flags = [*mode("compact"), *budget("0.5")]
    with started(pair, tmp_path_factory, *flags) as server:
        for batch in check_plain_sampling(pair, server):
            assert sum(batch) == len(batch) + 7 * len(batch) // 2


def test_plain_sampling(pair, server):
    assert {w for batch in check_plain_sampling(pair, server) for w in batch} == {8}


def test_filtered_sampling(pair, server):
    def top_k_of_cooled(logits: torch.Tensor) -> torch.Tensor:
        p = (logits / 0.8).softmax(-1)
        kept = torch.where(p >= p.topk(4, dim=-1).values[..., -1:], p, 0.0)
        return kept / kept.sum(-1, keepdim=True)

    p = exact(pair[0], top_k_of_cooled)
    p = {outcome: probability for outcome, probability in p.items() if probability > 0}
    assert g_test(samples(server, temperature=0.8, top_k=4), p) > FALSE_ALARM


def test_greedy_and_sampling_requests_share_a_batch(pair, server):
    model = reference.load_target(pair[0])
    expected = reference.greedy(model, PROMPT, 12)
    payload = {
        "input_ids": [PROMPT] * 16,
        "sampling_params": [
            {"max_new_tokens": 12, "ignore_eos": True, "temperature": 1.0 * (i % 2)}
            for i in range(16)
        ],
    }
    answers = server.post("/generate", payload)
    assert all(a["output_ids"] == expected for a in answers[::2])
    assert any(a["output_ids"] != expected for a in answers[1::2])
    assert generate(server, PROMPT, 12)["output_ids"] == expected
