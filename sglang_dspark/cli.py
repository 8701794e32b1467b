"""The console script `sglang-dspark`: one sub-command a function, imported when it is called.

Nothing heavy is imported at the top, so that `--help` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_dspark import __version__

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

# SmolLM2 answers it sensibly, in 108 tokens: enough for a stable rate.
DEFAULT_PROMPT = "Write a Python function that computes the factorial of a number."
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
PROFILE = "profile-sps"  # parses its own arguments: most of them are launch_server's


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in _HEAVY:
            return _run_heavy(words[0], words[1:])
        if words and words[0] == PROFILE:
            from cost_tables import profile_sps

            return profile_sps.main(words[1:])
        args = build_parser().parse_args(words)
        command: Callable[[argparse.Namespace], int] = args.command
        return command(args)
    except KeyboardInterrupt:  # before the command took care of signals itself
        print("sglang-dspark: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-dspark",
        description="DSPARK speculative decoding for SGLang: try it and look at it.",
    )
    parser.add_argument("--version", action="version", version=f"sglang-dspark {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_demo, _add_doctor):
        add(commands)
    for name, (_, summary, _) in _HEAVY.items():
        commands.add_parser(name, help=summary)
    commands.add_parser(PROFILE, help="measure what a round costs on your machine: a cost table")
    return parser


# --- demo ----------------------------------------------------------------------------------------


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="one prompt on a real SGLang server, with speculation and without",
        description="Serve SmolLM2-135M-Instruct with SGLang, with speculation and then "
        "without; answer one prompt on both, and compare their speed and their tokens.",
    )
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="default: %(default)r")
    parser.add_argument(
        "--max-new-tokens",
        type=_at_least(2),
        default=128,
        metavar="N",
        help="longest answer in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="0, the default, is greedy: only then the tokens of both servers can be compared",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and arithmetic (default: %(default)s; in bfloat16 two tokens may tie, "
        "and a tie may fall differently when several tokens are computed at once)",
    )
    parser.add_argument(
        "--draft",
        type=Path,
        metavar="PATH",
        help="draft checkpoint, whose algorithm is served (default: the shipped DSPARK one)",
    )
    parser.add_argument(
        "--gamma",
        type=_at_least(1),
        metavar="N",
        help="draft tokens a round (default: as many as the draft was trained for)",
    )
    parser.add_argument(
        "--repetitions",
        type=_at_least(1),
        default=3,
        metavar="N",
        help="timed runs on each server, of which the median counts (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the result to this file"
    )
    parser.set_defaults(command=_demo)


def _demo(args: argparse.Namespace) -> int:
    from sglang_dspark.demo.run import DemoOptions, run_command

    return run_command(
        DemoOptions(
            prompt=args.prompt,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            dtype=args.dtype,
            draft=args.draft,
            gamma=args.gamma,
            repetitions=args.repetitions,
            json_file=args.json,
        )
    )


# --- doctor --------------------------------------------------------------------------------------


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what a draft checkpoint is, and whether it fits a target",
        description="Read a draft checkpoint of any published layout without loading it: what it "
        "is, the algorithm to ask for, whether its weights are complete, whether it fits TARGET "
        "and why not, and the command to serve it with. Exit code 1 if there is a problem.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or Hugging Face name")
    parser.add_argument("--target", metavar="TARGET", help="the same of the model to speed up")
    parser.set_defaults(command=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from sglang_dspark import doctor

    return doctor.run(args.checkpoint, args.target)


# --- eval and train-demo -------------------------------------------------------------------------

# Their arguments need torch to be imported, so a parser is made once one of them is chosen.
_HEAVY = {
    "calibrate": (
        "sglang_dspark.calibrate.command",
        "temperatures for a draft's confidences, from recorded rounds",
        "Fit one temperature a draft position (sequential temperature scaling) on rounds that a "
        "server recorded, and say how far survivals were off before and are after, on requests "
        "that were held out.",
    ),
    "eval": (
        "sglang_dspark.recipe.eval_cli",
        "how much of a draft is accepted, in a plain PyTorch loop",
        "Speculative decoding of held-out prompts in plain PyTorch, without a server: accept "
        "length, verify rate, accept rate per draft position, and how far the confidence head can "
        "be trusted.",
    ),
    "train-demo": (
        "sglang_dspark.recipe.cli",
        "make the demo's drafts: generate data, train, evaluate, export",
        "Train DSPARK, DFLASH and EAGLE3 drafts for a demo target on text that the target writes "
        "itself. Every stage keeps what it has in --work-dir and goes on from there.",
    ),
    "report": (
        "sglang_dspark.report.command",
        "what a server's rounds did: acceptance, windows, padding, step times, calibration",
        "Sum up the decode rounds of a server, from a records file or from the running server: on "
        "the terminal, and with plots as one HTML page that needs nothing else.",
    ),
}


def _run_heavy(name: str, argv: Sequence[str]) -> int:
    module, _, description = _HEAVY[name]
    implementation = importlib.import_module(module)
    parser = argparse.ArgumentParser(prog=f"sglang-dspark {name}", description=description)
    implementation.add_arguments(parser)
    result: int = implementation.main(parser.parse_args(argv))
    return result


# --- argument types ------------------------------------------------------------------------------


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} on")
        return value

    return parse


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):  # also false for NaN
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


if __name__ == "__main__":
    sys.exit(main())
