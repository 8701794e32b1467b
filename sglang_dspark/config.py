"""One frozen `SpecConfig`, resolved and checked once from flags and environment.

Nothing else in the package reads flags or the environment. Every error is a `ConfigError`:
one line that names the flag, file or field, the value found and what is allowed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from cost_tables.files import Table, TableError, load_table
from sglang_dspark import flags
from sglang_dspark.drafters.checkpoints import (
    DraftCheckpoint,
    check_algorithm,
    check_ranks,
    check_weights,
    read_checkpoint,
)
from sglang_dspark.drafters.checkpoints.translate import is_translated
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import check_new_file
from sglang_dspark.gamma import resolve_gamma
from sglang_dspark.schedule.calibration import Scaling, read_calibration

TABLE_FLAG = "--speculative-dspark-sps-table-path"
MEASURE = "measure"  # in place of a path
CALIBRATION_FLAG = "--speculative-dspark-confidence-sts-path"
DRAFT_PATH_FLAG = "--speculative-draft-model-path"
_SGLANG_SIMULATION = "SGLANG_SIMULATE_ACC_LEN"  # -1, its default: off


class Algorithm(StrEnum):
    """Speculative algorithms that our worker serves."""

    DSPARK = "DSPARK"
    DFLASH = "DFLASH"
    EAGLE3 = "EAGLE3"


class VerifyMode(StrEnum):
    """How much of a drafted block the target verifies."""

    STATIC = "static"  # all gamma + 1 tokens of every request
    COMPACT = "compact"  # the scheduled windows, packed into a graph tier
    CAP_ACCEPT = "cap-accept"  # all, but at most the scheduled window is committed

    @property
    def schedules(self) -> bool:
        """Whether windows are scheduled at all."""
        return self is not VerifyMode.STATIC


@dataclass(frozen=True)
class TargetModel:
    """What a draft has to fit: the served model's numbers."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True)
class ScheduleConfig:
    """How windows are sized; means nothing in static mode.

    tiers: how many graphs, or their token counts. budget: "auto", "random", the share of the
    drafted tokens to verify, or "profile": what the profiler says, full windows until then.
    min_gain: see `schedule.budget`. table: the cost table of a file; None: a shipped one that fits,
    or measured at start-up. measure: at start-up in any case.
    scaling: calibration of the confidences; None: identity. calibration: where it is from, for the
    log. refine: whether step times measured while serving correct the table.
    confidence_fit: whether confidences are fitted while serving; "auto": where there is no
    calibration. test_delays: a test's file that slows tiers down.
    """

    tiers: int | tuple[int, ...] = 12
    budget: Literal["auto", "random", "profile"] | float = "auto"
    min_gain: float = 0.02
    table: Table | None = None
    measure: bool = False
    scaling: Scaling | None = None
    calibration: str = "none (identity)"
    refine: bool = True
    confidence_fit: str = "auto"
    test_delays: Path | None = None

    @property
    def fits_online(self) -> bool:
        """Whether confidences follow the verify outcomes while serving."""
        if self.confidence_fit == "auto":
            return self.scaling is None
        return self.confidence_fit == "on"


