"""Each rule of preflight, alone, with the remedy that it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.gpus import Gpu
from ansible_collections.firstlight.vllm.plugins.module_utils.host_facts import HostFacts
from ansible_collections.firstlight.vllm.plugins.module_utils.preflight_rules import (
    Problem,
    Wanted,
    host_rules,
    memory_rules,
    model_rules,
)
from support_hosts import gpu
from support_models import DRAFTER, TARGET

HOST = HostFacts(
    os_id="debian",
    os_version="12",
    glibc=(2, 36),
    machine="x86_64",
    python=(3, 11, 2),
    systemd=True,
    cpus=16,
    memory_mib=128000,
    disk_free_gib={"/opt/firstlight": 100.0},
    gpus=[gpu(0), gpu(1)],
    listeners=[],
)
WANTED = Wanted(
    platform="cuda",
    tensor_parallel=2,
    gpu_memory_utilization=0.9,
    max_model_len=32768,
    k=15,
    min_disk_gib={"/opt/firstlight": 25.0},
)


def host_problems(host: HostFacts = HOST, wanted: Wanted = WANTED) -> list[Problem]:
    return list(host_rules(host, wanted))


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def test_a_good_host_has_no_problem() -> None:
    assert host_problems() == []
    assert list(model_rules(TARGET, DRAFTER, WANTED)) == []


@pytest.mark.parametrize(
    ("host", "wanted", "problem"),
    [
        (replace(HOST, systemd=False), WANTED, "no-systemd"),
        (replace(HOST, machine="riscv64"), WANTED, "machine-unsupported"),
        (replace(HOST, glibc=(2, 34)), WANTED, "glibc-too-old"),
        (replace(HOST, glibc=()), WANTED, "glibc-too-old"),
        (replace(HOST, python=(3, 9, 2)), WANTED, "python-unsupported"),
        (replace(HOST, python=(3, 15, 0)), WANTED, "python-unsupported"),
        (replace(HOST, python=()), WANTED, "python-unsupported"),
        (replace(HOST, disk_free_gib={"/opt/firstlight": 24.9}), WANTED, "disk-too-small"),
        (replace(HOST, gpus=[]), WANTED, "no-gpu"),
        (replace(HOST, gpus=[gpu(0)]), WANTED, "too-few-gpus"),
        (replace(HOST, gpus=[gpu(0, driver_version="570.1"), gpu(1)]), WANTED, "driver-too-old"),
        (replace(HOST, gpus=[gpu(0), gpu(1, compute_capability="7.5")]), WANTED, "gpu-too-old"),
    ],
)
def test_each_rule_is_told_alone_as_an_error(host: HostFacts, wanted: Wanted, problem: str) -> None:
    found = only(host_problems(host, wanted))
    assert (found.id, found.severity) == (problem, "error")
    assert found.text.startswith(f"{found.where}: ")
    assert "Fix: " in found.text


def test_the_newest_python_is_fine_in_any_patch_release() -> None:
    assert host_problems(replace(HOST, python=(3, 14, 9))) == []
    assert host_problems(replace(HOST, python=(3, 10, 0))) == []


def test_all_problems_of_a_hopeless_host_are_told_at_once() -> None:
    hopeless = replace(HOST, systemd=False, glibc=(2, 17), python=(), disk_free_gib={}, gpus=[])
    assert {p.id for p in host_problems(hopeless)} == {
        "no-systemd", "glibc-too-old", "python-unsupported", "disk-too-small", "no-gpu",
    }  # fmt: skip


def test_a_cpu_build_needs_no_gpu() -> None:
    assert host_problems(replace(HOST, gpus=[]), replace(WANTED, platform="cpu")) == []


def test_too_few_gpus_names_the_value_to_set() -> None:
    found = only(host_problems(replace(HOST, gpus=[gpu(0)])))
    assert found.fix == "set vllm_server_tensor_parallel_size to 1."


def test_different_gpus_are_a_warning() -> None:
    found = only(host_problems(replace(HOST, gpus=[gpu(0), gpu(1, name="NVIDIA H100")])))
    assert (found.id, found.severity) == ("mixed-gpus", "warning")


def test_an_old_gpu_may_serve_without_speculation() -> None:
    old = replace(HOST, gpus=[gpu(0, compute_capability="7.5"), gpu(1, compute_capability="7.5")])
    assert host_problems(old, replace(WANTED, k=0)) == []


def test_a_driver_that_does_not_tell_the_capability_is_not_guessed_at() -> None:
    silent = replace(HOST, gpus=[gpu(0, compute_capability=""), gpu(1, compute_capability="")])
    assert host_problems(silent) == []


@pytest.mark.parametrize(("tensor_parallel", "fix"), [(3, "set 2."), (5, "set 4."), (16, "set 8.")])
def test_gpus_that_cannot_share_the_heads_get_the_next_legal_number(tensor_parallel: int, fix: str) -> None:
    found = list(model_rules(TARGET, DRAFTER, replace(WANTED, tensor_parallel=tensor_parallel)))
    assert {p.id for p in found} == {"tp-not-dividing-heads"}
    assert {p.fix for p in found} == {fix}


def test_a_request_longer_than_the_targets_positions_is_refused() -> None:
    found = only(list(model_rules(TARGET, None, replace(WANTED, max_model_len=300000))))
    assert (found.id, found.severity) == ("max-model-len-over-model", "error")
    assert "262144" in found.fix


def test_a_request_longer_than_the_drafters_positions_is_a_warning() -> None:
    short = {**DRAFTER, "max_position_embeddings": 4096}
    found = only(list(model_rules(TARGET, short, WANTED)))
    assert (found.id, found.severity) == ("drafter-positions-too-few", "warning")
    assert "4096" in found.fix


def memory(gpus: Sequence[Gpu] = HOST.gpus, wanted: Wanted = WANTED, **changes: Any) -> tuple[Any, list[Problem]]:
    arguments = {"target": TARGET, "drafter": DRAFTER, "weights_gib": 54.08, "graphs": (51, 512), **changes}
    arguments.setdefault("batched_tokens", 32768)
    return memory_rules(gpus, wanted, **arguments)


def test_the_reference_deployment_fits_and_its_figures_are_told() -> None:
    figures, problems = memory()
    assert problems == []
    assert figures["weights"] == pytest.approx(27.04)
    assert figures["request_full"] == pytest.approx(2.88)


def test_a_model_that_does_not_fit_is_refused_with_all_figures() -> None:
    small = [gpu(0, memory_total_mib=24564), gpu(1, memory_total_mib=24564)]
    figures, problems = memory(small)
    found = only(problems)
    assert (found.id, found.severity) == ("memory-does-not-fit", "error")
    assert figures["cache"] < 0
    for figure in ("24.0 GiB", "27.0", "32768 tokens", "2.9"):
        assert figure in found.message


def test_what_lacks_less_than_the_prediction_may_be_off_is_only_warned_of() -> None:
    # 2.2 GiB are predicted for the cache of a 48 GB card, where a request of the full length takes 2.9
    close = [gpu(0, memory_total_mib=49140), gpu(1, memory_total_mib=49140)]
    figures, problems = memory(close)
    assert 0 < figures["cache"] < figures["request_full"]
    found = only(problems)
    assert (found.id, found.severity) == ("memory-does-not-fit", "warning")
    assert "vllm_server_max_num_seqs" in found.fix


def test_the_smallest_card_decides() -> None:
    uneven = [gpu(0), gpu(1, memory_total_mib=24564)]
    assert only(memory(uneven)[1]).id == "memory-does-not-fit"


def test_cards_that_are_not_used_do_not_count() -> None:
    third = [gpu(0), gpu(1), gpu(2, memory_total_mib=8192)]
    assert memory(third)[1] == []


def test_a_cpu_build_has_no_memory_verdict() -> None:
    assert memory(wanted=replace(WANTED, platform="cpu")) == (None, [])


@pytest.mark.parametrize("target", [{}, {"text_config": {"num_hidden_layers": "many"}}, {"num_hidden_layers": 4}])
def test_a_target_of_an_unknown_kind_is_a_warning_and_not_a_crash(target: dict[str, Any]) -> None:
    figures, problems = memory(target=target, drafter=None)
    assert figures is None
    found = only(problems)
    assert (found.id, found.severity) == ("memory-unknown", "warning")
