"""The target's forward over the rows of a round: SGLang's graph replay, its eager runner, or ours.

On CUDA SGLang's decode graph runner replays the tier that the rows are packed into. The host
platform has no graphs; there the same packed rows go through an eager `GraphPool`, which keeps the
static buffers and the padding of a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from cuda_graph.pool import Buffer, GraphPool
from cuda_graph.tiers import TierGrid
from sglang_dspark.drafters.base import RoundState
from sglang_dspark.verify.layout import VerifyRows

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker

Result = tuple["LogitsProcessorOutput", bool]


class TargetForward:
    """Runs verify forwards. width: W, tokens of a full window."""

    def __init__(self, target_worker: TpModelWorker, width: int) -> None:
        self._worker = target_worker
        self._runner = target_worker.model_runner
        self._width = width
        self._pool: GraphPool | None = None
        # Rows, padding included, of the graph that the last forward replayed; None: it did not
        self.replayed: int | None = None
        self._run: Callable[[DFlashVerifyInput], Result]

    def use_eager_tiers(
        self, grid: TierGrid, before_replay: Callable[[int], None] | None = None
    ) -> None:
        """Run packed rows in the static buffers of `grid`. before_replay: see `GraphPool`."""
        integer = Buffer(torch.int64)
        self._pool = GraphPool(
            grid,
            lambda views: self._run(self._input(views, self._state, self._rows)),
            {"tokens": integer, "positions": integer, "columns": Buffer(torch.int64, padding=-1)},
            torch.device(self._runner.device),
            backend="eager",
            before_replay=before_replay,
        )

    def verify(self, batch: ScheduleBatch, state: RoundState, rows: VerifyRows) -> Result:
        """Logits [M, V] and aux features [M, F * H]; whether a CUDA graph was replayed.

        SGLang's scheduler restores the batch afterwards.
        """

        def run(verify_input: DFlashVerifyInput) -> Result:
            batch.out_cache_loc = state.kv_plan.virtual_write_ids(cols=verify_input.kv_loc_cols)
            lens_before = batch.seq_lens_cpu, batch.seq_lens_sum
            if state.seq_lens_cpu is not None:
                # An upper bound where windows are trimmed: their lengths are on the device.
                batch.seq_lens_cpu = state.seq_lens_cpu + self._width
                batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
            forward_batch, _ = verify_input.prepare_for_verify(batch, self._worker)
            batch.seq_lens_cpu, batch.seq_lens_sum = lens_before
            return self._forward(forward_batch)

        return self._dispatch(run, state, rows, batch.seq_lens_cpu)

    def rehearse(self, state: RoundState, rows: VerifyRows) -> Result:
        """The same without a batch of SGLang's, to measure before there are requests."""

        def run(verify_input: DFlashVerifyInput) -> Result:
            lens_cpu = None if state.seq_lens_cpu is None else state.seq_lens_cpu + self._width
            forward_batch = ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=len(state.anchors),
                input_ids=verify_input.draft_token,
                req_pool_indices=state.req_rows,
                seq_lens=state.seq_lens,
                out_cache_loc=rows.tokens,  # bound below
                seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
                seq_lens_cpu=lens_cpu,
                positions=verify_input.positions,
                spec_algorithm=SpeculativeAlgorithm.DSPARK,
                spec_info=verify_input,
                capture_hidden_mode=CaptureHiddenMode.FULL,
                global_num_token_non_padded_cpu=len(verify_input.draft_token),
            )
            translator = self._runner.kv_index_translator
            state.kv_plan.bind(forward_batch, translator, cols=verify_input.kv_loc_cols)
            graphs = self._runner.decode_cuda_graph_runner
            if graphs and graphs.can_run_graph(forward_batch):
                graphs.load_batch(forward_batch)
            else:
                self._runner.attn_backend.init_forward_metadata(forward_batch)
            return self._forward(forward_batch)

        return self._dispatch(run, state, rows, state.seq_lens_cpu)

    def _dispatch(
        self,
        run: Callable[[DFlashVerifyInput], Result],
        state: RoundState,
        rows: VerifyRows,
        live_seq_lens_cpu: torch.Tensor | None,
    ) -> Result:
        self._run, self._state, self._rows, self._live = run, state, rows, live_seq_lens_cpu
        views: dict[str, Any] = {
            "tokens": rows.tokens,
            "positions": rows.positions,
            "columns": rows.columns,
        }
        pool = self._pool
        if pool is not None and rows.ragged is not None and pool.holds(len(rows.tokens)):
            result: Result = pool.replay(len(rows.tokens), views)
            return result
        return run(self._input(views, state, rows))

    def _input(self, views: Any, state: RoundState, rows: VerifyRows) -> DFlashVerifyInput:
        return DFlashVerifyInput(
            draft_token=views["tokens"],
            positions=views["positions"],
            draft_token_num=self._width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            ragged_verify_layout=rows.ragged,
            live_seq_lens_cpu=self._live,
            kv_loc_plan=state.kv_plan,
            kv_loc_cols=views["columns"],
        )

    def _forward(self, forward_batch: ForwardBatch) -> Result:
        result = self._worker.forward_batch_generation(
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
            skip_attn_backend_init=True,
        )
        self.replayed = self._rows_of_graph() if result.can_run_cuda_graph else None
        return result.logits_output, result.can_run_cuda_graph

    def _rows_of_graph(self) -> int:
        graphs = self._runner.decode_cuda_graph_runner
        rows: int = graphs.raw_num_token if self._rows.ragged else graphs.bs * self._width
        return rows
