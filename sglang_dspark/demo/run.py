"""`sglang-dspark demo`: one prompt on a real SGLang server, with speculation and without.

Both servers get the same requests in the same order: a warm-up, the prompt streamed, and then
the timed repetitions, which are not streamed, so that sending single tokens costs neither side.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from sglang_dspark import __version__, config
from sglang_dspark.demo.model import DemoModelError, prepare_demo_model
from sglang_dspark.demo.result import DemoResult, Measurement, Repetition
from sglang_dspark.drafters.checkpoints import read_checkpoint
from sglang_dspark.errors import ConfigError
from sglang_dspark.gamma import BLOCK_SIZE
from sglang_dspark.serving import Server, ServerError

SHIPPED_DRAFT = Path(__file__).parents[1] / "drafts" / "smollm2-135m-dspark"
WARMUP_PROMPT = "Count from one to ten."
WARMUP_TOKENS = 16

Sampling = dict[str, Any]


@dataclass(frozen=True)
class DemoOptions:
    """What the user chose.

    draft: None for the shipped one; gamma: None for the draft's own; json_file: None for no file.
    """

    prompt: str
    max_new_tokens: int
    temperature: float
    dtype: str
    draft: Path | None
    gamma: int | None
    repetitions: int
    json_file: Path | None


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why."""


