"""Bad input stops with one line that names the flag or field, its value and what is allowed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

import micro
from cost_tables import CostModel, Fingerprint, save_table
from sglang_dspark import plugin
from sglang_dspark.config import TargetModel, resolve
from sglang_dspark.errors import ConfigError
from sglang_dspark.schedule.calibration import Scaling

TARGET = TargetModel(
    hidden_size=micro.HIDDEN, vocab_size=micro.VOCAB, num_layers=micro.TARGET_LAYERS
)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return micro.write_random(tmp_path_factory.mktemp("pair"))[1]


def args(path: Path | str | None, **changes):
    values = {
        "speculative_algorithm": "DSPARK",
        "speculative_draft_model_path": None if path is None else str(path),
        "speculative_num_draft_tokens": None,
        "speculative_dspark_block_size": None,
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "pp_size": 1,
        "enable_dp_attention": False,
        "disaggregation_mode": "null",
        **changes,
    }
    return SimpleNamespace(**values)


def error(path: Path | str | None, target: TargetModel = TARGET, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(args(path, **changes), target, environ={})
    message = str(caught.value)
    assert "\n" not in message
    return message


def edited(draft: Path, folder: Path, **changes) -> Path:
    """A copy of the draft with some fields of config.json changed (None removes one)."""
    folder.mkdir(parents=True)
    fields = {**json.loads((draft / "config.json").read_text()), **changes}
    fields = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes())
    return folder


def with_weights(draft: Path, folder: Path, change) -> Path:
    """A copy of the draft whose weights went through `change`."""
    copy = edited(draft, folder)
    weights = load_file(draft / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors")
    return copy


def test_a_good_draft_resolves(draft):
    resolved = resolve(args(draft), TARGET, environ={})
    assert (resolved.gamma, resolved.width, str(resolved.mode)) == (7, 8, "static")
    assert resolved.draft.target_layer_ids == (0, 2)
    assert "proposes 7, verifies 8" in resolved.describe()


def test_no_draft_path():
    assert "--speculative-draft-model-path is missing" in error(None)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "nowhere"])
def test_a_path_that_does_not_exist(path):
    message = error(path)
    assert "--speculative-draft-model-path" in message and repr(path) in message


def test_a_hub_name_that_cannot_be_fetched(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = error("nobody/no-such-draft")
    assert "'nobody/no-such-draft'" in message and "neither an existing folder" in message


def test_a_folder_without_config(tmp_path):
    assert "holds no config.json" in error(tmp_path)


def test_a_config_that_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert "is not readable JSON" in error(tmp_path)


@pytest.mark.parametrize(
    ("field", "target", "allowed"),
    [
        ("hidden_size", replace(TARGET, hidden_size=128), "128"),
        ("vocab_size", replace(TARGET, vocab_size=1000), "1000"),
        ("num_target_layers", replace(TARGET, num_layers=6), "6"),
    ],
)
def test_a_draft_of_another_target(draft, field, target, allowed):
    message = error(draft, target)
    assert field in message and allowed in message and "another target" in message


@pytest.mark.parametrize("ids", [[0, 3], [2, 0], [1, 1], [-1, 1]])
def test_layers_that_cannot_be_captured(draft, tmp_path, ids):
    message = error(edited(draft, tmp_path / "draft", target_layer_ids=ids))
    assert str(ids) in message and "0 to 2" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 0}, ["block_size is 0", "at least 1"]),
        ({"block_size": "seven"}, ["block_size is 'seven'", "int"]),
        ({"block_size": None}, ["block_size is missing"]),
        ({"mask_token_id": micro.VOCAB}, [f"mask_token_id is {micro.VOCAB}", "0 to 47"]),
        ({"markov_rank": -1}, ["markov_rank is -1", "at least 0"]),
        ({"markov_head_type": "lstm"}, ["'lstm'", "vanilla, gated, rnn"]),
        ({"architectures": ["Qwen9DSparkModel"]}, ["Qwen9DSparkModel", "Qwen3DSparkModel"]),
        ({"target_layer_ids": []}, ["target_layer_ids is []"]),
        ({"sample_from_anchor": False}, ["sample_from_anchor is False"]),
        ({"layer_types": ["sliding_attention"]}, ["sliding_attention", "full_attention"]),
    ],
    ids=str,
)
def test_a_bad_field(draft, tmp_path, changes, words):
    message = error(edited(draft, tmp_path / "draft", **changes))
    assert "config.json" in message
    assert all(word in message for word in words), message


def test_fields_may_be_nested(draft, tmp_path):
    nested = edited(draft, tmp_path / "draft", block_size=None, dspark_config={"block_size": 5})
    assert resolve(args(nested), TARGET, environ={}).gamma == 5


def test_a_missing_weight(draft, tmp_path):
    path = with_weights(draft, tmp_path / "draft", lambda w: w.pop("fc.weight"))
    message = error(path)
    assert "fc.weight" in message and "missing" in message


def test_a_weight_of_the_wrong_shape(draft, tmp_path):
    def cut(weights):
        weights["norm.weight"] = weights["norm.weight"][:-1].clone()

    message = error(with_weights(draft, tmp_path / "draft", cut))
    assert "norm.weight" in message and "(63,)" in message and "(64,)" in message


def test_a_head_that_the_config_does_not_name(draft, tmp_path):
    path = edited(draft, tmp_path / "draft", enable_confidence_head=False)
    message = error(path)
    assert "confidence_head.proj" in message and "no confidence head" in message


def test_no_weights_at_all(draft, tmp_path):
    path = edited(draft, tmp_path / "draft")
    (path / "model.safetensors").unlink()
    assert "holds no *.safetensors" in error(path)


def test_a_truncated_weight_file(draft, tmp_path):
    path = edited(draft, tmp_path / "draft")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert "not a readable safetensors file" in error(path)


@pytest.mark.parametrize(
    ("changes", "gamma"),
    [
        ({"speculative_num_draft_tokens": 8}, 7),
        ({"speculative_num_draft_tokens": 2}, 1),
        ({"speculative_dspark_block_size": 5}, 5),
        ({"speculative_dspark_block_size": 5, "speculative_num_draft_tokens": 6}, 5),
    ],
    ids=str,
)
def test_gamma_of_the_flags(draft, changes, gamma):
    assert resolve(args(draft, **changes), TARGET, environ={}).gamma == gamma


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"speculative_num_draft_tokens": 9},
            ["--speculative-num-draft-tokens is 9", "blocks of 7", "2 to 8"],
        ),
        ({"speculative_num_draft_tokens": 1}, ["--speculative-num-draft-tokens is 1", "2 to 8"]),
        ({"speculative_dspark_block_size": 8}, ["--speculative-dspark-block-size is 8", "1 to 7"]),
        (
            {"speculative_dspark_block_size": 5, "speculative_num_draft_tokens": 5},
            ["--speculative-num-draft-tokens is 5", "must be 6"],
        ),
        ({"speculative_num_steps": 3}, ["--speculative-num-steps is 3"]),
        ({"speculative_eagle_topk": 4}, ["--speculative-eagle-topk is 4"]),
        ({"pp_size": 2}, ["--pp-size is 2", "does not serve yet"]),
        ({"enable_dp_attention": True}, ["--enable-dp-attention"]),
        ({"disaggregation_mode": "decode"}, ["--disaggregation-mode is 'decode'"]),
        ({"enable_lora": True}, ["--enable-lora"]),
        ({"enable_mixed_chunk": True}, ["--enable-mixed-chunk"]),
        ({"speculative_draft_window_size": 128}, ["--speculative-draft-window-size is 128"]),
        (
            {"speculative_dspark_sps_table_path": "t.json"},
            ["--speculative-dspark-sps-table-path is 't.json'", "no effect in verify mode static"],
        ),
    ],
    ids=str,
)
def test_a_flag_that_cannot_be_served(draft, changes, words):
    message = error(draft, **changes)
    assert all(word in message for word in words), message


def test_a_mode_that_is_not_served(draft):
    with pytest.raises(ConfigError, match=r"SGLANG_RAGGED_VERIFY_MODE is 'compcat'.*static"):
        resolve(args(draft), TARGET, environ={"SGLANG_RAGGED_VERIFY_MODE": "compcat"})


# --- scheduled verification ----------------------------------------------------------------------

MODE = "SGLANG_RAGGED_VERIFY_MODE"
OURS = "SGLANG_SPEC_VERIFY_"


def scheduled(path: Path, environ: dict[str, str] | None = None, **changes):
    """What compact mode resolves to."""
    return resolve(args(path, **changes), TARGET, {MODE: "compact", **(environ or {})}).schedule


def scheduled_error(path: Path, environ: dict[str, str] | None = None, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        scheduled(path, environ, **changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("mode", ["static", "compact", "cap-accept"])
def test_the_mode_is_that_of_the_variable(draft, mode):
    resolved = resolve(args(draft), TARGET, environ={MODE: mode})
    assert str(resolved.mode) == mode and f"mode={mode}" in resolved.describe()
    assert resolved.mode.schedules == (mode != "static")


def test_a_measurement_can_be_asked_for_in_place_of_a_table(draft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no file of that name
    schedule = scheduled(draft, speculative_dspark_sps_table_path="measure")
    assert schedule.measure and schedule.table is None and not scheduled(draft).measure


def test_schedule_settings_have_defaults(draft):
    schedule = scheduled(draft)
    assert (schedule.tiers, schedule.budget, schedule.min_gain) == (12, "auto", 0.02)
    assert schedule.table is None and schedule.scaling is None
    assert schedule.calibration == "none (identity)"


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("TIERS", "4", 4),
        ("TIERS", "8,16,64", (8, 16, 64)),
        ("BUDGET", "auto", "auto"),
        ("BUDGET", "random", "random"),
        ("BUDGET", "0", 0.0),
        ("BUDGET", "1", 1.0),
        ("MIN_GAIN", "0", 0.0),
        ("MIN_GAIN", "0.5", 0.5),
    ],
)
def test_schedule_settings_are_read(draft, name, value, found):
    assert getattr(scheduled(draft, {OURS + name: value}), name.lower()) == found


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        (
            "TIERS",
            ["0", "-3", "x", "", "8,", "8,8", "16,8", "0,8", "1.5"],
            ["--speculative-verify-tiers", "a number of graphs", "8,16,64"],
        ),
        (
            "BUDGET",
            ["-0.1", "1.01", "half", "", "nan", "Auto"],
            ["--speculative-verify-budget", "auto, random, profile, or a number from 0 to 1"],
        ),
        (
            "MIN_GAIN",
            ["-0.01", "11", "auto", "", "nan", "inf"],
            ["--speculative-verify-min-gain", "a number from 0 to 10"],
        ),
    ],
    ids=["tiers", "budget", "min-gain"],
)
def test_bad_schedule_settings(draft, name, values, words):
    for value in values:
        message = scheduled_error(draft, {OURS + name: value})
        assert all(word in message for word in (*words, repr(value))), message


SIMULATE = OURS + "SIMULATE_ACCEPTANCE"


@pytest.mark.parametrize("mode", ["static", "compact", "cap-accept"])
def test_acceptance_can_be_simulated_in_every_mode(draft, mode):
    gamma = resolve(args(draft), TARGET, environ={}).gamma
    assert resolve(args(draft), TARGET, environ={MODE: mode}).simulated_survival is None
    each = tuple(1 - k / 10 for k in range(gamma))
    for value, found in (("0.5", (0.5,) * gamma), (",".join(map(str, each)), each)):
        resolved = resolve(args(draft), TARGET, environ={MODE: mode, SIMULATE: value})
        assert resolved.simulated_survival == found
        assert "ACCEPTANCE IS SIMULATED" in resolved.describe()


@pytest.mark.parametrize("value", ["", "x", "1.1", "-0.1", "nan", "0.5,0.5", "0.5,"])
def test_bad_simulated_acceptance(draft, value):
    with pytest.raises(ConfigError) as caught:
        resolve(args(draft), TARGET, environ={SIMULATE: value})
    message = str(caught.value)
    assert "--speculative-simulate-acceptance" in message and repr(value) in message
    assert "numbers from 0 to 1" in message


def test_sglangs_own_simulation_is_refused_by_name(draft):
    variable = "SGLANG_SIMULATE_ACC_LEN"
    assert resolve(args(draft), TARGET, environ={variable: "-1"}).simulated_survival is None
    with pytest.raises(ConfigError) as caught:
        resolve(args(draft), TARGET, environ={variable: "3"})
    assert variable in str(caught.value)
    assert "--speculative-simulate-acceptance" in str(caught.value)


def test_a_variable_that_nobody_knows(draft):
    for mode in ("static", "compact"):
        message = scheduled_error(draft, {MODE: mode, OURS + "TEIRS": "4"})
        assert "SGLANG_SPEC_VERIFY_TEIRS is not known" in message
        assert all(OURS + name in message for name in ("TIERS", "BUDGET", "MIN_GAIN"))


TABLE = "speculative_dspark_sps_table_path"
CALIBRATION = "speculative_dspark_confidence_sts_path"


@pytest.mark.parametrize(
    ("name", "value"), [("BUDGET", "0.5"), ("TIERS", "8,64"), ("MIN_GAIN", "0.1")]
)
@pytest.mark.parametrize("mode", [{}, {MODE: "static"}], ids=["unset", "static"])
def test_variables_of_the_schedule_mean_nothing_in_static_mode(draft, mode, name, value):
    with pytest.raises(ConfigError) as caught:
        resolve(args(draft), TARGET, environ={**mode, OURS + name: value})
    message = str(caught.value)
    assert "\n" not in message
    flag = "--speculative-verify-" + name.lower().replace("_", "-")
    for word in (flag, repr(value), "static", "--speculative-verify-mode compact"):
        assert word in message
    for scheduling in ("compact", "cap-accept"):
        resolve(args(draft), TARGET, environ={MODE: scheduling, OURS + name: value})


@pytest.mark.parametrize("name", [TABLE, CALIBRATION])
def test_files_of_the_schedule_mean_nothing_in_static_mode(draft, name):
    message = error(draft, **{name: "some.json"})
    flag = "--" + name.replace("_", "-")
    for word in (flag, "'some.json'", "static", "--speculative-verify-mode compact"):
        assert word in message


def test_files_of_the_schedule_are_read(draft, tmp_path):
    model = CostModel(0.01, (1.0,), (0.0,), (1.0, 8.0), (0.0, 0.01))
    place = Fingerprint("cpu", "m", "float32", 1, 7, "host")
    save_table(tmp_path / "t.json", model, place, 0.02, cells=48)
    temperatures = [1.0, 1.5, 2.0, 1.0, 1.0, 1.0, 0.5]
    (tmp_path / "c.json").write_text(json.dumps({"temperatures": temperatures}))
    files = {TABLE: str(tmp_path / "t.json"), CALIBRATION: str(tmp_path / "c.json")}
    schedule = scheduled(draft, **files)
    assert schedule.table.cost.drafted == model and schedule.table.fingerprint == place
    assert schedule.scaling == Scaling(tuple(temperatures), (0.0,) * 7)
    assert schedule.calibration == str(tmp_path / "c.json")


@pytest.mark.parametrize("name", [TABLE, CALIBRATION])
@pytest.mark.parametrize(
    ("content", "words"), [("{", "is not readable JSON"), (None, "no such file")]
)
def test_files_of_the_schedule_that_cannot_be_read(draft, tmp_path, name, content, words):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    message = scheduled_error(draft, **{name: str(path)})
    assert all(word in message for word in ("--" + name.replace("_", "-"), str(path), words))


@pytest.mark.parametrize(
    ("gamma_of_the_flag", "entries", "allowed"), [(None, 6, 7), (None, 8, 7), (5, 7, 5)]
)
def test_temperatures_of_another_gamma(draft, tmp_path, gamma_of_the_flag, entries, allowed):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"temperatures": [1.0] * entries}))
    flags = {CALIBRATION: str(path), "speculative_dspark_block_size": gamma_of_the_flag}
    message = scheduled_error(draft, **flags)
    assert "--speculative-dspark-confidence-sts-path" in message
    assert f"temperatures is {entries} entries; must be {allowed} numbers" in message


@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_windows_need_no_confidence_head(draft, tmp_path, mode):
    def drop(weights):
        for name in [name for name in weights if name.startswith("confidence_head")]:
            del weights[name]

    path = with_weights(draft, tmp_path / "headless", drop)
    path = edited(path, tmp_path / "draft", enable_confidence_head=False)
    resolved = resolve(args(path), TARGET, environ={MODE: mode})
    assert resolved.mode.schedules and not resolved.draft.has_confidence_head
    assert "confidence head no" in resolved.describe()


def test_another_sglang_version_stops_the_process():
    plugin.check_sglang_version("0.5.23")
    plugin.check_sglang_version("0.5.23+cpu")
    with pytest.raises(SystemExit, match=r"sglang 0\.5\.24 is installed.*sglang==0\.5\.23"):
        plugin.check_sglang_version("0.5.24")
