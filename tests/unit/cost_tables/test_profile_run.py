"""From a server to a table: fit, files, interruption, and every refusal before work starts."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from sglang.benchmark.dspark_sps_profiler import build_additive_table_from_cells, fitted_step_time

from cost_tables import CostModel, Fingerprint, load_table, profile_sps, save_table
from cost_tables.measure import Cell
from cost_tables.profiling.cell_file import CellFile, Header, Row, read_cells
from cost_tables.profiling.errors import ProfileError
from cost_tables.profiling.fitting import CellTime, cell_times, fit_cells, folds, seconds_of
from cost_tables.profiling.live import LiveRounds
from cost_tables.profiling.run import Options, profile
from cost_tables.profiling.show import compare, show
from profiled_fake import FINGERPRINT, GAMMA, FakeServer, cost
from sglang_dspark import cli

HERE = Fingerprint(**FINGERPRINT)
HEADER = Header(HERE, seed=0)
PNG = b"\x89PNG\r\n"


def options(folder: Path, **changes: Any) -> Options:
    values = {"out": folder / "t.json", "seconds": 60.0, "requests": None, "contexts": (128, 1024)}
    return Options(**{**values, **changes})  # type: ignore[arg-type]


def live(server: FakeServer) -> LiveRounds:
    return LiveRounds(server, server.clock, server.sleep)


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


# --- from end to end ------------------------------------------------------------------------------


def test_a_known_cost_is_found_also_between_the_cells(tmp_path: Path) -> None:
    where = console()
    assert profile(live(FakeServer()), options(tmp_path), where)
    table = load_table(tmp_path / "t.json")
    assert table.fingerprint == HERE
    assert table.median_error is not None and table.median_error < 0.01
    plain = table.cost.plain
    assert plain is not None
    for requests in range(1, 9):
        for depth in (1, 3, 7):
            for context in (150, 900):
                tokens, total = requests * (1 + depth), float(requests * context)
                expected = cost(requests, tokens, depth, total)
                found = table.cost.drafted.seconds(
                    requests, np.array([float(tokens)]), total, float(requests * depth)
                )
                assert found[0] == pytest.approx(expected, rel=0.03)
        expected = cost(requests, requests, 0, requests * 150.0)
        found = plain.seconds(requests, np.array([float(requests)]), requests * 150.0)
        assert found[0] == pytest.approx(expected, rel=0.03)
    assert (tmp_path / "t.png").read_bytes().startswith(PNG)
    header, rows = read_cells(tmp_path / "t.csv")
    assert header == HEADER and len(rows) >= 40
    assert "error of held-out ones" in said(where) and "--speculative-dspark-sps-table" in said(
        where
    )
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    server, where = FakeServer(kv_tokens=6000), console()
    assert profile(live(server), options(tmp_path, dry_run=True), where)
    assert list(tmp_path.iterdir()) == []
    assert re.search(r"\d+ cells, 2 passes of \d+ rounds .* about \d+\.\d minutes", said(where))
    assert "left out: R 8, context 1024: needs" in said(where)
    assert server.loads == 2, "no more than the probe"


class Interrupted(FakeServer):
    """Ctrl-C in the load with this number."""

    at = 6

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.loads >= self.at:
            self.at = 10**9
            raise KeyboardInterrupt


def test_an_interrupted_sweep_keeps_and_fits_what_it_has_and_can_go_on(tmp_path: Path) -> None:
    server, where = Interrupted(), console()
    assert not profile(live(server), options(tmp_path), where)
    assert not server.lengths, "its requests were ended"
    before = read_cells(tmp_path / "t.csv")[1]
    assert before and f"keeps {len(before)} visits" in said(where)
    assert load_table(tmp_path / "t.json").fingerprint == HERE
    assert profile(live(FakeServer()), options(tmp_path, resume=True), console())
    after = read_cells(tmp_path / "t.csv")[1]
    assert after[: len(before)] == before and len(after) > len(before)
    counts = {(row.cell): sum(r.cell == row.cell for r in after) for row in after}
    assert set(counts.values()) == {2}


def test_too_early_an_interruption_says_that_a_table_needs_more(tmp_path: Path) -> None:
    server = Interrupted()
    server.at = 3
    with pytest.raises(ProfileError, match=r"\d cells with a draft were measured; a table needs 6"):
        profile(live(server), options(tmp_path), console())
    assert (tmp_path / "t.csv").exists() and not (tmp_path / "t.json").exists()


def test_resuming_on_another_machine_is_refused(tmp_path: Path) -> None:
    CellFile(tmp_path / "t.csv", Header(Fingerprint(**{**FINGERPRINT, "tp": 2}), 0)).close()
    with pytest.raises(ProfileError, match="was measured elsewhere: tp: 2 against 1"):
        profile(live(FakeServer()), options(tmp_path, resume=True), console())


# --- the fit --------------------------------------------------------------------------------------


def test_a_cell_is_the_median_of_all_its_rounds() -> None:
    cell = Cell(1, 8, 7, 100)
    rows = [Row(cell, 100.0, (1.0, 2.0, 30.0)), Row(cell, 200.0, (1.5, 2.5))]
    assert cell_times(rows) == [CellTime(cell, 150.0, 2.0, 5)]


def test_every_cell_is_held_out_once() -> None:
    for count in (2, 3, 7, 40):
        parts = folds(count)
        assert sorted(np.concatenate(parts).tolist()) == list(range(count))


def noisy_rows(noise: float, slope: float = 2e-7) -> list[Row]:
    """Of a server whose κ is known. Contexts are as different as they are in service."""
    rng = np.random.default_rng(0)
    rows = []
    for requests in (1, 2, 4, 8, 16, 32):
        for budget in (0, 1, 3, 7):
            for context in (100, 1000, 4000):
                tokens, total = requests * (1 + budget), float(requests * context)
                seconds = 0.004 + 0.0001 * tokens + 0.00005 * requests + slope * total
                factors = 1 + noise * rng.standard_normal(9)
                cell = Cell(requests, tokens, 7, context)
                rows.append(Row(cell, total, tuple((seconds * factors).tolist())))
    return rows


def test_held_out_errors_are_those_of_the_noise_and_not_hidden_by_the_fit() -> None:
    assert fit_cells(noisy_rows(0.0)).median_error < 0.005
    fitted = fit_cells(noisy_rows(0.3))  # the median of 9 is off by 10 %
    in_sample = np.median(np.abs(fitted.drafted.predicted / fitted.drafted.cells.seconds - 1))
    assert 0.04 < fitted.median_error < 0.2
    assert in_sample < fitted.median_error


def test_the_context_is_what_sglangs_additive_fit_lacks() -> None:
    """The same held-out cells under SGLang's own fit of R and M."""
    fitted = fit_cells(noisy_rows(0.02))
    times = fitted.drafted.times
    errors = np.zeros(len(times))
    for held_out in folds(len(times)):
        kept = [times[i] for i in range(len(times)) if i not in held_out]
        cells = [{"bs": t.cell.requests, "M": t.cell.tokens, "T": t.seconds} for t in kept]
        theirs = build_additive_table_from_cells(cells=cells)
        for i in held_out:
            predicted = fitted_step_time(
                table=theirs, bs=times[i].cell.requests, m=times[i].cell.tokens
            )
            errors[i] = abs(predicted / times[i].seconds - 1)
    assert fitted.median_error < 0.03 < 0.1 < np.median(errors)


