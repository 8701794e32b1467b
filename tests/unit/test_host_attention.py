"""Host attention against a literal reference: one request, one row, one head at a time.

Everything that a row may not read is NaN in these tests: every slot of the KV cache but the
live ones, so a leak through padding, masks or a neighbour shows as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sglang_dspark.host.attention import Workspace, attend
from sglang_dspark.host.reads import Kind, ReadPlan, padded_tokens, split_by_length

CAUSAL = Kind(causal=True, window=-1, swa_pool=False)
FULL = Kind(causal=False, window=-1, swa_pool=False)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass
class Batch:
    q: torch.Tensor  # [M, H, D], rows packed in request order
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    req_to_token: torch.Tensor
    requests: torch.Tensor
    q_lens: torch.Tensor
    kv_lens: torch.Tensor

    def plan(self) -> ReadPlan:
        return ReadPlan(
            req_to_token=self.req_to_token,
            requests=self.requests,
            q_lens=self.q_lens,
            kv_lens=self.kv_lens,
            token_bytes=2 * self.k_cache[0].nbytes,
        )

    def attend(self, kind: Kind = CAUSAL, **options: float) -> torch.Tensor:
        return attend(
            self.q,
            self.k_cache,
            self.v_cache,
            self.plan(),
            kind,
            Workspace(),
            scale=0.3,
            **options,
        )

    def only(self, request: int, row: int, kind: Kind = CAUSAL) -> torch.Tensor:
        """The row as a batch of its own would decode it: one row, nothing after it."""
        start = int(self.q_lens[:request].sum()) + row
        kv_len = self.kv_lens[request] - self.q_lens[request] + row + 1
        alone = Batch(
            self.q[start : start + 1],
            self.k_cache,
            self.v_cache,
            self.req_to_token,
            self.requests[request : request + 1],
            torch.tensor([1]),
            kv_len[None],
        )
        return alone.attend(kind)[0]


def make_batch(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    heads: int = 9,
    kv_heads: int = 3,
    dim: int = 64,
    page_size: int = 1,
    dtype: torch.dtype = torch.float32,
    padding_rows: int = 0,
    seed: int = 0,
) -> Batch:
    """Requests in shuffled rows and pages of a cache that is NaN outside of their tokens."""
    rng = torch.Generator().manual_seed(seed)
    width = -(-max(kv_lens) // page_size) * page_size
    num_pages = len(kv_lens) * width // page_size + 3
    pages = torch.randperm(num_pages - 1, generator=rng) + 1
    k_cache = torch.full((num_pages * page_size, kv_heads, dim), math.nan, dtype=dtype)
    v_cache = k_cache.clone()
    req_to_token = torch.zeros(len(kv_lens) + 2, width + 5, dtype=torch.int32)
    requests = torch.randperm(len(kv_lens) + 2, generator=rng)[: len(kv_lens)]
    for i, n in enumerate(kv_lens):
        mine = pages[i * (width // page_size) : (i + 1) * (width // page_size)]
        slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()[:n]
        req_to_token[requests[i], :n] = slots.int()
        k_cache[slots] = torch.randn(n, kv_heads, dim, generator=rng).to(dtype)
        v_cache[slots] = torch.randn(n, kv_heads, dim, generator=rng).to(dtype)
    rows = sum(q_lens) + padding_rows
    q = torch.randn(rows, heads, dim, generator=rng).to(dtype)
    return Batch(
        q, k_cache, v_cache, req_to_token, requests, torch.tensor(q_lens), torch.tensor(kv_lens)
    )


def reference(batch: Batch, kind: Kind, logit_cap: float = 0.0) -> torch.Tensor:
    """[M, H*D] in float64 by loops over requests, rows and heads."""
    num_heads = batch.q.shape[1]
    group = num_heads // batch.k_cache.shape[1]
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    m = 0
    lens = zip(batch.requests.tolist(), batch.q_lens.tolist(), batch.kv_lens.tolist(), strict=True)
    for request, q_len, kv_len in lens:
        for j in range(q_len):
            position = kv_len - q_len + j
            low, high = 0, position if kind.causal else kv_len - 1
            if kind.window >= 0:
                low = max(0, position - kind.window)
                if not kind.causal:
                    high = min(high, position + kind.window)
            slots = batch.req_to_token[request, low : high + 1].long()
            for h in range(num_heads):
                k = batch.k_cache[slots, h // group].double()
                v = batch.v_cache[slots, h // group].double()
                logits = k @ batch.q[m, h].double() * 0.3
                if logit_cap:
                    logits = torch.tanh(logits / logit_cap) * logit_cap
                out[m, h] = torch.softmax(logits, dim=0) @ v
            m += 1
    return out.flatten(1)


def assert_matches(batch: Batch, kind: Kind = CAUSAL, logit_cap: float = 0.0) -> None:
    out = batch.attend(kind, logit_cap=logit_cap)
    expected = reference(batch, kind, logit_cap)
    assert out.dtype == batch.q.dtype
    worst = (out.double() - expected).abs().max().item()
    assert worst <= TOLERANCE[batch.q.dtype] * (1 + expected.abs().max().item()), worst


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What MKL_CBWR does for servers: the same kernels on every thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@BOTH
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kv_lens", [[1], [15, 16, 17], [1, 2, 33, 200, 7, 64, 65, 193]])
def test_decode_reads_exactly_its_own_tokens(
    dtype: torch.dtype, page_size: int, kv_lens: list[int]
) -> None:
    assert_matches(make_batch([1] * len(kv_lens), kv_lens, page_size=page_size, dtype=dtype))


@BOTH
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("width", [2, 5, 8, 16])
def test_uniform_verify_is_causal_inside_the_window(
    dtype: torch.dtype, page_size: int, width: int
) -> None:
    lens = [width, width + 1, 40, 16 * 3]  # an empty prefix, a short one, page edges
    assert_matches(make_batch([width] * 4, lens, page_size=page_size, dtype=dtype))


@BOTH
@pytest.mark.parametrize("padding_rows", [0, 7])
def test_ragged_verify_gives_every_request_its_own_window(
    dtype: torch.dtype, padding_rows: int
) -> None:
    batch = make_batch(
        [1, 8, 3, 1, 5], [30, 8, 100, 1, 48], padding_rows=padding_rows, page_size=16, dtype=dtype
    )
    assert_matches(batch)


def test_rows_past_the_last_request_are_zero_and_change_nothing() -> None:
    # A verify forward is padded to its tier; the padding must not meet any request.
    lens = [1, 8, 3], [30, 8, 100]
    padded = make_batch(*lens, padding_rows=9)
    padded.q[-9:] = math.nan
    out = padded.attend()
    assert torch.equal(out[-9:], torch.zeros_like(out[-9:]))
    assert torch.equal(out[:-9], make_batch(*lens).attend())


def test_a_request_slot_without_rows_is_skipped() -> None:
    batch = make_batch([2, 3], [20, 30])
    expected = batch.attend()
    batch.requests = torch.cat([batch.requests, torch.tensor([0])])
    batch.q_lens = torch.tensor([2, 3, 0])
    batch.kv_lens = torch.tensor([20, 30, 0])
    assert torch.equal(batch.attend(), expected)


@BOTH
@pytest.mark.parametrize("prefix", [0, 1, 37])
def test_extend_reads_prefix_and_earlier_rows(dtype: torch.dtype, prefix: int) -> None:
    q_lens = [1, 2, 33, 40]  # both sides of the limit between short and long requests
    lens = [prefix + q for q in q_lens]
    assert_matches(make_batch(q_lens, lens, page_size=16, dtype=dtype, heads=4, kv_heads=2, dim=32))


def test_extend_longer_than_one_block_of_rows() -> None:
    batch = make_batch([300, 1, 20], [310, 50, 20], heads=4, kv_heads=2, dim=16)
    assert_matches(batch)
    assert len(batch.plan().groups) == 3, "two blocks of rows and the short requests"


@BOTH
def test_draft_block_attends_to_the_whole_block(dtype: torch.dtype) -> None:
    batch = make_batch([7, 7, 7], [7, 30, 64], dtype=dtype)
    assert_matches(batch, FULL)
    assert not torch.equal(batch.attend(FULL), batch.attend(CAUSAL))


def test_long_block_without_causality_attends_to_everything() -> None:
    assert_matches(make_batch([40, 300], [60, 300], heads=2, kv_heads=1, dim=16), FULL)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 4, 31, 1000])
def test_sliding_window_counts_from_the_row(causal: bool, window: int) -> None:
    batch = make_batch([1, 6, 2, 40], [90, 50, 3, 70], page_size=16)
    assert_matches(batch, Kind(causal=causal, window=window, swa_pool=False))


def test_sliding_window_reads_nothing_before_it() -> None:
    # Tokens that fell out of every row's window may have been freed: here they are NaN.
    batch = make_batch([3, 1], [80, 40])
    window = Kind(causal=True, window=10, swa_pool=False)
    expected = batch.attend(window)
    for request, first in ((0, 80 - 3 - 10), (1, 40 - 1 - 10)):
        dead = batch.req_to_token[batch.requests[request], :first].long()
        batch.k_cache[dead] = math.nan
        batch.v_cache[dead] = math.nan
    assert torch.equal(batch.attend(window), expected)


def test_sliding_window_pool_has_slots_of_its_own() -> None:
    batch = make_batch([2, 1], [20, 9])
    expected = batch.attend(Kind(True, 5, False))
    moved = torch.randperm(batch.k_cache.shape[0], generator=torch.Generator().manual_seed(1))
    out = attend(
        batch.q,
        batch.k_cache[moved.argsort()],
        batch.v_cache[moved.argsort()],
        batch.plan(),
        Kind(True, 5, True),
        Workspace(),
        scale=0.3,
        full_to_swa=moved,
    )
    assert torch.equal(out, expected)


def test_layers_whose_heads_differ_in_number_and_size_share_their_memory() -> None:
    # As in Gemma 4: full layers have fewer, wider KV heads than sliding ones, and other slots.
    lens = [1, 3, 1, 2], [40, 9, 3, 25]
    sliding = make_batch(*lens, heads=4, kv_heads=2, dim=16)
    full = make_batch(*lens, heads=4, kv_heads=1, dim=32)
    plan, workspace, kind = sliding.plan(), Workspace(), Kind(True, 7, False)
    full.req_to_token, full.requests = sliding.req_to_token, sliding.requests
    full.k_cache, full.v_cache = (cache.nan_to_num() for cache in (full.k_cache, full.v_cache))
    for _ in range(2):
        for batch, layer in ((sliding, kind), (full, CAUSAL)):
            out = attend(batch.q, batch.k_cache, batch.v_cache, plan, layer, workspace, scale=0.3)
            assert torch.equal(out, batch.attend(layer))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (14, 2), (9, 3)])
def test_query_heads_share_their_kv_head(heads: int, kv_heads: int) -> None:
    assert_matches(make_batch([1, 4, 40], [17, 30, 90], heads=heads, kv_heads=kv_heads, dim=32))


def test_logit_cap_limits_the_logits() -> None:
    batch = make_batch([1, 4, 40], [17, 30, 90], dim=32)
    assert_matches(batch, CAUSAL, logit_cap=5.0)


def test_value_heads_may_have_another_size() -> None:
    batch = make_batch([1, 4], [17, 30])
    batch.v_cache = batch.v_cache[:, :, :48].contiguous()
    out = batch.attend()
    assert out.shape == (5, 9 * 48)
    assert not out.isnan().any()


@BOTH
def test_a_row_does_not_depend_on_its_window_or_its_batch(dtype: torch.dtype) -> None:
    # Verify must choose the token that decode would choose. Bits may differ on other CPUs,
    # where matrix products are cut differently; a last-digit difference is allowed for.
    batch = make_batch([8, 3, 1, 5], [210, 33, 400, 700], dtype=dtype)
    out = batch.attend()
    m = 0
    for request, q_len in enumerate(batch.q_lens.tolist()):
        for row in range(q_len):
            alone = batch.only(request, row)
            torch.testing.assert_close(out[m], alone, rtol=1e-2, atol=4e-7)
            m += 1


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (14, 2)])
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512"
    or "AuthenticAMD" not in Path("/proc/cpuinfo").read_text(),
    reason="MKL's order of sums was looked at on an AMD CPU with AVX-512 only",
)
def test_a_row_keeps_every_bit_in_any_window_and_batch(
    dtype: torch.dtype, heads: int, kv_heads: int, one_thread: None
) -> None:
    # Lengths around those at which MKL changes the order of its sums: 192, 384, 512.
    lens = [5, 190, 192, 193, 200, 383, 384, 385, 500, 512, 530, 710]
    batch = make_batch(
        [4, 1, 8, 3, 5, 2, 4, 7, 1, 6, 4, 2], lens, heads=heads, kv_heads=kv_heads, dtype=dtype
    )
    out = batch.attend()
    m = 0
    for request, q_len in enumerate(batch.q_lens.tolist()):
        for row in range(q_len):
            assert torch.equal(out[m], batch.only(request, row)), (lens[request], row)
            m += 1


def test_extend_in_chunks_gives_the_rows_of_extend_at_once() -> None:
    whole = make_batch([300], [300], heads=4, kv_heads=2)
    rest = make_batch([100], [300], heads=4, kv_heads=2)
    rest.q, rest.k_cache, rest.v_cache = whole.q[200:], whole.k_cache, whole.v_cache
    torch.testing.assert_close(rest.attend(), whole.attend()[200:], rtol=1e-4, atol=4e-7)


def test_requests_of_unequal_length_keep_their_place() -> None:
    # Long and short requests are attended apart and must come back in the order of the batch.
    lens = [900, 3, 850, 10, 1, 880, 5, 2]
    batch = make_batch([1] * 8, lens, kv_heads=3, dim=64)
    assert len(batch.plan().groups) > 1
    assert_matches(batch)


def test_splitting_by_length_covers_every_request_once_in_order() -> None:
    lengths = torch.tensor([900, 3, 850, 10, 1, 880, 5, 2])
    parts = split_by_length(lengths, budget=50)
    assert sorted(torch.cat(parts).tolist()) == list(range(8))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    assert [sorted(lengths[part].tolist()) for part in parts] == [
        [850, 880, 900],
        [1, 2, 3, 5, 10],
    ]
    assert len(split_by_length(lengths, budget=10_000)) == 1


def test_padding_of_tokens_avoids_the_lengths_that_change_the_order_of_sums() -> None:
    for tokens in range(1, 1200):
        padded = padded_tokens(tokens)
        assert tokens <= padded <= tokens + 207
        assert padded % 16 == 0
        assert not 192 < padded % 512 < 384


def test_too_few_rows_for_the_requests_is_an_error() -> None:
    batch = make_batch([2, 3], [20, 30])
    batch.q = batch.q[:-1]
    with pytest.raises(ValueError, match="has 4 rows, its requests need 5"):
        batch.attend()
