"""Measures what a round costs on a real server, and fits the cost table.

    python -m cost_tables.profile_sps --model-path TARGET --speculative-algorithm DSPARK \\
        --speculative-draft-model-path DRAFT -o TABLE.json      # arguments as for launch_server
    python -m cost_tables.profile_sps --url http://127.0.0.1:30000 -o TABLE.json
    python -m cost_tables.profile_sps show TABLE.json
    python -m cost_tables.profile_sps compare A.json B.json

`sglang-dspark profile-sps` is the same. See docs/profiling.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from cost_tables.profiling.client import Client
from cost_tables.profiling.errors import ProfileError
from cost_tables.profiling.launch import launch_arguments, launched
from cost_tables.profiling.live import LiveRounds
from cost_tables.profiling.run import Options, profile
from cost_tables.profiling.show import compare, show

DEFAULT_MINUTES, QUICK_MINUTES = 10.0, 1.2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    console = Console()
    try:
        if words[:1] == ["show"]:
            args = _show_parser().parse_args(words[1:])
            show(args.table, console, args.png)
            return 0
        if words[:1] == ["compare"]:
            args = _compare_parser().parse_args(words[1:])
            compare(args.first, args.second, console)
            return 0
        return _profile(words, console)
    except ProfileError as error:
        print(f"profile-sps: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("profile-sps: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _profile(words: Sequence[str], console: Console) -> int:
    args, launch = _parser().parse_known_args(words)
    minutes = args.minutes or (QUICK_MINUTES if args.quick else DEFAULT_MINUTES)
    options = Options(
        out=args.out,
        seconds=60 * minutes,
        requests=args.requests,
        contexts=args.contexts or ((64, 512) if args.quick else (128, 1024)),
        resume=args.resume,
        overwrite=args.overwrite,
        dry_run=args.dry_run,
        seed=args.sweep_seed,
        validate=args.validate,
    )
    options.check()
    with _first_signal_interrupts():
        if args.url is None:
            arguments = launch_arguments(launch)
            console.print("starting the server ...")
            with launched(arguments) as url:
                finished = profile(LiveRounds(Client(url)), options, console)
        elif launch:
            raise ProfileError(
                f"{launch[0]} is not known beside --url: arguments of launch_server are for a "
                "server that the profiler starts"
            )
        else:
            finished = profile(LiveRounds(Client(args.url)), options, console)
    return 0 if finished else EXIT_INTERRUPTED


@contextmanager
def _first_signal_interrupts() -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the sweep; those after it are ignored, since what follows
    (stopping the server, fitting what there is) takes seconds and has to finish."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, stop) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


# --- arguments -----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    # Whole flags only: an abbreviation may be one of launch_server's.
    parser = argparse.ArgumentParser(
        prog="profile-sps",
        allow_abbrev=False,
        usage="profile-sps [options] ARGUMENTS_OF_LAUNCH_SERVER | --url URL [options] | "
        "show TABLE [--png FILE] | compare A B",
        description="Start a server as launch_server would, run rounds of many sizes on it, and "
        "fit the cost table that verify mode compact decides by. All arguments that are not listed "
        "here go to launch_server.",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("cost_table.json"),
        metavar="TABLE.json",
        help="the table; the measured cells and plots go beside it, as .csv and .png "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--url", help="of a server that runs with --speculative-verify-budget profile"
    )
    parser.add_argument(
        "--minutes",
        type=_positive,
        metavar="M",
        help=f"length of the sweep, the server's start not counted (default: {DEFAULT_MINUTES:g})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_MINUTES:g} minutes and shorter contexts, to try it out",
    )
    parser.add_argument(
        "--requests",
        type=_counts,
        metavar="R,R,...",
        help="batch sizes (default: 1, 2, 4, ... up to --max-running-requests)",
    )
    parser.add_argument(
        "--contexts",
        type=_counts,
        metavar="C,C,...",
        help="prompt tokens of a request, shortest first (default: 128,1024; quick: 64,512)",
    )
    parser.add_argument(
        "--validate",
        action="store_true",
        help="then measure all rounds that the schedule can choose from anew, and say what the "
        "table's choices lose against the best ones; takes as long again",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start (or ask) the server, print what would be measured, and end",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the cells that TABLE.csv holds"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="measure anew though TABLE.csv holds cells"
    )
    parser.add_argument(
        "--sweep-seed",
        type=int,
        default=0,
        metavar="N",
        help="of the order of the cells and the prompts (default: %(default)s)",
    )
    return parser


def _show_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="profile-sps show", description="What a cost table says. SGLang's are read too."
    )
    parser.add_argument("table", type=Path, metavar="TABLE.json")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also plot T over M")
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="profile-sps compare", description="Where two tables differ, and by how much."
    )
    parser.add_argument("first", type=Path, metavar="A.json")
    parser.add_argument("second", type=Path, metavar="B.json")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):  # also false for NaN
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _counts(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = (0,)
    if min(values) < 1 or list(values) != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ascending numbers from 1 on")
    return values


if __name__ == "__main__":
    sys.exit(main())
