"""What tells best whether a draft token will survive, of what is known before it is drawn?

    python benchmarks/confidence_sources.py

Decodes held-out prompts with each shipped draft, greedy and at temperature 1, in plain PyTorch, and
keeps for every draft position of every round what the draft's distribution said of itself and
whether the token was reached and accepted. Then every source predicts each round with what it had
learned two rounds before, and learns: with the code that serves (`ConfidenceFit`), eight prompts at
a time, kinds mixed. "offline" is the same model fitted on other prompts (5 folds).

AUC, ECE and Brier score are over draft tokens that were reached ("conditional", of c_k), and over
all tokens of all blocks ("cumulative", of the running product).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from confidence_rounds import Rounds, rounds_of
from host_attention import describe_machine, versions

from cost_tables.model import Floats
from sglang_dspark.recipe.reliability import Reliability
from sglang_dspark.recipe.subjects import SUBJECTS
from sglang_dspark.schedule import confidence
from sglang_dspark.schedule.confidence import ConfidenceFit, confidence_logits

RESULTS = Path(__file__).parent / "results" / "confidence_sources.json"
ALGORITHMS = ("dspark", "dflash", "eagle3")
LAG, TOGETHER, FOLDS = 2, 8, 5
CHOSEN = "log_odds"
SOURCES: tuple[tuple[str, ...], ...] = (
    ("log_odds",),
    ("margin",),
    ("certainty",),
    ("collision",),
    ("log_odds", "margin"),
    ("log_odds", "certainty"),
    ("log_odds", "before"),
    ("log_odds", "margin", "certainty", "collision", "before"),
    ("log_odds", "recent"),
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--targets", nargs="+", choices=SUBJECTS, default=["smollm2", "tiny"])
    parser.add_argument("--limit", type=int, default=10, help="prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=Path, help="folder to keep the rounds in, or to read from")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": describe_machine(),
        "versions": versions(),
        "prompts_of_each_kind": args.limit,
        "max_new_tokens": args.max_new_tokens,
        "together": TOGETHER,
        "lag": LAG,
        "learn_us": {str(requests): learning_time(requests) for requests in (8, 64, 256)},
        "mixed_temperatures": [],
        "runs": [],
    }
    for target in args.targets:
        for algorithm in ALGORITHMS:
            greedy, sampled = (
                rounds_of(target, algorithm, t, args.limit, args.max_new_tokens, args.rounds)
                for t in (0.0, 1.0)
            )
            for temperature, rounds in ((0.0, greedy), (1.0, sampled)):
                run = {"target": target, "draft": algorithm, "temperature": temperature}
                report["runs"].append(run | compare(rounds, temperature))
            mixed = mix_temperatures(greedy, sampled)
            report["mixed_temperatures"].append({"target": target, "draft": algorithm} | mixed)
            write(report, args.out)
    print_tables(report)


def write(report: dict[str, Any], path: Path) -> None:
    """A run a line: with every number on its own nobody could read it."""
    runs = ",\n".join(json.dumps(run) for run in report["runs"])
    text = json.dumps({**report, "runs": []}, indent=1)
    path.write_text(text.replace('"runs": []', f'"runs": [\n{runs}\n ]') + "\n")


# --- sources -------------------------------------------------------------------------------------


def predict_online(
    rounds: Rounds,
    names: tuple[str, ...],
    head: bool,
    frozen: bool = False,
    sampled: np.ndarray | None = None,
    batches: list[np.ndarray] | None = None,
) -> Floats:
    """c_k [n, γ], each round with what was learned LAG rounds before it."""
    n, gamma = rounds.head.shape
    seen = rounds.columns(names) if names else np.zeros((n, gamma, 0))
    logits = rounds.head_logits() if head else None
    sampled = np.zeros(n, dtype=bool) if sampled is None else sampled
    fit = ConfidenceFit(gamma, head, frozen=frozen, features=len(names))
    chances, running = np.zeros((n, gamma)), deque[np.ndarray]()

    def of(rows: np.ndarray) -> tuple[Floats, Floats | None]:
        return seen[rows], None if logits is None else logits[rows]

    for rows in rounds.batches(TOGETHER) if batches is None else batches:
        x, h = (None if part is None else torch.from_numpy(part).float() for part in of(rows))
        assert x is not None
        parameters = torch.from_numpy(fit.parameters())
        found = confidence_logits(x, h, parameters, torch.from_numpy(sampled[rows]))
        chances[rows] = found.double().sigmoid().numpy()
        running.append(rows)
        if len(running) > LAG:
            done = running.popleft()
            fit.learn(*of(done), rounds.windows[done], rounds.length[done], sampled[done])
    return chances


def predict_offline(
    rounds: Rounds, names: tuple[str, ...], head: bool, slope_per_position: bool = False
) -> Floats:
    """The same model, all other prompts known: what learning as it goes can hope for."""
    n, gamma = rounds.head.shape
    position = np.broadcast_to(np.eye(gamma), (n, gamma, gamma))
    inputs = [rounds.columns(names)] if names else []
    inputs += [rounds.head_logits()[:, :, None]] if head else []
    if slope_per_position:
        inputs = [column[:, :, [i]] * position for column in inputs for i in range(column.shape[2])]
    parts = [position, *inputs]
    x, chances = np.concatenate(parts, axis=2), np.zeros((n, gamma))
    for fold in range(FOLDS):
        held_out = rounds.prompt % FOLDS == fold
        known = rounds.reached & ~held_out[:, None]
        weights = logistic_fit(x[known], rounds.survived[known])
        chances[held_out] = sigmoid(x[held_out] @ weights)
    return chances


def logistic_fit(x: Floats, labels: np.ndarray, ridge: float = 0.3) -> Floats:
    """Newton's method. x [n, P] -> [P]"""
    weights = np.zeros(x.shape[1])
    for _ in range(25):
        p = sigmoid(x @ weights)
        gradient = x.T @ (labels - p) - ridge * weights
        hessian = (x * (p * (1 - p))[:, None]).T @ x + ridge * np.eye(len(weights))
        weights += np.linalg.solve(hessian, gradient)
    return weights


