"""A running server: what it exports is read back, and what is not such a server is told apart.

Metrics and records are made by the code that makes them in a server, so no name can drift.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import prometheus_client
import pytest

from sglang_dspark.config import Algorithm, VerifyMode
from sglang_dspark.errors import ConfigError
from sglang_dspark.observe.metrics import RoundMetrics
from sglang_dspark.observe.records import RoundRecords
from sglang_dspark.report import html
from sglang_dspark.report.server import report_on_server
from sglang_dspark.schedule.rounds import FinishedRound
from sglang_dspark.schedule.scheduler import Decision

GAMMA = 3
Pages = dict[str, tuple[int, str]]


@pytest.fixture
def serve() -> Iterator[Callable[[Pages], str]]:
    """Pages by path, (status, text) each, on a server whose address is returned."""
    servers: list[ThreadingHTTPServer] = []

    def serve(pages: Pages) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, text = pages.get(self.path, (404, "no such page"))
                if self.headers.get("Authorization") == "Bearer wrong":
                    status = 401
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None:
                """Nothing on the terminal."""

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


class Worker:
    """The part of a worker that counts its rounds. metrics: whether it exports any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: VerifyMode, metrics: bool) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        for kind in ("Counter", "Gauge", "Histogram"):
            original = getattr(prometheus_client, kind)
            monkeypatch.setattr(prometheus_client, kind, partial(original, registry=self.registry))
        config: Any = SimpleNamespace(
            algorithm=Algorithm.DSPARK,
            mode=mode,
            gamma=GAMMA,
            describe=lambda: "the draft",
        )
        self.mode = mode
        self.records = RoundRecords(config)
        self._watchers: list[RoundRecords | RoundMetrics] = [self.records]
        if metrics:
            self.metrics = RoundMetrics(64, mode.schedules, {"model_name": "tiny"})
            self._watchers.append(self.metrics)

    def round(self, windows: list[int], accepted: list[int], tokens: int, **changes: Any) -> None:
        nothing = np.zeros(len(windows), dtype=bool)
        values = {
            "decision": Decision(GAMMA, sum(windows) - len(windows), 0),
            "rows": np.arange(len(windows)),
            "generations": np.arange(len(windows)),
            "seconds": None,
            "tokens": tokens,
            "full": self.mode is not VerifyMode.COMPACT,
            "survivals": np.ones((len(windows), GAMMA)),
            "windows": np.array(windows),
            "accepted": np.array(accepted),
            "ceiling": np.array(accepted),
            "broken": nothing,
            "evidence": None,
            "head_logits": None,
            "sampled": nothing,
            **changes,
        }
        for watcher in self._watchers:
            watcher.add(FinishedRound(**values))

    def pages(self) -> Pages:
        record = {**self.records.dump(), "schedule": {"budget": "auto"}}
        info = {
            "model_path": "a/target",
            "speculative_draft_model_path": "a/draft",
            "version": "0.5.23",
            "internal_states": [{"dspark_info_record": record}],
        }
        text = prometheus_client.generate_latest(self.registry).decode()
        # A server without --enable-metrics has no such page.
        exported = {"/metrics": (200, text)} if text else {}
        return {"/server_info": (200, json.dumps(info)), **exported}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    return partial(Worker, monkeypatch)


def counts(distribution) -> dict[str, int]:
    return {bar.label: bar.count for bar in distribution.bars}


def compact_rounds(worker: Worker) -> None:
    """The rounds of `recorded.COMPACT`."""
    worker.round([3, 1], [2, 0], 4, decision=Decision(3, 2, 0, 2.0, 0.010), seconds=0.012)
    worker.round([4, 3], [1, 0], 8, decision=Decision(3, 5, 1, 2.0, 0.020), seconds=0.016)
    plain = Decision(0, 0, 0, 2.0, 0.006)
    worker.round([1, 1], [0, 0], 4, decision=plain, seconds=0.006, survivals=None)


