"""Launchers of servers that are forked from a process which has imported SGLang already.

`python -m sglang.launch_server` imports for 9 s on one core before it does anything, the same for
every server of a test run. So one process does it once (`main`), and forks itself for each server.
The child goes on as that command does: it loads the plugins, reads its arguments and starts
scheduler and detokenizer, which are new processes and import everything themselves. Servers that
are launched as a user does it: test_demo.py, test_launch_errors.py, test_train_demo.py.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

MODULE = "sglang.launch_server"
# What MODULE imports when it starts, and when it serves.
IMPORTED = ("sglang.srt.plugins", "sglang.srt.server_args", "sglang.srt.entrypoints.http_server")


class Launcher:
    """A forked launcher, with as much of subprocess.Popen as `Server` uses."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.returncode: int | None = None
        self.pid: int = parent().ask("start", [list(arguments), dict(environ), str(log)])

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = parent().ask("poll", self.pid)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.05)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Parent:
    """The process that forks. It ends with this one, whose end closes its standard input."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the tests, which end their servers
        )

    def ask(self, name: str, value: Any) -> Any:
        """The answer to one request; both are a line of JSON."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        with self._lock:
            print(json.dumps([name, value]), file=requests, flush=True)
            line = answers.readline()
        if not line:
            raise RuntimeError("the process that forks launchers has ended: see its output above")
        return json.loads(line)


@cache
def parent() -> Parent:
    return Parent()


def main() -> None:
    """Answer requests until there are none; in a forked child: be a launcher."""
    sys.path[0] = os.getcwd()  # as `python -m` has it, instead of the folder of this file
    before_imports = dict(os.environ)
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    for module in IMPORTED:
        importlib.import_module(module)
    for line in requests:
        name, value = json.loads(line)
        answer = exit_code(value) if name == "poll" else os.fork()
        if name == "start" and answer == 0:
            requests.close()
            answers.close()
            arguments, environ, log = value
            be_launcher(arguments, changes(before_imports, environ), log)
            return
        print(json.dumps(answer), file=answers, flush=True)


def exit_code(pid: int) -> int | None:
    """Of a child that has ended; may be asked once then."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that differ; None: it is gone. What imports have set is kept that way."""
    names = before.keys() | after.keys()
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def be_launcher(arguments: list[str], environ: Mapping[str, str | None], log: str) -> None:
    """Go on as `python -m sglang.launch_server`, in a session and with an output of its own."""
    os.setsid()
    with open(os.devnull) as nothing, open(log, "wb") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for name, value in environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv[1:] = arguments
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