@dataclass(frozen=True)
class SpecConfig:
    """Everything the worker needs to know, resolved.

    gamma: draft tokens proposed per round; a verify window holds gamma + 1 tokens.
    records: file to write every round to, None: none. simulated_survival: gamma probabilities by
    which acceptance is made up, None: it is real. asked_mode: the mode that was asked for; another
    one than mode where --speculative-verify-fallback chose, None: mode.
    """

    algorithm: Algorithm
    mode: VerifyMode
    gamma: int
    draft: DraftCheckpoint
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    records: Path | None = None
    simulated_survival: tuple[float, ...] | None = None
    asked_mode: VerifyMode | None = None

    @property
    def wants_evidence(self) -> bool:
        """Whether drafters say how sure they are of each token."""
        return self.mode.schedules or self.records is not None

    @property
    def width(self) -> int:
        """Tokens of one request in a full verify window: the anchor and gamma drafts."""
        return self.gamma + 1

    def describe(self) -> str:
        """The resolved settings in one log line."""
        draft = self.draft
        asked = "" if self.asked_mode in (None, self.mode) else f" (asked for {self.asked_mode})"
        parts = [
            f"algorithm={self.algorithm} mode={self.mode}{asked} proposes {self.gamma}, "
            f"verifies {self.width} (checkpoint block {draft.block_size})",
            f"draft {draft.architecture} ({draft.layout}): {draft.num_layers} layers, target "
            f"layers {list(draft.target_layer_ids)}"
            + (f" of {draft.num_target_layers}" if draft.num_target_layers else ""),
        ]
        if draft.markov_rank:
            parts.append(f"head {draft.markov_head_type} rank {draft.markov_rank}")
        parts.append(f"confidence head {'yes' if draft.has_confidence_head else 'no'}")
        parts.append(
            f"vocabulary {draft.draft_vocab_size} of {draft.vocab_size}"
            if draft.maps_vocabulary
            else f"vocabulary {draft.vocab_size} shared with the target"
        )
        if draft.mask_token_id is not None:
            parts.append(f"mask token {draft.mask_token_id}")
        if self.simulated_survival is not None:
            chances = ", ".join(f"{chance:g}" for chance in self.simulated_survival)
            parts.append(f"ACCEPTANCE IS SIMULATED ({chances}), the output is not the target's")
        return "; ".join(parts)


_DROP = "drop the flag"
_NOT_IN_STATIC = (
    "it has no effect in verify mode static: drop the flag, or add "
    "--speculative-verify-mode compact"
)
# (field of SGLang's server arguments, values with which we serve, remedy). A flag that would be
# ignored, or that the worker was never run with, is refused rather than served wrongly.
_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("pp_size", (1,), "serve with --pp-size 1"),
    ("attn_cp_size", (1,), _DROP),
    ("dcp_size", (1,), _DROP),
    ("enable_dp_attention", (False,), _DROP),
    ("disaggregation_mode", ("null",), _DROP),
    ("enable_lora", (False,), "serve adapters without speculation"),
    ("enable_hierarchical_cache", (False,), _DROP),
    ("enable_mixed_chunk", (False,), "drop the flag; chunked prefill works without it"),
    ("enable_two_batch_overlap", (False,), _DROP),
    ("enable_pdmux", (False,), _DROP),
    ("enable_return_hidden_states", (False,), _DROP),
    ("enable_watermark", (False,), _DROP),
    (
        "enable_deterministic_inference",
        (False,),
        "drop the flag; greedy requests are deterministic without it",
    ),
    ("speculative_adaptive", (False,), _DROP),
    ("speculative_use_block_verification", (False,), _DROP),
    ("speculative_token_map", (), _DROP),
    ("speculative_draft_window_size", (), _DROP),
    ("speculative_draft_sink_size", (), _DROP),
)
_STATIC_ONLY_UNSUPPORTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("speculative_dspark_sps_table_path", (), _NOT_IN_STATIC),
    ("speculative_dspark_confidence_sts_path", (), _NOT_IN_STATIC),
    # Ours always fills the tier, so outside of static the flag asks for what is done anyway.
    ("speculative_dspark_align_verify_tokens_to_graph_tier", (False,), _NOT_IN_STATIC),
)


