"""What requests ask for works under speculation, and the KV pool is as full after as before.

The yardstick is a server without speculation and without overlap: SGLang's overlap scheduler lets
penalties lag one token behind, ours count exactly. Servers have the default settings otherwise.
"""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import micro
import reference
from servers import (
    MICRO,
    assert_no_leak,
    assert_rounds_equal_the_loop,
    generate,
    generate_all,
    in_thread,
    info,
    metric,
    serve,
    speculative,
    tell,
)
from sglang_dspark.serving import HOST, Server
from trained import budget, mode

pytestmark = pytest.mark.server

CONTEXT = 640
ARGS = [*MICRO, "--context-length", str(CONTEXT)]


def tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(micro.VOCAB - 1) for _ in range(length)]


PROMPT = tokens(3, 30)
# Prompts with room for 1 to 12 more tokens; a full window is 8 tokens wide. SGLang itself refuses
# prompts that end within its safety margin of 6 tokens; speculation must not widen that margin.
NEAR_LIMIT = [(tokens(i, CONTEXT - i), i) for i in range(1, 13)]

# Parameters of one request each; all greedy, all compared with the yardstick.
ASKED = {
    "plain": {},
    "one token": {"max_new_tokens": 1},
    "stop token": {"stop_token_ids": list(range(0, 48, 5)), "ignore_eos": False},
    "frequency penalty": {"frequency_penalty": 1.5},
    "presence penalty": {"presence_penalty": 2.0},
    "repetition penalty": {"repetition_penalty": 1.8},
    # Not with a repetition penalty: SGLang without overlap applies the two kinds in the order of
    # a set of classes, which differs from process to process.
    "two penalties": {"frequency_penalty": 0.4, "presence_penalty": 0.7},
    "logit bias": {"logit_bias": {"3": 4.0, "11": -100.0, "20": -3.0}},
}


def ask(server: Server, params: dict) -> list[int]:
    params = {"max_new_tokens": 80, **params}
    return generate(server, PROMPT, params.pop("max_new_tokens"), **params)["output_ids"]


def near_limit(server: Server, request: tuple[list[int], int]) -> list[int] | str:
    """Output of a request that fills the context, or the status with which it is refused."""
    try:
        output: list[int] = generate(server, *request)["output_ids"]
        return output
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"


def logprobs(server: Server) -> tuple[list[float], list[list[tuple[float, int]]]]:
    answer = server.post(
        "/generate",
        {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 3,
        },
    )
    meta = answer["meta_info"]
    chosen = [entry[0] for entry in meta["output_token_logprobs"]]
    top = [[(p, token) for p, token, _ in row] for row in meta["output_top_logprobs"]]
    return chosen, top


@pytest.fixture(scope="module")
def pair(noisy_pairs) -> tuple[Path, Path]:
    return noisy_pairs["rnn"]


