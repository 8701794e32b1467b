"""The verify modes, with a trained pair (the tiny target and its DSPARK draft) on real servers.

Greedy output is that of the server without speculation, whatever the windows are: sized by the
table, none, all, or another number every round; packed into few tiers, so that much is padding.
Sixteen requests of 1 to 120 tokens at 1, 4, 8 and 16 concurrent ones, in float32.
"""

from __future__ import annotations

import json

import pytest

from servers import assert_no_leak, generate, generate_all, info, metric, serve, speculative
from sglang_dspark.serving import Server
from trained import ARGS, COARSE, DRAFT, REQUESTS, TARGET, budget, mode

pytestmark = pytest.mark.server

SMALL_POOL = ["--max-total-tokens", "768", "--schedule-conservativeness", "0.05"]
CONFIGS = {
    "compact, coarse tiers": mode("compact", *COARSE),
    "compact, nothing": mode("compact", *COARSE, *budget("0")),
    "compact, everything": mode("compact", *COARSE, *budget("1")),
    "compact, half": mode("compact", *COARSE, *budget("0.5")),
    "compact, random, pool too small": mode(
        *("compact", *budget("random"), *SMALL_POOL),
        *("--page-size", "16", "--chunked-prefill-size", "32"),
    ),
    "compact, no overlap": mode("compact", "--disable-overlap-schedule"),
    "cap-accept": mode("cap-accept"),
    "cap-accept, half": mode("cap-accept", *COARSE, *budget("0.5")),
}


SAMPLED: dict[str, list[list[int]]] = {}  # of configurations with half of the budget


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory):
    with serve(TARGET, ARGS, tmp_path_factory.mktemp("log") / "log") as server:
        return generate_all(server, REQUESTS, 1)


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def server(request, tmp_path_factory):
    args = [*ARGS, *speculative(DRAFT), *CONFIGS[request.param]]
    environ = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    if "pool too small" in request.param:
        environ |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
    with serve(TARGET, args, tmp_path_factory.mktemp("log") / "log", **environ) as server:
        server.name = request.param
        if "half" in request.param:  # first of all: both modes start from the same seed
            SAMPLED[request.param] = [
                generate(server, prompt, length, temperature=1.0)["output_ids"]
                for prompt, length in REQUESTS
            ]
        yield server


@pytest.mark.parametrize("concurrency", [1, 4, 8, 16])
def test_output_equals_no_speculation(server: Server, expected, concurrency):
    assert generate_all(server, REQUESTS, concurrency) == expected
    assert_no_leak(server)


def test_windows_are_what_was_asked_for(server: Server):
    """After the runs above: what the server says of itself is what happened."""
    seen = info(server)
    windows = [w for batch in seen["windows_of_rounds"] for w in batch]
    padding = metric(server, "sglang_dspark:padding_tokens_total")
    assert metric(server, "sglang_dspark:verified_tokens_total") == seen["verified"]
    assert metric(server, "sglang_dspark:verify_windows_total") == seen["windows"]
    if "nothing" in server.name:
        assert set(windows) == {1} and seen["accept_length"] == 1
    elif "everything" in server.name:
        assert set(windows) == {8}
    elif "half" in server.name:
        for batch in seen["windows_of_rounds"]:
            assert sum(batch) == len(batch) + int(0.5 * 7 * len(batch))
    else:
        assert len(set(windows)) > 3, "a scheduler that always does the same proves little"
    if "cap-accept" in server.name:
        assert padding == 0
        assert 0 < seen["utilisation"] <= 1
        assert metric(server, "sglang_dspark:accept_ceilings_total") > 0
    else:
        assert seen["utilisation"] is None
        if "20,60,128" in server.command:
            assert padding > 0, "padding is what these tiers are for"
            # Rounds without a draft need no tier where there are no graphs.
            steps = zip(seen["tokens"], seen["depths"], strict=True)
            assert {tokens for tokens, depth in steps if depth} <= {20, 60, 128}
        assert seen["padding"] == pytest.approx(padding / seen["computed"])
    if "half" not in server.name and "everything" not in server.name:
        return
    # Half of the requests are random tokens, of which the draft knows little.
    assert seen["accept_length"] > 1.2


def test_the_start_told_what_is_in_force(server: Server):
    log = server.log.read_text()
    assert "sglang-dspark: algorithm=DSPARK mode=" + server.name.split(",")[0] in log
    forced = "--speculative-verify-budget" in server.command
    source = "cost table: " + ("none, the budget is fixed" if forced else "measured now")
    assert source in log and source.removeprefix("cost table: ") in json.dumps(info(server))
    assert "calibration: none (identity)" in log


def test_a_response_tells_its_windows(server: Server):
    """SGLang's own fields of meta_info."""
    meta = generate(server, REQUESTS[9][0], 40)["meta_info"]
    histogram = meta["spec_cap_lens_histogram"]
    assert sum(histogram) == meta["spec_verify_ct"]
    total = sum(length * count for length, count in enumerate(histogram))
    assert meta["spec_cap_length"] == pytest.approx(total / meta["spec_verify_ct"])
    # Its accept length counts the token of the prefill too, which no round made.
    accept_length = meta["spec_accept_length"] - 1 / meta["spec_verify_ct"]
    assert accept_length <= meta["spec_cap_length"] + 1e-9
    if "cap-accept" in server.name:
        assert meta["spec_block_accept_length"] >= accept_length - 1e-9
    else:
        assert "spec_block_accept_length" not in meta


def test_a_retracted_request_is_served(server: Server):
    small = "pool too small" in server.name
    assert ("#retracted_reqs" in server.log.read_text()) == small


def test_cap_accept_commits_what_compact_commits():
    """Same seed, same budgets, temperature 1: token for token."""
    assert SAMPLED["compact, half"] == SAMPLED["cap-accept, half"]
    assert len({tuple(tokens[:2]) for tokens in SAMPLED["compact, half"]}) > 8
