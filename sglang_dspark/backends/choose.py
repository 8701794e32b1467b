"""Which verify mode a server serves on its attention backend.

Decided twice. By name, when SGLang resolves its arguments: before anything is loaded, in the
process that starts all others, so that a fallback reaches them through the environment, SGLang's
own reading of the mode included. And by the object, once it is built: this knows backends that
SGLang's registry got from elsewhere, but it is too late to fall back, so it only refuses.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from sglang_dspark import flags
from sglang_dspark.backends.table import CPU_NAMES, HOST, Backend, by_class, by_name, names
from sglang_dspark.config import VerifyMode, verify_fallback, verify_mode
from sglang_dspark.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """What SGLang's arguments say of the backend that runs verify forwards.

    flag, name: the flag that decides on it, and its value. mla: whether the target has MLA.
    graphs: whether decode graphs are wanted. cpu: whether the device is one.
    """

    flag: str
    name: str
    mla: bool
    graphs: bool
    cpu: bool

    def objection(self, mode: VerifyMode) -> str | None:
        """Why the mode cannot be served; None if it can, or if the backend is not known here."""
        line = by_name(self.name, mla=self.mla)
        if line is None:
            return None
        if self.cpu and line.name not in CPU_NAMES:
            return "needs a GPU"
        if mode is not VerifyMode.COMPACT:
            return None if line.uniform else line.why
        if line.ragged(self.graphs) and not _on_excluded(line):
            return None
        return f"ragged windows: {line.why}"

    def refusal(self, mode: VerifyMode, objection: str) -> str:
        """The one line for a mode that is not served."""
        ragged = mode is VerifyMode.COMPACT
        able = HOST if self.cpu else ", ".join(names(ragged=ragged, mla=self.mla))
        what = f"{self.flag} is {self.name!r}, which does not serve {mode} ({objection})"
        others = [other for other in VerifyMode if self.objection(other) is None]
        if not others:
            return f"{what}: use {able}"
        return (
            f"{what}: use {able}, or {flags.MODE.name} {' or '.join(others)}, or let "
            f"{flags.FALLBACK.name} choose one of these"
        )


def settle_mode(server_args: Any) -> None:
    """Serve the mode asked for, fall back as asked, or refuse; see the top of the file."""
    from sglang.srt.arg_groups.model_override_base import resolved_view, use_mla_backend
    from sglang.srt.model_executor.cuda_graph_config import Backend as GraphBackend

    view = resolved_view(server_args)
    flag, name = verifying_name(view)
    setup = Setup(
        flag=flag,
        name=name,
        mla=use_mla_backend(server_args),
        graphs=view.cuda_graph_config.decode.backend != GraphBackend.DISABLED,
        cpu=view.device == "cpu",
    )
    settle(setup, os.environ)


def settle(setup: Setup, environ: MutableMapping[str, str]) -> None:
    """Write the mode to serve into environ if it is another than the one asked for."""
    mode, fallback = verify_mode(environ), verify_fallback(environ)
    objection = setup.objection(mode)
    if objection is None:
        return
    if fallback is None or setup.objection(fallback) is not None:
        raise ConfigError(setup.refusal(mode, objection))
    environ[flags.MODE.variable] = fallback
    environ[flags.ASKED_MODE] = mode
    logger.warning(
        "sglang-dspark: verify mode %s was asked for, %s is served (%s): %s is %r, which does not "
        "serve %s (%s)",
        mode,
        fallback,
        flags.FALLBACK.name,
        setup.flag,
        setup.name,
        mode,
        objection,
    )


def verifying_name(view: Any) -> tuple[str, str]:
    """The backend of verify forwards, and the flag that decides on it.

    view: SGLang's resolved arguments. Verify runs on the prefill backend unless SGLang is told
    otherwise; `HybridAttnBackend` chooses in the same way.
    """
    side = "decode" if view.speculative_attention_mode == "decode" else "prefill"
    name = getattr(view, f"{side}_attention_backend")
    if name is not None:
        return f"--{side}-attention-backend", name
    return "--attention-backend", view.attention_backend


def check_backend(backend: Any, mode: VerifyMode) -> None:
    """Raise ConfigError unless the target's attention backend, as built, serves the mode."""
    verifying = _verifying(backend)
    kind = type(verifying)
    line = by_class(kind)
    if mode is not VerifyMode.COMPACT:
        if line is not None and not line.uniform:
            raise ConfigError(
                f"--attention-backend: {kind.__name__} {line.why}, so there is no speculation "
                f"with it; use one of {', '.join(names(ragged=False))} (on CPU: {HOST})"
            )
        return
    if line is not None and line.name == HOST:
        return
    if line is not None and (not line.ragged(with_graphs=True) or _on_excluded(line)):
        able = False
    else:
        able = bool(getattr(verifying, "supports_ragged_verify_graph", False))
    if not able:
        raise ConfigError(
            f"--attention-backend: {kind.__name__} does not read ragged windows, which verify mode "
            f"compact needs; use one of {', '.join(names(ragged=True))} (on CPU: {HOST}), or "
            f"{flags.MODE.name} cap-accept or static"
        )


def _verifying(backend: Any) -> Any:
    """The one that runs verify forwards, where there is one for prefill and one for decode."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    if not isinstance(backend, HybridAttnBackend):
        return backend
    return backend.decode_backend if backend.spec_attn_is_decode else backend.prefill_backend


def _on_excluded(line: Backend) -> bool:
    from sglang.srt.runtime_context import get_platform

    return any(getattr(get_platform(), fact) for fact in line.not_on)
