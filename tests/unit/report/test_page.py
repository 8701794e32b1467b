"""The page, the terminal and the command around them."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from recorded import CAP_ACCEPT, COMPACT, STATIC, header, round_of
from sglang_dspark import cli
from sglang_dspark.report import html, terminal
from sglang_dspark.report.records import report_on_records
from sglang_dspark.report.summary import Report

VOID = {"meta", "br", "link", "img"}
EVIL = "<script>alert(1)</script>[bold]\"'&"


class Page(HTMLParser):
    """Checks that tags match; keeps texts, attributes and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data

    def values(self, name: str) -> list[str]:
        return [value for found, value in self.attributes if found == name]


@pytest.fixture
def reports(write) -> dict[str, Report]:
    """One of each mode; the compact one has all there is."""
    half = [0.3, 0.0, -0.4]
    full = round_of([4, 4], [3, 0], logits=[half, half], predicted_s=0.01, measured_s=0.01)
    evil = header()
    evil["schedule"] = {"tiers": EVIL}
    return {
        "compact": report_on_records(write([*COMPACT, full], evil)),
        "cap-accept": report_on_records(write(CAP_ACCEPT, header("cap-accept"))),
        "static": report_on_records(write(STATIC, header("static"))),
    }


MODES = ["compact", "cap-accept", "static"]


@pytest.mark.parametrize("mode", MODES)
def test_the_page_needs_nothing_from_outside(reports, mode):
    text = html.render(reports[mode])
    page = Page(text)
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base"})
    assert page.values("src") == []
    links = page.values("href") + page.values("xlink:href")
    assert links and all(link.startswith("#") for link in links)
    assert all(target == "#" for target in re.findall(r"url\((.)", text))
    assert "@import" not in text and "http" not in text


@pytest.mark.parametrize("mode", MODES)
def test_ids_of_the_pictures_do_not_meet(reports, mode):
    page = Page(html.render(reports[mode]))
    ids = page.values("id")
    assert len(ids) == len(set(ids)) > 100
    assert {link[1:] for link in page.values("xlink:href")} <= set(ids)


@pytest.mark.parametrize("mode", MODES)
def test_pictures_take_the_colours_of_the_page(reports, mode):
    """A fixed black or white would vanish in the dark or in the light; tiers have their own."""
    pictures = "".join(re.findall(r"<svg.*?</svg>", html.render(reports[mode]), flags=re.DOTALL))
    assert "currentColor" in pictures and "var(--bar)" in pictures and "var(--grid)" in pictures
    for colour in re.findall(r"#([0-9a-f]{6})\b", pictures):
        levels = [int(colour[i : i + 2], 16) for i in (0, 2, 4)]
        assert 60 < sum(levels) / 3 < 200, colour


def test_the_five_figures_come_first(reports):
    page = Page(html.render(reports["compact"]))
    names = ["accept length", "verify cost", "utilisation", "padding", "step time error"]
    places = [page.text.index(name) for name in names]
    assert places == sorted(places) and places[-1] < page.text.index("Verify windows")


def test_what_is_missing_says_why(reports):
    static = Page(html.render(reports["static"])).text
    assert "static mode has no budget" in static and "no cost table" in static
    assert "cap-accept does, to measure" in Page(html.render(reports["compact"])).text


def test_nothing_that_was_served_becomes_a_tag(reports):
    text = html.render(reports["compact"])
    assert EVIL not in text and "<script" not in text
    assert EVIL in Page(text).text


def printed(report: Report) -> str:
    output = io.StringIO()
    terminal.show(report, Console(file=output, width=100))
    return output.getvalue()


def test_the_terminal_has_the_figures_and_the_reasons(reports):
    text = printed(reports["compact"])
    assert re.search(r"accept length +1\.75 ", text)
    assert re.search(r"padding +12\.5 % ", text)
    assert re.search(r"step time error +8\.3 % ", text)
    assert re.search(r"utilisation +- ", text)
    static = re.sub(r"\s+", " ", printed(reports["static"]))
    assert "static mode has no cost table" in static


# --- the command ---------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_the_figures(write, tmp_path, capsys):
    page, figures = tmp_path / "r.html", tmp_path / "r.json"
    page.write_text("older")
    assert cli.main(["report", str(write(COMPACT)), "-o", str(page), "--json", str(figures)]) == 0
    assert Page(page.read_text()).text.count("accept length") == 1
    assert json.loads(figures.read_text())["rounds"] == 3
    assert str(page) in capsys.readouterr().out


def test_without_o_the_page_has_a_name_of_its_own(write, tmp_path, monkeypatch):
    source = write(COMPACT)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(source)]) == 0
    assert Path("sglang-dspark-report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "none/r.html"], "-o is none/r.html: the folder"),
        (["-o", "."], "this is a folder"),
        (["-o", "/dev/null"], "not a regular file"),
        (["--json", "none/r.json"], "--json is none/r.json"),
        (["-o", "rounds.jsonl"], "-o is rounds.jsonl, which is the SOURCE"),
        (["--json", "rounds.jsonl"], "--json is rounds.jsonl, which is the SOURCE"),
        (["-o", "same", "--json", "same"], "--json is same, which is the page"),
    ],
)
def test_a_target_that_cannot_be_written_is_found_before_anything_is_read(
    tmp_path, monkeypatch, capsys, arguments, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sglang_dspark.report.command.report_on", lambda *_: pytest.fail("read"))
    assert cli.main(["report", "rounds.jsonl", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_full_disk_leaves_the_older_page(write, tmp_path, monkeypatch, capsys):
    page = tmp_path / "r.html"
    page.write_text("older")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    source = write(COMPACT)
    monkeypatch.setattr("os.replace", fail)
    assert cli.main(["report", str(source), "-o", str(page)]) == 1
    assert "No space left" in capsys.readouterr().err
    assert page.read_text() == "older"
    assert {path.name for path in tmp_path.iterdir()} == {"r.html", source.name}


def test_a_source_that_is_neither_file_nor_address(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "localhost:30000"]) == 1
    assert "starts with http://" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
