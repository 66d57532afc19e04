"""The cache key: moved by all that shapes a compiled graph, and by nothing else."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.cache_key import cache_key

BASE: dict[str, Any] = {
    "vllm_version": "0.20.1",
    "venv": "0.20.1-abc",
    "target_config": {"text_config": {"num_hidden_layers": 64}},
    "drafter_config": {
        "hidden_size": 5120,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        "eagle_aux_hidden_state_layer_ids": [2, 17, 32, 47, 62],
    },
    "serve_config": {
        "host": "127.0.0.1",
        "port": 30000,
        "model": "/srv/target",
        "served-model-name": "Qwen3.6-27B",
        "tensor-parallel-size": 2,
        "max-model-len": 32768,
        "max-num-seqs": 16,
        "gpu-memory-utilization": 0.9,
        "speculative-config": {"method": "dflash", "model": "/srv/drafter", "num_speculative_tokens": 15},
    },
    "gpus": ["NVIDIA H200", "NVIDIA H200"],
    "driver": "580.95.05",
}

Change = Callable[[dict[str, Any]], object]


def key_after(change: Change) -> str:
    arguments = copy.deepcopy(BASE)
    change(arguments)
    return cache_key(**arguments)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda a: a.update(vllm_version="0.22.0"), id="vLLM version"),
        pytest.param(lambda a: a.update(venv="0.20.1-def"), id="another lock, another torch"),
        pytest.param(lambda a: a["target_config"]["text_config"].update(num_hidden_layers=36), id="target"),
        pytest.param(
            lambda a: a["drafter_config"]["dflash_config"].update(target_layer_ids=[0, 15, 30, 45, 60]),
            id="taps under dflash_config, which vLLM's own key leaves out",
        ),
        pytest.param(
            lambda a: a["drafter_config"].update(eagle_aux_hidden_state_layer_ids=[1, 16, 31, 46, 61]), id="upper taps"
        ),
        pytest.param(lambda a: a["drafter_config"]["dflash_config"].update(mask_token_id=248064), id="mask id"),
        pytest.param(lambda a: a["drafter_config"].update(rope_theta=1e7), id="a field added to the drafter"),
        pytest.param(lambda a: a.update(drafter_config=None), id="no drafter"),
        pytest.param(lambda a: a["serve_config"]["speculative-config"].update(num_speculative_tokens=7), id="k"),
        pytest.param(lambda a: a["serve_config"]["speculative-config"].update(method="eagle"), id="method"),
        pytest.param(lambda a: a["serve_config"].update({"tensor-parallel-size": 4}), id="tensor parallel size"),
        pytest.param(lambda a: a["serve_config"].update({"max-num-seqs": 8}), id="graph sizes"),
        pytest.param(lambda a: a["serve_config"].update({"enforce-eager": True}), id="a further flag"),
        pytest.param(lambda a: a.update(gpus=["NVIDIA H100", "NVIDIA H100"]), id="GPU"),
        pytest.param(lambda a: a.update(gpus=["NVIDIA H200"]), id="number of GPUs"),
        pytest.param(lambda a: a.update(driver="585.00.00"), id="driver"),
    ],
)
def test_what_shapes_the_graph_changes_the_key(change: Change) -> None:
    assert key_after(change) != cache_key(**BASE)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda a: a["serve_config"].update(port=30001), id="port"),
        pytest.param(lambda a: a["serve_config"].update(host="0.0.0.0"), id="host"),
        pytest.param(lambda a: a["serve_config"].update({"served-model-name": "other"}), id="served name"),
        pytest.param(lambda a: a["serve_config"].update(model="/elsewhere/target"), id="the target's path"),
        pytest.param(
            lambda a: a["serve_config"]["speculative-config"].update(model="/elsewhere/drafter"),
            id="the drafter's path",
        ),
        pytest.param(lambda a: a["serve_config"].update({"gpu-memory-utilization": 0.8}), id="memory share"),
        pytest.param(lambda a: a["serve_config"].update({"reasoning-parser": "x"}), id="parser"),
        pytest.param(lambda a: a["serve_config"].update({"no-enable-log-requests": True}), id="a flag switched off"),
    ],
)
def test_what_does_not_reach_the_graph_keeps_the_key(change: Change) -> None:
    assert key_after(change) == cache_key(**BASE)


def test_the_order_of_keys_does_not_count() -> None:
    shuffled = {**BASE, "serve_config": dict(reversed(list(BASE["serve_config"].items())))}
    assert cache_key(**shuffled) == cache_key(**BASE)


def test_the_order_of_taps_counts() -> None:
    def swap(arguments: dict[str, Any]) -> None:
        arguments["drafter_config"]["dflash_config"]["target_layer_ids"].reverse()

    assert key_after(swap) != cache_key(**BASE)


def test_the_key_of_a_known_combination_never_changes() -> None:
    """Else every host would compile anew, and prune would take its caches away."""
    assert cache_key(**BASE) == "0.20.1-b3742c4c80913ff1"


def test_the_key_is_a_plain_folder_name_that_shows_the_version() -> None:
    assert re.fullmatch(r"0\.20\.1-[0-9a-f]{16}", cache_key(**BASE))


def test_a_cpu_server_without_speculation_has_a_key_too() -> None:
    assert cache_key(**{**BASE, "gpus": [], "driver": "", "drafter_config": None, "serve_config": {}})
