"""Writes every round that is over to a file, in the form of `record_file`.

A round is put into words where the worker learns that it is over; a thread writes them, so that no
round waits for a disk. What cannot be written ends the recording, never the serving.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import check_new_file
from sglang_dspark.observe.record_file import FORMAT, VERSION, Floats
from sglang_dspark.schedule.confidence import LOG_ODDS

if TYPE_CHECKING:
    from sglang_dspark.config import SpecConfig
    from sglang_dspark.schedule.rounds import FinishedRound

WRITE_SECONDS = 0.5
# Lines that may wait for a slow disk, a few kB each.
MOST_WAITING = 20_000
# What the schedule says of the moment; that it is off is lasting.
PASSING, LASTING = "refinement", "off"
# Of the logits: far below what their float32 means for a probability.
DECIMALS = 4
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE

logger = logging.getLogger(__name__)


class RecordWriter:
    """flag: that `path` was given with, for errors. schedule: as the server describes it.

    Opens the file and writes its first line; raises ConfigError if it cannot.
    """

    def __init__(self, path: Path, flag: str, config: SpecConfig, schedule: dict[str, str]) -> None:
        check_new_file(path, flag)
        self._path, self._lines = path, queue.SimpleQueue[bytes]()
        self._on, self._stopping = True, threading.Event()
        try:
            self._file = path.open("ab")
            self._file.write(first_line(config, schedule))
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{flag} is {path}: cannot be written ({error.strerror})") from error
        self._thread = threading.Thread(target=self._write_on, name="records", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, done: FinishedRound) -> None:
        if not self._on:
            return
        if self._lines.qsize() >= MOST_WAITING:
            return self._give_up("the disk does not keep up")
        self._lines.put(line_of(done))

    def close(self) -> None:
        """Write what is left."""
        self._stopping.set()
        self._thread.join()
        # After a full disk closing fails once more; that has been told.
        with suppress(OSError):
            self._file.close()

    def _write_on(self) -> None:
        last = False
        while self._on and not last:
            last = self._stopping.wait(WRITE_SECONDS)
            waiting = [self._lines.get() for _ in range(self._lines.qsize())]
            try:
                self._file.write(b"".join(waiting))
                self._file.flush()
            except OSError as error:
                self._give_up(error.strerror)

    def _give_up(self, why: str | None) -> None:
        self._on = False
        logger.warning(
            "sglang-dspark: no more rounds are recorded in %s: %s. Serving goes on.",
            self._path,
            why,
        )


def first_line(config: SpecConfig, schedule: dict[str, str]) -> bytes:
    served = {
        "algorithm": str(config.algorithm),
        "mode": str(config.mode),
        "gamma": config.gamma,
        "has_confidence_head": config.draft.has_confidence_head,
    }
    lasting = {t: text for t, text in schedule.items() if t != PASSING or text == LASTING}
    content = {"format": FORMAT, "version": VERSION, "config": served, "schedule": lasting}
    return orjson.dumps(content, option=_OPTIONS)


def line_of(done: FinishedRound) -> bytes:
    """A round, with the fields of `RecordedRound`."""
    decision = done.decision
    logits = _logits(done)
    drafted = decision.drafts or done.survivals is not None
    content = {
        "rows": done.rows,
        "generations": done.generations,
        "depth": decision.depth,
        "budget": decision.budget,
        "tier": decision.tier,
        "tokens": done.tokens,
        "full": done.full,
        "windows": done.windows,
        "accepted": done.accepted,
        "ceiling": done.ceiling if done.full and drafted else None,
        "predicted_s": decision.seconds,
        "measured_s": done.seconds,
        "logits": None if logits is None else np.ascontiguousarray(np.round(logits, DECIMALS)),
        "sampled": done.sampled,
        "broken": done.broken,
    }
    return orjson.dumps(content, option=_OPTIONS)  # NaN and infinities become null


def _logits(done: FinishedRound) -> Floats | None:
    """[R, D], what the draft itself says, before any fit."""
    if done.head_logits is not None:
        return done.head_logits
    return None if done.evidence is None else done.evidence[:, :, LOG_ODDS]
