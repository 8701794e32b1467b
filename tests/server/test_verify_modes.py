"""The verify modes, with a trained pair (the tiny target and its DSPARK draft) on real servers.

Greedy output is that of the server without speculation, whatever the windows are: sized by the
table, none, all, or another number every round; packed into few tiers, so that much is padding.
Sixteen requests of 1 to 120 tokens at 1, 8 and 16 concurrent ones, in float32. A running server
can be told another budget: so few servers are started.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from servers import assert_no_leak, generate, generate_all, info, metric, serve, speculative, tell
from sglang_dspark.serving import Server
from trained import ARGS, COARSE, DRAFT, REQUESTS, TARGET, budget, mode

pytestmark = pytest.mark.server

SMALL_POOL = ["--max-total-tokens", "768", "--schedule-conservativeness", "0.05"]
SERVERS = {
    "compact": mode("compact"),
    "compact, random, coarse tiers, pool too small": mode(
        *("compact", *budget("random"), *COARSE, *SMALL_POOL),
        *("--disable-radix-cache", "--chunked-prefill-size", "32"),
    ),
    "compact, no overlap, page 16, files": mode(
        *("compact", "--disable-overlap-schedule", "--page-size", "16"),
    ),
    "cap-accept": mode("cap-accept"),
}
# Shares of the drafts that a running server is told to verify, after what its flags say (None).
NOTHING, HALF, EVERYTHING = 1e-3, 0.5, 1.0  # SGLang refuses to force a share of 0
SHARES = {
    "compact": (None, NOTHING, EVERYTHING, HALF),
    "cap-accept": (None, HALF),
}
# A table that says that a row costs much, and a calibration; SGLang's own forms.
TABLE = {
    "sample_batch_tokens": [1, 9, 17, 33, 65],
    "sample_steps_per_sec": [100.0, 60.0, 30.0, 10.0, 2.0],
    "max_batch_tokens": 128,
}
CALIBRATION = {"temperatures": [1.5] * 7}

SAMPLED: dict[str, list[list[int]]] = {}  # by server, with half of the budget


def write_files(folder: Path) -> list[str]:
    table, calibration = folder / "table.json", folder / "sts.json"
    table.write_text(json.dumps(TABLE))
    calibration.write_text(json.dumps(CALIBRATION))
    return [
        *("--speculative-dspark-sps-table-path", str(table)),
        *("--speculative-dspark-confidence-sts-path", str(calibration)),
    ]


@pytest.fixture(scope="module", params=SERVERS, ids=str)
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    args = [*ARGS, *speculative(DRAFT), *SERVERS[request.param]]
    if "files" in request.param:
        args += write_files(folder)
    environ = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    if "pool too small" in request.param:
        environ |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
    with serve(TARGET, args, folder / "log", **environ) as server:
        server.name = request.param
        generate(server, [1], 3)  # so that there are counts
        yield server


def count(server: Server) -> dict[str, float]:
    """What our counters say."""
    names = ["verified_tokens", "verify_windows", "padding_tokens"]
    if "cap-accept" in server.name:
        names += ["accept_ceilings"]
    return {name: metric(server, f"sglang_dspark:{name}_total") for name in names}


def test_output_equals_no_speculation(server: Server, trained_greedy):
    for share in SHARES.get(server.name, (None,)):
        if share is not None:
            tell(server, dspark_force_budget_frac=share)
        tell(server, dspark_clear_info_records=True)
        before = count(server)
        # Long requests are alone anyway, at the end of every batch.
        for concurrency, number in ((1, 10), (8, 16)) if share else ((1, 16), (8, 16), (16, 16)):
            outputs = generate_all(server, REQUESTS[:number], concurrency)
            assert outputs == trained_greedy[:number], concurrency
            assert_no_leak(server)
        check_records(server, share, before)
        if share == HALF:  # the first random numbers: both modes have the same seed
            SAMPLED[server.name] = [
                generate(server, prompt, min(length, 24), temperature=1.0)["output_ids"]
                for prompt, length in REQUESTS
            ]


def check_records(server: Server, share: float | None, before: dict[str, float]) -> None:
    """What the server says of itself is what happened since."""
    seen = info(server)
    counted = {name: value - before[name] for name, value in count(server).items()}
    assert counted["verified_tokens"] == seen["verified"]
    assert counted["verify_windows"] == seen["windows"]
    windows = [w for batch in seen["windows_of_rounds"] for w in batch]
    if share == NOTHING:
        assert set(windows) == {1} and seen["accept_length"] == 1
    elif share == EVERYTHING:
        assert set(windows) == {8}
    elif share == HALF:
        for batch in seen["windows_of_rounds"]:
            assert sum(batch) == len(batch) + int(0.5 * 7 * len(batch))
    else:
        assert len(set(windows)) > 2, "a scheduler that always does the same proves little"
    if "cap-accept" in server.name:
        assert counted["padding_tokens"] == 0
        assert 0 < seen["utilisation"] <= 1
        assert counted["accept_ceilings"] > 0
    else:
        assert seen["utilisation"] is None
        if "coarse" in server.name:
            assert counted["padding_tokens"] > 0, "padding is what these tiers are for"
            # Rounds without a draft need no tier where there are no graphs.
            steps = zip(seen["tokens"], seen["depths"], strict=True)
            assert {tokens for tokens, depth in steps if depth} <= {20, 60, 128}
        assert seen["padding"] == pytest.approx(counted["padding_tokens"] / seen["computed"])
    if "files" in server.name:
        assert seen["schedule"]["confidence fit"] == "off"
        assert seen["schedule"]["calibration"].endswith("sts.json")
    if share in (HALF, EVERYTHING):
        # Half of the requests are random tokens, of which the draft knows little.
        assert seen["accept_length"] > 1.2
    if "files" in server.name:
        assert seen["plain_rounds"] == 0, "SGLang's tables say nothing of rounds without a draft"
        assert seen["verified"] < 0.5 * 8 * seen["windows"], "nearly everything is trimmed"


def test_the_start_told_what_is_in_force(server: Server):
    log, schedule = server.log.read_text(), info(server)["schedule"]
    assert "sglang-dspark: algorithm=DSPARK mode=" + server.name.split(",")[0] in log
    table, calibration = "measured now", "none (identity)"
    if "random" in server.name:
        table = "none, the budget is fixed"
    if "files" in server.name:
        table, calibration = (str(server.log.parent / name) for name in ("table.json", "sts.json"))
    assert schedule["cost table"].startswith(table) and f"cost table: {table}" in log
    assert schedule["calibration"] == calibration and f"calibration: {calibration}" in log


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
    assert SAMPLED["compact"] == SAMPLED["cap-accept"]
    assert len({tuple(tokens[:2]) for tokens in SAMPLED["cap-accept"]}) > 8
