"""Full CUDA graphs are warned of where they lose attention, and only there."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.cache_groups import Groups, cache_groups
from ansible_collections.firstlight.vllm.plugins.module_utils.graph_rules import (
    captured_graphs,
    cudagraph_mode,
    graph_rules,
)
from support_hosts import gpu
from support_models import DRAFTER, TARGET


def hybrid(layers: int, interval: int, **more: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "full_attention_interval": interval, "linear_num_value_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, **more}  # fmt: skip


ALIKE = {**DRAFTER, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("target", "drafter", "groups"),
    [
        # vLLM's log of the reference deployment's shapes: 4 empty places among attention layers, 2 among recurrent ones
        (TARGET, DRAFTER, Groups(5, attention=4, drafter=1, recurrent=10)),
        (TARGET, None, Groups(16, attention=1, drafter=0, recurrent=3)),
        # six recurrent layers, and four of one kind with the drafter's
        (hybrid(8, 4), ALIKE, Groups(4, attention=1, drafter=0, recurrent=2)),
        (hybrid(8, 2), ALIKE, Groups(4, attention=2, drafter=0, recurrent=1)),
        (hybrid(8, 2), {**DRAFTER, "num_hidden_layers": 2}, Groups(2, attention=2, drafter=1, recurrent=2)),
        # no kind has 1.5 times as many layers as another: one size for all
        (hybrid(8, 2), {**DRAFTER, "num_hidden_layers": 3}, Groups(4, attention=1, drafter=1, recurrent=1)),
    ],
)
def test_the_groups_are_those_that_vllm_makes(
    target: dict[str, Any], drafter: dict[str, Any] | None, groups: Groups
) -> None:
    assert cache_groups(target, drafter) == groups


@pytest.mark.parametrize(
    ("max_num_seqs", "k", "mode", "graphs"),
    [
        # each as vLLM logged it (`Profiling CUDA graph memory`)
        (16, 15, "PIECEWISE", (51, 512)),
        (16, 15, "", (32 + 16, 512)),
        (16, 0, "", (7 + 5, 32)),
        (16, 15, "FULL_AND_PIECEWISE", (32 + 16, 512)),
        (16, 15, "NONE", (0, 0)),
        # not logged: each is a part of the above
        (16, 15, "FULL_DECODE_ONLY", (16, 256)),
        (16, 15, "FULL", (32, 512)),
        (1, 15, "PIECEWISE", (7, 32)),
        # rounded up to whole requests of five tokens: 5, 10, 20, 25, 35, 40 ... 160
        (16, 4, "", (21 + 11, 160)),
    ],
)
def test_the_graphs_are_those_that_vllm_captures(max_num_seqs: int, k: int, mode: str, graphs: tuple[int, int]) -> None:
    assert captured_graphs(max_num_seqs=max_num_seqs, k=k, mode=mode, batched_tokens=8192) == graphs


def test_no_graph_is_larger_than_a_step() -> None:
    assert captured_graphs(max_num_seqs=16, k=15, mode="PIECEWISE", batched_tokens=256) == (35, 256)


def test_a_drafter_that_vllm_would_divide_is_told() -> None:
    serve = {"compilation-config": {"cudagraph_mode": "PIECEWISE"}}
    [problem] = graph_rules([gpu()], serve, hybrid(8, 2), ALIKE)
    assert problem.id == "drafter-layers-split"
    assert graph_rules([gpu()], serve, hybrid(8, 4), ALIKE) == []


@pytest.mark.parametrize(
    ("serve", "mode"),
    [
        ({}, ""),
        ({"compilation-config": {"cudagraph_mode": "piecewise"}}, "PIECEWISE"),
        ({"compilation-config": {"level": 3}}, ""),
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
        ("9.0", {"max-num-seqs": 1}, DRAFTER),
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


def test_a_dense_target_has_one_kind_of_group_and_no_warning() -> None:
    assert graph_rules([gpu()], {}, {"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128}, DRAFTER) == []
