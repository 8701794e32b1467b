"""Acceptance as a graph does it: over static buffers that earlier rounds have used, and for more
requests than there are. Here the hook that SGLang calls in a capture is called at every replay."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cuda_graph.tiers import Tier
from sglang_dspark.verify.accept import accept_greedy
from sglang_dspark.verify.captured import CapturedAccept
from sglang_dspark.verify.layout import VerifyRows, full_rows, packed_rows
from sglang_dspark.verify.simulated import SimulatedAcceptance

WIDTH, VOCAB, SLOTS = 4, 11, 6
CPU = torch.device("cpu")


def replay(captured: CapturedAccept, rows: VerifyRows, logits: torch.Tensor, graph_rows: int):
    """What a graph for SLOTS requests and graph_rows rows does with the rows of a round."""
    captured.stage(rows, drafted=WIDTH - 1)
    ids = torch.zeros(graph_rows, dtype=torch.int64)
    ids[: len(rows.tokens)] = rows.tokens
    padded = torch.randn(graph_rows, VOCAB)
    padded[: len(logits)] = logits
    captured.capture(
        None,
        SimpleNamespace(next_token_logits=padded),
        SimpleNamespace(input_ids=ids, batch_size=min(graph_rows, SLOTS)),
        graph_rows,
    )
    return captured.verdict(graph_rows, len(rows.index))


def a_round(generator: torch.Generator, requests: int) -> torch.Tensor:
    """Window tokens of a few kinds, so that drafts are often right."""
    return torch.randint(0, 3, (requests, WIDTH), generator=generator)


def logits_for(rows: VerifyRows, generator: torch.Generator) -> torch.Tensor:
    logits = torch.randn(len(rows.tokens), VOCAB, generator=generator)
    logits[:, :3] += 5
    return logits


def expected(tokens: torch.Tensor, logits: torch.Tensor, rows: VerifyRows):
    return accept_greedy(tokens[:, 1:], logits.argmax(dim=-1)[rows.index], rows.windows)


def assert_same(found, wanted, *, ceiling: bool) -> None:
    assert found.commit_lens.tolist() == wanted.commit_lens.tolist()
    assert found.commit_lens.dtype == wanted.commit_lens.dtype
    assert found.bonus.tolist() == wanted.bonus.tolist()
    for length, ours, theirs in zip(
        wanted.commit_lens.tolist(), found.tokens.tolist(), wanted.tokens.tolist(), strict=True
    ):
        assert ours[:length] == theirs[:length]
    if ceiling:
        assert found.ceiling.tolist() == wanted.ceiling.tolist()


def test_a_graph_accepts_what_is_accepted_outside_of_it():
    """Full, capped and packed windows in turns, of different numbers of requests."""
    generator = torch.Generator().manual_seed(0)
    captured = CapturedAccept(SLOTS, WIDTH, CPU)
    lengths = set()
    for step in range(60):
        requests = int(torch.randint(1, SLOTS + 1, (), generator=generator))
        tokens = a_round(generator, requests)
        positions = torch.arange(WIDTH).expand(requests, WIDTH) + 7
        windows = torch.randint(1, WIDTH + 1, (requests,), generator=generator)
        kind = ("full", "capped", "packed", "packed", "full")[step % 5]
        if kind == "packed":
            tier = Tier(int(windows.sum()) + step % 3, SLOTS)
            rows, graph_rows = packed_rows(tokens, positions, windows, tier), tier.tokens
        else:
            rows = full_rows(tokens, positions, windows if kind == "capped" else None)
            graph_rows = SLOTS * WIDTH
        logits = logits_for(rows, generator)
        found = replay(captured, rows, logits, graph_rows)
        assert_same(found, expected(tokens, logits, rows), ceiling=kind != "packed")
        lengths |= set(found.commit_lens.tolist())
    assert lengths == {1, 2, 3, 4}, "every length has to occur, or little was shown"


def test_a_verdict_outlives_the_next_replay():
    generator = torch.Generator().manual_seed(1)
    captured = CapturedAccept(SLOTS, WIDTH, CPU)
    tokens = a_round(generator, 2)
    rows = full_rows(tokens, torch.zeros_like(tokens), None)
    logits = logits_for(rows, generator)
    first = replay(captured, rows, logits, 8)
    before = (first.tokens.clone(), first.bonus.clone(), first.commit_lens.clone())
    graph = captured._verdicts[8]  # what a replay of a real graph writes again
    for part in (graph.tokens, graph.bonus, graph.commit_lens):
        part.fill_(-1)
    assert all(
        torch.equal(now, then)
        for now, then in zip((first.tokens, first.bonus, first.commit_lens), before, strict=True)
    )


@pytest.mark.parametrize("drafted", [0, 1, 3])
def test_made_up_acceptance_knows_how_much_was_drafted(drafted):
    made_up = SimulatedAcceptance([1.0] * 3, CPU, torch.Generator().manual_seed(0))
    captured = CapturedAccept(SLOTS, WIDTH, CPU, made_up)
    tokens = torch.zeros(3, WIDTH, dtype=torch.int64)
    rows = full_rows(tokens, torch.zeros_like(tokens), None)
    captured.stage(rows, drafted)
    captured.capture(
        None,
        SimpleNamespace(next_token_logits=torch.randn(12, VOCAB)),
        SimpleNamespace(input_ids=rows.tokens, batch_size=3),
        12,
    )
    assert captured.verdict(12, 3).commit_lens.tolist() == [drafted + 1] * 3
