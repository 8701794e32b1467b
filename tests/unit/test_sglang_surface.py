"""Everything of SGLang that we lean on exists. After an upgrade, this fails first and by name."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
from pathlib import Path

import pytest

import sglang_dspark
from sglang_dspark import config, plugin
from sglang_dspark.errors import ConfigError

PACKAGE = Path(sglang_dspark.__file__).parent


def imported_names() -> list[str]:
    """Every `from sglang... import name` of the package, as dotted paths."""
    names = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None)
            if isinstance(node, ast.ImportFrom) and module and module.split(".")[0] == "sglang":
                names |= {f"{module}.{alias.name}" for alias in node.names}
    return sorted(names)


def resolve(path: str):
    return pkgutil.resolve_name(path)


@pytest.mark.parametrize("name", imported_names())
def test_imported_name_exists(name):
    module, _, attribute = name.rpartition(".")
    there = hasattr(importlib.import_module(module), attribute)
    # If not, it may be a module that nobody has imported yet.
    assert there or importlib.util.find_spec(name), f"{name} is gone from SGLang"


@pytest.mark.parametrize("hook", plugin.hooks(), ids=lambda hook: hook.target)
def test_hooked_function_exists(hook):
    assert callable(resolve(hook.target)), f"{hook.target} is gone from SGLang"


def test_the_hook_registry_tells_which_hooks_took():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    assert isinstance(HookRegistry._patched, set)
    assert {"AROUND", "AFTER", "BEFORE", "REPLACE"} <= {kind.name for kind in HookType}


def test_a_hook_that_did_not_take_is_an_error(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", {hook.target for hook in plugin.hooks()})
    plugin.assert_hooks_applied()
    monkeypatch.setattr(HookRegistry, "_patched", set())
    with pytest.raises(ConfigError, match="did not apply the hook on sglang"):
        plugin.assert_hooks_applied()


# Fields that we read or fill, by the class that has them.
FIELDS = {
    "sglang.srt.managers.utils.GenerationBatchResult": (
        "logits_output next_token_ids accept_lens new_seq_lens next_draft_input "
        "speculative_num_draft_tokens can_run_cuda_graph"
    ),
    "sglang.srt.managers.schedule_batch.ScheduleBatch": (
        "reqs forward_mode spec_info seq_lens seq_lens_cpu seq_lens_sum req_pool_indices "
        "out_cache_loc sampling_info has_grammar return_logprob prefix_lens extend_lens"
    ),
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo": (
        "temperatures top_ps top_ks min_ps is_all_greedy is_any_greedy need_top_p_sampling "
        "need_top_k_sampling need_min_p_sampling logit_bias has_custom_logit_processor"
    ),
    "sglang.srt.speculative.dflash_info.DFlashVerifyInput": (
        "draft_token positions draft_token_num capture_hidden_mode live_seq_lens_cpu kv_loc_plan"
    ),
    "sglang.srt.speculative.dflash_info_v2.DFlashDraftInputV2": "bonus_tokens nxt_kv_lens_cpu",
    "sglang.srt.layers.logits_processor.LogitsProcessorOutput": "next_token_logits hidden_states",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch": (
        "forward_mode batch_size input_ids req_pool_indices seq_lens out_cache_loc seq_lens_sum "
        "seq_lens_cpu positions spec_algorithm spec_info capture_hidden_mode "
        "global_num_token_non_padded_cpu"
    ),
    "sglang.srt.server_args.ServerArgs": (
        "speculative_algorithm speculative_draft_model_path speculative_num_draft_tokens "
        "speculative_dspark_block_size speculative_num_steps speculative_eagle_topk "
        "max_running_requests device "
    )
    + " ".join(field for field, _, _ in config._UNSUPPORTED),
    "sglang.srt.sampling.sampling_params.SamplingParams": (
        "frequency_penalty presence_penalty repetition_penalty min_new_tokens stop_token_ids"
    ),
}


@pytest.mark.parametrize("path", FIELDS)
def test_fields_exist(path):
    cls = resolve(path)
    known = set(dir(cls)) | set(getattr(cls, "__annotations__", {}))
    known |= set(inspect.signature(cls.__init__).parameters)
    missing = [field for field in FIELDS[path].split() if field not in known]
    assert not missing, f"{path} has no field {', '.join(missing)} any more"


# Methods that we call or override, with the parameters that we name.
METHODS = {
    "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.plan_uniform_extend": (
        "req_pool_indices seq_lens seq_lens_cpu width"
    ),
    "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.own_plan": "forward_batch",
    "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan.write_ids": "cols",
    "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan.bind": "cols",
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": (
        "batch forward_batch is_verify skip_attn_backend_init capture_hidden_mode"
    ),
    "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify": (
        "batch target_worker"
    ),
    "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.on_verify_complete_cpu": (
        "num_correct_drafts_per_req batch_size"
    ),
    "sglang.srt.models.dspark.DSparkDraftMixin.attach_shared_modules": "embed_tokens lm_head",
    "sglang.srt.models.dspark.DSparkDraftMixin.compute_base_logits": "hidden",
    "sglang.srt.models.dspark.DSparkDraftMixin.write_target_hidden_kv": (
        "target_hidden pool positions cache_loc"
    ),
    "sglang.srt.models.dflash.DFlashDraftModel.project_target_hidden": "target_hidden",
    "sglang.srt.models.dflash.DFlashAttention.kv_proj_only": "",
    "sglang.srt.models.dflash.DFlashAttention.apply_k_norm": "k",
    "sglang.srt.models.dflash.DFlashAttention.apply_k_rope": "positions k",
    "sglang.srt.models.dspark.BaseDSparkMarkovHead.init_state": "hidden_states",
    "sglang.srt.models.dspark.BaseDSparkMarkovHead.step_bias": "prev_tokens hidden_states state",
    "sglang.srt.models.dspark.VanillaMarkov.get_prev_embeddings": "token_ids",
}


@pytest.mark.parametrize("path", METHODS)
def test_methods_take_what_we_pass(path):
    parameters = inspect.signature(resolve(path)).parameters
    missing = [name for name in METHODS[path].split() if name not in parameters]
    assert not missing, f"{path} takes no {', '.join(missing)} any more"


def test_draft_layers_have_the_switch_that_we_turn_off_on_cpu():
    from sglang.srt.models.dflash import DFlashAttention

    assert "self.use_table_qk_norm_rope and" in inspect.getsource(DFlashAttention.forward)


def test_the_worker_answers_what_the_scheduler_asks():
    """Missing answers kill a running server late: at the first log line, or on /server_info."""
    from sglang.srt.managers.scheduler_components import internal_state

    from sglang_dspark.worker import SpecWorker

    asked = "dump_info_records clear_info_records block_accept_estimate_log_suffix".split()
    source = inspect.getsource(internal_state)
    assert "dump_info_records" in source and "clear_info_records" in source
    assert all(callable(getattr(SpecWorker, name)) for name in asked)
