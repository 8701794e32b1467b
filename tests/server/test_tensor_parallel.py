"""Ranks of a tensor-parallel server agree on windows and tiers that change every round.

If two ranks disagreed, they would wait for each other forever: the requests would never come back.
The tiny target has three heads, so there are three ranks; on two cores this is slow.
"""

from __future__ import annotations

import pytest

from servers import assert_no_leak, generate_all, info, serve, speculative
from trained import ARGS, COARSE, DRAFT, REQUESTS, TARGET, budget, mode

pytestmark = pytest.mark.server


def test_output_equals_one_rank_without_speculation(trained_greedy, tmp_path):
    args = [*ARGS, *speculative(DRAFT), *mode("compact", *COARSE, *budget("random")), "--tp", "3"]
    environ = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0"}
    with serve(TARGET, args, tmp_path / "log", **environ) as server:
        assert generate_all(server, REQUESTS[:8], 4) == trained_greedy[:8]
        record = info(server)
        assert len({w for batch in record["windows_of_rounds"] for w in batch}) > 3
        assert set(record["tokens"]) <= {20, 60, 128}
        assert_no_leak(server)
