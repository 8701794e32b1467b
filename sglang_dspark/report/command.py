"""The command: where from, where to, and what is wrong with either."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import check_target, replace_file
from sglang_dspark.report import html, terminal
from sglang_dspark.report.records import report_on_records
from sglang_dspark.report.server import report_on_server
from sglang_dspark.report.summary import Report

DEFAULT_PAGE = Path("sglang-dspark-report.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a file that a server wrote with --speculative-verify-records, or the address of one "
        "that is running, such as http://127.0.0.1:30000",
    )
    parser.add_argument(
        "-o",
        dest="page",
        type=Path,
        default=DEFAULT_PAGE,
        metavar="FILE.html",
        help="the page to write; an older one is replaced (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures to this file"
    )
    parser.add_argument("--api-key", metavar="KEY", help="that the server was started with")


def main(args: argparse.Namespace) -> int:
    try:
        return run(args)
    except ConfigError as error:
        print(f"sglang-dspark report: error: {error}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> int:
    _check(args.page, "-o", args.source)
    if args.json is not None:
        _check(args.json, "--json", args.source)
        if args.json.absolute() == args.page.absolute():
            raise ConfigError(f"--json is {args.json}, which is the page of -o too; name another")
    report = report_on(args.source, args.api_key)
    terminal.show(report, Console(highlight=False))
    _write(args.page, "-o", html.render(report))
    print(f"page: {args.page}")
    if args.json is not None:
        _write(args.json, "--json", report.to_json())
    return 0


def report_on(source: str, api_key: str | None = None) -> Report:
    if source.startswith(("http://", "https://")):
        return report_on_server(source, api_key)
    if not Path(source).exists():
        raise ConfigError(
            f"SOURCE is {source}: no such file (the address of a server starts with http://)"
        )
    return report_on_records(Path(source))


def _check(path: Path, flag: str, source: str) -> None:
    check_target(path, flag)
    if path.absolute() == Path(source).absolute():
        raise ConfigError(f"{flag} is {path}, which is the SOURCE to read; name another")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{flag} is {path}: not a regular file; name one")


def _write(path: Path, flag: str, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{flag} is {path}: cannot be written ({error.strerror})") from error