@pytest.mark.parametrize("metrics", [True, False])
def test_compact(worker, serve, metrics):
    found = worker(VerifyMode.COMPACT, metrics)
    compact_rounds(found)
    report = report_on_server(serve(found.pages()))
    assert (report.rounds, report.requests) == (3, 6)
    assert (report.committed, report.verified, report.computed) == (9, 13, 16)
    assert report.accept_length == pytest.approx(9 / 6)
    assert report.padding == pytest.approx(3 / 16)
    assert report.plain == pytest.approx(1 / 3)
    assert counts(report.commits) == {"1": 4, "2": 1, "3": 1}
    assert counts(report.windows) == {"1": 3, "2": 0, "3": 2, "4": 1}
    assert report.budgets.mean == pytest.approx(7 / 3)
    assert counts(report.forwards) == ({"3-4": 2, "5-8": 1} if metrics else {"4": 2, "8": 1})
    assert counts(report.budgets) == {"0": 1, "2": 1, "5-8" if metrics else "5": 1}
    assert "cap-accept" in report.utilisation.missing
    assert "--speculative-verify-records" in report.calibration.missing
    assert bool(report.notes) is not metrics


def test_a_server_without_metrics_is_told_what_to_add(worker, serve):
    found = worker(VerifyMode.COMPACT, False)
    compact_rounds(found)
    report = report_on_server(serve(found.pages()))
    assert report.run.covers == "the last 3 rounds"
    assert "--enable-metrics" in report.notes[0]


def test_corrections_are_those_that_the_server_exports(worker, serve):
    found = worker(VerifyMode.COMPACT, True)
    compact_rounds(found)
    metrics = found.metrics
    said = ((4, True, 1.0), (4, True, 1.15), (64, True, 2.0), (4, False, 0.5))
    for tier, drafted, factor in said:
        metrics.corrected(tier, drafted, factor)
    report = report_on_server(serve(found.pages()))
    facts = [
        (c.low, c.drafted, c.rounds, c.measured, c.in_force) for c in report.refinement.corrections
    ]
    assert facts == [
        (4, True, 1, pytest.approx(1.2), 1.15),
        (8, True, 1, pytest.approx(0.8), None),
        (64, True, 0, None, 2.0),
        (4, False, 1, pytest.approx(1.0), 0.5),
    ]
    assert "In force: what the server makes of it now" in html.render(report)


def test_without_metrics_corrections_are_not_known(worker, serve):
    found = worker(VerifyMode.COMPACT, False)
    compact_rounds(found)
    report = report_on_server(serve(found.pages()))
    assert not report.refinement.in_force and len(report.refinement.corrections) == 3


def test_step_times_of_the_last_rounds_are_exact_and_those_of_all_by_bucket(worker, serve):
    found = worker(VerifyMode.COMPACT, True)
    compact_rounds(found)
    found.records.clear()  # the server forgets its last rounds, and its metrics do not
    late = Decision(3, 2, 0, 2.0, 0.010)
    found.round([3, 1], [2, 0], 4, decision=late, seconds=0.008)
    report = report_on_server(serve(found.pages()))
    steps = report.steps
    assert (steps.rounds, steps.error) == (1, pytest.approx(0.25))
    assert steps.tiers[0].points == ((0.010, 0.008),)
    assert (steps.predicted.median, steps.measured.median) == pytest.approx((0.010, 0.008))
    everything = steps.since_start
    assert everything.rounds == 4
    assert everything.measured.mean == pytest.approx(0.042 / 4)
    assert everything.predicted.mean == pytest.approx(0.046 / 4)
    # 6 and 8 ms are in the bucket from 4 to 8, 12 and 16 in that from 8 to 16.
    assert everything.measured.median == pytest.approx(0.008)
    assert everything.measured.p90 == pytest.approx(0.0144)
    assert "Over 4 rounds since the server started" in html.render(report)


@pytest.mark.parametrize("metrics", [True, False])
def test_cap_accept_says_what_trimming_loses(worker, serve, metrics):
    found = worker(VerifyMode.CAP_ACCEPT, metrics)
    found.round([3, 1], [2, 0], 8, ceiling=np.array([3, 0]))
    found.round([2, 4], [1, 1], 8, ceiling=np.array([3, 1]))
    report = report_on_server(serve(found.pages()))
    assert report.utilisation == pytest.approx(8 / 11)
    if metrics:
        assert counts(report.ceilings) == {"1": 1, "2": 1, "3": 0, "4": 2}
    else:
        assert "--enable-metrics" in report.ceilings.missing


