"""Everything worth knowing from a GPU that is there for ten minutes, in one command.

    python benchmarks/gpu.py                                   # all stages, 10 minutes
    python benchmarks/gpu.py --stages identity,profile --minutes 5
    python benchmarks/gpu.py --tiny                            # the same logic on a CPU

The stages run in order of value, each in a process of its own and with a time of its own; what one
leaves goes to those behind it. After every measurement all results are in the JSON, so that a run
that is cut off keeps what it had. A stage that fails leaves its error there and the next one runs.
Exit status: 0 if all stages that were asked for ran to their end and found nothing wrong, else 1.

No network is needed. docs/gpu.md says how to install, what to read and what to keep.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu_stages.runner import NAMES, Options, run_stages

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import check_target

RESULTS = Path(__file__).parent / "results" / "gpu.json"
# Float32 on every backend but this one fails in attention kernels that know 16 bits only.
IDENTITY_FLAGS = "--attention-backend triton --sampling-backend pytorch"
MOST_SERVERS = 10
MINUTES, TINY_MINUTES = 10.0, 30.0  # in --tiny nobody waits for a GPU to be given back


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        check_target(args.out, "--out")
    except ConfigError as error:
        parser.error(str(error))
    if not args.tiny and not _has_cuda():
        parser.error("no CUDA device is visible; --tiny tries the stages on a CPU")
    with tempfile.TemporaryDirectory(prefix="gpu-run-") as temporary:
        work = Path(temporary) if args.work is None else args.work
        work.mkdir(parents=True, exist_ok=True)
        options = Options(
            stages=args.stages,
            minutes=args.minutes or (TINY_MINUTES if args.tiny else MINUTES),
            out=args.out.absolute(),
            work=work.absolute(),
            tiny=args.tiny,
            serve_flags=tuple(shlex.split(args.serve_flags)),
            identity_flags=() if args.tiny else tuple(shlex.split(args.identity_flags)),
            builtin_flags=tuple(shlex.split(args.builtin_flags)),
            parallel=1 if args.tiny else args.parallel,
            simulate=args.simulate,
        )
        return run_stages(options)


def _parser() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], epilog=f"stages: {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--stages",
        type=_stages,
        default=NAMES,
        metavar="A,B",
        help="which ones, in any order (default: all)",
    )
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with models of a few MB")
    parser.add_argument(
        "--minutes", type=_positive, metavar="M", help="of all stages (10; --tiny: 30)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="the JSON; cost tables are written beside it (default: benchmarks/results/gpu.json)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="checkpoints (4 GB) and logs; kept, and found again (default: a temporary folder)",
    )
    parser.add_argument(
        "--serve-flags",
        default="",
        metavar="FLAGS",
        help="of the servers that are profiled and measured, in one string",
    )
    parser.add_argument(
        "--identity-flags",
        default=IDENTITY_FLAGS,
        metavar="FLAGS",
        help="of the float32 servers whose tokens are compared (default: %(default)r)",
    )
    parser.add_argument(
        "--builtin-flags",
        default="",
        metavar="FLAGS",
        help="further ones of SGLang's own DSPARK, in the stage throughput",
    )
    parser.add_argument(
        "--parallel",
        type=int,
        default=max(1, min(MOST_SERVERS, cores * 5 // 8)),
        metavar="N",
        help="servers that are up at a time (%(default)s; --tiny: 1)",
    )
    parser.add_argument(
        "--simulate",
        type=_chances,
        metavar="P1,P2,...",
        help="simulate acceptance in the stage throughput, in place of the real one of a pair that "
        "is made for it; see docs/gpu.md",
    )
    return parser


def _stages(text: str) -> tuple[str, ...]:
    asked = text.split(",")
    if wrong := [name for name in asked if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in asked)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _chances(text: str) -> tuple[float, ...]:
    try:
        chances = tuple(float(part) for part in text.split(","))
    except ValueError:
        chances = ()
    if not chances or not all(0 <= chance <= 1 for chance in chances):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers from 0 to 1, such as 0.8,0.7")
    return chances


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
