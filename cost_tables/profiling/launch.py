"""Starting the server to be profiled: the one place here that knows SGLang and sglang-dspark."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cost_tables.profiling.errors import ProfileError
from cost_tables.profiling.facts import BUDGET_FLAG

MODE_FLAG = "--speculative-verify-mode"
START_SECONDS = 3600.0  # a large model may compile for long
_NEEDED = (
    ("--model-path", "--model", "the model to speed up"),
    ("--speculative-algorithm", "DSPARK, DFLASH or EAGLE3"),
    ("--speculative-draft-model-path", "--speculative-draft-model", "the draft to profile"),
)


def launch_arguments(given: Sequence[str]) -> list[str]:
    """Arguments of launch_server with those of the profiling mode. Raises ProfileError."""
    names = {word.split("=", 1)[0] for word in given if word.startswith("--")}
    if "--config" not in names:  # else the file may have them
        for *flags, meaning in _NEEDED:
            if not names & set(flags):
                raise ProfileError(
                    f"{flags[0]} is missing ({meaning}): give the arguments of launch_server, or "
                    "--url of a server that runs"
                )
    if BUDGET_FLAG in names:
        raise ProfileError(f"{BUDGET_FLAG} is set by the profiler: leave it out")
    mode = _value(given, MODE_FLAG)
    if mode not in (None, "compact"):
        raise ProfileError(f"{MODE_FLAG} is {mode}; only compact has a cost table: leave it out")
    if taken := names & {"--host", "--port"}:
        raise ProfileError(f"{min(taken)} is chosen by the profiler: leave it out")
    added = [] if mode else [MODE_FLAG, "compact"]
    if "--skip-tokenizer-init" not in names:
        added.append("--skip-tokenizer-init")
    return [*given, *added, BUDGET_FLAG, "profile"]


@contextmanager
def launched(arguments: Sequence[str]) -> Iterator[str]:
    """The URL of a server that runs with these arguments. Raises ProfileError."""
    from sglang_dspark.serving import Server, ServerError

    log = Path(tempfile.mkdtemp(prefix="profile-sps-")) / "server.log"
    try:
        with Server(arguments, log=log, timeout_s=START_SECONDS) as server:
            yield server.url
    except ServerError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ProfileError(f"the server did not start: {lines[-1]} (all of it: {log})") from error


def _value(given: Sequence[str], flag: str) -> str | None:
    """What an argument list says of a flag, in either way of writing it."""
    for i, word in enumerate(given):
        if word == flag:
            return given[i + 1] if i + 1 < len(given) else ""
        if word.startswith(flag + "="):
            return word.split("=", 1)[1]
    return None
