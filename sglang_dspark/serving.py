"""Start a real SGLang server as a child process, talk to it, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

HOST = "127.0.0.1"


class ServerError(RuntimeError):
    """The server did not start, or stopped by itself; the message ends with its last log lines."""


class Server:
    """`python -m sglang.launch_server` on a free loopback port, as a context manager.

    args: arguments of launch_server except host and port.
    log:  file that takes the server's output.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        log: Path,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *args,
            *("--host", HOST, "--port", str(self.port)),
        ]
        self.log = log
        self._environ = {**os.environ, **(environ or {})}
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with self.log.open("wb") as output:
            # A session of its own: a Ctrl-C reaches us first, and we end the whole group.
            self._process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environ,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and every process that it started."""
        if self._process is None:
            return
        group = self._process.pid
        # SIGINT to the launcher alone, which ends its children; if the whole group got it,
        # SGLang would take its children's end for a crash and gather diagnostics for 5 s.
        self._process.send_signal(signal.SIGINT)
        if not self._wait_for_group(group, wait_s=10.0):
            _kill_group(group)
            self._wait_for_group(group, wait_s=10.0)
        self._process.wait()
        self._process = None

    def _wait_for_group(self, group: int, wait_s: float) -> bool:
        """Whether every process of the group is gone within wait_s seconds."""
        assert self._process is not None
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            self._process.poll()  # reaps our child, so that its group can vanish
            if not _group_alive(group):
                return True
            time.sleep(0.05)
        return False

    @property
    def pid(self) -> int:
        """Process id (and process group id) of the launcher."""
        assert self._process is not None
        return self._process.pid

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tail(self, lines: int = 15) -> str:
        """The last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def post(self, path: str, payload: Any, timeout_s: float = 300.0) -> Any:
        """POST JSON and return the decoded JSON answer."""
        with self._open(path, payload, timeout_s) as response:
            body = response.read()
        return json.loads(body) if body else None

    def get(self, path: str, timeout_s: float = 60.0) -> Any:
        """GET and return the decoded JSON answer (text if it is not JSON)."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as response:
            body = response.read().decode()
        try:
            return json.loads(body)
        except ValueError:
            return body

    def stream(self, path: str, payload: Any, timeout_s: float = 300.0) -> Iterator[Any]:
        """POST JSON with stream=true and yield the decoded server-sent events."""
        with self._open(path, {**payload, "stream": True}, timeout_s) as response:
            for line in response:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data != b"[DONE]":
                        yield json.loads(data)

    def _open(self, path: str, payload: Any, timeout_s: float) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(payload).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=timeout_s)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            if not self.running():
                raise ServerError(f"the server stopped while starting:\n{self.tail()}")
            try:
                self.get("/health_generate", timeout_s=30.0)
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise ServerError(f"the server was not ready after {self._timeout_s:.0f} s:\n{self.tail()}")


def free_port() -> int:
    """A loopback port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