def test_without_rounds_that_have_no_draft_there_is_no_plain_model(tmp_path: Path) -> None:
    fitted = fit_cells(noisy_rows(0.0))
    assert fitted.plain is None and fitted.cost.plain is None
    model = fitted.drafted.model
    assert seconds_of(model, 8, 64, 8000.0, 56) == pytest.approx(0.004 + 0.0064 + 0.0004 + 0.0016)


# --- the file of cells ----------------------------------------------------------------------------

ROW = Row(Cell(4, 16, 7, 100), 412.5, (0.0125, 0.013))


def test_cells_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    file = CellFile(tmp_path / "c.csv", HEADER, [ROW])
    file.append(ROW)
    assert read_cells(tmp_path / "c.csv") == (HEADER, [ROW, ROW])  # before it is closed
    file.close()


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    CellFile(path, HEADER, [ROW, ROW]).close()
    for cut in range(2, 12):
        path.write_text(path.read_text())
        whole = path.read_text()
        path.write_text(whole[:-cut])
        assert read_cells(path) == (HEADER, [ROW])
        path.write_text(whole)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("4,16,7,100,412.5,0", "line 4"),
        ("4,16,7,100,412.5,", "line 4"),
        ("4,16,7,100,x,1.0", "line 4 is '4,16,7,100,x,1.0'; must be requests,tokens,depth"),
        ("4,16,1.0", "line 4"),
        ("4,16,7,100,412.5,nan", "line 4"),
    ],
)
def test_a_wrong_line_is_an_error_with_its_number(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "c.csv"
    CellFile(path, HEADER, [ROW]).close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ProfileError, match=words):
        read_cells(path)


@pytest.mark.parametrize("text", ["", "requests,tokens\n", "# {}\n", '# {"format": "x"}\n'])
def test_another_csv_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.csv"
    path.write_text(text)
    with pytest.raises(ProfileError, match="line 1 is not the header of measured cells"):
        read_cells(path)


# --- refused before anything is started -----------------------------------------------------------


def failing(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert profile_sps.main(argv) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("profile-sps: error: ")
    return error


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("t.csv", "-o is t.csv; its name must end in .json"),
        ("missing/t.json", "nothing can be written to missing (No such file or directory)"),
        ("/proc/t.json", "nothing can be written to /proc"),
        ("folder.json", "-o folder.json is a folder; must be a file"),
    ],
)
def test_targets_that_cannot_be_written_are_found_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    assert words in failing(["--url", "http://127.0.0.1:9", "-o", out], capsys)


