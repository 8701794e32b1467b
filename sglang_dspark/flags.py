"""Our own command-line flags, beside those that SGLang has already.

SGLang keeps only its own fields of the parsed arguments, so a flag writes an environment variable,
which every process of the server inherits; `config` reads them there. The variables can also be set
by hand, e.g. where SGLang is used as a library. A flag wins over its variable.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = "SGLANG_SPEC_VERIFY_"  # of the variables that are ours alone


@dataclass(frozen=True)
class Flag:
    """A flag, the variable that carries it, and what its value means."""

    name: str
    variable: str
    help: str
    choices: tuple[str, ...] | None = None


MODE = Flag(
    "--speculative-verify-mode",
    "SGLANG_RAGGED_VERIFY_MODE",  # SGLang's own variable; its users know it
    "How much of a drafted block the target verifies. static: all of it. compact: per request, "
    "what pays, packed into graph tiers. cap-accept: all of it, but at most what compact would "
    "have verified is committed (to measure with). Default: static.",
    ("static", "compact", "cap-accept"),
)
TIERS = Flag(
    "--speculative-verify-tiers",
    PREFIX + "TIERS",
    "In compact mode, for which token counts graphs are captured: how many, chosen for the least "
    "padding, or a list such as 8,16,64,384. Default: 12.",
)
BUDGET = Flag(
    "--speculative-verify-budget",
    PREFIX + "BUDGET",
    "Draft tokens to verify in a round. auto: what the cost table and the confidences say. A "
    "number from 0 to 1: this share of what was drafted. random: another share every round. "
    "profile: what `sglang-dspark profile-sps` asks for. All but auto are for tests and "
    "measurements. Default: auto.",
)
MIN_GAIN = Flag(
    "--speculative-verify-min-gain",
    PREFIX + "MIN_GAIN",
    "Predicted gain in throughput from which windows are trimmed. Default: 0.02.",
)
REFINE = Flag(
    "--speculative-verify-refine",
    PREFIX + "REFINE",
    "Whether step times measured while serving correct the cost table, by tier. Default: on.",
    ("on", "off"),
)
CONFIDENCE_FIT = Flag(
    "--speculative-confidence-fit",
    PREFIX + "CONFIDENCE_FIT",
    "Whether confidences are fitted to verify outcomes while serving. auto: unless a calibration "
    "is given (--speculative-dspark-confidence-sts-path). on: also on top of one. off: never. "
    "Default: auto.",
    ("auto", "on", "off"),
)
RECORDS = Flag(
    "--speculative-verify-records",
    PREFIX + "RECORDS",
    "A new file, to which every decode round is written as a JSON line: confidences, windows, "
    "outcomes and times, no text. `sglang-dspark calibrate` and `report` read it.",
)
SIMULATE = Flag(
    "--speculative-simulate-acceptance",
    PREFIX + "SIMULATE_ACCEPTANCE",
    "Make acceptance up: draft token k survives with this probability, given that all before it "
    "did. gamma numbers, such as 0.8,0.7,0.6, or one for all. The output is then not the target's: "
    "for profiling and capacity studies with drafts that are not trained.",
)
TEST_DELAYS = Flag(
    "--speculative-verify-test-delays",
    PREFIX + "TEST_DELAYS",
    argparse.SUPPRESS,  # see `TierDelays`
)
FALLBACK = Flag(
    "--speculative-verify-fallback",
    PREFIX + "FALLBACK",
    "The verify mode to serve where the attention backend cannot serve the one asked for. none: "
    "the server does not start then. Default: none.",
    ("none", "cap-accept", "static"),
)
# Not a flag: where a fallback took place, the mode that was asked for.
ASKED_MODE = "SGLANG_SPEC_ASKED_VERIFY_MODE"
FLAGS = (
    MODE,
    FALLBACK,
    TIERS,
    BUDGET,
    MIN_GAIN,
    REFINE,
    CONFIDENCE_FIT,
    RECORDS,
    SIMULATE,
    TEST_DELAYS,
)


class _StoreInEnvironment(argparse._StoreAction):
    """A store action, as SGLang's reader of --config files wants, that also sets the variable."""

    def __init__(self, *args: Any, variable: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.variable = variable

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        os.environ[self.variable] = str(values)
        super().__call__(parser, namespace, values, option_string)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `FLAGS` to SGLang's parser."""
    group = parser.add_argument_group("sglang-dspark: scheduled verification")
    for flag in FLAGS:
        group.add_argument(
            flag.name,
            action=_StoreInEnvironment,
            variable=flag.variable,
            choices=flag.choices,
            help=flag.help,
        )
