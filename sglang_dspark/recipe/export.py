"""Stage 5: the folder that is served as a draft, in layouts of DeepSpec and SpecForge.

    DSPARK   Qwen3DSparkModel         markov_rank > 0, with or without a confidence head
    DFLASH   Qwen3DSparkModel         markov_rank = 0
    EAGLE3   LlamaForCausalLMEagle3   SpecForge: midlayer.*, lm_head of the draft vocabulary, d2t
                                      (offsets: target id - draft id), t2d (bool per target id)
             Qwen3Eagle3Model         DeepSpec: layers.0.*, norms on q and k, the whole vocabulary

embed_tokens, and the lm_head of all but SpecForge's, are the target's own and left out: SGLang
attaches them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dspark.recipe.draft import DraftConfig, DraftModel
from sglang_dspark.recipe.eagle3 import STEP_DECAY, Eagle3Config, Eagle3Model
from sglang_dspark.recipe.target import FastLlama

AnyDraft = DraftModel | Eagle3Model


def hf_config(config: DraftConfig) -> dict[str, Any]:
    """config.json of the exported draft."""
    common = {
        **config.as_dict(),
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    del common["confidence"]
    if not isinstance(config, Eagle3Config):
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            **common,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": config.num_hidden_layers,
            **({"markov_head_type": "vanilla"} if config.markov_rank else {}),
            "enable_confidence_head": config.confidence,
            **(
                {"confidence_head_with_markov": config.markov_rank > 0} if config.confidence else {}
            ),
        }
    for name in ("markov_rank", "mask_token_id", "block_size", "qk_norm"):
        del common[name]
    if config.qk_norm:
        del common["draft_vocab_size"]
        return {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            **common,
            "ttt_length": config.block_size,
            "step_loss_decay": STEP_DECAY,
            "draft_num_hidden_layers": config.num_hidden_layers,
        }
    layer_ids = common.pop("target_layer_ids")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **common,
        "ttt_length": config.block_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layer_ids,
            "use_aux_hidden_state": True,
        },
        "num_aux_hidden_states": len(layer_ids),
    }


def published_weights(draft: AnyDraft) -> dict[str, Tensor]:
    """The draft's weights under their published names, bfloat16, on the CPU."""
    weights = {name: value.detach().cpu() for name, value in draft.state_dict().items()}
    if isinstance(draft, Eagle3Model):
        d2t = weights.pop("d2t")
        if draft.config.qk_norm:
            del weights["lm_head.weight"]
            weights = {name.replace("midlayer.", "layers.0."): w for name, w in weights.items()}
        else:
            t2d = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
            t2d[d2t] = True
            weights |= {"d2t": d2t - torch.arange(len(d2t)), "t2d": t2d}
    return {
        name: value.to(torch.bfloat16).contiguous() if value.is_floating_point() else value
        for name, value in weights.items()
    }


def export(draft: AnyDraft, folder: Path, readme: str | None = None) -> None:
    """Write config.json, model.safetensors (bfloat16) and README.md as one atomic step.

    An earlier export in `folder` is replaced; an interruption leaves either the old or the new one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    old = temp.with_name(temp.name + "-old")
    try:
        weights = published_weights(draft)
        save_file(weights, temp / "model.safetensors", metadata={"format": "pt"})
        (temp / "config.json").write_text(json.dumps(hf_config(draft.config), indent=2) + "\n")
        if readme is not None:
            (temp / "README.md").write_text(readme)
        # mkdtemp and save_file make them private to the user; a draft is data to share.
        for path in temp.iterdir():
            path.chmod(0o644)
        temp.chmod(0o755)
        if folder.exists():
            os.replace(folder, old)
        os.replace(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def load_draft(folder: Path, target: FastLlama | None = None) -> AnyDraft:
    """Read an exported draft back, in float32. target: lends DeepSpec's EAGLE3 its lm_head."""
    values = json.loads((folder / "config.json").read_text())
    architecture = (values.get("architectures") or [None])[0]
    weights = load_file(folder / "model.safetensors")
    draft: AnyDraft
    if architecture == "Qwen3DSparkModel":
        values["confidence"] = values.get("enable_confidence_head", False)
        draft = DraftModel(DraftConfig.from_dict(values))
    elif architecture in ("LlamaForCausalLMEagle3", "Qwen3Eagle3Model"):
        draft = _eagle3_from(values, weights, target)
    else:
        raise ValueError(
            f"{folder}/config.json: architectures is {values.get('architectures')}; allowed: "
            "Qwen3DSparkModel, LlamaForCausalLMEagle3, Qwen3Eagle3Model"
        )
    draft.load_state_dict(weights)
    return draft.float().eval()


def _eagle3_from(
    values: dict[str, Any], weights: dict[str, Tensor], target: FastLlama | None
) -> Eagle3Model:
    """The empty model; `weights` get this module's names."""
    vocab = int(values["vocab_size"])
    deepspec = values["architectures"] == ["Qwen3Eagle3Model"]
    if deepspec:
        if target is None:
            raise ValueError("a Qwen3Eagle3Model without lm_head needs the target's")
        for name in [name for name in weights if name.startswith("layers.0.")]:
            weights[name.replace("layers.0.", "midlayer.")] = weights.pop(name)
        weights |= {"lm_head.weight": target.head, "d2t": torch.arange(vocab)}
    else:
        values["target_layer_ids"] = values["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        weights["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]))
        del weights["t2d"]
    settings = {
        "draft_vocab_size": vocab,
        **values,
        "block_size": values["ttt_length"],
        "mask_token_id": 0,
        "qk_norm": deepspec,
    }
    config = Eagle3Config.from_dict(settings)
    return Eagle3Model(config)
