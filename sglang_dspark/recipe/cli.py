"""`python -m sglang_dspark.recipe`: every stage, one after the other, within a time budget."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.demo import DemoModelError, prepare_demo_model
from sglang_dspark.recipe import evaluate, export, features, generate, report, train
from sglang_dspark.recipe.draft import DraftConfig, DraftModel
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.initialise import init_from_target, init_markov
from sglang_dspark.recipe.target import FastLlama

# Shares of --minutes. Features take what they take; training gets the rest.
GENERATE_SHARE = 0.3
EVALUATE_SHARE = 0.05
NUM_FEATURES = 4
TOP_K = 64
MAX_BATCHES = 10_000
PROBE_STEPS = 6


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        run(args)
    except (DemoModelError, ValueError, FileNotFoundError, FileExistsError) as error:
        print(f"sglang_dspark.recipe: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; go on with --resume --work-dir {args.work_dir}",
            file=sys.stderr,
        )
        return 130
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sglang_dspark.recipe", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported draft")
    parser.add_argument("--minutes", type=float, required=True, help="wall time for all stages")
    parser.add_argument(
        "--model", type=Path, default=None, help="target folder (default: the demo model)"
    )
    parser.add_argument(
        "--work-dir", type=Path, default=None, help="data, features, checkpoint (default: new)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with --work-dir")
    parser.add_argument("--mask-token", default="<reponame>", help="an unused token of the target")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.minutes <= 0:
        parser.error(f"--minutes is {args.minutes}; must be above 0")
    if args.resume and args.work_dir is None:
        parser.error("--resume needs --work-dir")
    return args


def run(args: argparse.Namespace) -> None:
    deadline = time.monotonic() + args.minutes * 60
    work = _work_dir(args)
    torch.set_num_threads(args.threads)
    target_path = args.model or prepare_demo_model("bfloat16")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, tokenizer = load_target(target_path, device)
    layer_ids = spread_layer_ids(len(target.layers), NUM_FEATURES)
    config = DraftConfig.for_target(target, layer_ids, mask_id(tokenizer, args.mask_token))
    figures = report.Figures.load(work / "figures.json")
    figures.target = target_path.name

    with figures.timed("generate"):
        settings = generate.GenerateConfig(seed=args.seed)
        seconds = args.minutes * 60 * GENERATE_SHARE - figures.seconds.get("generate", 0.0)
        generate.generate(
            target, tokenizer, work / "data", settings, range(MAX_BATCHES), max(seconds, 1.0)
        )
    conversations = generate.read_conversations(work / "data")
    figures.conversations = len(conversations)
    figures.answer_tokens = sum(len(c.ids) - c.answer_start for c in conversations)
    figures.save(work / "figures.json")

    with figures.timed("features"):
        top_k = min(TOP_K, config.vocab_size)
        features.write_features(target, work / "data", work / "features", layer_ids, top_k)
    figures.save(work / "figures.json")
    examples = features.read_features(work / "features")

    with figures.timed("train"):
        draft = new_draft(config, target, examples, args.seed)
        shared = train.Shared(target.embed, target.head)
        left = deadline - args.minutes * 60 * EVALUATE_SHARE - time.monotonic()
        settings_train = plan_training(work / "plan.json", draft, shared, examples, left, args.seed)
        losses = train.train(
            draft, shared, examples, settings_train, work / "checkpoint.pt", resume=True
        )
    if losses:
        recent = losses[-50:]
        figures.final_loss = sum(recent) / len(recent)
    figures.steps = settings_train.total_steps
    figures.blocks = count_blocks(examples, settings_train)
    figures.save(work / "figures.json")

    with figures.timed("evaluate"):
        results = evaluate.evaluate(draft, target, tokenizer, evaluate.PROMPTS)
    export.export(draft, args.out, report.readme(figures, config, results))
    print(evaluate.format_table(results))
    print(f"draft: {args.out}   work directory: {work}")


def load_target(path: Path, device: str) -> tuple[FastLlama, Any]:
    """The target in bfloat16 and its tokenizer."""
    from transformers import AutoTokenizer

    return FastLlama.load(path, torch.bfloat16, device), AutoTokenizer.from_pretrained(path)


def spread_layer_ids(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` ids from an early layer to the last that can be captured; 30, 4 -> 2, 11, 20, 28."""
    last = num_layers - 2
    first = min(2, last)
    steps = max(1, count - 1)
    return tuple(sorted({math.ceil(first + (last - first) * i / steps) for i in range(count)}))


def mask_id(tokenizer: Any, token: str) -> int:
    ids = tokenizer(token, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise ValueError(f"--mask-token is {token!r}, {len(ids)} tokens; must be one unused token")
    return int(ids[0])


def new_draft(
    config: DraftConfig, target: FastLlama, examples: list[Example], seed: int
) -> DraftModel:
    """The untrained draft, initialised from the target and the corpus."""
    sample = torch.cat([example.features[:64] for example in examples[:16]])
    draft = init_from_target(config, target, sample, seed)
    answers: list[Tensor] = [example.ids[example.answer_start :] for example in examples]
    init_markov(
        draft,
        target.embed,
        torch.cat(answers),
        torch.cat([example.topk_ids for example in examples]),
        torch.cat([example.topk_probs for example in examples]),
    )
    return draft


def plan_training(
    path: Path,
    draft: DraftModel,
    shared: train.Shared,
    examples: list[Example],
    seconds: float,
    seed: int,
) -> train.TrainConfig:
    """How many steps fit into `seconds`, measured once and kept in `path`.

    The schedule counts steps, not seconds: otherwise no two runs would be the same.
    """
    if path.exists():
        steps = int(json.loads(path.read_text())["total_steps"])
        return train.TrainConfig(total_steps=steps, seed=seed)
    probe = train.TrainConfig(total_steps=PROBE_STEPS, seed=seed)
    scratch = copy.deepcopy(draft)
    train.train(scratch, shared, examples, dataclasses.replace(probe, total_steps=1))
    start = time.monotonic()
    train.train(scratch, shared, examples, probe)
    per_step = (time.monotonic() - start) / PROBE_STEPS
    steps = max(1, int(seconds / per_step))
    path.write_text(json.dumps({"total_steps": steps, "seconds_per_step": per_step}) + "\n")
    print(f"train: {per_step:.2f} s a step, so {steps} steps", flush=True)
    return train.TrainConfig(total_steps=steps, seed=seed)


def count_blocks(examples: list[Example], config: train.TrainConfig) -> int:
    """Anchors that training visited, with repetitions (short answers have fewer than the cap)."""
    per_example = [
        min(config.anchors_per_sequence, len(e.ids) - 1 - e.answer_start) for e in examples
    ]
    visits = config.total_steps * config.sequences_per_step
    return round(visits * sum(per_example) / len(per_example))


def _work_dir(args: argparse.Namespace) -> Path:
    if args.work_dir is None:
        args.work_dir = Path(tempfile.mkdtemp(prefix="sglang-dspark-recipe-"))
    work: Path = args.work_dir
    if not args.resume and work.exists() and any(work.iterdir()):
        raise FileExistsError(f"--work-dir {work} is not empty; pass --resume or another folder")
    work.mkdir(parents=True, exist_ok=True)
    return work
