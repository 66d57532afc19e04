"""Whether a folder holds a whole model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.hub_files import INDEX, inspect_model

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY / "tiny-qwen3", tmp_path / "model"))


def kind_of(folder: Path) -> str:
    with pytest.raises(FirstlightError) as caught:
        inspect_model(str(folder))
    assert caught.value.fix
    return caught.value.kind


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("tiny-qwen3", "Qwen3ForCausalLM"), ("tiny-qwen35", "Qwen3_5ForConditionalGeneration")],
)
def test_a_whole_model_is_described(name: str, architecture: str) -> None:
    found = inspect_model(str(TINY / name))
    assert found.architectures == (architecture,)
    assert found.weights == ("model.safetensors",)
    assert found.weight_bytes == (TINY / name / "model.safetensors").stat().st_size


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert kind_of(tmp_path / "none") == "model-missing"


def test_a_missing_config_is_named(model: Path) -> None:
    (model / "config.json").unlink()
    assert kind_of(model) == "model-config-missing"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\udcff"])
def test_a_broken_config_is_named(model: Path, text: str) -> None:
    (model / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert kind_of(model) == "model-broken"


def test_a_missing_tokenizer_is_seen_although_the_server_would_start(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert kind_of(model) == "tokenizer-missing"


def test_missing_weights_are_named(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert kind_of(model) == "weights-missing"


def test_a_shard_that_the_index_names_has_to_be_there(model: Path) -> None:
    shard = "model-00002-of-00002.safetensors"
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": shard}}))
    with pytest.raises(FirstlightError, match=f"lacks 1 of 2 weight files: {shard}"):
        inspect_model(str(model))


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {"a": 1}}, {"weight_map": []}])
def test_a_broken_index_is_named(model: Path, index: object) -> None:
    (model / INDEX).write_text(json.dumps(index))
    assert kind_of(model) == "model-broken"


def test_an_index_cannot_lead_out_of_the_folder(model: Path) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "../other/model.safetensors"}}))
    assert kind_of(model) == "weights-missing"


def test_a_git_lfs_pointer_is_no_weights(model: Path) -> None:
    (model / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 3423944\n"
    )
    assert kind_of(model) == "lfs-pointer"


@pytest.mark.parametrize("left", [0, 4, 1000, 3_000_000])
def test_truncated_weights_are_refused(model: Path, left: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    kind_of(model)
