"""Accept lengths are exactly what theory says, round by round.

For drafts that are right now and then: `assert_rounds_equal_the_loop`, for each head on the servers
of test_greedy_equality.py and test_requests.py.
"""

from __future__ import annotations

import pytest

import micro
from servers import MICRO, generate, run_alone, serve, speculative

pytestmark = pytest.mark.server

# Tokens stay below the mask token (47) in these tests, or a mask would be right by chance.
PROMPT = [2, 6, 10, 14, 18, 22, 26, 30, 3, 8]


@pytest.mark.parametrize(
    ("oracle", "accept_length", "dtype"),
    [
        ({"distance": 7}, micro.GAMMA + 1, "bfloat16"),  # always agrees
        ({"distance": 7, "draft_distance": 6}, 1, "float32"),  # never does
    ],
    ids=["always, bfloat16", "never"],
)
def test_an_oracle_is_accepted_as_it_must_be(oracle, accept_length, dtype, tmp_path):
    target, draft = micro.write_oracle(tmp_path, **oracle)
    args = [*MICRO, *speculative(draft), "--dtype", dtype]
    with serve(target, args, tmp_path / "log") as server:
        length = 10 * accept_length + 1
        tokens, record = run_alone(server, PROMPT, length)
        accept_lens = [batch[0] for batch in record["accept_lens"]]
        assert tokens == micro.continuation(PROMPT, length)
        assert accept_lens == [accept_length] * len(accept_lens)
        assert len(accept_lens) >= 10
        warned = "the draft does not help" in server.log.read_text()
        if accept_length == 1:
            generate(server, PROMPT, 400)
            text = server.log.read_text()
            assert text.count("the draft does not help: mean accept length 1.0") == 1
            assert "target layers [0] of 4; head vanilla rank 8" in text
        else:
            assert not warned
