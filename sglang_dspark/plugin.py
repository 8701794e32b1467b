"""The only place where sglang-dspark takes hold of SGLang.

SGLang calls `register` once in every process (launcher, scheduler, detokenizer) through the entry
point group `sglang.srt.plugins`. It checks the SGLang version and puts the hooks of the table
below in place. Imports of SGLang modules stay inside functions: what is imported here costs
start-up time in each of these processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from sglang_dspark import __version__, config, flags
from sglang_dspark.backends.choose import settle_mode
from sglang_dspark.backends.registry import serve_ragged_triton
from sglang_dspark.drafters.checkpoints.translate import served_folder
from sglang_dspark.errors import ConfigError
from sglang_dspark.hooking import Hook

if TYPE_CHECKING:
    from sglang_dspark.worker import SpecWorker

SGLANG_VERSION = "0.5.23"
# SGLang's algorithm in whose place ours run; see `_resolve`.
SLOT = "DSPARK"

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point of SGLang's plugin loader."""
    check_sglang_version(version("sglang"))
    config.report_config_errors_in_one_line()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks():
        HookRegistry.register(hook.target, hook.fn, HookType[hook.kind])


def check_sglang_version(found: str) -> None:
    """Stop on another SGLang: its inside is what the hooks below lean on."""
    if found.split("+")[0] != SGLANG_VERSION:
        # SGLang logs and swallows an Exception of a plugin; it would go on without us, silently.
        raise SystemExit(
            f"sglang-dspark: error: sglang {found} is installed, but sglang-dspark {__version__} "
            f"works with sglang {SGLANG_VERSION} only: pip install sglang=={SGLANG_VERSION}, "
            "or pip uninstall sglang-dspark"
        )


def worker_class(algorithm: str) -> type[SpecWorker] | None:
    """Our worker for SGLang's algorithm; None for those that are not ours."""
    if algorithm != SLOT:
        return None
    from sglang_dspark.worker import SpecWorker

    return SpecWorker


def spec_config(server_args: Any, model_config: Any) -> config.SpecConfig:
    """The resolved `SpecConfig` from SGLang's server arguments and the target's ModelConfig."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if mambaish_config(model_config) is not None:
        raise ConfigError(
            f"--model-path: {model_config.hf_config.architectures[0]} keeps a recurrent state, "
            "which speculation of sglang-dspark cannot roll back yet; served today: targets with "
            "attention layers only"
        )
    text = model_config.hf_text_config
    target = config.TargetModel(
        hidden_size=int(model_config.hidden_size),
        vocab_size=int(model_config.vocab_size),
        num_layers=int(text.num_hidden_layers),
    )
    return config.resolve(server_args, target)


def register_models() -> None:
    """Announce our draft architectures to SGLang. Not in `register`: it imports every model."""
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.register("sglang_dspark.models", overwrite=True, strict=True)


def register_backends(mode: config.VerifyMode) -> None:
    """Announce our attention backends to SGLang, before it builds those of this process."""
    if mode is config.VerifyMode.COMPACT:
        serve_ragged_triton()


def sanitizes_logits() -> bool:
    """Whether SGLang was asked to replace NaN logits before anything is chosen from them."""
    from sglang.srt.environ import envs

    asked: bool = envs.SGLANG_SANITIZE_NAN_LOGITS.get()
    return asked


def hooks() -> tuple[Hook, ...]:
    """Every hook of this process, those of the host platform included where it is active."""
    from sglang.srt.platforms import current_platform

    common = (
        Hook(
            "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
            "AROUND",
            _resolve,
            "SGLang opens the draft here, knows few layouts and tells a bad one with a traceback",
        ),
        Hook(
            "sglang.srt.arg_groups.speculative_hook._handle_dspark",
            "AROUND",
            _resolve_dspark,
            "checks the draft before anything is loaded; the original knows no CPU device",
        ),
        Hook(
            "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
            "AFTER",
            _req_to_token_headroom,
            "a request row must hold the double-buffered reserve, at page size 1 as well",
        ),
        Hook(
            "sglang.srt.mem_cache.kv_cache_builder.create_tree_cache",
            "BEFORE",
            _pairs_in_prefix_cache,
            "the slot of a chain holds a pair of tokens, which SGLang's cache knows for EAGLE only",
        ),
        Hook(
            "sglang.srt.server_args.ServerArgs.add_cli_args",
            "AFTER",
            _add_flags,
            "our own flags",
        ),
    )
    if current_platform.is_out_of_tree():
        from sglang_dspark.host.hooks import HOST_HOOKS
        from sglang_dspark.host.platform import HostPlatform

        return common + (HOST_HOOKS if isinstance(current_platform, HostPlatform) else ())
    return (
        *common,
        Hook(
            "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
            "AROUND",
            _create_worker,
            "an in-tree platform offers no method to name another worker",
        ),
        Hook(
            "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
            "._build_ragged_verify_token_buckets",
            "AROUND",
            _token_counts,
            "graphs are captured for our tiers instead of full windows of each batch size",
        ),
        Hook(
            "sglang.srt.model_executor.model_runner.ModelRunner.decode_num_tokens_per_req",
            "AROUND",
            _graph_width,
            "a chain runs one row a request, where SGLang captures blocks of gamma",
        ),
    )


def assert_hooks_applied() -> None:
    """Raise if a hook did not take: SGLang only logs a hook that it could not apply."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [hook.target for hook in hooks() if hook.target not in HookRegistry._patched]
    if missing:
        raise ConfigError(
            f"SGLang did not apply the hook on {missing[0]} (see its log above): is this "
            f"sglang {SGLANG_VERSION}, and does SGLANG_PLUGINS include sglang_dspark?"
        )


