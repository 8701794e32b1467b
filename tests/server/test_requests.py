"""What requests ask for works under speculation, and the KV pool is as full after as before.

The yardstick is a server without speculation and without overlap: SGLang's overlap scheduler lets
penalties lag one token behind, ours count exactly.
"""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest

import micro
from servers import MICRO, assert_no_leak, generate, in_thread, serve, speculative
from sglang_dspark.serving import HOST, Server
from trained import budget, mode

pytestmark = pytest.mark.server

CONTEXT = 256
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
def expected(noisy_pair, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "baseline.log"
    with serve(noisy_pair[0], [*ARGS, "--disable-overlap-schedule"], log) as server:
        return {
            "asked": {name: ask(server, params) for name, params in ASKED.items()},
            "near limit": [near_limit(server, request) for request in NEAR_LIMIT],
            "logprobs": logprobs(server),
            "long": generate(server, PROMPT, 150)["output_ids"],
        }


# Windows that end anywhere: penalties and log-probabilities have to find their rows.
RANDOM = [*mode("compact"), *budget("random")]


@pytest.fixture(scope="module", params=[[], RANDOM], ids=["static", "compact, random"])
def server(request, noisy_pair, tmp_path_factory):
    target, draft = noisy_pair
    log = tmp_path_factory.mktemp("log") / "server.log"
    args = [*ARGS, *speculative(draft), *request.param]
    with serve(target, args, log, SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="1") as server:
        yield server


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
    sampling = {"max_new_tokens": 150, "temperature": 0.0, "ignore_eos": True}
    events = list(server.stream("/generate", {"input_ids": PROMPT, "sampling_params": sampling}))
    assert events[-1]["output_ids"] == expected["long"]
    assert events[-1]["meta_info"]["completion_tokens"] == 150
    counts = [len(event["output_ids"]) for event in events]
    assert counts == sorted(counts) and len(counts) > 5


def test_two_answers_of_one_request(server, expected):
    answers = server.post(
        "/generate",
        {
            "input_ids": PROMPT,
            "sampling_params": {
                "max_new_tokens": 150,
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
        others = [pool.submit(generate, server, PROMPT, 150) for _ in range(4)]
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
    assert generate(server, PROMPT, 150)["output_ids"] == expected["long"]
    assert_no_leak(server)