class Stopped(BaseException):
    """A signal asks for an end."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def run_command(options: DemoOptions) -> int:
    """Run the demo for the command line and return its exit status."""
    console = Console(highlight=False)
    logs = Path(tempfile.mkdtemp(prefix="sglang-dspark-demo-"))
    keep_logs = False
    try:
        with _signals_raise(), _no_child_left():
            result = run_demo(options, console, logs)
        console.print(result.table())
        if options.json_file is not None:
            result.write(options.json_file)
            console.print(f"written: {options.json_file}", markup=False, soft_wrap=True)
    except Stopped as stopped:
        print("\nsglang-dspark: interrupted, the servers are stopped", file=sys.stderr)
        return 128 + stopped.signum
    except (ConfigError, DemoModelError, DemoError, OSError) as error:
        print(f"sglang-dspark: error: {error}", file=sys.stderr)
        return 1
    except ServerError as error:
        keep_logs = True
        print(f"sglang-dspark: error: {error}\n(whole log: {logs})", file=sys.stderr)
        return 1
    finally:
        if not keep_logs:
            shutil.rmtree(logs, ignore_errors=True)
    if result.tokens_equal is False:
        print("sglang-dspark: error: " + _explain_difference(options.dtype), file=sys.stderr)
        return 1
    return 0


def run_demo(options: DemoOptions, console: Console, logs: Path) -> DemoResult:
    """Serve, ask and measure, first with speculation and then without."""
    json_file = options.json_file
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise DemoError(f"--json is {json_file}: the folder {json_file.parent} does not exist")
    draft = options.draft or SHIPPED_DRAFT
    if not draft.is_dir():
        raise DemoError(f"the draft checkpoint {draft} does not exist; name one with --draft PATH")
    target = prepare_demo_model(options.dtype)
    spec = check_pair(target, draft, options.gamma)
    device = describe_device()
    console.print(
        f"sglang-dspark {__version__} on SGLang {version('sglang')}, {device}, {options.dtype}",
        markup=False,
    )
    conversation = Conversation(options, target)
    common = ["--model-path", str(target), "--dtype", options.dtype]
    if not torch.cuda.is_available():
        common += ["--device", "cpu"]
    drafting = [
        *("--speculative-algorithm", str(spec.algorithm)),
        *("--speculative-draft-model-path", str(draft)),
    ]
    if options.gamma is not None:
        drafting += [BLOCK_SIZE.name, str(options.gamma)]
    console.rule(f"1 of 2: {spec.algorithm} ({spec.mode}), {spec.gamma} drafts a round")
    speculative = measure([*common, *drafting], conversation, logs / "speculative.log", console)
    console.rule("2 of 2: the same server without speculation")
    baseline = measure(common, conversation, logs / "baseline.log", console)
    return DemoResult(
        algorithm=spec.algorithm.value,
        mode=spec.mode.value,
        gamma=spec.gamma,
        dtype=options.dtype,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        prompt=options.prompt,
        device=device,
        speculative=speculative,
        baseline=baseline,
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("sglang-dspark", "sglang", "torch")},
        },
    )


def check_pair(target: Path, draft: Path, gamma: int | None) -> config.SpecConfig:
    """What the server will resolve from our flags; raises `ConfigError` before one is started."""
    model = json.loads((target / "config.json").read_text())
    algorithm = read_checkpoint(str(draft), flag="--draft").algorithm
    args = SimpleNamespace(
        speculative_algorithm=algorithm,
        speculative_num_steps=None,
        speculative_eagle_topk=None,
        speculative_draft_model_path=str(draft),
        speculative_num_draft_tokens=None,
        speculative_dspark_block_size=gamma,
    )
    return config.resolve(
        args,
        config.TargetModel(
            hidden_size=model["hidden_size"],
            vocab_size=model["vocab_size"],
            num_layers=model["num_hidden_layers"],
        ),
    )


class Conversation:
    """The requests that both servers get: token ids through the target's chat template."""

    def __init__(self, options: DemoOptions, target: Path) -> None:
        from transformers import AutoTokenizer

        self.options = options
        self._tokenizer = AutoTokenizer.from_pretrained(target)
        self.warmup_ids = self._encode(WARMUP_PROMPT)
        self.prompt_ids = self._encode(options.prompt)
        room: int = self._tokenizer.model_max_length
        needed = len(self.prompt_ids) + options.max_new_tokens
        if needed > room:
            raise DemoError(
                f"the prompt has {len(self.prompt_ids)} tokens and --max-new-tokens is "
                f"{options.max_new_tokens}: together at most {room}, the model's context"
            )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        return ids

    def request(self, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        sampling = {"temperature": self.options.temperature, "max_new_tokens": max_new_tokens}
        return {"input_ids": ids, "sampling_params": sampling}


def measure(
    args: list[str], conversation: Conversation, log: Path, console: Console
) -> Measurement:
    """Start one server, ask it everything, and stop it."""
    options = conversation.options
    server = Server(args, log=log)
    command = shlex.join(server.command)
    console.print(f"$ {command}", markup=False, soft_wrap=True)
    started = time.monotonic()
    try:
        with console.status("loading SGLang and the model (20 to 60 s) ..."):
            server.__enter__()
        console.print(f"ready after {time.monotonic() - started:.0f} s", style="dim")
        with _request_errors(server):
            server.post("/generate", conversation.request(conversation.warmup_ids, WARMUP_TOKENS))
            console.print(f"\n> {options.prompt}", style="bold", markup=False)
            request = conversation.request(conversation.prompt_ids, options.max_new_tokens)
            answer = _stream(server, request, lambda text: print(text, end="", flush=True))
            print("\n", flush=True)
            with console.status(f"measuring, {options.repetitions} times ..."):
                repetitions = tuple(
                    _time_once(server, conversation) for _ in range(options.repetitions)
                )
    finally:
        # Also where a signal cut short an earlier call of it: a second one starts anew.
        with console.status("stopping the server ..."):
            server.stop()
    return Measurement(
        launch_command=command,
        text=answer["text"],
        output_ids=tuple(answer["output_ids"]),
        histogram=tuple(answer["meta_info"].get("spec_correct_drafts_histogram", ())),
        repetitions=repetitions,
    )


def _stream(server: Server, request: dict[str, Any], show: Callable[[str], None]) -> Any:
    """Show the answer while it arrives and return the last event, which holds all of it."""
    shown = 0
    event: Any = None
    for event in server.stream("/generate", request):
        if "error" in event:
            raise DemoError(f"the server refused the request: {event['error']}")
        show(event["text"][shown:])
        shown = len(event["text"])
    if event is None:
        raise DemoError("the server ended its answer without a token")
    return event


def _time_once(server: Server, conversation: Conversation) -> Repetition:
    """The prompt for one token and for all; the prompt itself comes from the prefix cache."""
    times, answer = [], None
    for length in (1, conversation.options.max_new_tokens):
        request = conversation.request(conversation.prompt_ids, length)
        started = time.perf_counter()
        answer = server.post("/generate", request, timeout_s=300.0 + length)
        times.append(time.perf_counter() - started)
    assert answer is not None
    return Repetition(tuple(answer["output_ids"]), times[1], times[0])


@contextmanager
def _request_errors(server: Server) -> Iterator[None]:
    """Tell in one message what went wrong with a request."""
    try:
        yield
    except urllib.error.HTTPError as error:
        body = error.read().decode(errors="replace").strip()
        raise DemoError(f"the server answered {error.code}: {body}") from error
    except BrokenPipeError:
        raise  # our own output: whoever read it has gone
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"the server stopped answering ({error}):\n{server.tail()}") from error


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn the signals that ask for an end into `Stopped`, so that every `finally` runs.

    Only the first counts: the clean-up that it starts takes seconds and has to finish.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signum)

    before = {each: signal.signal(each, stop) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _no_child_left() -> Iterator[None]:
    """Kill new children that are left: a signal may come while one is being created."""
    import psutil  # type: ignore[import-untyped]

    own = psutil.Process()
    before = own.children(recursive=True)
    try:
        yield
    finally:
        for child in set(own.children(recursive=True)).difference(before):
            try:
                child.kill()
                child.wait(10)
            except psutil.Error:
                continue


def describe_device() -> str:
    """The GPU, or the CPU and how many cores of it this process may use."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass  # not every kernel and architecture names its model
    return f"{name} ({len(os.sched_getaffinity(0))} CPUs)"


def _explain_difference(dtype: str) -> str:
    if dtype == "float32":
        return "the tokens differ, which greedy decoding in float32 must not do: please report it"
    return (
        f"the tokens differ. In {dtype} that can be a tie of two tokens, broken differently when "
        "several tokens are computed at once; run with --dtype float32 to tell"
    )
