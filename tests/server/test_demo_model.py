"""The demo model with its shipped draft: SmolLM2-135M-Instruct in float32, a real language model.

Everything that needs a tokenizer is here: chat completions, stop strings, grammars.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import reference
import sglang_dspark
from servers import COMMON, assert_no_leak, generate, generate_all, serve, speculative
from sglang_dspark.cli import DEFAULT_PROMPT
from sglang_dspark.demo.model import prepare_demo_model

pytestmark = pytest.mark.server

DRAFT = Path(sglang_dspark.__file__).parent / "drafts" / "smollm2-135m-dspark"
QUESTIONS = [
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Tell me a story about a brave little boat.",
    "Copy this exactly: 7f3a-91bc-44d2-a0e8, 550e8400-e29b-41d4-a716-446655440000",
    "What is 17 times 23? Think step by step.",
    "List five fruits.",
    "Explain photosynthesis to a child.",
    "Translate to French: good morning, my friend.",
]
# Output lengths; the sum is what the test costs.
LENGTHS = [1, 2, 60, 34, 5, 13, 21, 8]


@pytest.fixture(scope="module")
def target() -> Path:
    return prepare_demo_model("float32", progress=False)


@pytest.fixture(scope="module")
def tokenizer(target):
    return AutoTokenizer.from_pretrained(target)


@pytest.fixture(scope="module")
def requests(tokenizer) -> list[tuple[list[int], int]]:
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
    ]
    return list(zip(chats, LENGTHS, strict=True))


def ask(server, changes: dict) -> dict:
    payload = {
        "model": "default",
        "messages": [{"role": "user", "content": QUESTIONS[5]}],
        "max_tokens": 48,
        "temperature": 0.0,
        **changes,
    }
    return server.post("/v1/chat/completions", payload)["choices"][0]


def ask_all(server) -> dict[str, dict]:
    """All chats in one batch."""
    with ThreadPoolExecutor(len(CHATS)) as pool:
        answers = pool.map(lambda changes: ask(server, changes), CHATS.values())
        return dict(zip(CHATS, answers, strict=True))


CHATS = {
    "chat": {},
    "min tokens": {"min_tokens": 100, "max_tokens": 110},
    "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    "stop string": {"stop": ["2.", "\n\n\n"]},
    "regex": {"regex": r"(apple|pear|plum)(, (apple|pear|plum)){4}", "max_tokens": 30},
    "json": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "fruit",
                "schema": {
                    "type": "object",
                    "properties": {
                        "name": {"enum": ["apple", "pear"]},
                        "ripe": {"type": "boolean"},
                    },
                    "required": ["name", "ripe"],
                    "additionalProperties": False,
                },
            },
        },
    },
}


@pytest.fixture(scope="module")
def expected(target, requests, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "baseline.log"
    # Without overlap: SGLang's overlap scheduler lets penalties lag one token behind.
    with serve(target, [*COMMON, "--disable-overlap-schedule"], log) as server:
        return {
            "tokens": generate_all(server, requests, 8),
            "chats": ask_all(server),
        }


@pytest.fixture(scope="module")
def server(target, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serve(target, [*COMMON, *speculative(DRAFT)], log) as server:
        yield server


@pytest.fixture(scope="module")
def answers(server):
    return ask_all(server)


@torch.inference_mode()
def test_baseline_is_transformers_own_greedy(target, requests, expected):
    """Every token is the argmax behind all before it; cheaper than to generate again."""
    model = reference.load_target(target)
    for (prompt, _), output in zip(requests, expected["tokens"], strict=True):
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == output


def test_eight_requests_equal_no_speculation(server, requests, expected):
    assert generate_all(server, requests, 8) == expected["tokens"]
    assert_no_leak(server)


def test_the_shipped_draft_helps_on_the_demos_prompt(server, tokenizer):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": DEFAULT_PROMPT}],
        add_generation_prompt=True,
        return_dict=False,
    )
    meta = generate(server, prompt, 60)["meta_info"]
    assert meta["spec_accept_length"] > 1.3


@pytest.mark.parametrize("name", CHATS)
def test_chat_completions(answers, expected, name):
    answer, wanted = answers[name], expected["chats"][name]
    assert answer["message"]["content"] == wanted["message"]["content"]
    assert answer["finish_reason"] == wanted["finish_reason"]
