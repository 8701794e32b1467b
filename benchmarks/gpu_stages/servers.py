"""Real SGLang servers of the stages, and loads for them."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from gpu_stages.settings import Settings
from sglang_dspark.serving import Server

READY_S = 240.0
TELL = "/set_internal_state"


@dataclass(frozen=True)
class Request:
    """prompt: token ids. length: tokens to generate. expected: these tokens, if they are known."""

    prompt: list[int]
    length: int
    expected: list[int] | None = None


@contextmanager
def serve(
    settings: Settings, name: str, args: Sequence[str], environ: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server that is ended at once: it holds nothing worth the seconds of a tidy end."""
    log = settings.work / f"server-{name.replace(' ', '-')}.log"
    with Server(args, log=log, environ=environ, timeout_s=READY_S) as server:
        try:
            yield server
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def device_flags(settings: Settings, max_requests: int) -> list[str]:
    """Of every server. On a GPU others run beside it: the KV pool is sized by its tokens, and the
    fraction leaves the others their part. Graphs of prefill would only take time to capture."""
    common = ["--skip-tokenizer-init", "--skip-server-warmup", "--random-seed", "7"]
    common += ["--max-running-requests", str(max_requests)]
    if settings.tiny:
        return common
    return [
        *common,
        *("--mem-fraction-static", "0.85", "--cuda-graph-backend-prefill", "disabled"),
        *("--cuda-graph-max-bs-decode", str(max_requests)),
    ]


def speculative(draft: Path, algorithm: str = "DSPARK") -> list[str]:
    return [
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", str(draft)),
    ]


def without_us() -> dict[str, str]:
    """The environment in which SGLang serves DSPARK by itself: every other plugin stays."""
    names = [ep.name for ep in entry_points(group="sglang.srt.plugins")]
    others = [name for name in names if name != "sglang_dspark"]
    return {"SGLANG_PLUGINS": ",".join(others) or "none"}


def tell(server: Server, **state: Any) -> None:
    """Change the state of a running server."""
    answer = server.post(TELL, {"server_args": state})
    if answer != [True]:
        raise RuntimeError(f"{TELL} {state}: the server answers {answer}")


def info(server: Server) -> dict[str, Any]:
    """What our worker says of itself."""
    said: dict[str, Any] = server.get("/server_info")["internal_states"][0]["dspark_info_record"]
    return said


def generate(server: Server, request: Request, **more: Any) -> dict[str, Any]:
    """Greedy, and of exactly the length that was asked for."""
    sampling = {"max_new_tokens": request.length, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = server.post(
        "/generate", {"input_ids": request.prompt, "sampling_params": sampling, **more}
    )
    return answer


def generate_all(
    server: Server, requests: Sequence[Request], concurrency: int, **more: Any
) -> list[dict[str, Any]]:
    """Answers in the order of the requests, at most `concurrency` at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda request: generate(server, request, **more), requests))


@dataclass(frozen=True)
class Load:
    """What a load measured. tokens_per_s: output tokens of all requests for the wall time, prefill
    included. user_tokens_per_s: mean over requests of output tokens for the request's time.
    accept_length: tokens committed in a request's round, None without speculation. right: answers
    that are what was expected."""

    tokens_per_s: float
    user_tokens_per_s: float
    accept_length: float | None
    right: int
    requests: int


def run_load(server: Server, requests: Sequence[Request], concurrency: int) -> Load:
    """A closed loop: each client sends its next request when its last one is answered."""
    server.get("/flush_cache")
    speeds = []

    def send(request: Request) -> dict[str, Any]:
        began = time.perf_counter()
        answer = generate(server, request)
        speeds.append(request.length / (time.perf_counter() - began))
        return answer

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(send, requests))
    wall = time.perf_counter() - began
    rounds = [answer["meta_info"].get("spec_verify_ct") for answer in answers]
    tokens = sum(request.length for request in requests)
    return Load(
        tokens_per_s=round(tokens / wall, 2),
        user_tokens_per_s=round(statistics.mean(speeds), 2),
        accept_length=round(tokens / sum(rounds), 3) if all(rounds) else None,
        right=sum(
            answer["output_ids"] == request.expected
            for answer, request in zip(answers, requests, strict=True)
        ),
        requests=len(requests),
    )
