"""What `vllm serve` is told when a site gives nothing but its weights: the reference deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ansible_collections.firstlight.vllm.plugins.module_utils.serve_config import serve_config
from jinja2.nativetypes import NativeEnvironment

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = {
    "host": "127.0.0.1",
    "port": 30000,
    "model": "/srv/models/Qwen3.6-27B",
    "served-model-name": "Qwen3.6-27B",
    "tensor-parallel-size": 2,
    "max-model-len": 32768,
    "max-num-batched-tokens": 32768,
    "max-num-seqs": 16,
    "gpu-memory-utilization": 0.9,
    "language-model-only": True,
    "reasoning-parser": "qwen3",
    "enable-auto-tool-choice": True,
    "tool-call-parser": "qwen3_coder",
    "attention-backend": "FLASH_ATTN",
    "gdn-prefill-backend": "triton",
    "disable-custom-all-reduce": True,
    "compilation-config": {"cudagraph_mode": "PIECEWISE"},
    "speculative-config": {"method": "dflash", "model": "/srv/drafter", "num_speculative_tokens": 15},
}


def defaults(role: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / "roles" / role / "defaults" / "main.yml").read_text())
    return values


def served(**given: Any) -> dict[str, Any]:
    """The mapping of the configuration file, made of the roles' defaults, their expressions and the given values."""
    values = defaults("vllm_server") | defaults("vllm_install") | defaults("drafter")
    values |= {"vllm_server_model": "/srv/models/Qwen3.6-27B", "drafter_result": {"path": "/srv/drafter"}} | given
    flags = yaml.safe_load((ROOT / "roles" / "vllm_server" / "vars" / "main.yml").read_text())
    environment = NativeEnvironment()

    def rendered(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: rendered(each) for name, each in value.items()}
        return environment.from_string(value).render(values) if isinstance(value, str) else value

    for name in ("__vllm_server_speculative", "__vllm_server_compilation"):
        values[name] = rendered(flags[name])
    return serve_config(rendered(flags["__vllm_server_flags"]), values["vllm_server_extra_args"])


def test_the_defaults_are_those_of_the_reference_deployment() -> None:
    assert served() == REFERENCE


def test_code_beside_the_weights_runs_only_when_asked_for() -> None:
    assert "trust-remote-code" not in served()
    assert served(vllm_server_trust_remote_code=True)["trust-remote-code"] is True


def test_without_a_drafter_nothing_speculates() -> None:
    assert "speculative-config" not in served(drafter_enabled=False)


def test_cuda_graphs_are_left_to_vllm_where_the_drafter_cannot_break_them_or_the_site_says_so() -> None:
    assert "compilation-config" not in served(drafter_enabled=False)
    assert "compilation-config" not in served(vllm_install_platform="cpu")
    assert "compilation-config" not in served(vllm_server_cudagraph_mode="")


def test_what_a_site_adds_to_the_compilation_leaves_the_graphs_as_they_are() -> None:
    sizes = {"cudagraph_capture_sizes": [16, 32]}
    for extra in ({"compilation_config": sizes}, {"compilation-config.cudagraph_capture_sizes": [16, 32]}):
        assert served(vllm_server_extra_args=extra)["compilation-config"] == {"cudagraph_mode": "PIECEWISE", **sizes}


def test_any_other_flag_goes_through_one_mapping() -> None:
    assert served(vllm_server_extra_args={"enable_prefix_caching": False}) == {
        **REFERENCE,
        "no-enable-prefix-caching": True,
    }


def test_the_gate_and_the_load_have_the_documented_defaults() -> None:
    smoke = defaults("smoke")
    assert (smoke["smoke_min_acceptance_length"], smoke["smoke_warn_acceptance_length"]) == (1.5, 2.5)
    assert smoke["smoke_prompts"][0] == "is_prime"
    assert len(smoke["smoke_prompts"]) == 3
    assert smoke["smoke_samples"] >= 3
    bursts = NativeEnvironment().from_string(smoke["smoke_load_bursts"])
    assert bursts.render(smoke_max_num_seqs=16) == [16, 16, 8]
    assert bursts.render(smoke_max_num_seqs=1) == [1, 1, 1]


def test_the_packages_are_those_of_the_reference_deployment() -> None:
    install = defaults("vllm_install")
    assert (install["vllm_install_version"], install["vllm_install_platform"]) == ("0.20.1", "cuda")
    lock = (ROOT / "roles" / "vllm_install" / "files" / "locks" / "cuda-0.20.1.txt").read_text()
    for pin in ("vllm==0.20.1 ", "flash-attn==2.8.3 ", "flash-attn-4==4.0.0b12 "):
        assert f"\n{pin}" in lock, pin
