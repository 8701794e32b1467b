"""DFLASH and EAGLE3 in every verify mode, with trained drafts of the tiny target.

Greedy output is that of the server without speculation: as in test_verify_modes.py, whose subject
is DSPARK. Sampled output, and drafts of other layouts: test_layouts.py.
"""

from __future__ import annotations

import pytest

from servers import assert_no_leak, generate_all, info, serve, speculative, tell
from trained import ARGS, COARSE, PACKAGE, REQUESTS, TARGET, budget, mode

pytestmark = pytest.mark.server

SMALL_POOL = ["--max-total-tokens", "768", "--schedule-conservativeness", "0.05"]
HALF, EVERYTHING = 0.5, 1.0
# Flags, and what the running server is told to verify of its drafts; None: what its flags say.
SERVERS = {
    "DFLASH, compact, coarse tiers": (mode("compact", *COARSE), (None, HALF, EVERYTHING)),
    "DFLASH, cap-accept, page 16": (
        mode("cap-accept", "--page-size", "16", "--chunked-prefill-size", "32"),
        (HALF,),
    ),
    "EAGLE3, compact, coarse tiers": (mode("compact", *COARSE), (None, HALF, EVERYTHING)),
    "EAGLE3, compact, random, pool too small": (
        mode(
            *("compact", *budget("random"), *SMALL_POOL),
            *("--disable-radix-cache", "--chunked-prefill-size", "32", "--page-size", "16"),
        ),
        (None,),
    ),
    "EAGLE3, static, four steps, no overlap": (
        [
            *("--speculative-num-steps", "4", "--speculative-eagle-topk", "1"),
            "--disable-overlap-schedule",
        ],
        (None,),
    ),
}


@pytest.fixture(scope="module", params=SERVERS, ids=str)
def server(request, tmp_path_factory):
    algorithm = request.param.split(",")[0]
    draft = PACKAGE / "drafts" / f"tiny-{algorithm.lower()}"
    args = [*ARGS, *speculative(draft, algorithm=algorithm), *SERVERS[request.param][0]]
    environ = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    if "pool too small" in request.param:
        environ |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
    with serve(TARGET, args, tmp_path_factory.mktemp("log") / "log", **environ) as server:
        server.name = request.param
        yield server


def test_output_equals_no_speculation(server, trained_greedy):
    for share in SERVERS[server.name][1]:
        if share is not None:
            tell(server, dspark_force_budget_frac=share)
        tell(server, dspark_clear_info_records=True)
        # Long requests are alone anyway, at the end of every batch.
        for concurrency, number in ((1, 10), (8, 16)) if share else ((1, 16), (8, 16), (16, 16)):
            outputs = generate_all(server, REQUESTS[:number], concurrency)
            assert outputs == trained_greedy[:number], concurrency
            assert_no_leak(server)
        check_records(server, share)
    if "pool too small" in server.name:
        assert "#retracted_reqs" in server.log.read_text()


def check_records(server, share: float | None) -> None:
    """What the server says of itself since it was told."""
    seen = info(server)
    algorithm, width = server.name.split(",")[0], 5 if "four steps" in server.name else 8
    assert seen["algorithm"] == algorithm
    windows = [w for batch in seen["windows_of_rounds"] for w in batch]
    if share == HALF:
        for batch in seen["windows_of_rounds"]:
            assert sum(batch) == len(batch) + int(0.5 * 7 * len(batch))
    if share == EVERYTHING or "static" in server.name:
        assert set(windows) == {width}
        # Of these requests, a round accepts 0.3 tokens (DFLASH) or 0.7; a wrong draft, none.
        assert seen["accept_length"] > (1.2 if algorithm == "DFLASH" else 1.5)
