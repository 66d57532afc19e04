"""Finding a drafter's files: one of any name, shards with an index or without, and folders of all sorts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import drafter_target, drafter_weights
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from hypothesis import given, settings
from hypothesis import strategies as st
from support_drafters import Layout, plain_layout, published_row, write_weights

LAYOUT = plain_layout(published_row("Qwen3-4B-DFlash-b16"))
NAMES = list(LAYOUT)
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def sharded(folder: Path, index: str | None = "model.safetensors.index.json") -> Path:
    halves: list[Layout] = [{name: LAYOUT[name] for name in half} for half in (NAMES[:30], NAMES[30:])]
    for part, half in zip(PARTS, halves, strict=True):
        write_weights(folder / part, half)
    if index:
        names = {name: part for part, half in zip(PARTS, halves, strict=True) for name in half}
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def kind_of(path: Path) -> str:
    with pytest.raises(FirstlightError) as caught:
        drafter_weights.read_weights(str(path))
    return caught.value.kind


@pytest.mark.parametrize("name", ["model.safetensors", "drafter-step-300.safetensors", "odd", "weights final (2).bin"])
def test_a_single_file_of_any_name_is_read(tmp_path: Path, name: str) -> None:
    path = write_weights(tmp_path / name, LAYOUT)
    weights = drafter_weights.read_weights(str(path))
    assert weights.files == (str(path),)
    assert list(weights.tensors) == NAMES


def test_a_folder_with_one_file_is_read(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "odd.safetensors", LAYOUT)
    (tmp_path / "README.md").touch()
    assert drafter_weights.read_weights(str(tmp_path)).files == (str(path),)


def test_further_names_of_the_same_file_are_no_second_file(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "odd.safetensors", LAYOUT)
    os.link(path, tmp_path / "model.safetensors")
    (tmp_path / "link.safetensors").symlink_to("odd.safetensors")
    assert drafter_weights.read_weights(str(tmp_path)).files == (str(tmp_path / "model.safetensors"),)


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "drafter.safetensors.index.json", None])
def test_shards_are_read_as_one(tmp_path: Path, index: str | None) -> None:
    folder = sharded(tmp_path, index)
    weights = drafter_weights.read_weights(str(folder))
    assert sorted(weights.tensors) == sorted(NAMES)
    assert [Path(file).name for file in weights.files] == list(PARTS)
    if index:
        assert drafter_weights.read_weights(str(folder / index)) == weights


@pytest.mark.parametrize("index", ["model.safetensors.index.json", None])
def test_a_missing_shard_is_named(tmp_path: Path, index: str | None) -> None:
    folder = sharded(tmp_path, index)
    (folder / PARTS[1]).unlink()
    with pytest.raises(FirstlightError, match="model-00002-of-00002") as caught:
        drafter_weights.read_weights(str(folder))
    assert caught.value.kind == "missing-shard"


def test_naming_one_shard_means_all_of_them(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    assert sorted(drafter_weights.read_weights(str(folder / PARTS[1])).tensors) == sorted(NAMES)
    (folder / PARTS[0]).unlink()
    assert kind_of(folder / PARTS[1]) == "missing-shard"


def test_an_index_that_names_absent_tensors_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["layers.7.ghost"] = PARTS[0]
    index.write_text(json.dumps(document))
    with pytest.raises(FirstlightError, match=r"layers\.7\.ghost") as caught:
        drafter_weights.read_weights(str(folder))
    assert caught.value.kind == "index-mismatch"


def test_an_index_that_leaves_tensors_out_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    del document["weight_map"]["fc.weight"]
    index.write_text(json.dumps(document))
    assert kind_of(folder) == "index-mismatch"


def test_the_same_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    write_weights(folder / PARTS[1], {name: LAYOUT[name] for name in NAMES[29:]})
    assert kind_of(folder) == "duplicate-key"


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x"}}',
        '{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {"a": ".."}}', '{"weight_map": ' + "[" * 100000,
        '{"weight_map": {"a": "x\\u0000y"}}', "\0",
    ],
)  # fmt: skip
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert kind_of(tmp_path) == "bad-index"


def test_folders_without_or_with_too_many_weights_are_refused(tmp_path: Path) -> None:
    assert kind_of(tmp_path) == "no-weights"
    (tmp_path / "pytorch_model.bin").touch()
    assert kind_of(tmp_path) == "no-weights"
    write_weights(tmp_path / "a.safetensors", LAYOUT)
    write_weights(tmp_path / "b.safetensors", LAYOUT)
    assert kind_of(tmp_path) == "several-weights"


def test_shards_share_one_limit_of_reading(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    total = drafter_weights.read_weights(str(folder)).bytes_read
    assert drafter_weights.read_weights(str(folder), limit=total).bytes_read == total
    with pytest.raises(FirstlightError):
        drafter_weights.read_weights(str(folder), limit=total // 2)


def test_a_fifo_among_the_shards_does_not_block(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / PARTS[1]).unlink()
    os.mkfifo(folder / PARTS[1])
    assert kind_of(folder) == "not-a-file"
    (folder / "model.safetensors.index.json").unlink()
    os.mkfifo(folder / "model.safetensors.index.json")
    assert kind_of(folder) == "not-a-file"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=9), children, max_size=3),
    max_leaves=12,
)
KEYS = st.sampled_from(
    ["hidden_size", "num_hidden_layers", "vocab_size", "text_config", "architectures", "rope_parameters", "layer_types"]
)


@settings(max_examples=60)
@given(st.dictionaries(KEYS, JSON | st.dictionaries(KEYS, JSON | st.integers(1, 99))))
def test_any_target_configuration_is_read_or_refused(document: dict[str, object]) -> None:
    try:
        target = drafter_target.parse_target(document, "config.json")
    except FirstlightError as error:
        assert error.kind == "bad-target-config"  # noqa: PT017 - either outcome is right
        return
    assert target.hidden_size > 0
    assert target.rope_scaling is None or isinstance(target.rope_scaling, dict)
    assert isinstance(target.hybrid, bool)
    assert target.rope_theta is None or target.rope_theta is not ...


@pytest.mark.parametrize(
    ("document", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4}}, 5e5, {"type": "yarn", "factor": 4}),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}, 1e7, None),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 64}},
            1e6,
            {"rope_type": "yarn", "factor": 64},
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, None, None),
        ({"rope_scaling": None}, None, None),
    ],
)
def test_the_rotary_base_is_found_in_old_and_new_layouts(
    document: dict[str, object], theta: float | None, scaling: dict[str, object] | None
) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 4, "vocab_size": 9}
    for whole in (sizes | document, {"text_config": sizes | document}):
        target = drafter_target.parse_target(whole, "config.json")
        assert target.rope_theta == theta
        assert target.rope_scaling == scaling


@pytest.mark.parametrize("make", ["absent", "folder", "fifo", "garbage", "huge", "pointer"])
def test_a_target_that_cannot_be_read_is_told(tmp_path: Path, make: str) -> None:
    file = tmp_path / "config.json"
    if make == "folder":
        file.mkdir()
    elif make == "fifo":
        os.mkfifo(file)
    elif make == "garbage":
        file.write_bytes(b"\xff{")
    elif make == "huge":
        file.write_text('{"a": "' + "x" * 2_000_000 + '"}')
    elif make == "pointer":
        file.write_text("version https://git-lfs.github.com/spec/v1\n")
    expected = {
        "absent": "target-missing", "folder": "not-a-file", "fifo": "not-a-file", "garbage": "bad-target-config",
        "huge": "bad-target-config", "pointer": "lfs-pointer",
    }  # fmt: skip
    with pytest.raises(FirstlightError) as caught:
        drafter_target.read_target(str(tmp_path))
    assert caught.value.kind == expected[make]
