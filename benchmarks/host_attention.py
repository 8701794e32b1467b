"""The host attention backend against SGLang's torch_native, in real servers side by side.

    python benchmarks/host_attention.py

Both servers run SmolLM2-135M on the host platform without speculation, so that only the
attention backend differs. They are up at the same time and take turns, one loaded at a time.
Reported are medians of output tokens per second and, since a shared machine blurs them, of the
scheduler's CPU time per decode step.

With --variants threads-1 and threads-spin the thread settings are compared in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from sglang_dspark.demo.model import prepare_demo_model
from sglang_dspark.host.threads import usable_cores
from sglang_dspark.serving import Server

RESULTS = Path(__file__).parent / "results" / "host_attention.json"
# name: (arguments, environment) of the server
VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "host": (["--attention-backend", "host"], {}),
    "torch_native": (["--attention-backend", "torch_native"], {}),
    "threads-1": (["--attention-backend", "host"], {"OMP_NUM_THREADS": "1"}),
    "threads-spin": (["--attention-backend", "host"], {"OMP_WAIT_POLICY": "ACTIVE"}),
}


@dataclass(frozen=True)
class Run:
    """One measured batch of requests."""

    dtype: str
    variant: str
    concurrency: int
    tokens_per_s: float  # output tokens of all requests / wall time, prefill included
    cpu_ms_per_step: float  # CPU time of the scheduler / decode steps, all threads
    load_average: float  # of the machine over the last minute, as the run ended


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    runs: list[Run] = []
    for dtype in args.dtypes:
        runs += measure_dtype(dtype, args)
    report = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine(),
        "versions": versions(),
        "model": "SmolLM2-135M-Instruct",
        "workload": {
            "prompt_tokens": args.prompt_tokens,
            "output_tokens": args.output_tokens,
            "requests_per_run": "as many as concurrent",
            "repeats": args.repeats,
        },
        "medians": medians(runs),
        "runs": [asdict(run) for run in runs],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report["medians"])
    print(f"written to {args.out}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["host", "torch_native"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5, help="at least 3")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="mean; half to 1.5 times")
    parser.add_argument("--output-tokens", type=int, default=192)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.repeats < 3:
        parser.error(f"--repeats {args.repeats}: medians need at least 3")
    return args


def measure_dtype(dtype: str, args: argparse.Namespace) -> list[Run]:
    """All variants with one dtype, taking turns."""
    model = str(prepare_demo_model(dtype))
    runs = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        servers: dict[str, Server] = {}
        for name in args.variants:
            flags, environ = VARIANTS[name]
            server = Server(
                ["--model-path", model, "--dtype", dtype, "--device", "cpu", *flags],
                log=Path(logs) / f"{name}.log",
                environ=environ,
                timeout_s=600,
            )
            servers[name] = stack.enter_context(server)
        for name, server in servers.items():  # every shape once: oneDNN compiles for each
            for concurrency in args.concurrency:
                measure(server, dtype, name, concurrency, args, seed=0)
        for repeat in range(1, args.repeats + 1):
            for concurrency in args.concurrency:
                order = list(servers.items())
                for name, server in order if repeat % 2 else reversed(order):
                    run = measure(server, dtype, name, concurrency, args, seed=repeat)
                    runs.append(run)
                    print(run, file=sys.stderr, flush=True)
    return runs


def measure(
    server: Server,
    dtype: str,
    variant: str,
    concurrency: int,
    args: argparse.Namespace,
    seed: int,
) -> Run:
    """Sends `concurrency` requests at once and waits for all of them."""
    server.get("/flush_cache")
    prompts = random_prompts(concurrency, args.prompt_tokens, seed)
    scheduler = find_scheduler(server)

    def send(prompt: list[int]) -> None:
        sampling = {"temperature": 0, "max_new_tokens": args.output_tokens, "ignore_eos": True}
        server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})

    cpu, wall = cpu_seconds(scheduler), time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(send, prompts))
    wall = time.perf_counter() - wall
    cpu = cpu_seconds(scheduler) - cpu
    return Run(
        dtype=dtype,
        variant=variant,
        concurrency=concurrency,
        tokens_per_s=round(concurrency * args.output_tokens / wall, 2),
        cpu_ms_per_step=round(1e3 * cpu / args.output_tokens, 2),
        load_average=round(os.getloadavg()[0], 2),
    )


def random_prompts(count: int, mean: int, seed: int) -> list[list[int]]:
    """Token ids; lengths spread evenly from half to one and a half times the mean."""
    rng = random.Random(seed)
    spread = [mean // 2 + mean * (2 * i + 1) // (2 * count) for i in range(count)]
    return [[rng.randrange(100, 40000) for _ in range(length)] for length in spread]


def find_scheduler(server: Server) -> psutil.Process:
    for child in psutil.Process(server.pid).children(recursive=True):
        if "sglang::scheduler" in " ".join(child.cmdline()):
            return child
    raise RuntimeError("the server has no process called sglang::scheduler")


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def describe_machine() -> dict[str, Any]:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "usable_cores": usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "sglang", "sglang-dspark")},
    }


def medians(runs: list[Run]) -> list[dict[str, Any]]:
    """One row for each dtype, concurrency and variant, with ratios to the variant `host`."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.dtype, run.concurrency, run.variant), []).append(run)
    rows = []
    for (dtype, concurrency, variant), group in sorted(groups.items()):
        tokens = statistics.median(run.tokens_per_s for run in group)
        cpu = statistics.median(run.cpu_ms_per_step for run in group)
        row = {
            "dtype": dtype,
            "concurrency": concurrency,
            "variant": variant,
            "tokens_per_s": tokens,
            "cpu_ms_per_step": cpu,
        }
        host = groups.get((dtype, concurrency, "host"))
        if host is not None and variant != "host":
            row["host_is_faster_by"] = round(
                statistics.median(run.tokens_per_s for run in host) / tokens, 3
            )
            row["host_cpu_is_less_by"] = round(
                cpu / statistics.median(run.cpu_ms_per_step for run in host), 3
            )
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'dtype':9} {'conc':>4} {'variant':13} {'tok/s':>8} {'cpu ms/step':>12} {'host/it':>8}")
    for row in rows:
        print(
            f"{row['dtype']:9} {row['concurrency']:4} {row['variant']:13} "
            f"{row['tokens_per_s']:8.1f} {row['cpu_ms_per_step']:12.1f} "
            f"{row.get('host_is_faster_by', 1.0):8.2f}"
        )


if __name__ == "__main__":
    main()
