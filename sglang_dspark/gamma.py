"""gamma, the draft tokens of a round, from the flags of three algorithms and the checkpoint.

SGLang has four flags for it, of which two count the anchor too. Those that are given have to agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_dspark.drafters.checkpoints import DraftCheckpoint
from sglang_dspark.errors import ConfigError

# More is a waste on any draft, and graphs are captured for it.
LONGEST_CHAIN = 32


@dataclass(frozen=True)
class _Flag:
    field: str
    extra: int  # what its value counts beyond gamma
    algorithms: tuple[str, ...]

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")


BLOCK_SIZE = _Flag("speculative_dspark_block_size", 0, ("DSPARK", "DFLASH", "EAGLE3"))
NUM_DRAFT_TOKENS = _Flag("speculative_num_draft_tokens", 1, ("DSPARK", "DFLASH", "EAGLE3"))
FLAGS = (
    BLOCK_SIZE,
    _Flag("speculative_dflash_block_size", 1, ("DFLASH",)),
    _Flag("speculative_num_steps", 0, ("EAGLE3",)),
    NUM_DRAFT_TOKENS,
)


def resolve_gamma(args: Any, draft: DraftCheckpoint) -> int:
    """Raises `ConfigError` for flags that disagree, or ask for what the draft cannot do."""
    _check_chain(args, draft)
    given = [
        (flag, int(value))
        for flag in FLAGS
        if (value := getattr(args, flag.field, None)) is not None
        and draft.algorithm in flag.algorithms
        # 1 is what SGLang itself puts there for drafts of one forward
        and not (flag.field == "speculative_num_steps" and value == 1 and _slot_taken(args))
    ]
    if not given:
        return draft.block_size
    flag, value = given[0]
    gamma = value - flag.extra
    # A block has as many rows as it was trained with; a chain goes on as long as one likes.
    longest = LONGEST_CHAIN if draft.chain and not draft.parallel else draft.block_size
    for other, its_value in given[1:]:
        if its_value - other.extra != gamma:
            counts = "the first counts" if other.extra else "the second counts"
            note = f": {counts} the anchor too" if other.extra != flag.extra else ""
            raise ConfigError(
                f"{other.name} is {its_value} but {flag.name} is {value}{note}, so it must be "
                f"{gamma + other.extra}"
            )
    if not 1 <= gamma <= longest:
        drafts = f"1 to {longest}"
        allowed = f"2 to {longest + 1} (the anchor and {drafts} drafts)" if flag.extra else drafts
        reason = (
            f"but the draft {draft.path} was trained for blocks of {draft.block_size}: "
            if longest == draft.block_size
            else ""
        )
        raise ConfigError(f"{flag.name} is {value}, {reason}allowed are {allowed}")
    return gamma


def _slot_taken(args: Any) -> bool:
    return getattr(args, "speculative_dspark_block_size", None) is not None


def _check_chain(args: Any, draft: DraftCheckpoint) -> None:
    topk = getattr(args, "speculative_eagle_topk", None)
    if topk not in (None, 1):
        raise ConfigError(
            f"--speculative-eagle-topk is {topk}, which asks for a tree, but sglang-dspark drafts "
            f"one chain: leave it out or set 1 (a longer chain: {NUM_DRAFT_TOKENS.name}; SGLang's "
            "own trees: start with SGLANG_PLUGINS=none)"
        )
    steps = getattr(args, "speculative_num_steps", None)
    if steps not in (None, 1) and not draft.chain:
        raise ConfigError(
            f"--speculative-num-steps is {steps}, but {draft.algorithm} drafts a block in one "
            f"forward: leave it out (the length of a block is {NUM_DRAFT_TOKENS.name} - 1)"
        )