def _resolve(original: Callable[[Any], None], server_args: Any) -> None:
    """Check the draft before SGLang opens it, and put the algorithm into SGLang's DSPARK slot.

    All three algorithms draft and verify a linear chain, and SGLang 0.5.23 runs ragged windows in
    graphs for DSPARK only. So its scheduler sees DSPARK and a folder that it can open, which says
    what is really served (`checkpoints.translate`).
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    algorithm = str(view.speculative_algorithm).upper()
    if algorithm in list(config.Algorithm):
        settle_mode(server_args)  # before SGLang reads the mode, and raises of its own
        if view.speculative_draft_model_path is not None:
            target = model_config_of(server_args)
            resolved = spec_config(view, target)
            positions = int(target.context_len)
            if positions > resolved.draft.max_position_embeddings:
                logger.warning(
                    "sglang-dspark: the draft was made for contexts of %d tokens, the server's is "
                    "%d: beyond the former its proposals may get worse (output stays right)",
                    resolved.draft.max_position_embeddings,
                    positions,
                )
            declare_resolution(
                server_args,
                "sglang_dspark",
                speculative_algorithm=SLOT,
                speculative_draft_model_path=str(
                    served_folder(resolved.draft, positions=positions)
                ),
                **_block_fields(resolved),
            )
        elif algorithm != SLOT:
            raise ConfigError(
                f"{config.DRAFT_PATH_FLAG} is missing: {algorithm} needs a draft checkpoint"
            )
    original(server_args)


def _block_fields(resolved: config.SpecConfig) -> dict[str, Any]:
    """Of SGLang's server arguments: those from which it sizes KV reserves and request rows."""
    return {
        "speculative_num_draft_tokens": resolved.width,
        "speculative_dspark_block_size": resolved.gamma,
        "speculative_dflash_block_size": None,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
    }


def _resolve_dspark(original: Callable[[Any], None], server_args: Any) -> None:
    """Resolve DSPARK's fields of the server arguments, on CUDA and on the host platform."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    if view.device != "cpu":
        original(server_args)  # looks for a draft that is bundled with the target, if none is given
    resolved = spec_config(view, model_config_of(server_args))
    declare_resolution(server_args, "sglang_dspark", **_block_fields(resolved))
    if view.device == "cpu" and view.max_running_requests is None:
        # The original would have declared it, but refuses the device.
        declare_resolution(server_args, "sglang_dspark", max_running_requests=48)


def _create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    return worker_class(algorithm.name) or original(algorithm, server_args)


def _add_flags(result: None, parser: Any) -> None:
    flags.add_flags(parser)


def _token_counts(original: Callable[[Any], list[int]], runner: Any) -> list[int]:
    """Token counts for which SGLang captures a verify graph in compact mode."""
    from sglang.srt.runtime_context import get_spec

    from sglang_dspark.schedule.grid import make_grid

    if get_spec().speculative_algorithm != SLOT:
        return original(runner)
    width = runner.captured_req_width
    grid = make_grid(config.graph_tiers(), runner.max_bs, width - 1, multiple_of=width)
    tokens = [tier.tokens for tier in grid.tiers]
    # SGLang captures `width` tokens for every entry of this list; max_bs is kept beside it.
    runner.capture_bs = [count // width for count in tokens]
    return tokens


def _graph_width(original: Callable[..., int], runner: Any, **kwargs: Any) -> int:
    """Rows a request of a draft's captured forward."""
    own: int | None = getattr(runner.model, "graph_width", None) if runner.is_draft_worker else None
    return original(runner, **kwargs) if own is None else own


def _pairs_in_prefix_cache(context: Any) -> None:
    """Let a cached prefix end before a slot whose next token is another: see `Eagle3Drafter`."""
    draft = context.tp_worker.model_runner.spec_aux_config.draft_model_config
    described = getattr(getattr(draft, "hf_config", None), "sglang_dspark", None) or {}
    if described.get("algorithm") == config.Algorithm.EAGLE3:
        context.params.is_eagle = True


def _req_to_token_headroom(extra: int, *args: Any, **kwargs: Any) -> int:
    """Tokens of a request row beyond the context length: at least the largest reserve."""
    from sglang.srt.runtime_context import get_schedule, get_spec

    spec = get_spec()
    if spec.speculative_algorithm != SLOT:
        return extra
    reserve: int = 2 * spec.speculative_num_draft_tokens + get_schedule().page_size
    return max(extra, reserve)