def test_cells_of_another_run_are_not_overwritten_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CellFile(tmp_path / "t.csv", HEADER, [ROW]).close()
    argv = ["--url", "http://127.0.0.1:9", "-o", str(tmp_path / "t.json")]
    assert "--resume goes on with them, --overwrite measures anew" in failing(argv, capsys)
    assert "not reachable" in failing([*argv, "--overwrite"], capsys)
    (tmp_path / "t.csv").unlink()
    assert "t.csv: is not readable (No such file" in failing([*argv, "--resume"], capsys)


def test_a_server_that_cannot_be_reached_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["-o", str(tmp_path / "t.json")]
    error = failing(["--url", "http://127.0.0.1:9", *out], capsys)
    assert "http://127.0.0.1:9/server_info: not reachable (" in error
    assert "must start with http" in failing(["--url", "localhost:30000", *out], capsys)
    error = failing(["--url", "http://127.0.0.1:9", "--tp", "2", *out], capsys)
    assert "--tp is not known beside --url" in error
    assert "--model-path is missing" in failing(out, capsys)


def test_what_it_does_not_know_goes_to_launch_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[str] = []

    def launched(arguments: list[str]) -> None:
        given.extend(arguments)
        raise ProfileError("that is all")

    monkeypatch.setattr(profile_sps, "launched", launched)
    of_server = ["--model-path", "m", "--speculative-algorithm", "EAGLE3", "--tp", "2"]
    of_server += ["--speculative-draft-model-path", "d", "--json-model-override-args", '{"a": -1}']
    ours = ["--quick", "--minutes", "3", "-o", str(tmp_path / "t.json")]
    failing([*of_server[:3], *ours, *of_server[3:]], capsys)
    assert given[: len(of_server)] == of_server


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--minutes", "0"), ("--minutes", "nan"), ("--requests", "4,2"), ("--contexts", "x")],
)
def test_mistyped_values_are_refused(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        profile_sps.main([flag, value])
    assert f"argument {flag}: '{value}' is not a" in capsys.readouterr().err


# --- show and compare -----------------------------------------------------------------------------

MODEL = CostModel(0.01, (1.0, 8.0), (0.0, 0.002), (1.0, 64.0), (0.0, 0.02), 1e-7)


def test_show_prints_where_it_was_measured_its_parts_and_predictions(tmp_path: Path) -> None:
    save_table(tmp_path / "t.json", MODEL, HERE, 0.034, cells=48, plain=MODEL)
    where = console()
    show(tmp_path / "t.json", where, tmp_path / "t.png")
    text = said(where)
    assert "HostAttention" in text and "median error 3.4% on held-out cells" in text
    assert "bias 10.000 ms, 100.00 ns a context token" in text
    # R = 1, all verified: 10 + 20 * 7 / 63 + 0.1e-3 * 512 ms.
    assert f"{10 + 20 * GAMMA / 63 + 0.0512:.2f}" in text
    assert (tmp_path / "t.png").read_bytes().startswith(PNG)


def test_show_reads_sglangs_tables_too(tmp_path: Path) -> None:
    path = tmp_path / "sglang.json"
    path.write_text(
        json.dumps({"sample_batch_tokens": [1, 64], "sample_steps_per_sec": [100.0, 50.0]})
    )
    where = console()
    show(path, where)
    assert "does not say where it was measured" in said(where) and "20.00" in said(where)


def test_compare_says_what_differs_and_by_how_much(tmp_path: Path) -> None:
    double = CostModel(0.02, (1.0, 8.0), (0.0, 0.004), (1.0, 64.0), (0.0, 0.04), 2e-7)
    other = Fingerprint(**{**FINGERPRINT, "dtype": "bfloat16"})
    save_table(tmp_path / "a.json", MODEL, HERE, 0.03, cells=48, plain=MODEL)
    save_table(tmp_path / "b.json", double, other, 0.03, cells=48)
    where = console()
    compare(tmp_path / "a.json", tmp_path / "b.json", where)
    assert "dtype: float32 against bfloat16" in said(where)
    assert len(re.findall(r"\b2\.00\b", said(where))) >= 6
    assert "rounds without a draft: only in one of them" in said(where)


def test_a_table_that_is_none_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such file" in failing(["show", str(tmp_path / "t.json")], capsys)
    (tmp_path / "t.json").write_text("[]")
    assert "must hold a JSON object" in failing(["show", str(tmp_path / "t.json")], capsys)


def test_it_is_a_command_of_sglang_dspark_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile-sps", "show", str(tmp_path / "t.json")]) == 1
    assert "t.json: no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["profile-sps", "--help"])
    assert "--dry-run" in capsys.readouterr().out
    assert "profile-sps" in cli.build_parser().format_help()
