"""Deriving a configuration: families, versions, ambiguity, what is missing, and the complete tensor list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_deploy import Job, inspect
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_report import DrafterReport
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_values import reference_taps
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_vllm_rules import parse_version
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from support_drafters import (
    DATA,
    QWEN36_27B,
    Layout,
    dflash2_layout,
    families,
    ids,
    plain_layout,
    published_row,
    target_of,
    write_target,
    write_weights,
)

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_taps": 3,
    "vocab_size": 500,
}
TINY_TARGET = {
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "vocab_size": 500,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
}
GIVEN = {"mask_token_id": 499, "block_size": 8}


def tiny() -> Layout:
    return plain_layout(TINY)


def look(tmp_path: Path, layout: Layout, target: dict[str, Any] = TINY_TARGET, **job: Any) -> DrafterReport:
    weights = write_weights(tmp_path / "weights" / "some.safetensors", layout)
    folder = write_target(tmp_path / job.pop("target_name", "target"), target)
    return inspect(Job(str(weights), str(folder), families=families(), writing=False, **job)).report


def errors(report: DrafterReport) -> list[str]:
    return ids(report.errors)


# --- families and versions -----------------------------------------------------------------------------------------


def with_extra(**extra: tuple[str, tuple[int, ...]]) -> Layout:
    return tiny() | {name.replace("__", "."): value for name, value in extra.items()}


def quantised() -> Layout:
    layout = {
        name: (("F8_E4M3", shape) if "proj" in name else (dtype, shape)) for name, (dtype, shape) in tiny().items()
    }
    return layout | {f"{name}_scale": ("F32", (1,)) for name in tiny() if "proj" in name}


def gptq() -> Layout:
    layout: Layout = {}
    for name, (dtype, shape) in tiny().items():
        if "proj" in name:
            stem = name.removesuffix("weight")
            layout |= {
                f"{stem}qweight": ("I32", (1, 8)),
                f"{stem}scales": ("F16", (1, 8)),
                f"{stem}qzeros": ("I32", (1,)),
            }
        else:
            layout[name] = (dtype, shape)
    return layout


def laguna() -> Layout:
    layout = tiny()
    for index in range(2):
        stem = f"layers.{index}.self_attn."
        for name in "qkv":
            del layout[f"{stem}{name}_proj.weight"]
        layout[f"{stem}qkv_proj.weight"] = ("BF16", (64 + 2 * 32, 64))
    return layout


def dspark() -> Layout:
    return with_extra(
        markov_head__markov_w1__weight=("BF16", (500, 8)), markov_head__markov_w2__weight=("BF16", (500, 8))
    )


def speculators() -> Layout:
    return with_extra(
        d2t=("I64", (200,)),
        t2d=("BOOL", (500,)),
        embed_tokens__weight=("BF16", (500, 64)),
        lm_head__weight=("BF16", (200, 64)),
    )


FAMILIES = {
    "dflash": (tiny, "0.20.0"),
    "dflash2": (lambda: dflash2_layout(TINY, rank=8), "0.28.0"),
    "dspark": (dspark, "0.25.0"),
    "laguna": (laguna, "0.25.0"),
    "quantised": (quantised, "0.25.0"),
    "speculators": (speculators, "0.20.0"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_told_by_its_tensor_names(tmp_path: Path, family: str) -> None:
    make, first = FAMILIES[family]
    report = look(tmp_path, make(), vllm_version=first)
    assert report.family == family
    assert "family-unsupported" not in errors(report)


@pytest.mark.parametrize(
    ("family", "version"),
    [("dflash", "0.19.1"), *((name, "0.20.1") for name in FAMILIES if FAMILIES[name][1] > "0.21")],
)
def test_a_family_that_this_vllm_cannot_run_is_refused_with_the_release_that_can(
    tmp_path: Path, family: str, version: str
) -> None:
    make, first = FAMILIES[family]
    report = look(tmp_path, make(), vllm_version=version)
    refusal = next(problem for problem in report.errors if problem.id == "family-unsupported")
    assert version in refusal.message
    assert first in refusal.fix


def test_packed_weights_are_refused_as_quantised_although_their_sizes_cannot_be_read(tmp_path: Path) -> None:
    report = look(tmp_path, gptq())
    assert report.family == "quantised"
    assert errors(report)[0] == "family-unsupported"


def test_a_quantised_drafter_needs_its_quantization_config(tmp_path: Path) -> None:
    report = look(tmp_path, quantised(), vllm_version="0.25.0", user=GIVEN)
    assert errors(report) == ["missing-field"]
    assert report.errors[0].field == "quantization_config"
    given = GIVEN | {"quantization_config": {"quant_method": "fp8"}}
    report = look(tmp_path, quantised(), vllm_version="0.25.0", user=given)
    assert report.usable
    assert report.config["quantization_config"] == {"quant_method": "fp8"}


def test_a_speculators_drafter_runs_on_0_20_1_once_its_layers_are_given(tmp_path: Path) -> None:
    report = look(tmp_path, speculators(), user=GIVEN)
    assert [problem.field for problem in report.errors] == ["target_layer_ids"]
    report = look(tmp_path, speculators(), user=GIVEN | {"target_layer_ids": [0, 5, 10]})
    assert report.usable
    assert report.config["draft_vocab_size"] == 200


def test_tensors_left_over_from_training_are_refused(tmp_path: Path) -> None:
    layout = speculators() | {"verifier_norm.weight": ("BF16", (64,))}
    report = look(tmp_path, layout, user=GIVEN | {"target_layer_ids": [0, 5, 10]})
    assert errors(report) == ["training-tensor"]


def test_a_dspark_drafter_is_configured_for_its_own_method(tmp_path: Path) -> None:
    given = GIVEN | {"target_layer_ids": [0, 5, 10]}
    report = look(tmp_path, dspark(), vllm_version="0.25.0", user=given)
    assert report.usable
    assert report.config["architectures"] == ["Qwen3DSparkModel"]
    assert report.config["markov_rank"] == 8
    assert report.config["target_layer_ids"] == [0, 5, 10]
    assert report.facts["method"] == "dspark"


def test_dflash2_sizes_are_read_off_its_own_tensors(tmp_path: Path) -> None:
    given = GIVEN | {"target_layer_ids": [0, 5, 10], "selector_top_k": 16}
    report = look(tmp_path, dflash2_layout(TINY, group=8, rank=24), vllm_version="0.28.0", user=given)
    assert report.usable
    nested = report.config["dflash_config"]
    assert (nested["conv_kernel_size"], nested["conv_group_size"], nested["selector_rank"]) == (2, 8, 24)


def test_attention_sinks_need_the_release_that_reads_them(tmp_path: Path) -> None:
    sinks: Layout = {f"layers.{index}.self_attn.attention_sink_bias": ("BF16", (4,)) for index in range(2)}
    assert errors(look(tmp_path, tiny() | sinks, user=GIVEN)) == ["family-unsupported"]
    report = look(tmp_path, tiny() | sinks, user=GIVEN, vllm_version="0.25.0")
    assert report.usable
    assert report.config["dflash_config"]["attention_sink_bias"] is True


def test_attention_biases_are_seen_and_checked(tmp_path: Path) -> None:
    biases: Layout = {
        f"layers.{index}.self_attn.{name}_proj.bias": ("BF16", (rows,))
        for index in range(2)
        for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))
    }
    report = look(tmp_path, tiny() | biases, user=GIVEN)
    assert report.usable
    assert report.config["attention_bias"] is True
    del biases["layers.1.self_attn.k_proj.bias"]
    assert [problem.field for problem in look(tmp_path, tiny() | biases, user=GIVEN).errors] == [
        "layers.1.self_attn.k_proj.bias"
    ]


# --- not a drafter -------------------------------------------------------------------------------------------------


def test_the_targets_own_weights_are_recognised() -> None:
    for name in ("tiny-qwen3", "tiny-qwen35"):
        path = str(DATA / "tiny" / name)
        report = inspect(Job(path, path, families=families())).report
        assert errors(report) == ["target-weights"]
        assert "target itself" in report.errors[0].message


def test_the_folder_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", QWEN36_27B)
    report = inspect(Job(str(DATA / "tiny" / "tiny-qwen3"), str(target), families=families())).report
    assert errors(report) == ["wrong-model"]
    assert "8 layers" in report.errors[0].message


def test_other_heads_and_renamed_tensors_are_told_apart(tmp_path: Path) -> None:
    eagle: Layout = {
        "fc.weight": ("BF16", (64, 192)),
        "midlayer.hidden_norm.weight": ("BF16", (64,)),
        "d2t": ("I64", (9,)),
    }
    assert errors(look(tmp_path, eagle)) == ["other-drafter"]
    prefixed: Layout = {f"model.{name}": value for name, value in tiny().items()}
    assert errors(look(tmp_path, prefixed)) == ["prefixed-names"]
    assert errors(look(tmp_path, {"weight": ("F32", (1,))})) == ["unknown-family"]


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    report = look(tmp_path, plain_layout(published_row("Qwen3-8B-DFlash-b16")), QWEN36_27B)
    assert "wrong-target" in errors(report)
    assert "4096" in report.errors[0].message
    assert "5120" in report.errors[0].message


def test_an_fc_that_fits_no_number_of_layers_is_refused(tmp_path: Path) -> None:
    layout = tiny() | {"fc.weight": ("BF16", (64, 100))}
    assert "wrong-target" in errors(look(tmp_path, layout, user=GIVEN))
    layout = tiny() | {"fc.weight": ("BF16", (64, 13 * 64))}
    assert "wrong-target" in errors(look(tmp_path, layout, user=GIVEN))


def test_an_empty_fc_is_refused_by_name(tmp_path: Path) -> None:
    assert "empty-fc" in errors(look(tmp_path, tiny() | {"fc.weight": ("BF16", (64, 0))}, user=GIVEN))


# --- the complete tensor list --------------------------------------------------------------------------------------


def test_a_complete_drafter_has_no_errors(tmp_path: Path) -> None:
    assert look(tmp_path, tiny(), user=GIVEN).usable


@pytest.mark.parametrize("name", sorted(tiny()))
def test_each_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    layout = tiny()
    del layout[name]
    report = look(tmp_path, layout, user=GIVEN | {"target_layer_ids": [1, 5, 9]})
    assert [(problem.id, problem.field) for problem in report.errors] == [("missing-tensor", name)]


@pytest.mark.parametrize("name", sorted(tiny()))
def test_each_wrongly_shaped_tensor_is_named(tmp_path: Path, name: str) -> None:
    layout = tiny()
    dtype, shape = layout[name]
    if name in {"fc.weight", "norm.weight"} or name == "layers.0.input_layernorm.weight":
        shape = (*shape, 1)
    else:
        shape = tuple(size + 16 for size in shape)
    layout[name] = (dtype, shape)
    report = look(tmp_path, layout, user=GIVEN | {"target_layer_ids": [1, 5, 9]})
    named = [problem.field for problem in report.errors if problem.id in {"wrong-shape", "missing-tensor"}]
    # with two layers neither is the majority: then the other one is named
    assert name.split(".")[-2] in " ".join(named), report.errors


@pytest.mark.parametrize("name", sorted(tiny()))
def test_each_wrongly_typed_tensor_is_named(tmp_path: Path, name: str) -> None:
    layout = tiny()
    layout[name] = ("F32", layout[name][1])
    report = look(tmp_path, layout, user=GIVEN)
    assert [(problem.id, problem.field) for problem in report.errors] == [("wrong-dtype", name)]


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    report = look(tmp_path, with_extra(layers__1__mlp__surplus__weight=("BF16", (3,))), user=GIVEN)
    assert [(problem.id, problem.field) for problem in report.errors] == [
        ("extra-tensor", "layers.1.mlp.surplus.weight")
    ]


def test_a_whole_missing_layer_in_the_middle_is_named(tmp_path: Path) -> None:
    sizes = TINY | {"num_hidden_layers": 3}
    layout = {name: value for name, value in plain_layout(sizes).items() if not name.startswith("layers.1.")}
    report = look(tmp_path, layout, user=GIVEN)
    assert errors(report) == ["missing-tensor"] * 11


def test_a_lost_last_layer_points_to_the_published_drafter(tmp_path: Path) -> None:
    row = published_row("Qwen3.6-27B-DFlash")
    report = look(tmp_path, plain_layout(row | {"num_hidden_layers": 4}), QWEN36_27B)
    mask = next(problem for problem in report.errors if problem.field == "mask_token_id")
    assert "Qwen3.6-27B-DFlash has num_hidden_layers 5, this one 4" in mask.message


def test_absurd_layer_numbers_are_refused_at_once(tmp_path: Path) -> None:
    layout = with_extra(layers__999999__mlp__up_proj__weight=("BF16", (1,)))
    assert errors(look(tmp_path, layout)) == ["bad-layer-numbers"]


def test_a_thousand_extra_tensors_are_counted_rather_than_listed(tmp_path: Path) -> None:
    extra: Layout = {f"surplus.{index}": ("BF16", (1,)) for index in range(1000)}
    report = look(tmp_path, tiny() | extra, user=GIVEN)
    assert len(report.errors) == 41
    assert "960 more" in report.errors[-1].message


# --- what the weights cannot tell ----------------------------------------------------------------------------------


def test_an_unknown_drafter_lists_exactly_the_fields_to_give(tmp_path: Path) -> None:
    report = look(tmp_path, tiny())
    assert [(problem.id, problem.field) for problem in report.errors] == [
        ("missing-field", "mask_token_id"),
        ("missing-field", "block_size"),
    ]
    assert all("--set" in problem.fix for problem in report.errors)


def test_without_the_targets_rope_and_positions_these_must_be_given_too(tmp_path: Path) -> None:
    target = {name: TINY_TARGET[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    report = look(tmp_path, tiny(), target)
    assert {problem.field for problem in report.errors} == {
        "mask_token_id",
        "block_size",
        "rope_theta",
        "max_position_embeddings",
    }
    given = GIVEN | {"rope_theta": 1e6, "max_position_embeddings": 4096}
    assert look(tmp_path, tiny(), target, user=given).usable


def test_formula_taps_that_nothing_confirms_are_flagged(tmp_path: Path) -> None:
    report = look(tmp_path, tiny(), user=GIVEN)
    assert report.config["dflash_config"]["target_layer_ids"] == [1, 5, 9]
    assert "taps-unconfirmed" in ids(report.problems)
    given = look(tmp_path, tiny(), user=GIVEN | {"target_layer_ids": [0, 4, 8]})
    assert given.fields["target_layer_ids"].source == "user"
    assert given.config["eagle_aux_hidden_state_layer_ids"] == [1, 5, 9]
    assert "taps-unconfirmed" not in ids(given.problems)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mask_token_id", 500),
        ("mask_token_id", -1),
        ("mask_token_id", "five"),
        ("mask_token_id", True),
        ("block_size", 1),
        ("target_layer_ids", [1, 5]),
        ("target_layer_ids", [1, 5, 12]),
        ("target_layer_ids", [1, 5, 5]),
        ("target_layer_ids", [1, 5, -1]),
        ("target_layer_ids", "1,5,9"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "nonsense"]),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("rope_theta", 0),
        ("rope_theta", float("nan")),
        ("rope_theta", float("inf")),
        ("hidden_size", 65),
        ("num_hidden_layers", 3),
        ("vocab_size", 499),
        ("eagle_aux_hidden_state_layer_ids", [1, 5, 9]),
        ("mask_tokenid", 5),
        ("family", "Qwen3.6-27B-DFlash"),
        ("rope_scaling", "yarn"),
    ],
)
def test_a_bad_value_given_is_refused_and_named(tmp_path: Path, name: str, value: Any) -> None:
    report = look(tmp_path, tiny(), user=GIVEN | {name: value})
    assert report.errors
    assert name in [problem.field for problem in report.errors] or name in report.errors[0].message


def test_values_that_agree_with_the_weights_may_be_given(tmp_path: Path) -> None:
    assert look(tmp_path, tiny(), user=GIVEN | {"hidden_size": 64, "dflash_config.mask_token_id": 3}).usable


def test_a_given_value_replaces_the_tables(tmp_path: Path) -> None:
    report = look(tmp_path, plain_layout(published_row("Qwen3.6-27B-DFlash")), QWEN36_27B, user={"block_size": 8})
    assert report.config["block_size"] == 8
    assert report.fields["block_size"].source == "user"
    assert report.fields["mask_token_id"].source == "table"


# --- ambiguity -----------------------------------------------------------------------------------------------------

TWINS = plain_layout(published_row("Qwen3.6-27B-DFlash"))


def test_twins_that_differ_in_what_this_vllm_ignores_are_a_warning(tmp_path: Path) -> None:
    report = look(tmp_path, TWINS, QWEN36_27B)
    warning = next(problem for problem in report.problems if problem.id == "ambiguous-family")
    assert report.usable
    assert "Qwen3.6-27B-DFlash, Qwen3.5-27B-DFlash@2026-04" in warning.message
    assert "layer_types" in warning.message
    assert report.config["dflash_config"] == {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}


def test_the_same_twins_are_an_error_where_the_difference_counts(tmp_path: Path) -> None:
    report = look(tmp_path, TWINS, QWEN36_27B, vllm_version="0.26.0")
    assert "ambiguous-family" in errors(report)
    chosen = look(tmp_path, TWINS, QWEN36_27B, vllm_version="0.26.0", user={"family": "Qwen3.5-27B-DFlash@2026-04"})
    assert chosen.usable
    assert set(chosen.config["layer_types"]) == {"full_attention"}


@pytest.mark.parametrize(
    ("name", "window"), [("Qwen3.6-27B", 2048), ("models--Qwen--Qwen3.5-27B", None), ("qwen3.6_27b-fp8", 2048)]
)
def test_the_targets_folder_tells_twins_apart(tmp_path: Path, name: str, window: int | None) -> None:
    report = look(tmp_path, TWINS, QWEN36_27B, vllm_version="0.26.0", target_name=name)
    assert report.usable
    assert report.config["sliding_window"] == window


def test_twins_with_other_layers_are_an_error_on_every_vllm(tmp_path: Path) -> None:
    coder, following = published_row("Qwen3-Coder-30B-A3B-DFlash"), published_row("Qwen3-Coder-Next-DFlash")
    target = target_of(coder, nested=False)
    found = look(tmp_path, plain_layout(coder), target | {"model_type": "qwen3_moe"})
    assert found.config["dflash_config"]["target_layer_ids"] == coder["target_layer_ids"]
    found = look(tmp_path, plain_layout(coder), target | {"model_type": "qwen3_next"})
    assert found.config["dflash_config"]["target_layer_ids"] == following["target_layer_ids"]
    assert found.fields["target_layer_ids"].source == "table"
    found = look(tmp_path, plain_layout(coder), target, target_name="Qwen3-Coder-Next")
    assert found.config["dflash_config"]["target_layer_ids"] == following["target_layer_ids"]
    found = look(tmp_path, plain_layout(coder), target | {"layer_types": ["linear_attention", "full_attention"]})
    assert found.config["dflash_config"]["target_layer_ids"] == following["target_layer_ids"]


# --- vLLM's version and the served length --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "length", "expected"),
    [
        ("0.20.1", 32768, ["window-ignored"]),
        ("0.24.0", 4096, ["window-ignored"]),
        ("0.20.1", 2048, []),
        ("0.25.1", 2048, ["mixed-attention-refused"]),
        ("0.26.0", 32768, []),
        ("0.20.1", None, ["window-ignored"]),
    ],
)
def test_the_sliding_window_is_judged_by_version_and_length(
    tmp_path: Path, version: str, length: int | None, expected: list[str]
) -> None:
    report = look(tmp_path, TWINS, QWEN36_27B, vllm_version=version, max_model_len=length, target_name="Qwen3.6-27B")
    assert ids(report.problems) == expected


def test_too_few_positions_are_told(tmp_path: Path) -> None:
    row = published_row("Qwen3-4B-DFlash-b16")
    report = look(tmp_path, plain_layout(row), target_of(row) | {}, max_model_len=100000)
    assert "positions-too-few" in ids(report.problems)


@pytest.mark.parametrize("version", ["0.20.1", "0.24.0", "0.26.0", "0.28.0", "0.33.0"])
def test_the_shifted_list_is_always_there_and_auto_map_never(tmp_path: Path, version: str) -> None:
    config = look(tmp_path, tiny(), user=GIVEN, vllm_version=version).config
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 10]
    assert "auto_map" not in config


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.20.1", (0, 20, 1)), ("v0.26.0+cpu", (0, 26, 0)), ("0.26.1rc1.dev913+ged34", (0, 26, 1)), ("1.0", (1, 0, 0))],
)
def test_versions_are_read_as_people_write_them(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["", "latest", "0", "0.20.1; rm", "0.20.1 ", "9" * 5000 + ".1.1", "0.20.1\n"])
def test_what_is_no_version_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FirstlightError):
        parse_version(text)
    assert errors(look(tmp_path, tiny(), vllm_version=text)) == ["bad-vllm-version"]


def test_the_reference_formula_for_one_tap_and_for_the_known_pairs() -> None:
    assert reference_taps(64, 1) == [32]
    assert reference_taps(64, 5) == [1, 16, 31, 46, 61]
    assert reference_taps(64, 8) == [1, 10, 18, 27, 35, 44, 52, 61]


def test_a_target_too_shallow_for_the_formula_needs_the_layers_given(tmp_path: Path) -> None:
    report = look(tmp_path, tiny(), TINY_TARGET | {"num_hidden_layers": 3}, user=GIVEN)
    assert [problem.field for problem in report.errors] == ["target_layer_ids"]


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": None}, {"hidden_size": "64"}, {"num_hidden_layers": 0}, {"vocab_size": True},
        {"vocab_size": -5}, {"architectures": ["DFlashDraftModel"]},
    ],
)  # fmt: skip
def test_a_target_without_usable_sizes_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    assert errors(look(tmp_path, tiny(), TINY_TARGET | change)) == ["bad-target-config"]


def test_a_broken_row_of_the_table_is_named(tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "x.safetensors", tiny())
    target = write_target(tmp_path / "t", TINY_TARGET)
    for rows in ([{}], [1], [{"id": "x", "shape": None}]):
        report = inspect(Job(str(weights), str(target), families=rows, writing=False)).report  # type: ignore[arg-type]
        assert errors(report) == ["bad-family-table"]


def test_values_that_are_not_certain_are_flagged(tmp_path: Path) -> None:
    row = published_row("LLaMA3.1-8B-Instruct-DFlash-UltraChat")
    report = look(tmp_path, plain_layout(row), target_of(row))
    assert "uncertain-value" in ids(report.problems)
    report = look(tmp_path, plain_layout(row), target_of(row), user={"mask_token_id": 128002})
    assert "uncertain-value" not in ids(report.problems)
