"""SGLang's side of a draft: its worker, model, KV pool, attention backend and graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.draft_parallel import (
    model_draft_parallel_spec,
    resolve_draft_parallel_layout,
)
from sglang.srt.speculative.draft_worker_common import (
    build_draft_tp_worker,
    make_draft_block_spec_info,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context
from sglang.srt.utils.common import async_h2d

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.server_args import ServerArgs

    from sglang_dspark.config import SpecConfig


class ServedDraft:
    """Made before the KV pools exist. Every forward is inside `context()`."""

    def __init__(
        self,
        config: SpecConfig,
        server_args: ServerArgs,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
    ) -> None:
        self.target = target = target_worker.model_runner
        self.layout = resolve_draft_parallel_layout(
            model_draft_parallel_spec(
                target.spec_aux_config.draft_model_config, spec_algorithm=target.spec_algorithm
            )
        )
        with self.context():
            bundle = build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=target.model_config,
                algo_label=str(config.algorithm),
                attention_backend_override=_host_backend(target),
                random_seed=target_worker.random_seed,
            )
        self.worker = bundle.draft_worker
        self.runner = bundle.draft_model_runner
        self.model: Any = bundle.draft_model
        self.model.attach_shared_modules(
            embed_tokens=target.model.get_input_embeddings(), lm_head=target.model.lm_head
        )
        self.device = torch.device(target.device)
        self.ranks = int(server_args.tp_size)
        self.hidden_size = int(config.draft.hidden_size)
        self.on_host = self.device.type == "cpu"
        # Whether SGLang samples with FlashInfer's kernels
        self.sampling_kernels = (
            not self.on_host and get_exec().kernel.sampling_backend == "flashinfer"
        )
        # Requests, padding included, of the graph that the last `forward` replayed, if it did
        self.replayed: int | None = None
        # By the rows of a request.
        self._row_info = {
            width: make_draft_block_spec_info(draft_token_num=width, device=self.device)
            for width in range(1, config.gamma + 2)
        }

    def context(self) -> AbstractContextManager[None]:
        """The draft's parallel group, inside which its model is built, captured and run.

        Its pipeline is the target's: one stage, since `config` refuses more.
        """
        group: AbstractContextManager[None] = draft_tp_context(self.layout)
        return group

    @property
    def has_graphs(self) -> bool:
        return self.runner.decode_cuda_graph_runner is not None

    @property
    def shares_slots(self) -> bool:
        """Whether a slot's number is the same in the KV pools of target and draft."""
        translators = (self.target.kv_index_translator, self.runner.kv_index_translator)
        spaces = [translator.space(IdSpaceKind.FULL) for translator in translators]
        return all(space is not None and space.write is None for space in spaces)

    @property
    def captured_requests(self) -> list[int]:
        """For how many requests there are graphs, ascending."""
        return sorted(self.runner.decode_cuda_graph_runner.capture_bs) if self.has_graphs else []

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        req_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor | None,
        plan: KVLocPlan,
        columns: slice,
    ) -> torch.Tensor:
        """Run `width` rows a request behind its first seq_lens positions.

        ids, positions: [R, width] int64. plan, columns: where their KV goes; the plan's window may
        be wider. seq_lens [R] int64 and the same on the host, neither counting the rows.
        Returns hidden states [R * width, H]. How the rows see each other is the model's affair.
        """
        requests, width = ids.shape
        slots = plan.write_virtual.view(requests, -1)[:, columns]
        lens_cpu = None if seq_lens_cpu is None else seq_lens_cpu + width
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=ids.flatten(),
            req_pool_indices=req_rows,
            seq_lens=seq_lens,
            out_cache_loc=slots.flatten(),
            seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
            seq_lens_cpu=lens_cpu,
            positions=positions.flatten(),
            spec_algorithm=SpeculativeAlgorithm.DSPARK,
            spec_info=self._row_info[width],
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=requests * width,
        )
        plan.bind(batch, self.runner.kv_index_translator, cols=columns)
        output = self.runner.forward(batch)
        hidden: torch.Tensor = output.logits_output.hidden_states
        graphs = self.runner.decode_cuda_graph_runner
        self.replayed = graphs.bs if output.can_run_graph else None
        assert hidden.shape[0] == requests * width, (hidden.shape, requests, width)
        return hidden

    def prompt_positions(self, batch: ScheduleBatch) -> torch.Tensor:
        """[N] int64 positions of a prefill's tokens; those of request i start at prefix_lens[i]."""
        starts = async_h2d(batch.prefix_lens, dtype=torch.int64, device=self.device)
        lens = async_h2d(batch.extend_lens, dtype=torch.int64, device=self.device)
        count = sum(batch.extend_lens)
        before = lens.cumsum(0) - lens  # tokens of earlier requests in the batch
        offsets = (starts - before).repeat_interleave(lens, output_size=count)
        positions: torch.Tensor = torch.arange(count, device=self.device) + offsets
        return positions


def _host_backend(target: Any) -> str | None:
    """On the host platform the draft runs on the target's attention backend."""
    from sglang.srt.runtime_context import attention_backends

    if str(target.device) != "cpu":
        return None
    backend: str = attention_backends()[1]
    return backend
