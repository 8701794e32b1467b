"""`sglang-dspark train-demo`: generate, features, train, evaluate, export; resumable everywhere."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.demo import DemoModelError
from sglang_dspark.recipe import evaluate, features, generate, report, train
from sglang_dspark.recipe.confidence import refit_confidence
from sglang_dspark.recipe.draft import DraftConfig, DraftModel
from sglang_dspark.recipe.eagle3 import Eagle3Config, Eagle3Model
from sglang_dspark.recipe.export import AnyDraft, export
from sglang_dspark.recipe.features import Example, select_layers
from sglang_dspark.recipe.initialise import init_block_draft, init_eagle3
from sglang_dspark.recipe.objectives import (
    CE_LOSS,
    EARLY_LOSS,
    PAPER_LOSS,
    BlockObjective,
    Eagle3Objective,
    Objective,
    Shared,
    frequent_ids,
)
from sglang_dspark.recipe.subjects import SUBJECTS, Subject
from sglang_dspark.recipe.target import FastLlama
from sglang_dspark.serving import ServerError

DRAFTS = ("dspark", "dflash", "eagle3")
TOP_K = 64
HELD_OUT_EVERY = 16  # one conversation in so many is kept for the confidence head
FREQUENT_IDS = 3000


@dataclass(frozen=True)
class Options:
    """What the command line says; see `add_arguments`."""

    target: str
    drafts: tuple[str, ...]
    out: Path
    work_dir: Path
    tokens: int
    steps: int
    threads: int
    seed: int
    start_from: Path | None = None
    eval_prompts: int | None = None
    confidence_weight: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", choices=tuple(SUBJECTS), default="smollm2")
    parser.add_argument(
        "--drafts", nargs="+", choices=DRAFTS, default=DRAFTS, help="default: all three"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the drafts: OUT/dspark and so on"
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        required=True,
        help="data, features, checkpoints, logs; what is found there is kept and gone on from",
    )
    parser.add_argument(
        "--tokens", type=_positive, default=300_000, help="answer tokens to generate (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=_positive, default=8000, help="training steps a draft (%(default)s)"
    )
    parser.add_argument(
        "--threads", type=_positive, default=torch.get_num_threads(), help="of PyTorch"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--eval-prompts", type=_positive, metavar="N", help="of each kind (default: all 20)"
    )
    parser.add_argument(
        "--confidence-weight",
        type=float,
        metavar="W",
        help="of the confidence loss, all along (default: 0.3, and 1, the paper's, at the end)",
    )
    parser.add_argument(
        "--start-from",
        type=Path,
        metavar="DRAFT",
        help="an exported block draft, whose backbone a new dspark or dflash draft begins with",
    )


def main(args: argparse.Namespace) -> int:
    """Run the recipe; errors of the user's are one line and exit code 1."""
    options = Options(
        target=args.target,
        drafts=tuple(args.drafts),
        out=args.out,
        work_dir=args.work_dir,
        tokens=args.tokens,
        steps=args.steps,
        threads=args.threads,
        seed=args.seed,
        confidence_weight=args.confidence_weight,
        start_from=args.start_from,
        eval_prompts=args.eval_prompts,
    )
    try:
        run(options)
    except (DemoModelError, ServerError, ValueError, FileNotFoundError) as error:
        print(f"sglang-dspark train-demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            f"\ninterrupted; the same command goes on from {options.work_dir}",
            file=sys.stderr,
        )
        return 130
    return 0


