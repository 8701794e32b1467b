"""DSPARK: a parallel backbone, a sequential head and a confidence head.

From the DSpark paper (arXiv 2607.05147), for the block behind an anchor x_0:
  h_1..h_gamma = backbone([x_0, mask x (gamma - 1)])          one non-causal forward
  logits_k     = LMhead(h_k) + bias(x_{k-1}, h_k, state)      sequential, k = 1..gamma
  c_k          = sigmoid(w . [h_k ; W1[x_{k-1}]] + b)         P(x_k survives | all before do)
The backbone attends to its own KV of all committed tokens, which is computed from target hidden
states (fc, norm, then each layer's key and value projection); so to "commit" is to write that KV.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
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

from sglang_dspark.drafters.base import DraftBlock, RoundState
from sglang_dspark.drafters.checkpoints import DraftCheckpoint
from sglang_dspark.verify.sampling import SamplingParams, distribution, draw

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.server_args import ServerArgs

    from sglang_dspark.config import SpecConfig
    from sglang_dspark.verify.accept import Verdict
    from sglang_dspark.verify.layout import VerifyRows


class DSparkDrafter:
    """Runs SGLang's DSpark draft model. Made before the KV pools exist; see `Drafter`."""

    def __init__(
        self,
        config: SpecConfig,
        server_args: ServerArgs,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
        generator: torch.Generator,
    ) -> None:
        self.gamma = config.gamma
        self.generator = generator
        target = target_worker.model_runner
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
        self.model = bundle.draft_model
        self.model.attach_shared_modules(
            embed_tokens=target.model.get_input_embeddings(), lm_head=target.model.lm_head
        )
        self.device = torch.device(target.device)
        if self.device.type == "cpu":
            # In bfloat16 the draft layers would launch a CUDA kernel for norm and RoPE.
            for layer in self.model.layers:
                layer.self_attn.use_table_qk_norm_rope = False
        self.confidence_head = load_confidence_head(config.draft, self.device)
        self._mask_token_id = config.draft.mask_token_id
        # By the block's width. Graphs are captured for gamma tokens only.
        self._block_info = {
            width: make_draft_block_spec_info(draft_token_num=width, device=self.device)
            for width in range(1, self.gamma + 1)
        }

    def context(self) -> AbstractContextManager[None]:
        """The draft's parallel group, inside which its model is built, captured and run.

        Its pipeline is the target's: one stage, since `config` refuses more.
        """
        group: AbstractContextManager[None] = draft_tp_context(self.layout)
        return group

    def prefill(self, batch: ScheduleBatch, aux_hidden: torch.Tensor, kv_plan: KVLocPlan) -> None:
        """aux_hidden: [tokens, F * H]; the tokens of request i start at prefix_lens[i]."""
        num_tokens = sum(batch.extend_lens)
        starts = async_h2d(batch.prefix_lens, dtype=torch.int64, device=self.device)
        lens = async_h2d(batch.extend_lens, dtype=torch.int64, device=self.device)
        before = lens.cumsum(0) - lens  # tokens of earlier requests in the batch
        offsets = (starts - before).repeat_interleave(lens, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=self.device) + offsets
        slots = kv_plan.write_ids(self.runner.kv_index_translator)
        self._write_context_kv(aux_hidden, positions, slots)

    def propose(self, state: RoundState, depth: int) -> DraftBlock:
        with self.context(), torch.inference_mode():
            width = self.gamma if self.runner.decode_cuda_graph_runner else depth
            hidden = self._backbone(state, width)
            if width > depth:
                hidden = hidden.view(-1, width, hidden.shape[-1])[:, :depth].flatten(0, 1)
            num_requests = state.anchors.numel()
            base_logits, features = self.model.compute_base_logits(hidden)
            tokens, probs = self._sequential_head(
                base_logits.view(num_requests, depth, -1),
                hidden.view(num_requests, depth, -1),
                state,
            )
            confidence = self._confidence(
                features.view(num_requests, depth, -1), state.anchors, tokens
            )
        return DraftBlock(tokens=tokens, probs=probs, confidence_logits=confidence)

    def commit(
        self, state: RoundState, verdict: Verdict, aux_hidden: torch.Tensor, rows: VerifyRows
    ) -> None:
        # All rows, rejected ones too: those lie at or behind the next anchor, where the next
        # round's block writes before anything reads. So nothing needs to be masked or counted.
        slots = state.kv_plan.write_ids(self.runner.kv_index_translator, cols=rows.columns)
        self._write_context_kv(aux_hidden, rows.positions, slots)

    def _backbone(self, state: RoundState, width: int) -> torch.Tensor:
        """Hidden states [R * width, H] of the block behind each anchor."""
        num_requests = state.anchors.numel()
        ids = torch.full(
            (num_requests, width), self._mask_token_id, dtype=torch.int64, device=self.device
        )
        ids[:, 0] = state.anchors
        slots = state.kv_plan.write_virtual.view(num_requests, -1)[:, :width]
        lens_cpu = None if state.seq_lens_cpu is None else state.seq_lens_cpu + width
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=num_requests,
            input_ids=ids.flatten(),
            req_pool_indices=state.req_rows,
            seq_lens=state.seq_lens,
            out_cache_loc=slots.flatten(),
            seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
            seq_lens_cpu=lens_cpu,
            positions=state.positions[:, :width].flatten(),
            spec_algorithm=SpeculativeAlgorithm.DSPARK,
            spec_info=self._block_info[width],
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=num_requests * width,
        )
        state.kv_plan.bind(batch, self.runner.kv_index_translator, cols=slice(0, width))
        hidden: torch.Tensor = self.runner.forward(batch).logits_output.hidden_states
        assert hidden.shape[0] == num_requests * width, (hidden.shape, num_requests, width)
        return hidden

    def _sequential_head(
        self, base_logits: torch.Tensor, hidden: torch.Tensor, state: RoundState
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw x_1..x_gamma one after the other.

        base_logits: [R, D, V]; hidden: [R, D, H]. Returns tokens [R, D] int64 and their
        distributions [R, D, V] float32 (None if all requests are greedy).
        """
        head = self.model.markov_head
        head_state = head.init_state(hidden[:, 0])
        previous = state.anchors
        tokens, probs = [], []
        for k in range(hidden.shape[1]):
            bias, head_state = head.step_bias(
                previous, hidden_states=hidden[:, k], state=head_state
            )
            logits = base_logits[:, k] + bias
            previous, q = self._choose(logits, state.sampling)
            tokens.append(previous)
            probs.append(q)
        block = torch.stack(tokens, dim=1)
        if state.sampling is None:
            return block, None
        return block, torch.stack([q for q in probs if q is not None], dim=1)

    def _choose(
        self, logits: torch.Tensor, sampling: SamplingParams | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if sampling is None:
            return logits.argmax(dim=-1), None
        q = distribution(logits, sampling)
        return draw(q, self.generator), q

    def _confidence(
        self, hidden: torch.Tensor, anchors: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """Confidence logits [R, D]; logit k reads h_k and x_{k-1}, never x_k."""
        if self.confidence_head is None:
            return None
        features = hidden.float()
        if self.confidence_head.in_features > hidden.shape[-1]:
            previous = torch.cat([anchors.unsqueeze(1), tokens[:, :-1]], dim=1)
            embedded = self.model.markov_head.get_prev_embeddings(previous)
            features = torch.cat([features, embedded.float()], dim=-1)
        logits: torch.Tensor = self.confidence_head(features).squeeze(-1)
        return logits

    def _write_context_kv(
        self, aux_hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Turn target features [N, F * H] into each draft layer's KV at the given slots."""
        pool = self.runner.token_to_kv_pool
        with self.context(), torch.inference_mode():
            if self.device.type != "cpu":
                self.model.write_target_hidden_kv(
                    target_hidden=aux_hidden, pool=pool, positions=positions, cache_loc=slots
                )
                return
            # SGLang's writer launches a Triton kernel in bfloat16; the same steps one by one.
            context = self.model.project_target_hidden(aux_hidden)
            for layer in self.model.layers:
                attn = layer.self_attn
                k, v = attn.kv_proj_only(context)
                k = attn.apply_k_rope(positions, attn.apply_k_norm(k))
                shape = (-1, attn.num_kv_heads, attn.head_dim)
                where = KVWriteLoc(slots, physical=True)
                pool.set_kv_buffer(attn.attn, where, k.view(shape), v.view(shape))


def load_confidence_head(
    checkpoint: DraftCheckpoint, device: torch.device
) -> torch.nn.Linear | None:
    """The confidence head in float32, from the checkpoint's own file.

    SGLang's draft model builds it only outside static mode; ours is always there if the
    checkpoint has one, so that its logits can be recorded and calibrated in every mode.
    """
    if not checkpoint.has_confidence_head:
        return None
    head = torch.nn.Linear(checkpoint.confidence_features, 1, device=device)
    weights = _read_weights(checkpoint.path, "confidence_head.proj.")
    with torch.no_grad():
        head.weight.copy_(weights["weight"])
        head.bias.copy_(weights["bias"])
    return head.requires_grad_(False)


def _read_weights(path: str, prefix: str) -> dict[str, torch.Tensor]:
    from pathlib import Path

    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as weights:
            for name in weights.keys():
                stripped = name.removeprefix("model.")
                if stripped.startswith(prefix):
                    found[stripped.removeprefix(prefix)] = weights.get_tensor(name)
    return found


def _host_backend(target: Any) -> str | None:
    """On the host platform the draft runs on the target's attention backend."""
    from sglang.srt.runtime_context import attention_backends

    if str(target.device) != "cpu":
        return None
    backend: str = attention_backends()[1]
    return backend
