"""The command `sglang-dspark calibrate`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_dspark.calibrate.blocks import Blocks, load_blocks
from sglang_dspark.calibrate.fit import MIN_BLOCKS, fit_scaling
from sglang_dspark.calibrate.reliability import errors_by_position
from sglang_dspark.calibrate.result import Calibration
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import check_target, replace_file
from sglang_dspark.schedule.calibration import Scaling

# A share of fewer requests than this is none.
MIN_REQUESTS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "records",
        type=Path,
        nargs="+",
        metavar="RECORDS",
        help="files that servers of one draft wrote with --speculative-verify-records",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE.json",
        help="the calibration, for --speculative-dspark-confidence-sts-path",
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="reliability diagram, before and after"
    )
    parser.add_argument(
        "--held-out",
        type=_share,
        default=0.3,
        metavar="SHARE",
        help="of the requests, which the temperatures are judged on and not fitted to "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--shift",
        action="store_true",
        help="fit an offset beside each temperature; SGLang's own worker does not know of it",
    )
    parser.add_argument(
        "--only",
        choices=("greedy", "sampled"),
        help="fit on these requests (default: on all together)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the held-out share (default: %(default)s)"
    )


def main(args: argparse.Namespace) -> int:
    try:
        run(args)
    except (ConfigError, OSError) as error:
        print(f"sglang-dspark calibrate: error: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    from rich.console import Console

    _check_targets(args)
    header, blocks = load_blocks(args.records, args.only)
    fitted, held_out = blocks.split(args.held_out, args.seed)
    _check_enough(blocks, fitted, held_out)
    scaling = fit_scaling(fitted, shift=args.shift)
    result = Calibration(
        header=header,
        scaling=scaling,
        counts=fitted.counts(),
        before=errors_by_position(held_out, Scaling.identity(header.gamma)),
        after=errors_by_position(held_out, scaling),
        fitted=fitted,
        held_out=held_out,
        settings={
            "records": [str(path) for path in args.records],
            "only": args.only,
            "held_out": args.held_out,
            "seed": args.seed,
        },
    )
    console = Console()
    console.print(result.table())
    if result.unfitted:
        positions = ", ".join(map(str, result.unfitted))
        print(
            f"sglang-dspark calibrate: warning: position {positions}: fewer than {MIN_BLOCKS} "
            "blocks to fit on, nothing is fitted there; records of static or cap-accept reach "
            "every position",
            file=sys.stderr,
        )
    if scaling.shifted:
        print(
            "sglang-dspark calibrate: the shifts belong to the temperatures; SGLang's own worker "
            "reads the latter alone, so fit without --shift for it",
            file=sys.stderr,
        )
    replace_file(args.output, result.to_json())
    if args.png is not None:
        replace_file(args.png, result.picture())
    console.print(f"written: {args.output}", markup=False, soft_wrap=True)


def _check_targets(args: argparse.Namespace) -> None:
    for flag, path in (("-o", args.output), ("--png", args.png)):
        if path is None:
            continue
        check_target(path, flag)
        if any(path.absolute() == records.absolute() for records in args.records):
            raise ConfigError(f"{flag} is {path}: this is one of the records to read")


def _check_enough(blocks: Blocks, fitted: Blocks, held_out: Blocks) -> None:
    requests = len(set(blocks.request.tolist()))
    to_fit, to_judge = fitted.counts()[0], held_out.counts()[0]
    if requests < MIN_REQUESTS or to_fit < MIN_BLOCKS or not to_judge:
        raise ConfigError(
            f"too few blocks with an outcome: {to_fit} to fit on and {to_judge} held out, of "
            f"{requests} requests; needed are {MIN_BLOCKS} to fit on and some held out, of "
            f"{MIN_REQUESTS} requests: record more of them, or change --held-out"
        )


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value
