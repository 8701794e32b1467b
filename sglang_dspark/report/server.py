"""A report on a server that is running, from what it says on /server_info and /metrics."""

from __future__ import annotations

import http
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from typing import Any

import numpy as np

from sglang_dspark.errors import ConfigError
from sglang_dspark.report.exported import Exported, parse_metrics
from sglang_dspark.report.refinement import RatioTally
from sglang_dspark.report.steps import StepTally
from sglang_dspark.report.summary import MODES, Missing, Report, Run, summarise
from sglang_dspark.report.tally import Round, RoundTally

TIMEOUT_S = 60.0  # /server_info is answered between two rounds
PLUGIN = "sglang-dspark"
NOT_IN_A_SERVER = (
    "a running server does not keep the logits of its rounds: start it with "
    "--speculative-verify-records FILE and report on that file"
)
NO_METRICS = (
    "the server was started without --enable-metrics, so these figures are of its last rounds "
    "only: add it to have them from its start on"
)


def report_on_server(url: str, api_key: str | None = None) -> Report:
    """Raises ConfigError if there is no such server, it is not ours, or it has run no round."""
    if not urllib.parse.urlsplit(url).hostname:
        raise ConfigError(f"{url}: names no host; an address is such as http://127.0.0.1:30000")
    url = url.rstrip("/")
    answer = _json(url, _get(url, "/server_info", api_key))
    states = _states(url, answer)
    return summarise_server(url, answer, states, parse_metrics(url, _get(url, "/metrics", api_key)))


def summarise_server(
    url: str,
    answer: dict[str, Any],
    states: list[dict[str, Any]],
    metrics: Exported | None,
) -> Report:
    """answer: /server_info; states: its rounds' records, one a data-parallel rank."""
    tally, times, ratios = RoundTally(), StepTally(), RatioTally()
    for state in states:
        for done in _rounds(state):
            tally.add(done)
            times.add(done)
            ratios.add(done)
    totals = tally.totals() if metrics is None else metrics.totals()
    if not (totals.windows and totals.commits):
        raise ConfigError(f"{url}: has run no decode round yet; send it a request first")
    last = f"the last {tally.rounds} rounds"
    steps = times.result(last)
    if metrics is not None and steps is not None:
        steps = replace(steps, since_start=metrics.step_times())
    utilisation = states[0]["utilisation"] if len(states) == 1 else None
    return summarise(
        _run(url, answer, states[0], last if metrics is None else "all rounds since it started"),
        totals,
        steps,
        ratios.result(last, {} if metrics is None else metrics.corrections()),
        Missing(NOT_IN_A_SERVER),
        utilisation=utilisation,
        notes=() if metrics is not None else (NO_METRICS,),
    )


def _rounds(state: dict[str, Any]) -> list[Round]:
    """The last rounds of a record as observe/records.py dumps it."""
    return [
        Round(
            windows=np.array(windows, dtype=np.int64),
            commits=np.array(commits, dtype=np.int64),
            ceiling=None,
            tokens=tokens,
            full=state["mode"] != "compact",
            drafted=depth > 0,
            predicted_s=1e-3 * (predicted_ms or 0.0),
            measured_s=None if measured_ms is None else 1e-3 * measured_ms,
        )
        for windows, commits, tokens, depth, predicted_ms, measured_ms in zip(
            state["windows_of_rounds"],
            state["accept_lens"],
            state["tokens"],
            state["depths"],
            state["predicted_ms"],
            state["measured_ms"],
            strict=True,
        )
    ]


def _run(url: str, answer: dict[str, Any], state: dict[str, Any], covers: str) -> Run:
    facts = {
        "target": answer.get("model_path"),
        "draft": answer.get("speculative_draft_model_path"),
        "SGLang": answer.get("version"),
        "resolved": state["resolved"],
        **state["schedule"],
    }
    return Run(
        source=url,
        covers=covers,
        algorithm=state["algorithm"],
        mode=state["mode"],
        gamma=state["gamma"],
        facts=tuple((topic, str(what)) for topic, what in facts.items() if what is not None),
    )


def _states(url: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of each data-parallel rank."""
    internal = answer.get("internal_states")
    if not isinstance(internal, list) or not internal:
        raise ConfigError(
            f"{url}: is not an SGLang server: its /server_info has no internal_states"
        )
    states = [state.get("dspark_info_record") or {} for state in internal]
    if any(state.get("plugin") != PLUGIN or state.get("mode") not in MODES for state in states):
        raise ConfigError(
            f"{url}: an SGLang server, but no worker of sglang-dspark runs in it; is the plugin "
            "installed there, and --speculative-algorithm DSPARK, DFLASH or EAGLE3?"
        )
    return states


def _json(url: str, text: str | None) -> dict[str, Any]:
    if text is None:
        raise ConfigError(f"{url}: is not an SGLang server: it has no /server_info")
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ConfigError(f"{url}: is not an SGLang server: its /server_info is not a JSON object")
    return answer


def _get(url: str, path: str, api_key: str | None) -> str | None:
    """The text at a path; None: there is no such path."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.NOT_FOUND:
            return None
        if error.code in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
            raise ConfigError(f"{url}: wants an API key, or another one: give --api-key") from None
        raise ConfigError(f"{url}{path}: answered {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise ConfigError(f"{url}: cannot be reached ({error.reason})") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{url}: cannot be read ({said})") from None
    return body.decode(errors="replace")
