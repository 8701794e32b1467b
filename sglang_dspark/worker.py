"""The speculative worker: one decode round is draft -> verify -> accept -> publish -> commit.

SGLang's scheduler calls `forward_batch_generation` for every batch. Read `_prefill` and `_round`;
everything else answers questions that the scheduler asks of any speculative worker.

Symbols: R requests, gamma draft tokens per round, W = gamma + 1 the full verify window,
L committed KV length of a request (the anchor at position L is not counted).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_dspark import plugin
from sglang_dspark.drafters.base import DraftBlock, Drafter, RoundState
from sglang_dspark.drafters.dspark import DSparkDrafter
from sglang_dspark.observe.records import RoundRecords
from sglang_dspark.observe.selfcheck import AcceptanceCheck
from sglang_dspark.verify.accept import Verdict, accept_greedy, accept_sampled
from sglang_dspark.verify.adjust import LogitAdjuster
from sglang_dspark.verify.sampling import SamplingParams, distribution

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
        self._target_worker = target_worker
        self.model_runner: ModelRunner = target_worker.model_runner
        self.device = torch.device(target_worker.device)
        self.config = plugin.spec_config(server_args, self.model_runner.model_config)
        # One seed on every rank, so that tensor-parallel ranks draw the same numbers.
        self.generator = torch.Generator(self.device).manual_seed(target_worker.random_seed)
        drafter = DSparkDrafter(
            self.config, server_args, gpu_id, nccl_port, target_worker, self.generator
        )
        self.drafter: Drafter = drafter
        self._draft_worker = drafter.worker
        self._draft_context = drafter.context
        self.draft_parallel_layout = drafter.layout
        self.adjuster = LogitAdjuster(self.config.width, self.model_runner)
        self._window = torch.arange(self.config.width, device=self.device)
        self._check = AcceptanceCheck(self.config.describe())
        self._records = RoundRecords(self.config)
        logger.info("sglang-dspark: %s", self.config.describe())

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
        # Planned first: a finished forward releases the scheduler's tables that the plan reads.
        kv_plan = self.model_runner.kv_index_translator.own_plan(batch)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        result.new_seq_lens = batch.seq_lens
        publish(batch.seq_lens)
        self.adjuster.start_requests(batch)
        # Before returning: afterwards the radix cache may own the slots of this batch.
        self.drafter.prefill(batch, _take_aux_hidden(result.logits_output), kv_plan)
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
        state = self._state(batch)
        block = self.drafter.propose(state)
        if block.confidence_logits is not None:
            self._records.keep_confidence(block.confidence_logits)
        window_tokens = torch.cat([state.anchors.unsqueeze(1), block.tokens], dim=1)
        grammar = GrammarTree.from_linear_chain(window_tokens) if batch.has_grammar else None

        target, graphed = self._verify(batch, state, window_tokens)
        logits = target.next_token_logits
        grammar_mask = None
        if grammar is not None:
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar,
                sampling_info=batch.sampling_info,
                device=logits.device,
                barrier=grammar_barrier,
            )
        self.adjuster.apply(logits, batch, window_tokens, grammar_mask)
        verdict = self._accept(block, logits, state)
        new_seq_lens = state.seq_lens + verdict.commit_lens
        publish(new_seq_lens)

        self.adjuster.commit(batch, state.anchors, verdict)
        self.drafter.commit(state, verdict, _take_aux_hidden(target))
        if batch.return_logprob:
            compute_spec_logprobs(
                batch, target, verdict.tokens.flatten(), chain_stride=self.config.width
            )
        return GenerationBatchResult(
            logits_output=target,
            next_token_ids=verdict.tokens.flatten(),
            accept_lens=verdict.commit_lens,
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
        seq_lens_cpu = batch.seq_lens_cpu
        if seq_lens_cpu is None and self._reads_host_lens:
            seq_lens_cpu = draft_input.nxt_kv_lens_cpu - self.config.width
        return RoundState(
            req_rows=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=seq_lens_cpu if self._reads_host_lens else None,
            anchors=draft_input.bonus_tokens,
            positions=batch.seq_lens.unsqueeze(1) + self._window,
            kv_plan=self.model_runner.kv_index_translator.plan_uniform_extend(
                req_pool_indices=batch.req_pool_indices,
                seq_lens=batch.seq_lens,
                seq_lens_cpu=seq_lens_cpu,
                width=self.config.width,
            ),
            sampling=SamplingParams.of_batch(batch.sampling_info),
        )

    def _verify(
        self, batch: ScheduleBatch, state: RoundState, window_tokens: torch.Tensor
    ) -> tuple[LogitsProcessorOutput, bool]:
        """Target forward over all windows: logits [R * W, V] and aux features [R * W, F * H].

        Also says whether a CUDA graph was replayed. The scheduler restores the batch afterwards.
        """
        batch.out_cache_loc = state.kv_plan.write_virtual
        verify_input = DFlashVerifyInput(
            draft_token=window_tokens.flatten(),
            positions=state.positions.flatten(),
            draft_token_num=self.config.width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            live_seq_lens_cpu=batch.seq_lens_cpu,
            kv_loc_plan=state.kv_plan,
        )
        lens_before = batch.seq_lens_cpu, batch.seq_lens_sum
        if state.seq_lens_cpu is not None:
            batch.seq_lens_cpu = state.seq_lens_cpu + self.config.width
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward_batch, _ = verify_input.prepare_for_verify(batch, self._target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = lens_before
        result = self._target_worker.forward_batch_generation(
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
            skip_attn_backend_init=True,
        )
        return result.logits_output, result.can_run_cuda_graph

    def _accept(self, block: DraftBlock, logits: torch.Tensor, state: RoundState) -> Verdict:
        if block.probs is None or state.sampling is None:
            return accept_greedy(block.tokens, logits.argmax(dim=-1).view(-1, self.config.width))
        probs = distribution(logits, state.sampling.repeat(self.config.width))
        return accept_sampled(
            block.tokens,
            block.probs,
            probs.view(-1, self.config.width, probs.shape[-1]),
            self.generator,
        )

    # What the scheduler asks of a speculative worker

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (self.model_runner.attn_backend, self.drafter.runner.attn_backend)

    @property
    def _reads_host_lens(self) -> bool:
        return any(backend.needs_cpu_seq_lens for backend in self.spec_v2_attn_backends)

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        return [("draft", self.drafter.runner)]

    def init_attention_backends(self) -> None:
        with self._draft_context():
            self._draft_worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        decode = get_exec().graph.cuda_graph_config.decode
        with self._draft_context():
            self._draft_worker.init_cuda_graphs(
                capture_decode_cuda_graph=decode.backend != Backend.DISABLED
            )

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        self._check.add(num_correct_drafts_per_req)
        self._records.add(num_correct_drafts_per_req)

    def dump_info_records(self) -> dict[str, Any]:
        """What /server_info shows of a DSPARK worker, as `dspark_info_record`."""
        return self._records.dump()

    def clear_info_records(self) -> None:
        self._records.clear()

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
