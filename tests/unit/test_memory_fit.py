"""The memory prediction against figures that vLLM 0.20.1 logged for a 27B hybrid target on two GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.memory_fit import Fit, fit, request_gib
from support_models import DRAFTER, TARGET

DENSE: dict[str, Any] = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
}
WEIGHTS, WEIGHTS_WITH_DRAFTER = 2 * 25.24, 2 * 27.04


@pytest.mark.parametrize(("k", "short", "full"), [(0, 0.096, 1.08), (7, 0.674, 2.22), (15, 1.36, 2.88)])
def test_one_request_takes_what_vllm_logged(k: int, short: float, full: float) -> None:
    drafter = DRAFTER if k else None
    assert request_gib(TARGET, tensor_parallel=2, tokens=1, k=k, drafter=drafter) == pytest.approx(short, abs=5e-3)
    assert request_gib(TARGET, tensor_parallel=2, tokens=32768, k=k, drafter=drafter) == pytest.approx(full, abs=5e-3)


def reference(**changes: Any) -> Fit:
    arguments: dict[str, Any] = {
        "gpu_total_gib": 139.8,  # what CUDA tells of a 141 GB card
        "utilization": 0.9,
        "weights_gib": WEIGHTS,
        "tensor_parallel": 2,
        "max_model_len": 32768,
        "graphs": (12, 32),
    }
    return fit(TARGET, **{**arguments, **changes})


def test_the_cache_of_a_141_gb_card_is_what_vllm_logged() -> None:
    verdict = reference()
    assert verdict.weights == pytest.approx(25.24)
    assert verdict.cache == pytest.approx(96.08, rel=0.01)
    assert verdict.at_once == pytest.approx(89.2, rel=0.01)
    assert verdict.fits


def test_speculation_takes_more_graphs_the_tapped_states_and_one_state_a_drafted_token() -> None:
    plain = reference()
    speculating = reference(k=15, drafter=DRAFTER, weights_gib=WEIGHTS_WITH_DRAFTER, graphs=(51, 512))
    assert speculating.overhead > plain.overhead + 8
    assert speculating.weights == pytest.approx(27.04)
    assert speculating.request_short > 10 * plain.request_short
    fewer = reference(k=15, drafter=DRAFTER, weights_gib=WEIGHTS_WITH_DRAFTER, graphs=(51, 512), batched_tokens=8192)
    assert speculating.overhead - fewer.overhead == pytest.approx(2.2 * 3 / 4)


def test_no_graphs_take_nothing() -> None:
    assert reference(graphs=(0, 0)).overhead < reference().overhead - 1


def test_weights_larger_than_the_share_do_not_fit() -> None:
    verdict = reference(gpu_total_gib=24)
    assert verdict.cache < 0
    assert verdict.at_once == 0
    assert not verdict.fits


def test_room_for_a_short_request_alone_does_not_fit() -> None:
    tight = reference(gpu_total_gib=37, k=15, drafter=DRAFTER, graphs=(0, 0))
    assert tight.request_short < tight.cache < tight.request_full
    assert 0 < tight.at_once < 1
    assert not tight.fits


def test_values_beside_text_config_are_read_as_well() -> None:
    flat = dict(TARGET["text_config"])
    assert request_gib(flat, tensor_parallel=2, tokens=1) == request_gib(TARGET, tensor_parallel=2, tokens=1)


def test_layer_types_and_interval_mean_the_same() -> None:
    text = dict(TARGET["text_config"])
    del text["full_attention_interval"]
    text["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * 16
    assert request_gib(text, tensor_parallel=2, tokens=32768) == request_gib(TARGET, tensor_parallel=2, tokens=32768)


def test_a_dense_target_takes_keys_and_values_alone() -> None:
    # 36 layers, 4 of 8 heads on each GPU, keys and values of 128 numbers of two bytes: 72 KiB a token
    assert request_gib(DENSE, tensor_parallel=2, tokens=1024) == pytest.approx(1024 * 72 / 2**20)


def test_a_dense_target_with_a_drafter_adds_the_drafters_layers() -> None:
    # 5 layers more of 2 KiB a token
    with_drafter = request_gib(DENSE, tensor_parallel=2, tokens=1024, k=15, drafter=DRAFTER)
    assert with_drafter == pytest.approx(1024 * (72 + 10) / 2**20)


def test_more_gpus_than_heads_of_keys_keep_one_head_each() -> None:
    one = request_gib(DENSE, tensor_parallel=8, tokens=16)
    assert request_gib(DENSE, tensor_parallel=16, tokens=16) == one
