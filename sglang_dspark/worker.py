"""The speculative worker: a decode round is decide -> draft -> plan -> pack -> verify -> accept ->
publish -> commit.

SGLang's scheduler calls `forward_batch_generation` for every batch. Read `_prefill` and `_round`;
everything else answers questions that the scheduler asks of any speculative worker.

Symbols: R requests, gamma draft tokens per round, W = gamma + 1 the full verify window, M rows of
the verify forward, L committed KV length of a request (the anchor at position L is not counted).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_exec, get_schedule
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils.async_probe import sanitize_nan_logits
from torch.nn.functional import pad

from sglang_dspark import plugin
from sglang_dspark.drafters.algorithms import make_drafter
from sglang_dspark.drafters.base import DraftBlock, RoundState
from sglang_dspark.drafters.served import ServedDraft
from sglang_dspark.observe.observer import Observer
from sglang_dspark.schedule.rounds import RoundLog
from sglang_dspark.schedule.windows import Plan, WindowScheduler
from sglang_dspark.startup import (
    agreement_of,
    check_attention,
    log_settings,
    metric_labels,
    profile_facts,
    record_writer,
    start_schedule,
)
from sglang_dspark.verify.accept import Verdict
from sglang_dspark.verify.acceptance import make_acceptance
from sglang_dspark.verify.adjust import LogitAdjuster
from sglang_dspark.verify.forward import TargetForward
from sglang_dspark.verify.layout import VerifyRows, full_rows, packed_rows
from sglang_dspark.verify.sampling import SamplingParams

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    Publish = Callable[[torch.Tensor], None]

logger = logging.getLogger(__name__)


class SpecWorker(BaseSpecWorker):
    """Our worker for every algorithm; what differs between them is the drafter."""

    def __init__(
        self,
        server_args: ServerArgs,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
    ) -> None:
        super().__init__()
        plugin.assert_hooks_applied()
        self.server_args, self._target_worker = server_args, target_worker
        self.model_runner: ModelRunner = target_worker.model_runner
        self.device = torch.device(target_worker.device)
        self.config = plugin.spec_config(server_args, self.model_runner.model_config)
        # One seed on every rank, so that tensor-parallel ranks draw the same numbers.
        self.generator = torch.Generator(self.device).manual_seed(target_worker.random_seed)
        plugin.register_models()
        plugin.register_backends(self.config.mode)
        served = ServedDraft(self.config, server_args, gpu_id, nccl_port, target_worker)
        self.drafter = make_drafter(self.config, served, self.generator)
        self._draft_worker = served.worker
        self._draft_context = served.context
        self.draft_parallel_layout = served.layout
        self.adjuster = LogitAdjuster(self.config.width, self.model_runner)
        self.target = TargetForward(target_worker, self.config.width)
        self._window = torch.arange(self.config.width, device=self.device)
        self.acceptance = make_acceptance(self.config, self.model_runner, self.generator)
        self._rounds = RoundLog()
        # The parts below need pools and graphs, which come later.
        self.windows: WindowScheduler
        self._full_cap_lens: torch.Tensor
        self.observer: Observer

    # The two kinds of forward

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        *,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        publish = on_publish or _ignore
        if batch.forward_mode.is_idle():
            return self._idle(publish)
        if batch.forward_mode.is_extend():
            return self._prefill(batch, publish)
        return self._round(batch, publish, grammar_barrier)

    def _prefill(self, batch: ScheduleBatch, publish: Publish) -> GenerationBatchResult:
        """Run the target over a prompt (chunk) and hand its features to the drafter."""
        self._rounds.interrupt()
        # Planned first: a finished forward releases the scheduler's tables that the plan reads.
        kv_plan = self.model_runner.kv_index_translator.own_plan(batch)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        result.new_seq_lens = batch.seq_lens
        publish(batch.seq_lens)
        self.adjuster.start_requests(batch)
        # Before returning: afterwards the radix cache may own the slots of this batch.
        aux_hidden = _take_aux_hidden(result.logits_output)
        self.drafter.prefill(batch, aux_hidden, kv_plan, result.next_token_ids)
        result.next_draft_input = make_draft_input_v2(
            bonus_tokens=result.next_token_ids, new_seq_lens=batch.seq_lens
        )
        return result

    def _round(
        self,
        batch: ScheduleBatch,
        publish: Publish,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        """One decode round of every request in the batch."""
        started = self._rounds.start()
        state = self._state(batch)
        requests, generations = self.windows.requests(batch)
        decision = self.windows.decide(requests, generations, state.context)
        block = self._draft(state, self.windows.draft_depth(decision))
        plan = self.windows.plan(decision, block, state)

        window_tokens = self._window_tokens(state, block)
        rows = self._pack(window_tokens, state, plan)
        grammar = GrammarTree.from_linear_chain(window_tokens) if batch.has_grammar else None
        self.acceptance.stage(rows, block)
        target, graphed = self.target.verify(batch, state, rows)
        aux_hidden = _take_aux_hidden(target)

        adjusts = grammar is not None or self.adjuster.adjusts(batch)
        logits, places = self._adjust(
            batch, target, window_tokens, rows, adjusts, grammar, grammar_barrier
        )
        replayed = None if adjusts else self.target.replayed
        verdict = self.acceptance.verdict(
            block, window_tokens, logits, state.sampling, places, replayed
        )
        new_seq_lens = state.seq_lens + verdict.commit_lens
        publish(new_seq_lens)

        self.adjuster.commit(batch, state.anchors, verdict)
        drafted = block.tokens.shape[1] > 0
        self.drafter.commit(state, verdict, aux_hidden, rows, drafted=drafted, replayed=graphed)
        if batch.return_logprob:
            compute_spec_logprobs(
                batch, target, verdict.tokens.flatten(), chain_stride=self.config.width
            )
        full = rows.ragged is None
        self._rounds.launch(
            started,
            plan.decision,
            requests,
            generations,
            belief=plan.belief.without_evidence() if plan.belief and adjusts else plan.belief,
            windows=plan.windows,
            ceiling=verdict.ceiling,
            tokens=len(rows.tokens),
            full=full,
            width=self.config.width,
        )
        return GenerationBatchResult(
            logits_output=target,
            next_token_ids=verdict.tokens.flatten(),
            accept_lens=verdict.commit_lens,
            cap_lens=self._cap_lens(plan, len(requests)),
            block_accept_lens=self._ceilings(plan, verdict) if full else None,
            new_seq_lens=new_seq_lens,
            next_draft_input=make_draft_input_v2(
                bonus_tokens=verdict.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=self.config.width,
            can_run_cuda_graph=graphed,
        )

    def _idle(self, publish: Publish) -> GenerationBatchResult:
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        publish(nothing)
        return GenerationBatchResult(
            next_token_ids=nothing,
            accept_lens=nothing.to(torch.int32),
            new_seq_lens=nothing,
            next_draft_input=make_draft_input_v2(bonus_tokens=nothing, new_seq_lens=nothing),
            speculative_num_draft_tokens=self.config.width,
        )

    # The steps of a round

    def _state(self, batch: ScheduleBatch) -> RoundState:
        draft_input = batch.spec_info
        if self.device.type == "cuda":
            # Made on the scheduler's stream: its memory must outlive this round's kernels.
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        host_lens = batch.seq_lens_cpu
        if host_lens is None:  # no backend asked for them; this bounds them
            host_lens = draft_input.nxt_kv_lens_cpu - self.config.width
        return self.state_of(
            batch.req_pool_indices,
            batch.seq_lens,
            host_lens,
            draft_input.bonus_tokens,
            SamplingParams.of_batch(batch.sampling_info, self.drafter.served.sampling_kernels),
        )

    def state_of(
        self,
        req_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        host_lens: torch.Tensor,
        anchors: torch.Tensor,
        sampling: SamplingParams | None = None,
    ) -> RoundState:
        """A round of requests; host_lens: seq_lens, or a bound of them, on the host."""
        seq_lens_cpu = host_lens if self._reads_host_lens else None
        return RoundState(
            req_rows=req_rows,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            anchors=anchors,
            positions=seq_lens.unsqueeze(1) + self._window,
            kv_plan=self.model_runner.kv_index_translator.plan_uniform_extend(
                req_pool_indices=req_rows,
                seq_lens=seq_lens,
                seq_lens_cpu=seq_lens_cpu,
                width=self.config.width,
            ),
            sampling=sampling,
            context=float(host_lens.sum()),
        )

    def _draft(self, state: RoundState, depth: int) -> DraftBlock:
        """A block of depth tokens; an empty one in a round without a draft."""
        if depth:
            return self.drafter.propose(state, depth)
        nothing = state.anchors.new_empty(state.anchors.numel(), 0)
        return DraftBlock(tokens=nothing, probs=None, evidence=None, confidence_logits=None)

    def _window_tokens(self, state: RoundState, block: DraftBlock) -> torch.Tensor:
        """[R, W] int64: anchor and drafts, and zeros where nothing was drafted."""
        tokens = torch.cat([state.anchors.unsqueeze(1), block.tokens], dim=1)
        missing = self.config.width - tokens.shape[1]
        return pad(tokens, (0, missing)) if missing else tokens

    def _cap_lens(self, plan: Plan, requests: int) -> torch.Tensor:
        """Verify windows [R] int32, for SGLang's meta_info."""
        if plan.windows is None:
            return self._full_cap_lens[:requests]
        return plan.windows.to(torch.int32)

    def _ceilings(self, plan: Plan, verdict: Verdict) -> torch.Tensor:
        """What full windows would have committed, [R] int32."""
        if plan.windows is None:
            return verdict.commit_lens
        return (verdict.ceiling + 1).to(torch.int32)

    def _pack(self, window_tokens: torch.Tensor, state: RoundState, plan: Plan) -> VerifyRows:
        tier = self.windows.tier(plan.decision, len(window_tokens))
        if tier is None or plan.windows is None:
            return full_rows(window_tokens, state.positions, plan.windows)
        return packed_rows(window_tokens, state.positions, plan.windows, tier)

    def _adjust(
        self,
        batch: ScheduleBatch,
        target: LogitsProcessorOutput,
        window_tokens: torch.Tensor,
        rows: VerifyRows,
        adjusts: bool,
        grammar: Any,
        grammar_barrier: Callable[[], None] | None,
    ) -> tuple[torch.Tensor, VerifyRows]:
        """Logits [M, V] as the requests want them changed, and where their rows are.

        Penalties, grammars and log-probabilities are by place in the window: for these, packed
        rows are spread to R * W first.
        """
        logits = target.next_token_logits
        if rows.ragged is not None and (adjusts or batch.return_logprob):
            logits = target.next_token_logits = logits[rows.index.flatten()]
            rows = full_rows(window_tokens, rows.index, rows.windows)
        if adjusts:
            mask = None
            if grammar is not None:
                mask = build_grammar_vocab_mask(
                    reqs=batch.reqs,
                    tree=grammar,
                    sampling_info=batch.sampling_info,
                    device=logits.device,
                    barrier=grammar_barrier,
                )
            self.adjuster.apply(logits, batch, window_tokens, mask)
        sanitize_nan_logits(logits, "sglang-dspark: verify logits")
        return logits, rows

    # What the scheduler asks of a speculative worker

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (self.model_runner.attn_backend, self.drafter.served.runner.attn_backend)

    @property
    def _reads_host_lens(self) -> bool:
        return any(backend.needs_cpu_seq_lens for backend in self.spec_v2_attn_backends)

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        return [("draft", self.drafter.served.runner)]

    def init_attention_backends(self) -> None:
        check_attention(self)
        with self._draft_context():
            self.drafter.start()
            self._draft_worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        decode = get_exec().graph.cuda_graph_config.decode
        with self._draft_context():
            self._draft_worker.init_cuda_graphs(
                capture_decode_cuda_graph=decode.backend != Backend.DISABLED
            )
        self.drafter.capture()
        served = self.drafter.served
        self.acceptance.capture(
            served.captured_requests,
            self.config.width,
            self.model_runner.model_config.vocab_size,
            served.sampling_kernels,
        )
        self.windows = WindowScheduler(
            self.config,
            self.model_runner.req_to_token_pool,
            self.device,
            agreement_of(self.server_args),
            overlap=not get_schedule().disable_overlap_schedule,
        )
        if self.config.mode.schedules:
            start_schedule(self)
        grid = self.windows.grid
        max_requests = self.model_runner.max_running_requests if grid is None else grid.max_requests
        rows = self.model_runner.req_to_token_pool.req_to_token.shape[0]
        self._full_cap_lens = torch.full(
            (rows,), self.config.width, dtype=torch.int32, device=self.device
        )
        self.observer = Observer(
            self.config,
            self.windows,
            max_tokens=max_requests * self.config.width,
            labels=metric_labels(self.server_args),
            writer=record_writer(self.config, self.windows),
        )
        log_settings(self.config, self.windows.describe())

    def rehearse(self, state: RoundState, plan: Plan) -> None:
        """A whole greedy round of no request, to measure its time."""
        block = self._draft(state, plan.decision.depth)
        window_tokens = self._window_tokens(state, block)
        rows = self._pack(window_tokens, state, plan)
        self.acceptance.stage(rows, block)
        target, graphed = self.target.rehearse(state, rows)
        aux_hidden = _take_aux_hidden(target)
        logits, replayed = target.next_token_logits, self.target.replayed
        verdict = self.acceptance.verdict(block, window_tokens, logits, None, rows, replayed)
        drafted = plan.decision.drafts
        self.drafter.commit(state, verdict, aux_hidden, rows, drafted=drafted, replayed=graphed)

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        done = self._rounds.finish(np.array(num_correct_drafts_per_req, dtype=np.int64))
        self.windows.learn(done)
        self.observer.add(done)

    def get_confidence_budget_prepare(self) -> None:
        """Asked outside of static mode: confidences travel with our own round log, not SGLang's."""

    def set_dspark_forced_budget_frac(self, share: float | None) -> None:
        """SGLang's /set_internal_state, used by profilers: the share of drafts to verify."""
        self.windows.force(share)

    def dump_info_records(self) -> dict[str, Any]:
        """What /server_info shows of a DSPARK worker, as `dspark_info_record`."""
        if self.config.schedule.budget != "profile":
            return self.observer.dump()
        return {**self.observer.dump(), "profile": self._profile_facts}

    @cached_property
    def _profile_facts(self) -> dict[str, Any]:
        return profile_facts(self)

    def clear_info_records(self) -> None:
        self.observer.clear()

    def block_accept_estimate_log_suffix(self) -> None:
        """Asked by the decode log line of a DSPARK worker: nothing to add to it."""


def _take_aux_hidden(output: LogitsProcessorOutput) -> torch.Tensor:
    """The captured target features, removed from the output so that nobody copies them."""
    hidden: torch.Tensor | None = output.hidden_states
    if hidden is None:
        raise RuntimeError("the target returned no hidden states: is its layer capture set?")
    output.hidden_states = None
    return hidden


def _ignore(new_seq_lens: torch.Tensor) -> None:
    """Without overlap there is nobody to publish to."""
