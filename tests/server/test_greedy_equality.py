"""Greedy output is that of the target alone, whatever the batch and the server's settings are like.

float32, where ties do not occur by chance. The noisy pairs accept between 1 and 8 tokens a round.
Sixteen requests with prompts and outputs of 1 to 600 tokens arrive at odd moments at 1 and 8
concurrent ones; some share a prefix, so that the radix cache is hit. Alone, each round is that of
the plain PyTorch loop. The default settings are in test_requests.py, trimmed windows in
test_verify_modes.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import micro
import reference
from servers import (
    MICRO,
    assert_no_leak,
    assert_rounds_equal_the_loop,
    generate_all,
    info,
    metric,
    serve,
    speculative,
    tell,
)
from sglang_dspark.serving import Server

pytestmark = pytest.mark.server


@dataclass(frozen=True)
class Setting:
    head: str
    flags: tuple[str, ...]
    gamma: int = micro.GAMMA


# Room for the longest request and little more, and a scheduler that hopes for the best.
SMALL_POOL = ("--max-total-tokens", "768", "--schedule-conservativeness", "0.05")
SETTINGS = {
    "page 16, chunks of 32": Setting(
        "gated", ("--page-size", "16", "--chunked-prefill-size", "32")
    ),
    "gamma 3, no overlap, no radix cache, chunks of 64": Setting(
        "vanilla",
        (
            *("--speculative-num-draft-tokens", "4", "--disable-overlap-schedule"),
            *("--disable-radix-cache", "--chunked-prefill-size", "64"),
        ),
        gamma=3,
    ),
}


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def setting(request) -> Setting:
    return SETTINGS[request.param]


@pytest.fixture(scope="module")
def pair(setting: Setting, noisy_pairs) -> tuple[Path, Path]:
    return noisy_pairs[setting.head]


@pytest.fixture(scope="module")
def expected(pair) -> list[list[int]]:
    """transformers' own greedy."""
    target = reference.load_target(pair[0])
    return [reference.greedy(target, *request) for request in micro.requests()]


@pytest.fixture(scope="module")
def server(setting: Setting, pair, tmp_path_factory):
    target, draft = pair
    log = tmp_path_factory.mktemp("log") / "server.log"
    # Without records a static server leaves confidences alone.
    records = ["--speculative-verify-records", str(log.with_name("rounds.jsonl"))]
    args = [*MICRO, *speculative(draft), *SMALL_POOL, *setting.flags, *records]
    environ = {
        # Count every slot at every step: a leak stops the server at once.
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        # When the pool runs full depends on timing; some retractions come without fail.
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "25",
    }
    with serve(target, args, log, **environ) as server:
        yield server


@pytest.mark.parametrize("concurrency", [1, 8])
def test_output_equals_no_speculation(server: Server, expected, concurrency):
    tell(server, dspark_clear_info_records=True)
    assert generate_all(server, micro.requests(), concurrency) == expected
    assert info(server)["accept_length"] > 1.5
    assert_no_leak(server)


def test_every_round_equals_the_plain_pytorch_loop(server: Server, setting, pair):
    assert_rounds_equal_the_loop(server, *pair, setting.gamma)


@pytest.mark.parametrize("setting", ["page 16, chunks of 32"], indirect=True)
def test_the_radix_cache_was_hit(server: Server):
    assert metric(server, "sglang:cached_tokens_total") > 0


def test_a_small_pool_retracted_requests(server: Server):
    assert "#retracted_reqs" in server.log.read_text()
