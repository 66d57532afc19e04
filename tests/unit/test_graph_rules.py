"""Full CUDA graphs are warned of where they lose attention, and only there."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.graph_rules import (
    attention_groups,
    cudagraph_mode,
    graph_rules,
)
from support_hosts import gpu
from support_models import DRAFTER, TARGET


def hybrid(layers: int, interval: int, **more: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "full_attention_interval": interval, "linear_num_value_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, **more}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "drafter", "groups"),
    [
        # vLLM's log of the reference deployment's shapes says 15 groups: 10 recurrent, 4 and the drafter's
        (TARGET, DRAFTER, 4),
        # six recurrent layers, and four of one kind with the drafter's
        (hybrid(8, 4), {**DRAFTER, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 64}, 1),
        (hybrid(8, 2), {**DRAFTER, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 64}, 2),
        (hybrid(8, 2), {**DRAFTER, "num_hidden_layers": 2}, 2),
        # no kind has 1.5 times as many layers as another: one size for all
        (hybrid(8, 2), {**DRAFTER, "num_hidden_layers": 3}, 1),
        # a dense target has one kind of group
        ({"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128}, DRAFTER, 1),
    ],
)
def test_the_groups_are_those_that_vllm_makes(target: dict[str, Any], drafter: dict[str, Any], groups: int) -> None:
    assert attention_groups(target, drafter) == groups


@pytest.mark.parametrize(
    ("serve", "mode"),
    [
        ({}, ""),
        ({"compilation-config": {"cudagraph_mode": "piecewise"}}, "PIECEWISE"),
        ({"compilation-config": {"level": 3}}, ""),
        ({"compilation-config.cudagraph_mode": "FULL"}, "FULL"),
        ({"enforce-eager": True, "compilation-config": {"cudagraph_mode": "FULL"}}, "NONE"),
    ],
)
def test_the_mode_is_read_as_vllm_reads_it(serve: dict[str, Any], mode: str) -> None:
    assert cudagraph_mode(serve) == mode


@pytest.mark.parametrize("mode", ["", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_full_graphs_are_warned_of_with_the_remedy(mode: str) -> None:
    serve = {"compilation-config": {"cudagraph_mode": mode}} if mode else {}
    [problem] = graph_rules([gpu()], serve, TARGET, DRAFTER)
    assert (problem.id, problem.severity) == ("full-graphs-lose-attention", "warning")
    assert problem.where == "vllm_server_cudagraph_mode"
    assert "4 cache groups" in problem.message
    assert "PIECEWISE" in problem.fix


@pytest.mark.parametrize(
    ("compute_capability", "serve", "drafter"),
    [
        ("9.0", {"compilation-config": {"cudagraph_mode": "PIECEWISE"}}, DRAFTER),
        ("9.0", {"enforce-eager": True}, DRAFTER),
        ("9.0", {"attention-config": {"flash_attn_version": 2}}, DRAFTER),
        ("8.6", {}, DRAFTER),
        ("12.0", {}, DRAFTER),
        ("", {}, DRAFTER),
        ("9.0", {}, None),
        ("9.0", {}, {"num_key_value_heads": 8}),
    ],
)
def test_where_nothing_is_lost_or_nothing_is_known_there_is_no_warning(
    compute_capability: str, serve: dict[str, Any], drafter: dict[str, Any] | None
) -> None:
    assert graph_rules([gpu(compute_capability=compute_capability)], serve, TARGET, drafter) == []
