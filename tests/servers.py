"""Real SGLang servers for tests. A start takes many seconds, so a server is shared by many."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import micro
import reference
from preloaded import Launcher
from sglang_dspark.serving import Server

COMMON = ["--dtype", "float32", "--skip-server-warmup", "--enable-metrics"]
MICRO = [*COMMON, "--skip-tokenizer-init", "--context-length", "1024", "--random-seed", "7"]


def speculative(draft: Path, *more: str, algorithm: str = "DSPARK") -> list[str]:
    return [
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", str(draft)),
        *more,
    ]


class PreloadedServer(Server):
    """The same server, whose launcher need not import SGLang first."""

    def __enter__(self) -> Server:
        self._process = Launcher(self.command[3:], self._environ, self.log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self


@contextmanager
def serve(target: Path, args: Sequence[str], log: Path, **environ: str) -> Iterator[Server]:
    # A process that has looked for CUDA devices must not be forked.
    kind = Server if torch.cuda.is_available() else PreloadedServer
    with kind(["--model-path", str(target), *args], log=log, environ=environ) as server:
        try:
            yield server
        finally:
            # SGLang takes seconds to end by itself; test_demo.py sees to that.
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def generate(
    server: Server, prompt: list[int], length: int, *, delay_s: float = 0.0, **params: Any
) -> dict[str, Any]:
    """One request through /generate; greedy and of exactly `length` tokens unless told else."""
    time.sleep(delay_s)
    sampling = {"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True, **params}
    answer: dict[str, Any] = server.post(
        "/generate", {"input_ids": prompt, "sampling_params": sampling}
    )
    return answer


def generate_all(
    server: Server, requests: Sequence[tuple[list[int], int]], concurrency: int, **params: Any
) -> list[list[int]]:
    """Output ids of all requests, at most `concurrency` at a time, arriving at odd moments."""
    with ThreadPoolExecutor(concurrency) as pool:
        futures = [
            pool.submit(generate, server, prompt, length, delay_s=0.013 * (i % 5), **params)
            for i, (prompt, length) in enumerate(requests)
        ]
        return [future.result()["output_ids"] for future in futures]


def tell(server: Server, **state: Any) -> None:
    """Change the state of a running server; SGLang says whether it did."""
    assert server.post("/set_internal_state", {"server_args": state}) == [True]


def run_alone(server: Server, prompt: list[int], length: int) -> tuple[list[int], dict[str, Any]]:
    """Output of one request alone, and the worker's records of its rounds."""
    tell(server, dspark_clear_info_records=True)
    tokens = generate(server, prompt, length)["output_ids"]
    return tokens, info(server)


def info(server: Server) -> dict[str, Any]:
    """What the worker says of its rounds in /server_info."""
    said: dict[str, Any] = server.get("/server_info")["internal_states"][0]["dspark_info_record"]
    return said


def assert_rounds_equal_the_loop(
    server: Server, target: Path, draft: Path, gamma: int = micro.GAMMA
) -> None:
    """Tokens, accept lengths and confidences of requests alone are those of plain PyTorch."""
    model = reference.load_target(target)
    generator = torch.Generator().manual_seed(1)
    for prompt_length, length in ((1, 20), (10, 60), (50, 60)):
        prompt = torch.randint(micro.MASK, (prompt_length,), generator=generator).tolist()
        expected = reference.speculate(model, draft, prompt, length, gamma)
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


def launch(target: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """A launch that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target), *MICRO, *args],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def metric(server: Server, name: str) -> float:
    """The sum of a Prometheus metric over its labels."""
    with urllib.request.urlopen(server.url + "/metrics") as response:
        text = response.read().decode()
    values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, flags=re.MULTILINE)
    assert values, f"no metric {name}"
    return sum(float(value) for value in values)


def assert_no_leak(server: Server) -> None:
    """Once idle, every KV slot is free or held by the radix cache alone, and the server lives.

    SGLang also counts its slots itself whenever it is idle, and dies if one is missing.
    """
    deadline = time.monotonic() + 20
    while True:
        load = server.get("/v1/loads")["loads"][0]
        idle = load["num_running_reqs"] == 0 and load["num_used_tokens"] == 0
        if idle or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert idle, f"after all requests ended: {load}"
    assert server.running(), server.tail()


def in_thread(function, *args: Any, **kwargs: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    return thread
