"""`sglang-dspark doctor`: what a draft checkpoint is, and whether a target can be served with it.

Reads config files and the headers of the draft's weights. No model is loaded.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_dspark.config import TargetModel
from sglang_dspark.drafters.checkpoints import DraftCheckpoint, check_weights, read_checkpoint
from sglang_dspark.drafters.checkpoints.fields import Fields
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import read_json_object


def run(checkpoint: str, target: str | None, console: Console | None = None) -> int:
    """Print the report. Returns the exit code: 1 if there is a problem."""
    console = console or Console()
    problems: list[str] = []
    draft: DraftCheckpoint | None = None
    model: TargetModel | None = None
    try:
        draft = read_checkpoint(checkpoint, flag="CHECKPOINT")
        check_weights(draft)
    except ConfigError as error:
        problems.append(str(error))
    if target is not None:
        try:
            model = read_target(target)
        except ConfigError as error:
            problems.append(str(error))
    if draft is not None:
        if model is not None:
            problems += draft.misfits(model)
            draft = draft.for_target(model.num_layers)
        console.print(_facts(draft))
    for problem in problems:
        console.print(f"problem: {problem}", style="red", soft_wrap=True, markup=False)
    if problems or draft is None:
        return 1
    good = "the weights are what config.json says" + (f", and fit {target}" if target else "")
    console.print(good, style="green", soft_wrap=True, markup=False)
    console.print(
        f"launch: {launch_command(checkpoint, target, draft)}", soft_wrap=True, markup=False
    )
    return 0


def launch_command(checkpoint: str, target: str | None, draft: DraftCheckpoint) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", target or "TARGET"]
    words += ["--speculative-algorithm", draft.algorithm]
    words += ["--speculative-draft-model-path", checkpoint]
    return shlex.join(words)


def read_target(path: str) -> TargetModel:
    """The numbers of a target in a local folder, or of a Hugging Face repository by its name."""
    file = Path(path).expanduser() / "config.json"
    if not file.parent.is_dir():
        file = _fetched_config(path)
    config = Fields(read_json_object(file, f"--target {path}: holds no config.json"), file)
    if config.given("text_config"):  # of a multimodal model
        config = config.section("text_config")
    return TargetModel(
        hidden_size=config.count("hidden_size"),
        vocab_size=config.count("vocab_size"),
        num_layers=config.count("num_hidden_layers"),
    )


def _fetched_config(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"--target is {name!r}: neither an existing folder nor a Hugging Face repository "
            f"that can be fetched ({reason})"
        ) from error


def _facts(draft: DraftCheckpoint) -> Table:
    table = Table(show_header=False, title=draft.path, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in describe(draft).items():
        table.add_row(name, value)
    return table


def describe(draft: DraftCheckpoint) -> dict[str, str]:
    """What there is to know, in words."""
    layers = (
        f"{draft.num_layers} like {draft.style}'s, hidden size {draft.hidden_size}, "
        f"{draft.num_heads} heads ({draft.num_kv_heads} KV) of {draft.head_dim}"
    )
    ids = str(list(draft.target_layer_ids)) if draft.target_layer_ids else "EAGLE3's usual three"
    of = f" of {draft.num_target_layers}" if draft.num_target_layers else ""
    if draft.chain:
        first = "one forward for the whole block (P-EAGLE)" if draft.parallel else "one a forward"
    else:
        first = "the anchor's row" if draft.sample_from_anchor else "the first mask row"
        first = f"the first is proposed by {first}"
    vocabulary = f"{draft.vocab_size}, the target's"
    if draft.maps_vocabulary:
        vocabulary = f"{draft.draft_vocab_size} of the target's {draft.vocab_size} (d2t)"
    head = f"{draft.markov_head_type}, rank {draft.markov_rank}" if draft.markov_rank else "none"
    return {
        "layout": f"{draft.layout}, {draft.architecture}",
        "serve as": f"--speculative-algorithm {draft.algorithm}",
        "gamma": f"{draft.block_size} draft tokens a round; {first}",
        "layers": layers,
        "reads": f"the output of target layers {ids}{of}",
        "vocabulary": vocabulary,
        "LM head": "its own" if draft.own_head else "the target's",
        "embedding": "its own" if draft.own_embedding else "the target's",
        "sequential head": head,
        "confidence": "its head" if draft.has_confidence_head else "from the draft distribution",
        "mask token": "none" if draft.mask_token_id is None else str(draft.mask_token_id),
    }
