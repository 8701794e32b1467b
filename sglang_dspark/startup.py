"""What happens once between the capture of graphs and the first request: grid, cost table, log."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from cost_tables.files import Fingerprint
from cost_tables.measure import Cell, Measured, measure, plan_cells
from cuda_graph.tiers import TierGrid
from sglang_dspark import flags
from sglang_dspark.backends.choose import check_backend
from sglang_dspark.config import SpecConfig, VerifyMode
from sglang_dspark.drafters.base import RoundState
from sglang_dspark.host.delays import TierDelays
from sglang_dspark.host.platform import describe_cpu
from sglang_dspark.observe.record_writer import RecordWriter
from sglang_dspark.schedule.agree import Agreement, Alone, FirstRankDecides
from sglang_dspark.schedule.cost_source import find_cost
from sglang_dspark.schedule.grid import make_grid
from sglang_dspark.schedule.scheduler import Decision
from sglang_dspark.schedule.windows import Plan, WindowScheduler

if TYPE_CHECKING:
    from sglang_dspark.worker import SpecWorker

MEASURE_SECONDS = 10.0
CONTEXT, LONG_CONTEXT = 128, 1024

logger = logging.getLogger(__name__)


def agreement_of(server_args: Any) -> Agreement:
    """How this rank agrees with the others of its group."""
    if server_args.tp_size == 1:
        return Alone()
    from sglang.srt.runtime_context import get_parallel

    return FirstRankDecides(get_parallel().tp_group)


def check_attention(worker: SpecWorker) -> None:
    """To be called once the target's attention backend is built, before graphs are captured."""
    check_backend(worker.model_runner.attn_backend, worker.config.mode)


def start_schedule(worker: SpecWorker) -> None:
    """Find grid and cost table of a worker whose graphs are captured, and log what is in force."""
    config, runner = worker.config, worker.model_runner
    graphs = runner.decode_cuda_graph_runner
    captured = getattr(graphs, "capture_num_tokens", None)
    if captured:
        grid = TierGrid.of(captured, graphs.max_bs, config.gamma)
    else:
        grid = make_grid(config.schedule.tiers, runner.max_running_requests, config.gamma)
        if config.mode is VerifyMode.COMPACT and worker.device.type == "cpu":
            delays = config.schedule.test_delays
            worker.target.use_eager_tiers(grid, None if delays is None else TierDelays(delays))
    worker.windows.use_grid(grid, captured=bool(captured))
    padded = bool(captured)
    source = find_cost(
        config.schedule, fingerprint(worker), lambda: measure_rounds(worker, grid, padded)
    )
    worker.windows.start(source)


def log_settings(config: SpecConfig, schedule: dict[str, str]) -> None:
    """One block of lines, at the end of the start."""
    lines = [config.describe(), *(f"{topic}: {what}" for topic, what in schedule.items())]
    logger.info("sglang-dspark: %s", "\n  ".join(lines))


def fingerprint(worker: SpecWorker) -> Fingerprint:
    """What a cost table depends on."""
    config, runner = worker.config, worker.model_runner
    model, draft = runner.model_config, config.draft
    cuda = worker.device.type == "cuda"
    head = f", head {draft.markov_head_type} {draft.markov_rank}" if draft.markov_rank else ""
    shape = (
        f"hidden {model.hidden_size}, layers {model.num_hidden_layers}, vocabulary "
        f"{model.vocab_size}, {config.algorithm} draft layers {draft.num_layers}{head}"
    )
    return Fingerprint(
        device=torch.cuda.get_device_name(worker.device) if cuda else describe_cpu(),
        model=shape,
        dtype=str(model.dtype).removeprefix("torch."),
        tp=int(worker.server_args.tp_size),
        gamma=config.gamma,
        backend=type(runner.attn_backend).__name__,
    )


