"""Stage throughput: no speculation, SGLang's own DSPARK and ours, side by side.

All arms serve the same pair (see `pair`), whose acceptance is real and known, and answer the same
requests; with --simulate it is simulated instead, as far as each arm can. The servers are up at the
same time and take turns, one loaded at a time, in alternating order; where only one may be up, one
arm follows the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from gpu_stages.arms import Arm, arms_of, sglang_table
from gpu_stages.pair import Pair, mixed_accept_length, prepare_pair, requests
from gpu_stages.pair_weights import HIGH, LOW
from gpu_stages.profile import made_table
from gpu_stages.servers import device_flags, info, run_load, serve
from gpu_stages.settings import Result, Settings, one_line
from sglang_dspark.serving import Server

CONCURRENCY, TINY_CONCURRENCY = (1, 8, 32, 64), (1, 4)
PROMPT, OUTPUT, TINY_OUTPUT = 128, 128, 16
WAVES = 2  # requests of each client
REPEATS, TINY_REPEATS = 3, 1
WARM_UP_TOKENS = 16


def run(settings: Settings, result: Result) -> None:
    pair = prepare_pair(settings)
    table = made_table(settings)
    known, reason = sglang_table(table, settings.work / "sglang-table.json")
    arms, left_out = arms_of(settings, pair, table, known, reason)
    counts = TINY_CONCURRENCY if settings.tiny else CONCURRENCY
    gamma = pair.shape.gamma
    result.set(
        model=pair.shape.name,
        acceptance=acceptance(settings, gamma),
        arms={arm.name: " ".join([*arm.flags, *arm.describe_environ()]) for arm in arms},
        left_out=left_out,
        workload={
            "prompt_tokens": PROMPT,
            "output_tokens": TINY_OUTPUT if settings.tiny else OUTPUT,
            "requests": f"{WAVES} a client",
            "temperature": 0,
        },
        cost_table="measured at start-up" if table is None else table.name,
        loads=[],
    )
    groups = [[arm] for arm in arms] if settings.parallel < len(arms) else [arms]
    for group in groups:
        with ExitStack() as stack:
            servers = start(settings, pair, group, stack, result)
            measure_all(settings, pair, servers, counts, result)
            for name, server in servers.items():
                if name.startswith("ours"):
                    result.append("servers", {"arm": name, **info(server)["schedule"]})


def acceptance(settings: Settings, gamma: int) -> dict[str, Any]:
    if settings.simulate is not None:
        return {"simulated": list(settings.simulate)}
    return {
        "real": f"{HIGH} at every position for half of the requests, {LOW} for the others",
        "accept_length_of_whole_windows": round(mixed_accept_length(gamma), 3),
    }


def start(
    settings: Settings, pair: Pair, arms: Sequence[Arm], stack: ExitStack, result: Result
) -> dict[str, Server]:
    """Servers by arm, started at the same time. Those that do not start are told as problems."""

    def one(arm: Arm) -> Server:
        flags = [*server_flags(settings, pair), *arm.flags]
        server: Server = own.enter_context(serve(settings, arm.name, flags, arm.environ))
        return server

    # Entered by threads of this group, left in one piece.
    own = stack.enter_context(ExitStack())
    with ThreadPoolExecutor(len(arms)) as pool:
        starts = {arm.name: pool.submit(one, arm) for arm in arms}
    servers = {}
    for name, started in starts.items():
        if (error := started.exception()) is None:
            servers[name] = started.result()
        else:
            result.problem(f"{name}: {one_line(error)}")
    return servers


def server_flags(settings: Settings, pair: Pair) -> list[str]:
    """Of every arm. KV tokens: all clients' prompts, outputs and reserves, and no more, since five
    servers share the memory."""
    most = (TINY_CONCURRENCY if settings.tiny else CONCURRENCY)[-1]
    return [
        *("--model-path", str(pair.target), "--dtype", pair.shape.dtype),
        *device_flags(settings, most),
        *("--context-length", "2048", "--max-total-tokens", str(512 * most)),
        *settings.serve_flags,
    ]


def measure_all(
    settings: Settings,
    pair: Pair,
    servers: dict[str, Server],
    counts: Sequence[int],
    result: Result,
) -> None:
    """Every load of these arms; ends early, after whole repeats, where the time does not last."""
    for server in servers.values():
        for count in counts:
            run_load(server, load_of(pair, count, WARM_UP_TOKENS, seed=0), count)
    repeats = TINY_REPEATS if settings.tiny else REPEATS
    for repeat in range(1, repeats + 1):
        began = time.monotonic()
        for count in counts:
            names = list(servers) if repeat % 2 else list(reversed(servers))
            for name in names:
                length = TINY_OUTPUT if settings.tiny else OUTPUT
                # Other requests in every repeat, the same ones for every arm.
                work = load_of(pair, count, length, seed=1000 * repeat + count)
                load = run_load(servers[name], work, count)
                entry = {"arm": name, "concurrency": count, "repeat": repeat, **asdict(load)}
                result.append("loads", entry)
                if settings.simulate is None and load.right < load.requests:
                    wrong = f"{load.requests - load.right} of {load.requests} answers"
                    result.problem(f"{name}, {count} clients: {wrong} are not the known text")
        result.set(**summary(result.get("loads")))
        if settings.left_s < 1.2 * (time.monotonic() - began):
            return


def load_of(pair: Pair, concurrency: int, length: int, seed: int) -> list[Any]:
    return requests(pair.shape, WAVES * concurrency, PROMPT, length, seed)


def summary(loads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians by concurrency and arm, and how our arms compare with the others."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for load in loads:
        groups.setdefault((load["concurrency"], load["arm"]), []).append(load)
    medians = [
        {
            "concurrency": concurrency,
            "arm": arm,
            "runs": len(group),
            **{
                name: median_of(load[name] for load in group)
                for name in ("tokens_per_s", "user_tokens_per_s", "accept_length")
            },
        }
        for (concurrency, arm), group in sorted(groups.items())
    ]
    speed = {(row["concurrency"], row["arm"]): row["tokens_per_s"] for row in medians}
    ratios = [
        {
            "concurrency": concurrency,
            "of": ours,
            "over": other,
            "ratio": round(speed[concurrency, ours] / speed[concurrency, other], 3),
        }
        for concurrency, ours in sorted(speed)
        if ours.startswith("ours")
        for _, other in sorted(key for key in speed if key[0] == concurrency and key[1] != ours)
    ]
    return {"medians": medians, "ratios": ratios}


def median_of(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None
