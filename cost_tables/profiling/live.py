"""Rounds of a server in profiling mode: a load of requests, and the rounds it is told to run.

A round's time is the server's own: from its start to that of the next one, on the host. Under
overlap the host runs ahead of the device, so the first rounds after a change are not counted.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cost_tables.measure import Cell
from cost_tables.profiling import forcing
from cost_tables.profiling.errors import Drained, ProfileError
from cost_tables.profiling.facts import Facts, budget_of, read_facts

SKIPPED_ROUNDS = 2  # after a change, of those that run as told
LATE_ROUNDS = 6  # after a change, until the server has to do as told
FILL_SECONDS = 900.0  # until all requests of a load are past their prompts
QUIET_SECONDS = 120.0  # without a round that is as told
WHOLE_REQUEST_SECONDS = 24 * 3600.0


class Http(Protocol):
    """`client.Client`, or a server that a test makes up."""

    url: str

    def get(self, path: str, timeout_s: float = ...) -> Any: ...

    def post(self, path: str, payload: Any, timeout_s: float = ...) -> Any: ...


@dataclass(frozen=True)
class Visit:
    """Rounds of a cell, run one after another. seconds: of each that counts.
    context: KV tokens that the batch attended to, in the middle of the visit."""

    seconds: tuple[float, ...]
    context: float


@dataclass(frozen=True)
class _Round:
    """One entry of the server's records. verified: tokens of all windows."""

    requests: int
    depth: int
    budget: int
    tokens: int
    verified: int
    seconds: float | None


