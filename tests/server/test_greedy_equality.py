"""Greedy output is that of the same server without speculation, whatever the batch looks like.

float32, where ties do not occur by chance. The noisy pair accepts between 1 and 8 tokens a round.
Sixteen requests with prompts and outputs of 1 to 600 tokens arrive at odd moments at 1, 4 and 8
concurrent ones; some share a prefix, so that the radix cache is hit.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import micro
import reference
from servers import MICRO, assert_no_leak, generate_all, metric, serve, speculative
from sglang_dspark.serving import Server

pytestmark = pytest.mark.server

# (prompt length, output length)
LENGTHS = [
    *[(1, 40), (2, 1), (5, 2), (17, 3), (40, 7), (64, 8), (65, 9), (100, 30)],
    *[(333, 64), (600, 65), (16, 100), (31, 200), (8, 333), (3, 600), (100, 100), (100, 50)],
]


def prompts() -> list[tuple[list[int], int]]:
    rng = random.Random(0)
    tokens = [[rng.randrange(micro.VOCAB - 1) for _ in range(n)] for n, _ in LENGTHS]
    tokens[-1][:90] = tokens[-2][:90]  # a shared prefix
    return [(prompt, length) for prompt, (_, length) in zip(tokens, LENGTHS, strict=True)]


REQUESTS = prompts()

# Room for the longest request and little more, and a scheduler that hopes for the best.
SMALL_POOL = ["--max-total-tokens", "768", "--schedule-conservativeness", "0.05"]
CONFIGS = {
    "defaults": [],
    "page 16, chunks of 32": ["--page-size", "16", "--chunked-prefill-size", "32"],
    "no overlap": ["--disable-overlap-schedule"],
    "no radix cache, chunks of 64": ["--disable-radix-cache", "--chunked-prefill-size", "64"],
    "gamma 3": ["--speculative-num-draft-tokens", "4"],
    "pool too small": [*SMALL_POOL, "--disable-radix-cache"],
    "pool too small, page 16": [*SMALL_POOL, "--page-size", "16"],
}


@pytest.fixture(scope="module")
def expected(noisy_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory):
    """Output of the server without speculation, one request at a time."""
    log = tmp_path_factory.mktemp("log") / "baseline.log"
    with serve(noisy_pair[0], MICRO, log) as server:
        return generate_all(server, REQUESTS, 1)


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def server(request, noisy_pair, tmp_path_factory):
    target, draft = noisy_pair
    log = tmp_path_factory.mktemp("log") / "server.log"
    args = [*MICRO, *speculative(draft), *CONFIGS[request.param]]
    # Count every slot at every step: a leak stops the server at once.
    environ = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    if "--max-total-tokens" in args:
        # When the pool runs full depends on timing; some retractions come without fail.
        environ |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
    with serve(target, args, log, **environ) as server:
        yield server


def test_baseline_is_transformers_own_greedy(noisy_pair, expected):
    target = reference.load_target(noisy_pair[0])
    for i in (4, 7, 10, 15):
        prompt, length = REQUESTS[i]
        assert expected[i] == reference.greedy(target, prompt, length)


@pytest.mark.parametrize("concurrency", [1, 4, 8])
def test_output_equals_no_speculation(server: Server, expected, concurrency):
    assert generate_all(server, REQUESTS, concurrency) == expected
    assert_no_leak(server)


def test_speculation_helped_and_the_radix_cache_was_hit(server: Server):
    record = server.get("/server_info")["internal_states"][0]["dspark_info_record"]
    assert record["accept_length"] > 1.5, record
    if "--disable-radix-cache" not in server.command:
        assert metric(server, "sglang:cached_tokens_total") > 0


def test_a_small_pool_retracted_requests(server: Server):
    """The configurations with a small pool are there for this; elsewhere nothing is retracted."""
    small = "--max-total-tokens" in server.command
    assert ("#retracted_reqs" in server.log.read_text()) == small
