"""`sglang-dspark eval`: how much of a draft is accepted, in a plain PyTorch loop."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.demo import DemoModelError
from sglang_dspark.recipe import evaluate
from sglang_dspark.recipe.export import load_draft
from sglang_dspark.recipe.report import confidence_lines
from sglang_dspark.recipe.subjects import SUBJECTS
from sglang_dspark.recipe.target import FastLlama


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("draft", type=Path, metavar="DRAFT", help="folder of an exported draft")
    parser.add_argument(
        "--target",
        default="smollm2",
        metavar="NAME_OR_PATH",
        help=f"one of {', '.join(SUBJECTS)}, or a folder of a Llama model (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="JSON lines with `turns` (the first counts) or `prompt`; the file's name is the kind "
        "(default: 20 held-out prompts of each kind that the target was made for)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="first N prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="reliability diagram of the confidence head"
    )


def main(args: argparse.Namespace) -> int:
    try:
        run(args)
    except (DemoModelError, ValueError, OSError) as error:
        print(f"sglang-dspark eval: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    if args.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; must be at least 2")
    if not (args.draft / "config.json").is_file():
        raise ValueError(f"DRAFT is {args.draft}: holds no config.json")
    path, prompts, stop_id = _target(args)
    if args.limit is not None:
        prompts = {kind: rows[: args.limit] for kind, rows in prompts.items()}
    target = FastLlama.load(path, getattr(torch, args.dtype))
    draft = load_draft(args.draft, target)
    last = len(target.layers) - 2
    found = list(draft.config.target_layer_ids)
    sizes = (draft.config.vocab_size, draft.config.hidden_size)
    if sizes != tuple(target.embed.shape) or max(found) > last:
        raise ValueError(
            f"{args.draft}/config.json: vocab_size and hidden_size are {sizes}, target_layer_ids "
            f"{found}; the target {path} has {tuple(target.embed.shape)} and layers up to {last}"
        )
    results = evaluate.evaluate(
        draft, target, prompts, stop_id, args.max_new_tokens, args.temperature, args.seed
    )
    print(evaluate.format_table(results))
    reliability = results["all"].reliability()
    if reliability is not None:
        print("\n" + confidence_lines(reliability))
    if args.plot is not None:
        if reliability is None:
            raise ValueError(f"--plot is {args.plot}, but {args.draft} has no confidence head")
        reliability.plot(args.plot, f"{args.draft.name}, temperature {args.temperature:g}")
    if args.json is not None:
        about = {
            "draft": str(args.draft),
            "target": str(args.target),
            "gamma": draft.config.block_size,
            "temperature": args.temperature,
            "max_new_tokens": args.max_new_tokens,
            "dtype": args.dtype,
            "seed": args.seed,
        }
        evaluate.write_json(args.json, results, about)


def _target(args: argparse.Namespace) -> tuple[Path, dict[str, list[list[int]]], int]:
    """The target's folder, the prompts by kind, and the stop token."""
    from transformers import AutoTokenizer

    if args.target in SUBJECTS:
        subject = SUBJECTS[args.target]()
        path, prompts, stop_id = subject.path, subject.held_out, subject.stop_id
        if args.prompts is None:
            return path, prompts, stop_id
    else:
        path = Path(args.target)
        if not (path / "config.json").is_file():
            allowed = ", ".join(SUBJECTS)
            raise ValueError(f"--target is {args.target!r}; allowed: {allowed}, a model's folder")
        if args.prompts is None:
            raise ValueError("--prompts is missing; only the named targets have their own")
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = {file.stem: tuple(read_prompts(file)) for file in args.prompts}
    if tokenizer.chat_template is None:
        ids = {
            kind: [list(tokenizer(t).input_ids) for t in of_kind] for kind, of_kind in texts.items()
        }
    else:
        ids = evaluate.chat_prompts(tokenizer, texts)
    return path, ids, int(tokenizer.eos_token_id)


def read_prompts(file: Path) -> list[str]:
    """One prompt a line: the first of `turns` (DeepSpec's eval_datasets), or `prompt`."""
    prompts = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        row: Any = json.loads(line)
        text = row.get("prompt") or (row.get("turns") or [None])[0]
        if not isinstance(text, str):
            raise ValueError(f"{file}, line {number}: needs `turns`, a list of texts, or `prompt`")
        prompts.append(text)
    if not prompts:
        raise ValueError(f"{file}: holds no prompt")
    return prompts
