"""The cost table follows the machine while serving: a slow tier is left, and found again."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import reference
from cost_tables.profiling.client import Client
from cost_tables.profiling.errors import ProfileError
from cost_tables.profiling.live import LiveRounds
from servers import assert_no_leak, generate_all, info, serve, speculative, tell
from sglang_dspark.serving import Server
from trained import ARGS, DRAFT, REQUESTS, TARGET, mode

pytestmark = [pytest.mark.server, pytest.mark.alone]

CLIENTS, LENGTH = 4, 500
DELAY_S = 0.04  # several times a whole round of the tiny target
# Nearly flat, and far from the truth, which serving has to tell; of rounds without a draft it says
# nothing, so that there are none. In the form of SGLang's profiler.
TABLE = {
    "bias_seconds": 0.03,
    "bs_probes": [1, 16],
    "alpha_seconds": [0.0, 0.0],
    "m_probes": [1, 128],
    "theta_seconds": [0.0, 0.001],
}


class Load:
    """Rounds of four requests; output is checked every time."""

    def __init__(self, server: Server, wanted: list[int]) -> None:
        self.server, self._wanted = server, wanted

    def tiers(self, rounds: int) -> list[int]:
        """Tokens of the verify forwards of at least so many rounds with a draft, in order."""
        tiers: list[int] = []
        while len(tiers) < rounds:
            tell(self.server, dspark_clear_info_records=True)
            outputs = generate_all(self.server, [(PROMPT, LENGTH)] * CLIENTS, CLIENTS)
            assert outputs == [self._wanted] * CLIENTS
            seen = info(self.server)
            whole = zip(seen["tokens"], seen["depths"], seen["windows_of_rounds"], strict=True)
            tiers += [t for t, depth, windows in whole if depth and len(windows) == CLIENTS]
        return tiers


PROMPT = max((prompt for prompt, _ in REQUESTS[1::2]), key=len)[:200]


@pytest.fixture(scope="module")
def delays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("delays") / "delays.json"


@pytest.fixture(scope="module")
def load(delays: Path, tmp_path_factory: pytest.TempPathFactory):
    table = delays.with_name("table.json")
    table.write_text(json.dumps(TABLE))
    args = [*ARGS, *speculative(DRAFT), *mode("compact")]
    args += ["--speculative-dspark-sps-table-path", str(table)]
    log = tmp_path_factory.mktemp("log") / "log"
    variable = {"SGLANG_SPEC_VERIFY_TEST_DELAYS": str(delays)}
    with serve(TARGET, args, log, **variable) as server:
        model = reference.load_target(TARGET)
        yield Load(server, reference.greedy(model, PROMPT, LENGTH))


def test_only_a_server_in_profiling_mode_is_profiled(load: Load):
    with pytest.raises(ProfileError, match=r"not in profiling mode: its verify budget is auto"):
        LiveRounds(Client(load.server.url))


def test_budgets_move_to_the_tier_that_is_fast_within_200_rounds_and_back(load: Load, delays: Path):
    for fast in (16, 32, 16):
        slow = {str(tokens): DELAY_S for tokens in range(129) if tokens != fast}
        delays.with_suffix(".tmp").write_text(json.dumps(slow))
        os.replace(delays.with_suffix(".tmp"), delays)
        tiers = np.array(load.tiers(200)[:200])
        assert np.mean(tiers[-30:] == fast) >= 0.7, (fast, Counter(tiers[-30:].tolist()))
    assert_no_leak(load.server)
