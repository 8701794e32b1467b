"""A server in profiling mode that a test makes up: time passes only while the profiler sleeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cost_tables.profiling import forcing
from cost_tables.profiling.errors import ProfileError

GAMMA = 7
FINGERPRINT = {
    "device": "cpu",
    "model": "hidden 64",
    "dtype": "float32",
    "tp": 1,
    "gamma": GAMMA,
    "backend": "HostAttention",
}
# Seconds of a round with R requests, M tokens, depth D and C KV tokens.
RoundTime = Callable[[int, int, int, float], float]


def cost(requests: int, tokens: int, depth: int, context: float) -> float:
    """2 to 60 ms, linear in everything, with a draft that costs 1 ms to start."""
    drafting = 0.001 + 0.00001 * requests * depth if depth else 0.0
    return 0.002 + 0.0003 * requests + 0.0002 * tokens + drafting + 2e-8 * context


class FakeServer:
    """Every round commits one token of each request. max_requests, kv_tokens: of the server."""

    url = "http://fake"

    def __init__(
        self, round_time: RoundTime = cost, max_requests: int = 8, kv_tokens: int = 65536
    ) -> None:
        self.round_time, self.now = round_time, 0.0
        self.lengths: list[int] = []  # committed tokens of every running request
        self.prompts: list[int] = []
        self.new_tokens, self.new_tokens_limit = 0, 10**9
        self.told = 0.5 / (GAMMA + 1)
        self.loads = 0
        self.record: dict[str, Any] = {}
        self.changes: dict[str, Any] = {}  # of what /server_info says
        self.facts = {
            "fingerprint": FINGERPRINT,
            "tiers": [1, 2, 4, 8, 16, 24, 32, 48, 64],
            "max_requests": max_requests,
            "pads_plain": False,
            "vocab_size": 100,
            "max_context": 4096,
            "kv_tokens": kv_tokens,
        }
        self.clear()

    def clear(self) -> None:
        lists = ("windows_of_rounds", "depths", "budgets", "tokens", "measured_ms")
        self.record = {"rounds": 0, "windows": 0, "accepted": 0} | {name: [] for name in lists}

    # What the profiler uses

    def get(self, path: str, timeout_s: float = 0.0) -> Any:
        assert path == "/server_info"
        said = {
            "plugin": "sglang-dspark",
            "mode": "compact",
            "gamma": GAMMA,
            "schedule": {"budget": "profile, from confidences"},
            "profile": self.facts,
            **self.record,
            **self.changes,
        }
        return {"internal_states": [{"dspark_info_record": said}]}

    def post(self, path: str, payload: Any, timeout_s: float = 0.0) -> Any:
        if path == "/set_internal_state":
            self.told = payload["server_args"]["dspark_force_budget_frac"]
            assert 0 < self.told <= 1
            self.clear()
            return [True]
        if path == "/generate":
            self.loads += 1
            self.prompts = [len(prompt) for prompt in payload["input_ids"]]
            self.lengths = [0] * len(self.prompts)
            asked = payload["sampling_params"]["max_new_tokens"]
            self.new_tokens = min(asked, self.new_tokens_limit)
            used = sum(self.prompts) + len(self.prompts) * self.new_tokens
            assert used <= self.facts["kv_tokens"], "the profiler asks for more than there is"
        elif path == "/abort_request":
            self.lengths, self.prompts = [], []
        elif path == "/flush_cache" and self.lengths:
            raise ProfileError("busy")
        return None

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.lengths and self.now < until:
            self.run_round()
        self.now = max(self.now, until)

    def clock(self) -> float:
        return self.now

    # A round

    def decision(self) -> tuple[int, int]:
        return forcing.decode(self.told, len(self.lengths), GAMMA)

    def run_round(self) -> None:
        requests = len(self.lengths)
        depth, budget = self.decision()
        even, more = divmod(budget, requests)
        size = requests + budget
        tokens = min(t for t in self.facts["tiers"] if t >= size) if depth else size
        seconds = self.round_time(requests, tokens, depth, sum(self.prompts) + sum(self.lengths))
        self.now += seconds
        entry = {
            "windows_of_rounds": [1 + even + (i < more) for i in range(requests)],
            "depths": depth,
            "budgets": budget,
            "tokens": tokens,
            "measured_ms": 1e3 * seconds,
        }
        for name, value in entry.items():
            self.record[name].append(value)
        self.record["rounds"] += 1
        self.record["windows"] += requests
        self.lengths = [n + 1 for n in self.lengths if n + 1 < self.new_tokens]
        self.prompts = self.prompts[: len(self.lengths)]
