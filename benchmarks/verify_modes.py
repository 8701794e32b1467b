"""Verify modes under load: no speculation, static, compact and fixed windows, side by side.

    python benchmarks/verify_modes.py
    python benchmarks/verify_modes.py --algorithms DFLASH EAGLE3

Arms of an algorithm: none, static, compact, and for DSPARK fixed windows, which are static servers
that draft fewer tokens (`window 3`: the anchor and 2 drafts); they run on the mix. One algorithm
after the other, each beside a server without speculation of its own: more servers than an
algorithm has arms do not fit into a small machine's memory.

All servers of an algorithm run SmolLM2-135M on the host platform and are up at the same time; they
take turns, one loaded at a time, in alternating order. The load is a closed loop: as many clients
as the concurrency says, each of which sends its next request when the last one is answered. Prompts
are the recipe's held-out ones: `low` acceptance (chat, prose), `high` (maths, code), and a mix.

Written are every run, medians, ratios, what the compact servers say of padding and of their table's
predictions, and the utilisation of a cap-accept server; a plot of throughput against speed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from host_attention import describe_machine, versions
from transformers import AutoTokenizer

import sglang_dspark
from sglang_dspark.demo.model import prepare_demo_model
from sglang_dspark.recipe.evaluate import chat_prompts
from sglang_dspark.recipe.prompts import PROMPTS
from sglang_dspark.serving import Server

RESULTS = Path(__file__).parent / "results" / "verify_modes.json"
DRAFTS = Path(sglang_dspark.__file__).parent / "drafts"
ALGORITHMS = ("DSPARK", "DFLASH", "EAGLE3")


def speculative(algorithm: str, *more: str) -> list[str]:
    draft = DRAFTS / f"smollm2-135m-{algorithm.lower()}"
    flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)]
    return [*flags, *more]


def arms_of(algorithm: str) -> dict[str, list[str]]:
    """Flags by arm."""
    arms = {
        "none": [],
        "static": speculative(algorithm),
        "compact": speculative(algorithm, "--speculative-verify-mode", "compact"),
    }
    if algorithm == "DSPARK":
        for tokens in (2, 3):
            arms[f"window {tokens}"] = speculative(
                algorithm, "--speculative-num-draft-tokens", str(tokens)
            )
    return arms


CAP_ACCEPT = speculative("DSPARK", "--speculative-verify-mode", "cap-accept")
KINDS = {"low": ("chat", "prose"), "high": ("maths", "code")}


@dataclass(frozen=True)
class Run:
    """One measured load."""

    algorithm: str
    arm: str
    kind: str
    concurrency: int
    tokens_per_s: float  # output tokens of all requests / wall time, prefill included
    user_tokens_per_s: float  # mean over requests of output tokens / latency
    record: dict[str, Any] | None  # what the server says of its rounds; None without speculation


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    model = str(prepare_demo_model("bfloat16"))
    prompts = load_prompts(model)
    runs: list[Run] = []
    tables: dict[str, str] = {}
    for algorithm in args.algorithms:
        more, tables[algorithm] = compare(algorithm, model, prompts, args)
        runs += more
    report = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": describe_machine(),
        "versions": versions(),
        "model": "SmolLM2-135M-Instruct, bfloat16, drafts smollm2-135m-*",
        "workload": {
            "output_tokens": f"{args.output_tokens // 2} to {args.output_tokens * 3 // 2}",
            "requests_per_run": f"{args.waves} times the concurrency, at least 3",
            "repeats": args.repeats,
            "temperature": 0,
        },
        "cost_tables": tables,
        "medians": medians(runs),
        "checks": {algorithm: checks(runs, algorithm) for algorithm in args.algorithms},
        "utilisation_of_cap_accept_on_the_mix": {}
        if args.skip_cap_accept
        else utilisation(model, prompts, args),
        "runs": [asdict(run) for run in runs],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    plot(report["medians"], args.out.with_suffix(".png"))
    print_tables(report)


def compare(
    algorithm: str, model: str, prompts: dict[str, list[list[int]]], args: argparse.Namespace
) -> tuple[list[Run], str]:
    """All runs of an algorithm's arms, and where the compact server's cost table is from."""
    runs: list[Run] = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        servers = {
            arm: stack.enter_context(start(model, flags, Path(logs) / arm, args))
            for arm, flags in arms_of(algorithm).items()
        }
        for server in servers.values():  # every shape once: oneDNN compiles for each
            for concurrency in args.concurrency:
                load(server, prompts["mix"], concurrency, args, seed=0)
        for repeat in range(1, args.repeats + 1):
            for kind in ("low", "high", "mix"):
                arms = [n for n in servers if kind == "mix" or not n.startswith("window")]
                for concurrency in args.concurrency:
                    for arm in arms if repeat % 2 else reversed(arms):
                        record, speeds = measure(
                            servers[arm], arm, prompts[kind], concurrency, args, repeat
                        )
                        run = Run(algorithm, arm, kind, concurrency, *speeds, record)
                        runs.append(run)
                        print(summary(run), file=sys.stderr, flush=True)
        return runs, table_of(servers["compact"])


def utilisation(
    model: str, prompts: dict[str, list[list[int]]], args: argparse.Namespace
) -> dict[str, float]:
    """Committed tokens for one that a full window would have committed, by concurrency."""
    found = {}
    with tempfile.TemporaryDirectory() as logs:
        with start(model, CAP_ACCEPT, Path(logs) / "cap", args) as server:
            load(server, prompts["mix"], max(args.concurrency), args, seed=0)
            for concurrency in args.concurrency:
                record, _ = measure(server, "cap-accept", prompts["mix"], concurrency, args, 1)
                assert record is not None
                found[str(concurrency)] = round(record["utilisation"], 4)
    return found


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3, help="at least 3 for a result")
    parser.add_argument("--waves", type=float, default=1.0, help="requests for each client")
    parser.add_argument("--output-tokens", type=int, default=32, help="mean of a request")
    parser.add_argument("--tiers", default="12")
    parser.add_argument("--skip-cap-accept", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def load_prompts(model: str) -> dict[str, list[list[int]]]:
    """Token ids by kind; the mix takes turns."""
    of_topic = chat_prompts(AutoTokenizer.from_pretrained(model), PROMPTS)
    prompts = {
        kind: [p for topic in topics for p in of_topic[topic]] for kind, topics in KINDS.items()
    }
    for of_kind in prompts.values():
        random.Random(0).shuffle(of_kind)
    pairs = zip(prompts["low"], prompts["high"], strict=True)
    prompts["mix"] = [prompt for pair in pairs for prompt in pair]
    return prompts


def start(model: str, flags: list[str], log: Path, args: argparse.Namespace) -> Server:
    common = [
        *("--model-path", model, "--dtype", "bfloat16", "--skip-tokenizer-init"),
        *("--max-running-requests", str(max(args.concurrency)), "--max-total-tokens", "16384"),
    ]
    if "--speculative-verify-mode" in flags:
        common += ["--speculative-verify-tiers", args.tiers]
    return Server([*common, *flags], log=log, timeout_s=600)


def load(
    server: Server, prompts: list[list[int]], concurrency: int, args: argparse.Namespace, seed: int
) -> tuple[float, float]:
    """Output tokens per second, of all and as one user sees them."""
    server.get("/flush_cache")
    rng = random.Random(1000 * seed + concurrency)
    count = max(3, round(args.waves * concurrency))
    half = args.output_tokens // 2
    work = [(prompts[i % len(prompts)], half + rng.randrange(2 * half + 1)) for i in range(count)]

    def send(job: tuple[list[int], int]) -> float:
        prompt, length = job
        sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
        began = time.perf_counter()
        server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
        return length / (time.perf_counter() - began)

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        speeds = list(pool.map(send, work))
    wall = time.perf_counter() - began
    return sum(length for _, length in work) / wall, statistics.mean(speeds)


def measure(
    server: Server,
    arm: str,
    prompts: list[list[int]],
    concurrency: int,
    args: argparse.Namespace,
    repeat: int,
) -> tuple[dict[str, Any] | None, tuple[float, float]]:
    """What the server says of its rounds, and the speeds of `load`."""
    if arm != "none":
        server.post("/set_internal_state", {"server_args": {"dspark_clear_info_records": True}})
    tokens, user = load(server, prompts, concurrency, args, repeat)
    record = None
    if arm != "none":
        said = server.get("/server_info")["internal_states"][0]["dspark_info_record"]
        keep = ("rounds", "plain_rounds", "verified", "computed", "accept_length", "utilisation")
        record = {name: said[name] for name in keep}
        steps = zip(said["predicted_ms"], said["measured_ms"], strict=True)
        record["step_errors"] = [round(abs(p - m) / m, 4) for p, m in steps if p and m is not None]
    return record, (round(tokens, 2), round(user, 2))


def table_of(server: Server) -> str:
    said = server.get("/server_info")["internal_states"][0]["dspark_info_record"]
    return f"{said['schedule']['cost table']}; tiers {said['schedule']['tiers']}"


def medians(runs: list[Run]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.algorithm, run.kind, run.concurrency, run.arm), []).append(run)
    return [
        {
            "algorithm": algorithm,
            "kind": kind,
            "concurrency": concurrency,
            "arm": arm,
            "tokens_per_s": statistics.median(run.tokens_per_s for run in group),
            "user_tokens_per_s": statistics.median(run.user_tokens_per_s for run in group),
        }
        for (algorithm, kind, concurrency, arm), group in groups.items()
    ]


def checks(runs: list[Run], algorithm: str) -> dict[str, Any]:
    """The figures that an algorithm's modes are judged by."""
    runs = [run for run in runs if run.algorithm == algorithm]
    speed = {(r["kind"], r["concurrency"], r["arm"]): r["tokens_per_s"] for r in medians(runs)}
    kinds, sizes = {k for k, _, _ in speed}, sorted({c for _, c, _ in speed})
    best = {
        f"{kind}, {c}": round(
            speed[kind, c, "compact"] / max(speed[kind, c, "none"], speed[kind, c, "static"]), 3
        )
        for kind in sorted(kinds)
        for c in sizes
    }
    fixed = [arm for arm in arms_of(algorithm) if arm not in ("none", "compact")]
    windows = {
        str(c): round(speed["mix", c, "compact"] / max(speed["mix", c, arm] for arm in fixed), 3)
        for c in sizes
    }
    records = [run.record for run in runs if run.arm == "compact" and run.record is not None]
    verified = sum(record["verified"] for record in records)
    computed = sum(record["computed"] for record in records)
    errors = [error for record in records for error in record["step_errors"]]
    return {
        "compact_over_best_of_none_and_static": best,
        "compact_over_static_at_highest_concurrency_low": round(
            speed["low", sizes[-1], "compact"] / speed["low", sizes[-1], "static"], 3
        ),
        "compact_over_best_fixed_window_on_the_mix": windows,
        "padding_of_verify_tokens": round(1 - verified / computed, 4),
        "median_step_time_error": round(statistics.median(errors), 4),
    }