class LiveRounds:
    """One load at a time: `load`, any number of `visit`, `unload`."""

    def __init__(
        self,
        http: Http,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http, self._clock, self._sleep = http, clock, sleep
        self.facts: Facts = read_facts(http.get("/server_info"), http.url)
        self._rids: list[str] = []
        self._requests = self._prompt_tokens = 0
        self._committed = 0.0  # tokens of all requests, up to the last clearing of the records
        self._thread: threading.Thread | None = None
        self._failure: ProfileError | None = None
        self._loads = 0

    # A load

    def load(self, requests: int, context: int, new_tokens: int, seed: int) -> float:
        """Start R requests with prompts of `context` random tokens, and wait until all decode.
        Returns the seconds that it took."""
        began = self._clock()
        self._loads += 1
        self._rids = [f"profile-{self._loads}-{i}" for i in range(requests)]
        self._requests, self._prompt_tokens = requests, requests * context
        # Rounds without a draft, so that the first requests do not run far ahead of the last.
        self._tell(0, 0)
        rng = random.Random(seed)
        low = min(2, self.facts.vocab_size - 1)  # the first ids are often special
        payload = {
            "rid": self._rids,
            "input_ids": [
                [rng.randrange(low, self.facts.vocab_size) for _ in range(context)]
                for _ in range(requests)
            ],
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
            },
        }
        self._failure = None
        self._thread = threading.Thread(target=self._generate, args=(payload,), daemon=True)
        self._thread.start()
        self._fill()
        return self._clock() - began

    def _generate(self, payload: dict[str, Any]) -> None:
        try:
            self._http.post("/generate", payload, timeout_s=WHOLE_REQUEST_SECONDS)
        except ProfileError as error:
            self._failure = error

    def _fill(self) -> None:
        began, wait = self._clock(), 0.05
        while True:
            self._sleep(wait)
            wait = min(1.3 * wait, 0.5)
            record = self._record()
            if (windows := record["windows_of_rounds"]) and len(windows[-1]) == self._requests:
                self._committed = _committed(record)
                return
            if self._failure is not None:
                raise self._failure
            if self._clock() - began > FILL_SECONDS:
                running = len(windows[-1]) if windows else 0
                raise ProfileError(
                    f"{self._http.url}: {running} of {self._requests} requests decode after "
                    f"{FILL_SECONDS:.0f} s; is the server busy with others?"
                )

    def unload(self) -> None:
        """End the load's requests and wait until the server is idle and its cache empty."""
        for rid in self._rids:
            self._http.post("/abort_request", {"rid": rid})
        if self._thread is not None:
            self._thread.join(timeout=QUIET_SECONDS)
        self._rids, self._thread = [], None
        # Or finished requests hold KV slots, and making room for new ones would be timed too.
        for attempt in range(40):
            try:
                self._http.post("/flush_cache", {})
                return
            except ProfileError:  # its last round is still running
                if attempt == 39:
                    raise
                self._sleep(0.05)

    # A visit

    def visit(self, cell: Cell, rounds: int, expected_s: float) -> Visit:
        """So many rounds of a cell. expected_s: what one is thought to take.

        Raises Drained if a request comes to its end, ProfileError if the server does not do as
        told.
        """
        self._tell(cell.depth, budget_of(cell))
        wanted = SKIPPED_ROUNDS + rounds
        began, wait = self._clock(), (wanted + 1) * expected_s
        seen = 0
        while True:
            self._sleep(max(wait, 0.005))
            record = self._record()
            timed = self._timed(_rounds(record), cell)
            if len(timed) >= wanted:
                break
            if self._failure is not None:
                raise self._failure
            # All may end in the same round, so that no smaller batch is ever seen.
            if record["rounds"] == seen and self._answered():
                raise Drained
            seen = record["rounds"]
            spent = self._clock() - began
            if spent > QUIET_SECONDS + 20 * wanted * expected_s:
                raise ProfileError(
                    f"{_name(cell)}: {len(timed)} of {wanted} rounds after {spent:.0f} s"
                )
            each = spent / max(len(timed), 1)
            wait = min((wanted - len(timed)) * min(each, 2 * expected_s + 0.05), 5.0)
        during = _committed(record)
        context = self._prompt_tokens + self._committed + during / 2
        self._committed += during
        return Visit(tuple(timed[SKIPPED_ROUNDS:]), context)

    def _answered(self) -> bool:
        """Whether all requests of the load have had their answer."""
        return self._thread is not None and not self._thread.is_alive()

    def _timed(self, rounds: list[_Round], cell: Cell) -> list[float]:
        """Seconds of the rounds that ran as told; that they did is checked."""
        budget, timed = budget_of(cell), []
        for i, done in enumerate(rounds):
            if done.requests < cell.requests:
                raise Drained
            if done.requests > cell.requests:
                raise ProfileError(
                    f"{self._http.url} serves others too: a round had {done.requests} requests, "
                    f"the profiler has {cell.requests}"
                )
            if (done.depth, done.budget) != (cell.depth, budget):
                if i < LATE_ROUNDS:
                    continue
                raise ProfileError(
                    f"{_name(cell)}: the server was told depth {cell.depth} and budget {budget}, "
                    f"and runs depth {done.depth} and budget {done.budget}"
                )
            if (done.verified, done.tokens) != (cell.requests + budget, cell.tokens):
                raise ProfileError(
                    f"{_name(cell)}: a round verified {done.verified} tokens in a forward of "
                    f"{done.tokens}; forced were {cell.requests + budget} in {cell.tokens}"
                )
            if done.seconds is not None:
                timed.append(done.seconds)
        return timed

    # The server

    def _tell(self, depth: int, budget: int) -> None:
        """What rounds to run from now on; the records begin anew."""
        told = forcing.encode(depth, budget, self._requests, self.facts.gamma)
        state = {"dspark_force_budget_frac": told, "dspark_clear_info_records": True}
        answer = self._http.post("/set_internal_state", {"server_args": state})
        if answer != [True]:
            raise ProfileError(f"{self._http.url} refuses to be told a budget: it says {answer}")

    def _record(self) -> dict[str, Any]:
        info = self._http.get("/server_info")
        record: dict[str, Any] = info["internal_states"][0]["dspark_info_record"]
        return record


def _committed(record: dict[str, Any]) -> float:
    """Tokens that all requests committed since the records began."""
    return float(record["accepted"] + record["windows"])


def _rounds(record: dict[str, Any]) -> list[_Round]:
    columns = ("windows_of_rounds", "depths", "budgets", "tokens", "measured_ms")
    return [
        _Round(len(w), depth, budget, tokens, sum(w), None if ms is None else ms / 1e3)
        for w, depth, budget, tokens, ms in zip(*(record[c] for c in columns), strict=True)
    ]


def _name(cell: Cell) -> str:
    return (
        f"cell of {cell.requests} requests, {cell.tokens} tokens, depth {cell.depth}, context "
        f"{cell.context}"
    )
