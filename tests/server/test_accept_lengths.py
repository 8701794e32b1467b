"""Accept lengths are exactly what theory says, round by round."""

from __future__ import annotations

import pytest
import torch

import micro
import reference
from servers import MICRO, generate, serve, speculative
from sglang_dspark.serving import Server

pytestmark = pytest.mark.server

# Tokens stay below the mask token (47) in these tests, or a mask would be right by chance.
PROMPT = [2, 6, 10, 14, 18, 22, 26, 30, 3, 8]


def run_alone(server: Server, prompt: list[int], length: int) -> tuple[list[int], dict]:
    """Output of one request alone, and the worker's records of its rounds."""
    server.post("/set_internal_state", {"server_args": {"dspark_clear_info_records": True}})
    tokens = generate(server, prompt, length)["output_ids"]
    return tokens, server.get("/server_info")["internal_states"][0]["dspark_info_record"]


def rounds(server: Server, prompt: list[int], length: int) -> tuple[list[int], list[int]]:
    """Output of one request alone, and the accept length of each of its rounds."""
    tokens, record = run_alone(server, prompt, length)
    return tokens, [batch[0] for batch in record["accept_lens"]]


@pytest.mark.parametrize(
    ("oracle", "accept_length", "dtype"),
    [
        ({"distance": 7}, micro.GAMMA + 1, "float32"),  # always agrees
        ({"distance": 7}, micro.GAMMA + 1, "bfloat16"),
        ({"distance": 7, "draft_distance": 6}, 1, "float32"),  # never does
        ({"distance": 3}, 5, "float32"),  # sees the anchor, but no token behind it
    ],
    ids=["always", "always, bfloat16", "never", "halfway"],
)
def test_an_oracle_is_accepted_as_it_must_be(oracle, accept_length, dtype, tmp_path):
    target, draft = micro.write_oracle(tmp_path, **oracle)
    args = [*MICRO, *speculative(draft), "--dtype", dtype]
    with serve(target, args, tmp_path / "log") as server:
        length = 10 * accept_length + 1
        tokens, accept_lens = rounds(server, PROMPT, length)
        assert tokens == micro.continuation(PROMPT, length, oracle["distance"])
        assert accept_lens == [accept_length] * len(accept_lens)
        assert len(accept_lens) >= 10
        warned = "the draft does not help" in server.log.read_text()
        if accept_length == 1:
            generate(server, PROMPT, 400)
            text = server.log.read_text()
            assert text.count("the draft does not help: mean accept length 1.0") == 1
            assert "target layers [0] of 4, head vanilla rank 8" in text
        else:
            assert not warned


# Noise at which each head is wrong now and then, so that accept lengths vary.
@pytest.mark.parametrize(("head", "noise"), [("vanilla", 1.0), ("gated", 1.5), ("rnn", 1.0)])
def test_every_round_equals_the_plain_pytorch_loop(head, noise, tmp_path):
    target, draft = micro.write_oracle(
        tmp_path, head=head, target_noise=0.05, head_noise=noise, feature_layers=(0, 1, 2)
    )
    model = reference.load_target(target)
    generator = torch.Generator().manual_seed(1)
    with serve(target, [*MICRO, *speculative(draft)], tmp_path / "log") as server:
        for prompt_length, length in ((1, 20), (10, 60), (50, 100)):
            prompt = torch.randint(micro.VOCAB - 1, (prompt_length,), generator=generator).tolist()
            expected = reference.speculate(model, draft, prompt, length)
            tokens, record = run_alone(server, prompt, length)
            accept_lens = [batch[0] for batch in record["accept_lens"]]
            assert len(set(expected.accept_lens)) > 1, "a constant would prove little"
            assert tokens == expected.tokens
            assert accept_lens[: len(expected.accept_lens)] == expected.accept_lens
            # Under overlap one more round may run before the end is noticed.
            assert len(accept_lens) <= len(expected.accept_lens) + 1
            # The last rounds' survivals are kept; the newest may be of a round too many.
            kept = [batch[0] for batch in record["confidences"]]
            last = expected.confidences[-1].sigmoid().cumprod(dim=0).tolist()
            assert any(survivals == pytest.approx(last, abs=1e-3) for survivals in kept[-3:])
