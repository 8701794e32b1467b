"""The command line, and what the demo makes of its measurements."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from rich.console import Console

from sglang_dspark import cli
from sglang_dspark.demo import run
from sglang_dspark.demo.model import DTypeName
from sglang_dspark.demo.result import (
    DemoResult,
    Measurement,
    Repetition,
    accept_length,
    accept_rate_by_position,
    first_difference,
)
from sglang_dspark.serving import Server, ServerError


def parse(*argv: str) -> Any:
    return cli.build_parser().parse_args(["demo", *argv])


# --- the command line ----------------------------------------------------------------------------


def test_demo_needs_no_argument():
    args = parse()
    assert (args.prompt, args.json, args.draft) == (cli.DEFAULT_PROMPT, None, None)
    assert (args.temperature, args.max_new_tokens, args.dtype) == (0.0, 128, "float32")


def test_demo_takes_its_arguments():
    args = parse("--prompt=--it's $HOME", "--json", "o.json", "--max-new-tokens", "5")
    assert (args.prompt, args.json, args.max_new_tokens) == ("--it's $HOME", Path("o.json"), 5)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-new-tokens", "1"),  # the first token is not counted: nothing would be left
        ("--max-new-tokens", "x"),
        ("--repetitions", "0"),
        ("--gamma", "0"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--dtype", "int8"),
        ("--unknown", "1"),
    ],
)
def test_a_bad_value_is_told_in_one_line_with_its_flag(flag, value, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(flag, value)
    assert caught.value.code == 2
    assert flag in capsys.readouterr().err.splitlines()[-1]


def test_every_dtype_of_the_demo_model_can_be_chosen():
    for dtype in get_args(DTypeName):
        assert parse("--dtype", dtype).dtype == dtype


def test_the_command_line_loads_nothing_heavy():
    code = "import sys, sglang_dspark.cli; print({'torch', 'sglang', 'rich'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


# --- from the histogram to the rates --------------------------------------------------------------


def test_rates_are_conditional_on_reaching_the_position():
    # 10 rounds: 2 accepted none, 3 one, 5 two, nobody three.
    assert accept_rate_by_position([2, 3, 5], gamma=4) == [0.8, 5 / 8, 0.0, None]
    assert accept_length([2, 3, 5]) == pytest.approx(1 + (3 + 2 * 5) / 10)


def test_without_a_round_nothing_is_known():
    assert accept_rate_by_position([], gamma=2) == [None, None]
    assert accept_length([]) is None


def test_accept_length_is_the_sum_of_the_survivals():
    histogram, gamma = [4, 0, 7, 1, 0, 9], 7
    rates = [rate or 0.0 for rate in accept_rate_by_position(histogram, gamma)]
    survivals = [math.prod(rates[:k]) for k in range(gamma + 1)]
    assert accept_length(histogram) == pytest.approx(sum(survivals))


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 2), ([1, 2], [1], 2), ([], [4], 1), ([], [], None)],
)
def test_first_difference(one, other, place):
    assert first_difference(one, other) == place
    assert first_difference(other, one) == place


# --- the result ----------------------------------------------------------------------------------


def measurement(*answers: tuple[int, ...], decode_s: float = 1.0, histogram=()) -> Measurement:
    """The first answer was streamed, the others timed; the first token of each takes 0.5 s."""
    return Measurement(
        launch_command="python -m sglang.launch_server",
        text="text",
        output_ids=answers[0],
        histogram=tuple(histogram),
        repetitions=tuple(Repetition(ids, 0.5 + decode_s, 0.5) for ids in answers[1:]),
    )


def result(speculative: Measurement, baseline: Measurement, temperature=0.0) -> DemoResult:
    return DemoResult(
        algorithm="DSPARK",
        mode="static",
        gamma=4,
        dtype="float32",
        temperature=temperature,
        max_new_tokens=5,
        prompt="[bold]why[/bold]?",
        device="a CPU",
        speculative=speculative,
        baseline=baseline,
        versions={"sglang": "0"},
    )


SAME = (7, 8, 9, 10, 11)
OTHER = (7, 8, 9, 10, 12)


def table_text(value: DemoResult) -> str:
    output = io.StringIO()
    Console(file=output, width=80).print(value.table())
    return output.getvalue()


def test_json_says_what_was_measured(tmp_path):
    value = result(
        measurement(SAME, SAME, SAME, decode_s=0.5, histogram=[2, 3, 5]), measurement(SAME, SAME)
    )
    file = tmp_path / "out.json"
    file.write_text("older")
    value.write(file)
    found = json.loads(file.read_text())
    assert found["tokens_equal"] is True
    assert found["num_tokens"] == 5
    assert found["tokens_per_s"] == pytest.approx(8.0)  # four tokens after the first in 0.5 s
    assert found["baseline_tokens_per_s"] == pytest.approx(4.0)
    assert found["speedup"] == pytest.approx(2.0)
    assert found["accept_length"] == pytest.approx(2.3)
    assert found["accept_rate_by_position"] == [0.8, 0.625, 0.0, None]
    assert (found["algorithm"], found["mode"], found["gamma"]) == ("DSPARK", "static", 4)
    assert found["launch_command"].startswith("python -m sglang.launch_server")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]  # no temporary file is left


def test_a_failed_write_leaves_the_older_file(tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    file.write_text("older")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        result(measurement(SAME, SAME), measurement(SAME, SAME)).write(file)
    assert file.read_text() == "older"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_median_of_the_repetitions_counts():
    value = Measurement("", "", SAME, (), tuple(Repetition(SAME, 1 + s, 1) for s in (1, 2, 100)))
    assert value.tokens_per_s == pytest.approx(2.0)


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("side", ["speculative", "baseline"])
def test_one_different_token_in_any_run_is_found(side, where):
    answers = [SAME, SAME, SAME]
    answers[where] = OTHER
    odd, even = measurement(*answers), measurement(SAME, SAME, SAME)
    value = result(odd, even) if side == "speculative" else result(even, odd)
    assert value.tokens_equal is False
    assert value.to_json()["tokens_equal"] is False
    assert "NO, from token 5 on" in table_text(value)


def test_sampled_answers_are_not_compared():
    value = result(measurement(SAME, SAME), measurement(OTHER, OTHER), temperature=1.0)
    assert value.tokens_equal is None
    assert "not compared" in table_text(value)


def test_the_table_shows_both_sides():
    text = table_text(
        result(measurement(SAME, SAME, decode_s=0.5, histogram=[2, 3, 5]), measurement(SAME, SAME))
    )
    for shown in ("8.0", "4.0", "2.00x", "2.30", "80 62 0 -", "yes, in every run"):
        assert shown in text


def test_one_token_alone_has_no_decode_speed():
    value = result(measurement((7,), (7,), decode_s=0.0), measurement((7,), (7,), decode_s=0.0))
    assert value.to_json()["tokens_per_s"] is None
    assert value.to_json()["speedup"] is None
    assert table_text(value)


# --- what can go wrong ---------------------------------------------------------------------------


def options(**changes: Any) -> run.DemoOptions:
    values: dict[str, Any] = {
        "prompt": "Hi",
        "max_new_tokens": 5,
        "temperature": 0.0,
        "dtype": "float32",
        "draft": None,
        "gamma": None,
        "repetitions": 1,
        "json_file": None,
    }
    return run.DemoOptions(**{**values, **changes})


def test_a_missing_draft_is_named(tmp_path, capsys):
    assert run.run_command(options(draft=tmp_path / "nowhere")) == 1
    error = capsys.readouterr().err
    assert "nowhere" in error and "--draft" in error and len(error.splitlines()) == 1


def test_a_json_file_in_no_folder_is_refused_before_anything_runs(tmp_path, capsys):
    assert run.run_command(options(json_file=tmp_path / "nowhere" / "o.json")) == 1
    assert "--json" in capsys.readouterr().err


def test_a_server_that_does_not_start_ends_the_demo_with_its_log(tmp_path, monkeypatch, capsys):
    class Broken(Server):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.command = [sys.executable, "-c", "print('no weights here'); raise SystemExit(3)"]

    class FakeConversation:
        def __init__(self) -> None:
            self.options = options()

    def run_demo(*args: Any) -> None:
        run.measure([], FakeConversation(), args[2] / "server.log", args[1])  # type: ignore

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the log stays for the user
    monkeypatch.setattr(run, "Server", Broken)
    monkeypatch.setattr(run, "run_demo", run_demo)
    assert run.run_command(options()) == 1
    error = capsys.readouterr().err
    assert "stopped while starting" in error and "no weights here" in error
    assert [path.name for path in tmp_path.glob("*/*")] == ["server.log"]


def test_a_server_that_stops_answering_is_told_with_its_log(tmp_path):
    server = Server([], log=tmp_path / "log")
    server.log.write_text("out of memory")
    with pytest.raises(ServerError, match="out of memory"), run._request_errors(server):
        server.get("/generate")


def test_the_first_signal_stops_and_later_ones_cannot_cut_the_clean_up():
    before = signal.getsignal(signal.SIGINT)  # another test may have left its own
    cleaned = False
    with pytest.raises(run.Stopped) as caught, run._signals_raise():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            cleaned = True
    assert cleaned and caught.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before


def test_a_child_that_nobody_knows_of_is_ended():
    command = ["sleep", "600"]
    older = psutil.Popen(command)
    try:
        with run._no_child_left():
            child = psutil.Popen(command, start_new_session=True)
        try:
            assert not psutil.pid_exists(child.pid)
            assert older.is_running()  # not ours to end
        finally:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    finally:
        older.kill()
        older.wait()