def sigmoid(x: Floats) -> Floats:
    return 0.5 + 0.5 * np.tanh(0.5 * x)


# --- figures -------------------------------------------------------------------------------------


def compare(rounds: Rounds, temperature: float) -> dict[str, Any]:
    sources: dict[str, Any] = {}
    if rounds.has_head:
        sources["head, as it is"] = {"online": measure(rounds, sigmoid(rounds.head_logits()))}
        sources["head"] = both(rounds, (), head=True)
    as_it_is = predict_online(rounds, (CHOSEN,), head=False, frozen=True)
    sources[f"{CHOSEN}, as it is"] = {"online": measure(rounds, as_it_is)}
    for names in SOURCES:
        sources["+".join(names)] = both(rounds, names, head=False)
        if rounds.has_head:
            sources["+".join(("head", *names))] = both(rounds, names, head=True)
    result = {
        "rounds": len(rounds.length),
        "accept_length": float(rounds.committed.mean()),
        "reached": rounds.reached.sum(axis=0).tolist(),
        "sources": sources,
        # By chance alone, were the chosen source perfectly calibrated.
        "ece_of_chance": ece_of_chance(rounds, predict_online(rounds, (CHOSEN,), rounds.has_head)),
        "memory": by_memory(rounds),
    }
    apart = predict_offline(rounds, (CHOSEN,), rounds.has_head, slope_per_position=True)
    result["slope_per_position_offline"] = figure(
        apart[rounds.reached], rounds.survived[rounds.reached]
    )
    if temperature > 0:
        # Whether a token is accepted is a coin's throw then; nothing before the throw can know more
        # than its bias, Σ min(p, q). (Greedy, that knowledge is the outcome itself.)
        result["knowing_the_target"] = measure(rounds, rounds.overlap.astype(np.float64))
    return result


def both(rounds: Rounds, names: tuple[str, ...], head: bool) -> dict[str, Any]:
    offline = predict_offline(rounds, names, head)
    return {
        "online": measure(rounds, predict_online(rounds, names, head)),
        "offline": figure(offline[rounds.reached], rounds.survived[rounds.reached]),
    }


def measure(rounds: Rounds, chances: Floats) -> dict[str, Any]:
    """chances: c_k [n, γ]."""
    products = chances.cumprod(axis=1)
    return {
        "conditional": figures(chances, rounds.survived, rounds.reached),
        "cumulative": figures(products, rounds.survived, rounds.offered),
    }


def figures(chances: Floats, survived: np.ndarray, counted: np.ndarray) -> dict[str, Any]:
    """Pooled, and for each position that has any; all [n, γ]."""
    positions = [
        figure(chances[mask, k], survived[mask, k])
        for k, mask in enumerate(counted.T)
        if mask.any()
    ]
    by_position = {
        name: [position[name] for position in positions] for name in ("auc", "ece", "brier")
    }
    return figure(chances[counted], survived[counted]) | {"positions": by_position}


def figure(chances: Floats, survived: np.ndarray) -> dict[str, Any]:
    """chances, survived [m]."""
    found = Reliability.measure(
        torch.from_numpy(chances)[:, None], torch.from_numpy(survived)[:, None]
    ).positions[0]
    surprise = -np.log(np.where(survived, chances, 1 - chances).clip(1e-9)).mean()
    rounded = {
        name: None if (value := getattr(found, name)) is None else round(value, 4)
        for name in ("auc", "ece", "brier")
    }
    return {"count": found.count, **rounded, "log_loss": round(float(surprise), 4)}