def run(options: Options) -> None:
    work = options.work_dir
    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    subject = SUBJECTS[options.target]()
    figures = report.Figures.load(work / "figures.json")

    with figures.timed("generate"):
        settings = replace(subject.generate, seed=options.seed)
        generate.generate(subject.path, subject.source, work / "data", settings, options.tokens)
    conversations = generate.read_conversations(work / "data")
    figures.conversations = len(conversations)
    figures.answer_tokens = generate.answer_tokens(conversations)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = FastLlama.load(subject.path, torch.bfloat16, device)
    with figures.timed("features"):
        top_k = min(TOP_K, len(target.head))
        layers = subject.cached_layers
        features.write_features(target, work / "data", work / "features", layers, top_k)
    figures.save(work / "figures.json")

    everything = features.read_features(work / "features")
    kept_back = everything[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    examples = [e for i, e in enumerate(everything) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    for name in options.drafts:
        print(f"draft: {name}", file=sys.stderr)
        with figures.timed(f"train {name}"):
            draft = train_draft(name, options, subject, target, examples)
            if isinstance(draft, DraftModel) and draft.confidence_head is not None and kept_back:
                refit_confidence(draft, Shared(target.embed, target.head), kept_back, options.seed)
        with figures.timed(f"evaluate {name}"):
            prompts = {
                kind: rows[: options.eval_prompts] for kind, rows in subject.held_out.items()
            }
            results = {
                temperature: evaluate.evaluate(
                    draft, target, prompts, subject.stop_id, temperature=temperature
                )
                for temperature in (0.0, 1.0)
            }
        figures.save(work / "figures.json")
        text = report.readme(name, subject, figures, draft.config, options.steps, results)
        export(draft, options.out / name, text)
        print(evaluate.format_table(results[0.0]))
        print(f"draft: {options.out / name}   work directory: {work}")
    logs = {name: work / f"{name}.jsonl" for name in options.drafts}
    logs = {name: log for name, log in logs.items() if log.exists()}
    if logs:  # a training of seconds logs nothing
        report.plot_curves(logs, work / "curves.png")


def train_draft(
    name: str, options: Options, subject: Subject, target: FastLlama, examples: list[Example]
) -> AnyDraft:
    """The draft `name`, trained to the end; a checkpoint in the work directory is gone on from."""
    work = options.work_dir
    if name == "eagle3":
        examples = select_layers(examples, subject.cached_layers, subject.eagle3_layers)
    objective = new_objective(name, options, subject, target, examples)
    config = train.TrainConfig(total_steps=options.steps, seed=options.seed)
    train.train(
        objective,
        examples,
        config,
        work / f"{name}.pt",
        resume=True,
        log=work / f"{name}.jsonl",
    )
    return objective.model


def new_objective(
    name: str, options: Options, subject: Subject, target: FastLlama, examples: list[Example]
) -> Objective:
    """The untrained draft, initialised from the target and the corpus, and its loss."""
    from transformers import AutoTokenizer

    mask = mask_id(AutoTokenizer.from_pretrained(subject.path), subject.mask_token)
    shared = Shared(target.embed, target.head)
    if name == "eagle3":
        config = Eagle3Config.for_target(
            target, subject.eagle3_layers, mask, **subject.eagle3_sizes
        )
        model = Eagle3Model(config).to(target.device)
        init_eagle3(model, target, examples, options.seed)
        return Eagle3Objective(model, shared)
    heads: dict[str, Any] = {"markov_rank": 0, "confidence": False} if name == "dflash" else {}
    block = DraftConfig.for_target(target, subject.cached_layers, mask)
    block = replace(block, **subject.block_sizes, **heads)
    draft = init_block_draft(block, target, examples, options.seed)
    if options.start_from is not None:
        load_backbone(draft, options.start_from)
    frequent = frequent_ids(examples, FREQUENT_IDS, block.vocab_size).to(target.device)
    if name == "dflash":
        return BlockObjective(draft, shared, frequent, early=CE_LOSS, final=CE_LOSS)
    weight = options.confidence_weight
    if weight is None:
        return BlockObjective(draft, shared, frequent)
    early, final = (replace(loss, confidence=weight) for loss in (EARLY_LOSS, PAPER_LOSS))
    return BlockObjective(draft, shared, frequent, early=early, final=final)


def load_backbone(draft: DraftModel, folder: Path) -> None:
    """Copy every weight but the heads' from the block draft in `folder`."""
    from safetensors.torch import load_file

    heads = ("markov_head.", "confidence_head.")
    weights = {
        name: weight.float()
        for name, weight in load_file(folder / "model.safetensors").items()
        if not name.startswith(heads)
    }
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    wrong = [*unexpected, *(name for name in missing if not name.startswith(heads))]
    if wrong:
        raise ValueError(f"--start-from {folder}: has another backbone ({wrong[0]})")


def mask_id(tokenizer: object, token: str) -> int:
    ids = tokenizer(token, add_special_tokens=False).input_ids  # type: ignore[operator]
    if len(ids) != 1:
        raise ValueError(f"the mask token is {token!r}, {len(ids)} tokens; must be one")
    return int(ids[0])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)
