"""Finding a draft checkpoint and reading it in the layout that its config.json says.

Only config.json and the headers of the weight files are read, so that a wrong draft stops the
launch within a second and before any weight is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dspark.drafters.checkpoints import deepspec, specforge, speculators, zlab
from sglang_dspark.drafters.checkpoints.description import DraftCheckpoint
from sglang_dspark.drafters.checkpoints.fields import Fields
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import read_json_object

# The field of a folder that `translate` wrote; it holds the whole description.
TRANSLATED = "sglang_dspark"

# By architecture, each a layout's `read`. A checkpoint of speculators names its kind elsewhere,
# and shares architectures with others.
_LAYOUTS = {
    **dict.fromkeys(deepspec.ARCHITECTURES, deepspec.read),
    **dict.fromkeys(specforge.ARCHITECTURES, specforge.read),
    **dict.fromkeys(zlab.ARCHITECTURES, zlab.read),
}


def read_checkpoint(
    path: str, *, flag: str, num_target_layers: int | None = None
) -> DraftCheckpoint:
    """Describe the draft in a local folder, or in a Hugging Face repository by its name.

    flag: where the path is from, for messages. num_target_layers: decoder layers of the target;
    without it `target_layer_ids` is empty where the checkpoint leaves the choice to its reader.
    """
    folder = local_folder(path, flag)
    raw = read_json_object(folder / "config.json", f"{flag} {path}: holds no config.json")
    checkpoint = _read(raw, folder / "config.json")
    return checkpoint if num_target_layers is None else checkpoint.for_target(num_target_layers)


def _read(raw: dict[str, Any], file: Path) -> DraftCheckpoint:
    if TRANSLATED in raw:
        try:
            return DraftCheckpoint.from_dict(raw[TRANSLATED])
        except (TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{file}: {TRANSLATED} was not written by this release ({error}); delete "
                f"{file.parent} and name the original draft"
            ) from error
    if speculators.recognises(raw):
        return speculators.read(Fields(raw, file))
    architectures = raw.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(first, str) or first not in _LAYOUTS:
        raise ConfigError(
            f"{file}: architectures is {architectures!r}; drafts that are served: "
            f"{', '.join(_LAYOUTS)}, and those of speculators: {', '.join(speculators.KINDS)}"
        )
    return _LAYOUTS[first](Fields(raw, file), first)


def local_folder(path: str, flag: str) -> Path:
    """The folder, or where the repository of that name was fetched to. Raises ConfigError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.absolute()
    # "owner/name" may be a repository of the hub; anything else was meant as a path.
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
            if not any(folder.glob("*.safetensors")):
                folder = Path(snapshot_download(path, allow_patterns=["*.json", "*.bin"]))
            return folder
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"{flag} is {path!r}: neither an existing folder nor a Hugging Face repository "
                f"that can be fetched ({reason})"
            ) from error
    raise ConfigError(f"{flag} is {path!r}: no such folder")


def check_ranks(checkpoint: DraftCheckpoint, ranks: int) -> None:
    """Raise `ConfigError` unless our own layers can be split over so many tensor-parallel ranks."""
    draft = checkpoint
    if not (draft.chain or draft.style == "gemma4"):
        return  # SGLang's layers, which know for themselves
    kv = draft.num_kv_heads
    for name, count, splits in (
        ("num_attention_heads", draft.num_heads, draft.num_heads % ranks == 0),
        ("num_key_value_heads", kv, kv % ranks == 0 or ranks % kv == 0),
        ("intermediate_size", draft.intermediate_size, draft.intermediate_size % ranks == 0),
    ):
        if not splits:
            raise ConfigError(
                f"--tp-size is {ranks}, but {draft.path}/config.json: {name} is {count}, which "
                "cannot be split over so many ranks"
            )


def check_algorithm(checkpoint: DraftCheckpoint, asked: str) -> None:
    """Raise `ConfigError` if a draft is asked to be served as what it is not."""
    if asked.upper() != checkpoint.algorithm:
        raise ConfigError(
            f"--speculative-algorithm is {asked}, but {checkpoint.path} holds a "
            f"{checkpoint.algorithm} draft ({checkpoint.layout} {checkpoint.architecture}): "
            f"serve it with --speculative-algorithm {checkpoint.algorithm}"
        )