def summary(run: Run) -> str:
    record = "" if run.record is None else f" accept length {run.record['accept_length']:.2f}"
    return (
        f"{run.algorithm} {run.arm:9} {run.kind:5} {run.concurrency:3}"
        f" {run.tokens_per_s:8.1f} tokens/s {run.user_tokens_per_s:6.1f} a user{record}"
    )


def print_tables(report: dict[str, Any]) -> None:
    for row in report["medians"]:
        print(
            f"{row['algorithm']:6} {row['kind']:5} {row['concurrency']:3} {row['arm']:9} "
            f"{row['tokens_per_s']:8.1f} {row['user_tokens_per_s']:8.1f}"
        )
    print(json.dumps(report["checks"], indent=1))
    print("utilisation:", report["utilisation_of_cap_accept_on_the_mix"])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput against the speed of one user: one curve an arm, a panel for each algorithm and
    kind."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    kinds = sorted({row["kind"] for row in rows})
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    shape = (len(algorithms), len(kinds))
    figure, axes = pyplot.subplots(*shape, figsize=(5 * shape[1], 4 * shape[0]), squeeze=False)
    for algorithm, panels in zip(algorithms, axes, strict=True):
        for kind, axis in zip(kinds, panels, strict=True):
            for arm in arms_of(algorithm):
                points = [
                    row
                    for row in rows
                    if (row["algorithm"], row["kind"], row["arm"]) == (algorithm, kind, arm)
                ]
                if points:
                    axis.plot(
                        [row["user_tokens_per_s"] for row in points],
                        [row["tokens_per_s"] for row in points],
                        marker="o",
                        linewidth=2 if arm == "compact" else 1,
                        label=arm,
                    )
            axis.set(
                title=f"{algorithm}, {kind}",
                xlabel="tokens/s of one user",
                ylabel="tokens/s of all",
            )
            axis.grid(alpha=0.3)
        panels[-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
