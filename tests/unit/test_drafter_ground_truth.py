"""Every published drafter of the ground truth, derived from a header of its sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_deploy import Job, inspect
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_values import reference_taps
from support_drafters import (
    DATA,
    QWEN36_27B,
    families,
    layout_of,
    plain_layout,
    published,
    published_row,
    target_of,
    write_target,
    write_weights,
)

ROWS = published()
NAMES = [f"{row['repo']}@{row['rev']}" for row in ROWS]
# both targets have the same sizes as well, so the folder's name has to tell them apart
COMPARED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "block_size",
    "layer_types",
    "num_target_layers",
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "architectures",
)


def derive_row(tmp_path: Path, row: dict[str, Any], **job: Any) -> Any:
    name = row["target"].rsplit("/", 1)[-1]
    weights = write_weights(tmp_path / "drafter-step-300.safetensors", layout_of(row))
    target = write_target(tmp_path / name, target_of(row))
    return inspect(Job(str(weights), str(target), families=families(), writing=False, **job)).report


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_a_published_drafter_is_derived_as_published(tmp_path: Path, row: dict[str, Any]) -> None:
    report = derive_row(tmp_path, row, vllm_version="0.28.0")
    assert report.errors == []
    for name in COMPARED:
        if row[name] is not None:
            assert report.config[name] == row[name], name
    assert report.config["dflash_config"]["target_layer_ids"] == row["target_layer_ids"]
    assert report.config["dflash_config"]["mask_token_id"] == row["mask_token_id"]
    assert report.config["eagle_aux_hidden_state_layer_ids"] == [tap + 1 for tap in row["target_layer_ids"]]
    window = report.config.get("sliding_window")
    assert window == row["sliding_window"]
    if row["tie_word_embeddings"] is not None:
        assert report.config["tie_word_embeddings"] == row["tie_word_embeddings"]
    assert report.facts["num_speculative_tokens"] == row["recommended_num_speculative_tokens"]


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_taps_off_the_formula_are_reported_as_the_tables_and_others_as_the_formulas(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    report = derive_row(tmp_path, row)
    assert report.fields["target_layer_ids"].source == ("formula" if row["formula_ok"] else "table")
    assert report.fields["mask_token_id"].source == "table"
    assert report.fields["hidden_size"].source == "header"
    assert report.fields["num_target_layers"].source == "target"


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_the_formula_gives_what_the_ground_truth_says_it_gives(row: dict[str, Any]) -> None:
    assert reference_taps(row["num_target_layers"], row["num_taps"]) == row["formula_ids"]


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_the_expected_tensor_list_has_the_published_number_of_parameters(row: dict[str, Any]) -> None:
    total = 0
    for _, shape in plain_layout(row).values():
        size = 1
        for dimension in shape:
            size *= dimension
        total += size
    assert total == row["plain_param_count"]
    assert len(plain_layout(row)) == row["tensor_count_plain"]


def test_every_row_of_the_table_has_its_published_counterpart() -> None:
    assert len(families()) == len(ROWS)
    assert len({row["id"] for row in families()}) == len(ROWS)
    assert all(row["provenance"] for row in families())


def test_the_reference_deployment_gets_exactly_this_configuration(tmp_path: Path) -> None:
    row = published_row("Qwen3.6-27B-DFlash")
    weights = write_weights(tmp_path / "downloads" / "dflash.safetensors", plain_layout(row))
    target = write_target(tmp_path / "Qwen3.6-27B", QWEN36_27B)
    job = Job(str(weights), str(target), families=families(), max_model_len=32768, writing=False)
    report = inspect(job).report
    assert report.usable
    assert report.facts["weight_bytes"] == 2 * 1730213120
    assert report.config == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-06,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000,
        "rope_scaling": None,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "max_window_layers": 5,
        "block_size": 16,
        "num_target_layers": 64,
        "tie_word_embeddings": False,
        "eos_token_id": 248044,
        "pad_token_id": 248044,
        "bos_token_id": None,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        "eagle_aux_hidden_state_layer_ids": [2, 17, 32, 47, 62],
    }
    assert [problem.id for problem in report.problems] == ["window-ignored"]


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_the_tiny_drafters_are_derived_as_their_author_configured_them(name: str) -> None:
    tiny = DATA / "tiny"
    truth = json.loads((tiny / f"drafter-{name}" / "published-config.json").read_text())
    user = {"mask_token_id": 5, "block_size": 16}
    if name == "qwen35":
        user["rope_theta"] = 1000000  # this one differs from its target's, which only its author can know
    job = Job(
        str(tiny / f"drafter-{name}" / "drafter-step-300.safetensors"),
        str(tiny / f"tiny-{name}"),
        families=families(),
        user=user,
        writing=False,
    )
    report = inspect(job).report
    assert report.usable
    inert = {"attention_dropout", "use_cache", "initializer_range"}
    assert {key: report.config.get(key) for key in truth if key not in inert} == {
        key: value for key, value in truth.items() if key not in inert
    }
    assert report.config["eagle_aux_hidden_state_layer_ids"] == [2, 6]