@pytest.fixture(scope="module")
def expected(pair, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "baseline.log"
    with serve(pair[0], [*ARGS, "--disable-overlap-schedule"], log) as server:
        return {
            "sixteen": generate_all(server, micro.requests(), 8),
            "asked": {name: ask(server, params) for name, params in ASKED.items()},
            "near limit": [near_limit(server, request) for request in NEAR_LIMIT],
            "logprobs": logprobs(server),
            "long": generate(server, PROMPT, 100)["output_ids"],
        }


# Windows that end anywhere: penalties and log-probabilities have to find their rows.
MODES = {"static": [], "compact, random": [*mode("compact"), *budget("random")]}


@pytest.fixture(scope="module", params=MODES, ids=str)
def server(request, pair, tmp_path_factory):
    target, draft = pair
    log = tmp_path_factory.mktemp("log") / "server.log"
    # Without records a static server leaves confidences alone.
    records = ["--speculative-verify-records", str(log.with_name("rounds.jsonl"))]
    args = [*ARGS, *speculative(draft), *MODES[request.param], *records]
    with serve(target, args, log, SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="1") as server:
        yield server


def test_no_speculation_is_transformers_own_greedy(expected, pair):
    """The yardstick of test_greedy_equality.py."""
    target = reference.load_target(pair[0])
    assert expected["sixteen"] == [reference.greedy(target, *r) for r in micro.requests()]


@pytest.mark.parametrize("concurrency", [1, 8])
def test_sixteen_requests_equal_no_speculation(server, expected, concurrency):
    """Around the sizes of pages and chunks; some share a prefix."""
    tell(server, dspark_clear_info_records=True)
    assert generate_all(server, micro.requests(), concurrency) == expected["sixteen"]
    assert info(server)["accept_length"] > 1.2
    assert metric(server, "sglang:cached_tokens_total") > 0
    assert_no_leak(server)


@pytest.mark.parametrize("server", ["static"], indirect=True)
def test_every_round_equals_the_plain_pytorch_loop(server, pair):
    assert_rounds_equal_the_loop(server, *pair)


@pytest.mark.parametrize("name", ASKED)
def test_a_parameter_alone(server, expected, name):
    assert ask(server, ASKED[name]) == expected["asked"][name]


def test_parameters_together_in_one_batch(server, expected):
    """Penalties of one request must not reach its neighbours, also when slots are used again."""
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            futures = {n: pool.submit(ask, server, params) for n, params in ASKED.items()}
            assert {n: f.result() for n, f in futures.items()} == expected["asked"]


def test_the_parameters_do_something(expected):
    """Otherwise the two tests above would prove nothing."""
    plain = expected["asked"]["plain"]
    idle = [name for name, output in expected["asked"].items() if output == plain]
    assert idle == ["plain"]
    assert len(expected["asked"]["stop token"]) < 20


def test_prompts_that_end_before_the_context_limit(server, expected):
    """A window may run past the limit; tokens up to it are right, alone and in one batch."""
    alone = [near_limit(server, request) for request in NEAR_LIMIT]
    assert alone == expected["near limit"]
    with ThreadPoolExecutor(8) as pool:
        batch = list(pool.map(lambda request: near_limit(server, request), NEAR_LIMIT))
    assert batch == expected["near limit"]
    assert sum(not isinstance(outcome, str) for outcome in batch) >= 6
    assert_no_leak(server)


def test_log_probabilities(server, expected):
    chosen, top = logprobs(server)
    expected_chosen, expected_top = expected["logprobs"]
    assert chosen == pytest.approx(expected_chosen, abs=1e-4)
    assert len(top) == len(expected_top)
    for row, expected_row in zip(top, expected_top, strict=True):
        assert [p for p, _ in row] == pytest.approx([p for p, _ in expected_row], abs=1e-4)


def test_streaming_gives_the_same_tokens(server, expected):
    sampling = {"max_new_tokens": 100, "temperature": 0.0, "ignore_eos": True}
    events = list(server.stream("/generate", {"input_ids": PROMPT, "sampling_params": sampling}))
    assert events[-1]["output_ids"] == expected["long"]
    assert events[-1]["meta_info"]["completion_tokens"] == 100
    counts = [len(event["output_ids"]) for event in events]
    assert counts == sorted(counts) and len(counts) > 5


def test_two_answers_of_one_request(server, expected):
    answers = server.post(
        "/generate",
        {
            "input_ids": PROMPT,
            "sampling_params": {
                "max_new_tokens": 100,
                "temperature": 0.0,
                "ignore_eos": True,
                "n": 2,
            },
        },
    )
    assert [answer["output_ids"] for answer in answers] == [expected["long"]] * 2


def test_abort_of_a_running_and_a_waiting_request(server, expected):
    victims = ["victim-0", "victim-1"]
    for rid in victims:
        in_thread(
            server.post,
            "/generate",
            {
                "rid": rid,
                "input_ids": tokens(7, 20),
                "sampling_params": {"max_new_tokens": 230, "temperature": 0.0, "ignore_eos": True},
            },
        )
    time.sleep(0.05)
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(generate, server, PROMPT, 100) for _ in range(4)]
        for rid in victims:
            server.post("/abort_request", {"rid": rid})
        assert all(o.result()["output_ids"] == expected["long"] for o in others)
    assert_no_leak(server)


def test_a_client_that_disconnects(server, expected):
    connection = http.client.HTTPConnection(HOST, server.port)
    payload = {
        "input_ids": tokens(8, 20),
        "sampling_params": {"max_new_tokens": 230, "temperature": 0.0, "ignore_eos": True},
        "stream": True,
    }
    connection.request(
        "POST", "/generate", json.dumps(payload), {"Content-Type": "application/json"}
    )
    connection.getresponse().readline()
    connection.close()
    assert generate(server, PROMPT, 100)["output_ids"] == expected["long"]
    assert_no_leak(server)


def test_nothing_was_retracted(server):
    """Without a pool that is too small; see test_greedy_equality.py."""
    assert "#retracted_reqs" not in server.log.read_text()