def resolve(args: Any, target: TargetModel, environ: Mapping[str, str] = os.environ) -> SpecConfig:
    """Check SGLang's server arguments and the draft checkpoint against the target.

    args: any object with the fields of SGLang's `ServerArgs`.
    Raises `ConfigError` before the server loads a weight.
    """
    algorithm = Algorithm(str(args.speculative_algorithm).upper())
    mode = verify_mode(environ)
    asked = asked_mode(environ)
    unsupported = _UNSUPPORTED + (() if asked.schedules else _STATIC_ONLY_UNSUPPORTED)
    for name, served, remedy in unsupported:
        value = getattr(args, name, None)
        if value is not None and value not in served:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} is {value!r}, which {algorithm} of sglang-dspark does not serve yet: "
                f"{remedy}"
            )
    path = args.speculative_draft_model_path
    if path is None:
        raise ConfigError(f"{DRAFT_PATH_FLAG} is missing: {algorithm} needs a draft checkpoint")
    draft = read_checkpoint(path, flag=DRAFT_PATH_FLAG, num_target_layers=target.num_layers)
    if is_translated(path):
        algorithm = Algorithm(draft.algorithm)  # what was asked for before SGLang's slot took over
    check_algorithm(draft, algorithm)
    draft.check_fits(target)
    check_weights(draft)
    check_ranks(draft, getattr(args, "tp_size", 1) or 1)
    gamma = resolve_gamma(args, draft)
    _check_variables(asked, environ)
    schedule = ScheduleConfig()
    if mode.schedules:
        made_for = {"algorithm": algorithm, "has_confidence_head": draft.has_confidence_head}
        schedule = _schedule(args, environ, gamma, made_for)
    return SpecConfig(
        algorithm=algorithm,
        mode=mode,
        gamma=gamma,
        draft=draft,
        schedule=schedule,
        records=_records(args, environ),
        simulated_survival=_simulated_survival(environ, gamma),
        asked_mode=asked,
    )


def verify_mode(environ: Mapping[str, str] = os.environ) -> VerifyMode:
    """The mode that is served: of the environment variable, which our flag writes."""
    return _mode(flags.MODE.variable, environ.get(flags.MODE.variable, VerifyMode.STATIC))


def asked_mode(environ: Mapping[str, str] = os.environ) -> VerifyMode:
    """The mode that was asked for, before any fallback."""
    value = environ.get(flags.ASKED_MODE)
    return verify_mode(environ) if value is None else _mode(flags.ASKED_MODE, value)


def verify_fallback(environ: Mapping[str, str] = os.environ) -> VerifyMode | None:
    """The mode to serve where the attention backend cannot serve the one asked for."""
    value = _one_of(flags.FALLBACK, environ.get(flags.FALLBACK.variable, "none"))
    return None if value == "none" else VerifyMode(value)


def _mode(variable: str, value: str) -> VerifyMode:
    try:
        return VerifyMode(value)
    except ValueError:
        allowed = ", ".join(VerifyMode)
        raise ConfigError(f"{variable} is {value!r}; must be one of {allowed}") from None


def _check_variables(mode: VerifyMode, environ: Mapping[str, str]) -> None:
    """mode: the one asked for; flags of it have no effect in a fallback, and are no error."""
    ours = {flag.variable: flag.name for flag in flags.FLAGS if flag is not flags.MODE}
    in_every_mode = (flags.RECORDS.variable, flags.SIMULATE.variable)
    for name, value in environ.items():
        if name.startswith(flags.PREFIX) and name not in ours:
            raise ConfigError(f"{name} is not known; did you mean one of {', '.join(ours)}?")
        if name in ours and not mode.schedules and name not in in_every_mode:
            raise ConfigError(f"{ours[name]} is {value!r}, but {_NOT_IN_STATIC}")


def _records(args: Any, environ: Mapping[str, str]) -> Path | None:
    value = environ.get(flags.RECORDS.variable)
    if value is None:
        return None
    if not value:
        raise ConfigError(f"{flags.RECORDS.name} is {value!r}; must be the name of a file")
    replicas = getattr(args, "dp_size", 1) or 1
    if replicas > 1:
        raise ConfigError(
            f"{flags.RECORDS.name} with --dp-size {replicas}: {replicas} replicas would write one "
            "file; serve with --dp-size 1, or drop the flag"
        )
    check_new_file(Path(value), flags.RECORDS.name)
    return Path(value).absolute()


