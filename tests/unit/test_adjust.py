"""Penalties inside a window equal penalties applied one token at a time."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_dspark.verify.adjust import PenaltyTables

VOCAB, WIDTH = 12, 4


def request(row: int, output: list[int] = (), **params):
    values = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": None,
        **params,
    }
    return SimpleNamespace(
        kv=SimpleNamespace(req_pool_idx=row),
        output_ids=list(output),
        eos_token_ids={1},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1),
        sampling_params=SimpleNamespace(**values),
    )


def one_by_one(logits: torch.Tensor, output: list[int], req) -> torch.Tensor:
    """SGLang's formulas for one row, with everything generated so far in `output`."""
    p, row = req.sampling_params, logits.clone()
    for token in range(VOCAB):
        count = output.count(token)
        row[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        if count:
            scale = p.repetition_penalty
            row[token] = row[token] / scale if row[token] > 0 else row[token] * scale
    if len(output) < p.min_new_tokens:
        for token in {1} | set(p.stop_token_ids or ()):
            row[token] = float("-inf")
    return row


REQUESTS = [
    request(5, frequency_penalty=0.7),
    request(2, presence_penalty=1.1, repetition_penalty=1.5),
    request(7),
    request(3, output=[4, 4, 9], frequency_penalty=0.3, presence_penalty=0.2),
    request(1, min_new_tokens=4, stop_token_ids={6}),
]


def test_windows_equal_a_token_by_token_replay_over_several_rounds():
    generator = torch.Generator().manual_seed(0)
    tables = PenaltyTables.empty(rows=9, vocab_size=VOCAB, device=torch.device("cpu"))
    tables.counts.fill_(99)  # what an earlier request left behind
    tables.frequency.fill_(99.0)
    tables.start(REQUESTS)
    rows = torch.tensor([req.kv.req_pool_idx for req in REQUESTS])
    outputs = [list(req.output_ids) for req in REQUESTS]
    for _ in range(4):
        window = torch.randint(VOCAB, (len(REQUESTS), WIDTH), generator=generator)
        logits = torch.randn(len(REQUESTS) * WIDTH, VOCAB, generator=generator)
        expected = torch.stack(
            [
                one_by_one(logits[r * WIDTH + j], outputs[r] + window[r, : j + 1].tolist(), req)
                for r, req in enumerate(REQUESTS)
                for j in range(WIDTH)
            ]
        )
        tables.apply(logits, rows, window)
        torch.testing.assert_close(logits, expected)
        lengths = torch.randint(1, WIDTH + 1, (len(REQUESTS),), generator=generator)
        tables.count(rows, window, lengths)
        for output, tokens, length in zip(outputs, window.tolist(), lengths.tolist(), strict=True):
            output += tokens[:length]


def test_a_request_without_penalties_is_left_alone():
    tables = PenaltyTables.empty(rows=4, vocab_size=VOCAB, device=torch.device("cpu"))
    tables.start([request(2)])
    logits = torch.randn(WIDTH, VOCAB)
    before = logits.clone()
    tables.apply(logits, torch.tensor([2]), torch.tensor([[1, 2, 3, 4]]))
    assert torch.equal(logits, before)