def ece_of_chance(rounds: Rounds, chances: Floats) -> dict[str, Any]:
    """Mean of 50 draws, pooled and by position."""
    rng = np.random.default_rng(0)

    def mean(known: Floats) -> float:
        draws = [figure(known, rng.random(len(known)) < known)["ece"] for _ in range(50)]
        return round(float(np.mean(draws)), 4)

    positions = [mean(chances[mask, k]) for k, mask in enumerate(rounds.reached.T) if mask.any()]
    return {"pooled": mean(chances[rounds.reached]), "positions": positions}


def by_memory(rounds: Rounds) -> dict[str, Any]:
    """The chosen source with longer and shorter memories, kinds mixed and one after the other."""
    result: dict[str, Any] = {}
    usual = confidence.MEMORY
    for memory in (1024, usual, 1_000_000):
        confidence.MEMORY = memory
        for name, mixed in (("kinds mixed", True), ("one after the other", False)):
            batches = list(rounds.batches(TOGETHER, mixed))
            chances = predict_online(rounds, (CHOSEN,), rounds.has_head, batches=batches)
            known = figure(chances[rounds.reached], rounds.survived[rounds.reached])
            result.setdefault(name, {})[str(memory)] = known
    confidence.MEMORY = usual
    return result


def learning_time(requests: int, gamma: int = 7) -> float:
    """Median microseconds of a call of `learn` in which all was verified and half accepted."""
    rng, fit = np.random.default_rng(0), ConfidenceFit(gamma, head=True)
    evidence, head = rng.normal(size=(requests, gamma, 1)), rng.normal(size=(requests, gamma))
    windows, sampled = np.full(requests, gamma + 1), rng.random(requests) < 0.5
    times = []
    for _ in range(1000):
        accepted = rng.geometric(0.5, requests).clip(1, gamma + 1) - 1
        began = time.perf_counter()
        fit.learn(evidence, head, windows, accepted, sampled)
        times.append(time.perf_counter() - began)
    return round(1e6 * float(np.median(times)), 1)


def mix_temperatures(greedy: Rounds, sampled: Rounds) -> dict[str, Any]:
    """Greedy and sampled requests in one server: told apart by the fit, or not."""
    joined = {
        name: np.concatenate([getattr(greedy, name), getattr(sampled, name)])
        for name in vars(greedy)
        if name != "prompt"
    }
    both_prompts = np.concatenate([greedy.prompt, sampled.prompt + greedy.prompt.max() + 1])
    rounds = Rounds(**joined, prompt=both_prompts)
    is_sampled = np.arange(len(rounds.length)) >= len(greedy.length)
    # Half of what runs together is greedy.
    halves = [list(part.batches(TOGETHER // 2)) for part in (greedy, sampled)]
    halves[1] = [rows + len(greedy.length) for rows in halves[1]]
    length = max(map(len, halves))
    nothing = np.zeros(0, dtype=np.int64)
    halves = [half + [nothing] * (length - len(half)) for half in halves]
    batches = [np.concatenate(pair) for pair in zip(*halves, strict=True)]
    result = {}
    for name, told in (("told apart", is_sampled), ("one for both", None)):
        chances = predict_online(rounds, (CHOSEN,), rounds.has_head, sampled=told, batches=batches)
        result[name] = {
            kind: figure(chances[rounds.reached & which], rounds.survived[rounds.reached & which])
            for kind, which in (
                ("greedy", ~is_sampled[:, None]),
                ("sampled", is_sampled[:, None]),
            )
        }
    return result


def print_tables(report: dict[str, Any]) -> None:
    for run in report["runs"]:
        print(
            f"\n{run['target']} {run['draft']}, temperature {run['temperature']:g}: "
            f"{run['rounds']} rounds, reached {run['reached']}, "
            f"ECE of chance {run['ece_of_chance']['pooled']:.3f}"
        )
        print(f"{'source':50} {'AUC':>6} {'ECE':>6} {'Brier':>6}   cumulative   offline AUC")
        rows = dict(run["sources"])
        if "knowing_the_target" in run:
            rows["(knowing the target too)"] = {"online": run["knowing_the_target"]}
        for name, source in rows.items():
            c, s = source["online"]["conditional"], source["online"]["cumulative"]
            offline = source.get("offline", {}).get("auc")
            print(
                f"{name:50} {c['auc']:6.3f} {c['ece']:6.3f} {c['brier']:6.3f}   "
                f"{s['auc']:6.3f} {s['ece']:6.3f} {s['brier']:6.3f}   "
                + ("-" if offline is None else f"{offline:.3f}")
            )
    print("\nGreedy and sampled together, ECE and log loss of each")
    for row in report["mixed_temperatures"]:
        for name in ("told apart", "one for both"):
            parts = [
                f"{row[name][kind]['ece']:.3f} {row[name][kind]['log_loss']:.3f}"
                for kind in ("greedy", "sampled")
            ]
            print(f"{row['target']:8} {row['draft']:7} {name:13} {'   '.join(parts)}")


if __name__ == "__main__":
    main()