def _simulated_survival(environ: Mapping[str, str], gamma: int) -> tuple[float, ...] | None:
    if (length := environ.get(_SGLANG_SIMULATION)) is not None and length != "-1":
        raise ConfigError(
            f"{_SGLANG_SIMULATION} is {length!r}, which sglang-dspark does not follow: simulate "
            f"with {flags.SIMULATE.name} P1,P2,..., the probability of every position"
        )
    value = environ.get(flags.SIMULATE.variable)
    if value is None:
        return None
    try:
        chances = [float(part) for part in value.split(",")]
    except ValueError:
        chances = []
    if len(chances) not in (1, gamma) or not all(0 <= chance <= 1 for chance in chances):
        raise ConfigError(
            f"{flags.SIMULATE.name} is {value!r}; must be {gamma} numbers from 0 to 1, one a draft "
            "token, or one for all"
        )
    return tuple(chances * (gamma // len(chances)))


def _schedule(
    args: Any, environ: Mapping[str, str], gamma: int, made_for: Mapping[str, object]
) -> ScheduleConfig:
    table = scaling = None
    calibration = ScheduleConfig.calibration
    table_path = getattr(args, "speculative_dspark_sps_table_path", None)
    if table_path and table_path != MEASURE:
        try:
            table = load_table(Path(table_path))
        except TableError as error:
            raise ConfigError(f"{TABLE_FLAG}: {error}") from error
    if path := getattr(args, "speculative_dspark_confidence_sts_path", None):
        try:
            scaling = read_calibration(Path(path), gamma, made_for)
        except ConfigError as error:
            raise ConfigError(f"{CALIBRATION_FLAG}: {error}") from error
        calibration = str(path)
    return ScheduleConfig(
        tiers=graph_tiers(environ),
        budget=_budget(environ.get(flags.BUDGET.variable, "auto")),
        min_gain=_number(flags.MIN_GAIN, environ.get(flags.MIN_GAIN.variable, "0.02"), 0.0, 10.0),
        table=table,
        measure=table_path == MEASURE,
        scaling=scaling,
        calibration=calibration,
        test_delays=Path(delays) if (delays := environ.get(flags.TEST_DELAYS.variable)) else None,
        confidence_fit=_one_of(
            flags.CONFIDENCE_FIT, environ.get(flags.CONFIDENCE_FIT.variable, "auto")
        ),
        refine=_one_of(flags.REFINE, environ.get(flags.REFINE.variable, "on")) == "on",
    )


def graph_tiers(environ: Mapping[str, str] = os.environ) -> int | tuple[int, ...]:
    """`ScheduleConfig.tiers`, for where no server arguments are at hand."""
    return _tiers(environ.get(flags.TIERS.variable))


def _tiers(value: str | None) -> int | tuple[int, ...]:
    if value is None:
        return ScheduleConfig.tiers
    try:
        counts = [int(part) for part in value.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or counts != sorted(set(counts)):
        raise ConfigError(
            f"{flags.TIERS.name} is {value!r}; must be a number of graphs, or ascending token "
            "counts such as 8,16,64"
        )
    return counts[0] if len(counts) == 1 else tuple(counts)


def _budget(value: str) -> Literal["auto", "random", "profile"] | float:
    if value == "auto":
        return "auto"
    if value == "random":
        return "random"
    if value == "profile":
        return "profile"
    return _number(flags.BUDGET, value, 0.0, 1.0, also="auto, random, profile, or ")


def _one_of(flag: flags.Flag, value: str) -> str:
    allowed = flag.choices or ()
    if value not in allowed:
        raise ConfigError(f"{flag.name} is {value!r}; must be one of {', '.join(allowed)}")
    return value


def _number(flag: flags.Flag, value: str, low: float, high: float, also: str = "") -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise ConfigError(
            f"{flag.name} is {value!r}; must be {also}a number from {low:g} to {high:g}"
        )
    return number


def report_config_errors_in_one_line() -> None:
    """Print an uncaught `ConfigError` as its one line instead of a traceback."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, ConfigError):
            print(f"sglang-dspark: error: {error}", file=sys.stderr, flush=True)
        else:
            previous(kind, error, traceback)

    sys.excepthook = hook