@pytest.mark.parametrize("metrics", [True, False])
def test_static_has_nothing_to_trim(worker, serve, metrics):
    found = worker(VerifyMode.STATIC, metrics)
    found.round([4, 4], [3, 0], 8, survivals=None)
    report = report_on_server(serve(found.pages()))
    assert report.utilisation == 1.0
    assert report.verify_cost == pytest.approx(8 / 5)
    assert "no budget" in report.budgets.missing


def test_the_run_is_told(worker, serve):
    found = worker(VerifyMode.COMPACT, True)
    compact_rounds(found)
    url = serve(found.pages())
    run = report_on_server(url + "/").run
    assert (run.source, run.algorithm, run.mode, run.gamma) == (url, "DSPARK", "compact", GAMMA)
    facts = dict(run.facts)
    assert (facts["target"], facts["draft"], facts["SGLang"]) == ("a/target", "a/draft", "0.5.23")
    assert (facts["resolved"], facts["budget"]) == ("the draft", "auto")


def test_ranks_add_up(worker, serve):
    """Each data-parallel rank has a record of its own; their metrics are on one page."""
    found = worker(VerifyMode.COMPACT, False)
    compact_rounds(found)
    pages = found.pages()
    info = json.loads(pages["/server_info"][1])
    info["internal_states"] *= 2
    report = report_on_server(serve({"/server_info": (200, json.dumps(info))}))
    assert (report.rounds, report.requests, report.steps.rounds) == (6, 12, 6)
    assert report.accept_length == pytest.approx(1.5)


# --- what is not such a server -------------------------------------------------------------------


def error_of(url: str, api_key: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        report_on_server(url, api_key)
    message = str(caught.value)
    assert message.startswith(url) and "\n" not in message
    return message


@pytest.mark.parametrize("metrics", [True, False])
def test_a_server_that_decoded_nothing_yet(worker, serve, metrics):
    assert "no decode round yet" in error_of(serve(worker(VerifyMode.COMPACT, metrics).pages()))


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert "cannot be reached" in error_of(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://", "names no host; an address is such as http://127.0.0.1:30000"),
        ("http:///x", "names no host"),
        ("http://127.0.0.1:port", "nonnumeric port"),
    ],
)
def test_no_address(url, words):
    assert words in error_of(url)


def test_something_that_does_not_speak_http():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-server\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert "cannot be read" in error_of(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


OTHER_WORKER = {"internal_states": [{"dspark_info_record": {"mode": "compact"}}]}
NO_SPECULATION = {"internal_states": [{"memory_usage": {}}]}


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ((200, "<html>welcome</html>"), "not an SGLang server"),
        ((200, "[]"), "not an SGLang server"),
        ((200, "{}"), "not an SGLang server"),
        ((200, json.dumps(NO_SPECULATION)), "no worker of sglang-dspark"),
        ((200, json.dumps(OTHER_WORKER)), "no worker of sglang-dspark"),
        ((500, "sorry"), "answered 500"),
        ((401, ""), "--api-key"),
    ],
)
def test_a_server_of_another_kind(serve, page, said):
    assert said in error_of(serve({"/server_info": page}))
    assert "no /server_info" in error_of(serve({}))


def test_the_key_is_sent(worker, serve):
    found = worker(VerifyMode.COMPACT, True)
    compact_rounds(found)
    url = serve(found.pages())
    assert "--api-key" in error_of(url, "wrong")
    assert report_on_server(url, "right").rounds == 3


def test_a_metrics_page_that_is_none(worker, serve):
    found = worker(VerifyMode.COMPACT, False)
    compact_rounds(found)
    pages = {**found.pages(), "/metrics": (200, "<html>{</html>")}
    assert "Prometheus" in error_of(serve(pages))
