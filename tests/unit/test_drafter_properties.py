"""Whatever tensors, targets, values and files are given: a report comes back, and an unusable one says what to do."""

from __future__ import annotations

import json
from typing import Any

from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_derive import Request, derive
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_report import DrafterReport
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_target import parse_target
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_values import KNOWN
from ansible_collections.firstlight.vllm.plugins.module_utils.safetensors_header import DTYPE_BITS, Tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_drafters import QWEN36_27B, Layout, dflash2_layout, families, plain_layout, published

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_taps": 3, "vocab_size": 500,
}  # fmt: skip
TARGET = {
    "hidden_size": 64, "num_hidden_layers": 12, "vocab_size": 500, "max_position_embeddings": 4096, "rope_theta": 1e4,
}  # fmt: skip
LAYOUTS: list[Layout] = [
    plain_layout(SMALL),
    dflash2_layout(SMALL, rank=8),
    *(plain_layout(row) for row in published()),
]
SUFFIXES = [
    "self_attn.q_proj.weight", "self_attn.qkv_proj.weight", "self_attn.q_proj.qweight", "self_attn.q_proj.weight_scale",
    "attention_conv.base_kernel", "attention_conv.kernel_projection.weight", "self_attn.q_norm.weight",
    "input_layernorm.weight", "mlp.gate_up_proj.weight", "self_attn.attention_sink_bias", "x",
]  # fmt: skip
TOPS = [
    "fc.weight", "norm.weight", "hidden_norm.weight", "d2t", "t2d", "embed_tokens.weight", "lm_head.weight",
    "markov_head.markov_w1.weight", "candidate_selector.hidden_projection.weight", "verifier_norm.weight",
    "midlayer.x", "model.embed_tokens.weight", "model.fc.weight", "aux_hidden_norms.0.weight",
]  # fmt: skip
NAMES = (
    st.sampled_from(TOPS)
    | st.builds(
        lambda i, suffix: f"layers.{i}.{suffix}", st.integers(0, 9) | st.integers(0, 10**8), st.sampled_from(SUFFIXES)
    )
    | st.text(max_size=12)
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 16, 32, 64, 96, 192, 500, 2**62]), max_size=4).map(tuple)
CHANGES = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPE_BITS)), SHAPES), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 600) | st.floats() | st.text(max_size=6),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=6), children, max_size=3),
    max_leaves=6,
)
VALUES = st.dictionaries(st.sampled_from(sorted(KNOWN)) | st.text(max_size=8), JSON, max_size=5)
EXISTING = st.none() | st.dictionaries(
    st.sampled_from(
        [
            *KNOWN, "architectures", "auto_map", "dflash_config", "rope_parameters", "speculators_model_type",
            "transformer_layer_config", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids",
        ]
    ),
    JSON | st.just(["DFlashDraftModel"]) | VALUES,
    max_size=6,
)  # fmt: skip
VERSIONS = st.sampled_from(["0.19.0", "0.20.1", "0.25.1", "0.26.0", "0.28.0", "no"])


def sound(report: DrafterReport) -> None:
    assert report.usable == (not report.errors)
    for problem in report.problems:
        assert problem.id
        assert problem.message
        assert problem.fix
    text = json.dumps(report.as_dict())
    assert json.loads(text)["family"] == report.family
    if report.usable:
        assert report.config["eagle_aux_hidden_state_layer_ids"] == [
            layer + 1 for layer in report.fields["target_layer_ids"].value
        ]
        assert "auto_map" not in report.config
        assert all(name in report.fields for name in ("mask_token_id", "block_size", "rope_theta"))
    assert len(report.config_digest) == 64


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.sampled_from(LAYOUTS), CHANGES, st.sets(st.integers(0, 90), max_size=4), VALUES, EXISTING, VERSIONS)
def test_any_drafter_gets_a_report(
    layout: Layout, changes: Layout, dropped: set[int], user: dict[str, Any], existing: Any, version: str
) -> None:
    names = [name for index, name in enumerate(layout) if index not in dropped]
    whole = {name: layout[name] for name in names} | changes
    tensors = {name: Tensor(name, dtype, shape, 0, 0) for name, (dtype, shape) in whole.items()}
    for document in (TARGET, QWEN36_27B):
        target = parse_target(document, "config.json")
        request = Request(
            tensors, target, vllm_version=version, user=user, families=families(), existing=existing, where="x"
        )
        sound(derive(request))


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from([*TARGET, "layer_types", "rope_parameters", "rope_scaling", "eos_token_id"]), JSON)
)
def test_any_target_that_can_be_read_gets_a_report(change: dict[str, Any]) -> None:
    sizes = {name: TARGET[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    target = parse_target({**TARGET, **change, **sizes}, "config.json")
    tensors = {name: Tensor(name, dtype, shape, 0, 0) for name, (dtype, shape) in LAYOUTS[0].items()}
    sound(derive(Request(tensors, target, user={"mask_token_id": 1, "block_size": 4}, families=families())))