def profile_facts(worker: SpecWorker) -> dict[str, Any]:
    """What the profiler has to know of this server: read by cost_tables.profiling.facts."""
    runner, grid = worker.model_runner, worker.windows.grid
    assert grid is not None
    table = runner.req_to_token_pool.req_to_token
    return {
        "fingerprint": asdict(fingerprint(worker)),
        "tiers": [tier.tokens for tier in grid.tiers],
        "max_requests": grid.max_requests,
        "pads_plain": worker.windows.captured,
        "vocab_size": int(runner.model_config.vocab_size),
        "max_context": min(int(table.shape[1]), int(runner.model_config.context_len)),
        "kv_tokens": int(runner.max_total_num_tokens),
    }


def measure_rounds(worker: SpecWorker, grid: TierGrid, padded: bool) -> Measured:
    """Time whole rounds at every tier of the grid, in the worker itself. A few seconds.

    padded: whether rounds without a draft are run in a tier too.
    """
    runner, config = worker.model_runner, worker.config
    table = runner.req_to_token_pool.req_to_token
    room = min(table.shape[1], runner.model_config.context_len) - 2 * config.width
    context = max(1, min(CONTEXT, room))
    tokens = [tier.tokens for tier in grid.tiers]
    cells = plan_cells(
        tokens,
        config.gamma,
        grid.max_requests,
        context,
        max(context, min(LONG_CONTEXT, room)),
        padded,
    )
    rows = torch.arange(1, grid.max_requests + 1, device=worker.device)

    def run(cell: Cell) -> None:
        worker.rehearse(*_rehearsal(worker, cell, grid, rows))

    # Rows of no request: their context is read from slots all over the pool, as that of real ones
    # is, and the windows behind it stay on the reserved slot 0, which nobody reads.
    saved = table[rows].clone()
    slots = runner.token_to_kv_pool.size
    reads = torch.randint(1, slots + 1, saved.shape, device=table.device, dtype=table.dtype)
    try:
        reads[:, context:] = 0
        table[rows] = reads
        with torch.inference_mode():
            # Ranks run the same rounds in step: how many must not hang on one rank's clock.
            limit = MEASURE_SECONDS if worker.server_args.tp_size == 1 else float("inf")
            passes = 5 if limit == MEASURE_SECONDS else 3
            return measure(cells, run, lambda: _synchronize(worker.device), limit, passes)
    finally:
        table[rows] = saved


def _rehearsal(
    worker: SpecWorker, cell: Cell, grid: TierGrid, rows: torch.Tensor
) -> tuple[RoundState, Plan]:
    """A round of a cell. Windows are as even as they can be."""
    device, count = worker.device, cell.requests
    seq_lens = torch.full((count,), cell.context, dtype=torch.int64, device=device)
    seq_lens_cpu = torch.full((count,), cell.context, dtype=torch.int64)
    state = worker.state_of(
        rows[:count], seq_lens, seq_lens_cpu, torch.ones(count, dtype=torch.int64, device=device)
    )
    tier = grid.index(cell.tokens, count)
    budget = min(cell.tokens - count, count * cell.depth)
    even, more = divmod(budget, count)
    windows = torch.full((count,), 1 + even, dtype=torch.int64, device=device)
    windows[:more] += 1
    return state, Plan(Decision(cell.depth, budget, tier), windows, None)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def record_writer(config: SpecConfig, windows: WindowScheduler) -> RecordWriter | None:
    """What writes rounds down; None if nobody asked for it, or another rank does."""
    if config.records is None or windows.rank != 0:
        return None
    return RecordWriter(config.records, flags.RECORDS.name, config, windows.describe())


def metric_labels(server_args: Any) -> dict[str, str] | None:
    """Labels of our metrics; None if the server exports none, or another rank does."""
    from sglang.srt.runtime_context import get_parallel, get_serving

    if not server_args.enable_metrics or get_parallel().tp_rank != 0:
        return None
    return {"model_name": get_serving().served_model_name}
