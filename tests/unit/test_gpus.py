"""GPUs and their holders as nvidia-smi prints them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import gpus
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.host_command import CommandResult
from support_hosts import FakeRunner

UUID = "GPU-f5c18d7b-f4aa-19bb-8264-e39f4cfa9012"
ROW = f"0, {UUID}, NVIDIA H200, 143771, 0, 580.159.04, 9.0\n"
REPORT = Path(__file__).parents[1] / "data" / "nvidia_smi" / "h200.xml"


def test_a_real_answer_is_read() -> None:
    [gpu] = gpus.query(FakeRunner({"nvidia-smi --query-gpu": lambda argv: ROW}))
    assert gpu == gpus.Gpu(0, UUID, "NVIDIA H200", 143771, 0, "580.159.04", "9.0")


def test_gpus_come_by_index() -> None:
    text = ROW.replace("0, GPU", "1, GPU", 1) + ROW
    assert [gpu.index for gpu in gpus.query(FakeRunner({"nvidia-smi": lambda argv: text}))] == [0, 1]


def test_a_driver_that_does_not_know_the_compute_capability_is_asked_without_it() -> None:
    def answer(argv: list[str]) -> CommandResult | str:
        if "compute_cap" in argv[1]:
            return CommandResult(2, 'Field "compute_cap" is not a valid field to query.\n', "")
        return ROW.replace(", 9.0", "")

    [gpu] = gpus.query(FakeRunner({"nvidia-smi": answer}))
    assert gpu.compute_capability == ""


def test_a_host_without_nvidia_smi_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    assert (gpus.query(), gpus.holders(), gpus.all_holders()) == ([], [], [])


@pytest.mark.parametrize("ask", [gpus.query, gpus.holders, gpus.all_holders])
def test_a_driver_that_fails_is_an_error_and_not_an_empty_host(ask) -> None:  # type: ignore[no-untyped-def]
    said = "Failed to initialize NVML: Driver/library version mismatch"
    with pytest.raises(FirstlightError, match="version mismatch") as caught:
        ask(FakeRunner({"nvidia-smi": lambda argv: CommandResult(18, said, "")}))
    assert caught.value.kind == "nvidia-smi-failed"


def test_memory_that_is_not_told_is_an_error() -> None:
    with pytest.raises(FirstlightError, match=r"memory\.used"):
        gpus.query(FakeRunner({"nvidia-smi": lambda argv: ROW.replace(", 0, 580", ", [N/A], 580")}))


@pytest.mark.parametrize(
    ("line", "holder"),
    [
        (f"4711, {UUID}, 124310, sglang::scheduler_TP0", (4711, 124310, "sglang::scheduler_TP0")),
        (f"4711, {UUID}, [N/A], /usr/bin/python3", (4711, None, "/usr/bin/python3")),
        (f"4711, {UUID}, 5, a, b", (4711, 5, "a, b")),
    ],
)
def test_a_process_on_a_gpu_is_read(line: str, holder: tuple[int, int | None, str]) -> None:
    [read] = gpus.holders(FakeRunner({"nvidia-smi": lambda argv: line + "\n"}))
    assert (read.pid, read.used_mib, read.name) == holder


def test_no_process_means_no_holder() -> None:
    assert gpus.holders(FakeRunner()) == []


def test_the_full_report_of_an_idle_gpu_names_nobody() -> None:
    assert gpus.parse_report(REPORT.read_text()) == []


def test_the_full_report_names_desktops_too() -> None:
    text = REPORT.read_text()
    processes = "".join(
        f"<process_info><gpu_instance_id>N/A</gpu_instance_id><pid>{pid}</pid><type>{kind}</type>"
        f"<process_name>{name}</process_name><used_memory>{used}</used_memory></process_info>"
        for pid, kind, name, used in [
            (10, "G", "/usr/lib/xorg/Xorg", "60 MiB"),
            (20, "C", "python", "9000 MiB"),
            (30, "C+G", "mixed", "N/A"),
        ]
    )
    found = gpus.parse_report(text.replace("<processes>", f"<processes>{processes}", 1))
    assert [(each.pid, each.used_mib, each.graphics, each.gpu_uuid) for each in found] == [
        (10, 60, True, UUID),
        (20, 9000, False, UUID),
        (30, None, False, UUID),
    ]


def test_a_report_that_is_cut_off_is_an_error() -> None:
    with pytest.raises(FirstlightError, match="XML"):
        gpus.parse_report(REPORT.read_text()[:2000])
