"""Speculation is proven, not assumed: a server whose drafter listens to the wrong layers answers right, and is refused.

The drafter of these tests is right with the taps of the reference formula alone, so that what a wrong configuration
does shows in the counters at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from dflashlab import OLD_MODEL, Host

import deploy

RIGHT_LENGTH = 4.0  # a mean acceptance length, in tokens, that no drafter with wrong taps comes near
SHIFTED = [0, 4]  # target_layer_ids one layer too low; the formula gives [1, 5]
CACHES = "/var/cache/vllm"
_configs: dict[str, dict[str, object]] = {}


def test_shifted_taps_fail_at_the_gate_and_the_old_server_is_back(host: Host) -> None:
    assert host.serving().model == OLD_MODEL
    assert refused_for_its_taps(host).outcome == "the old server serves again"
    served = host.serving()
    assert served.model == OLD_MODEL
    assert "stand-in for SGLang" in served.answer
    assert (host.unit("sglang", "ActiveState"), host.unit("sglang", "UnitFileState")) == ("active", "enabled")
    assert host.unit("vllm", "ActiveState") in {"inactive", "failed"}
    assert host.unit("vllm", "UnitFileState") != "enabled"
    assert "VLLM::" not in host.exec("ps", "-eo", "args")


def test_corrected_taps_pass_with_nothing_cleaned_in_between(host: Host) -> None:
    caches = host.exec("ls", CACHES).split()
    assert caches, "the refused release's cache is gone, so nothing is shown"
    result = host.deploy()
    assert result.ok, result.failure
    assert result.verdict == "right"
    assert result.acceptance is not None
    assert result.acceptance.length is not None
    assert result.acceptance.length > RIGHT_LENGTH
    served = host.serving()
    assert served.model == host.variable("vllm_server_served_model_name")
    assert "def is_prime" in served.answer
    assert served.length is not None
    assert served.length > RIGHT_LENGTH
    assert served.release == result.release
    assert served.taps == "(2, 6)"
    # both caches lie side by side, each under its own key
    assert sorted(host.exec("ls", CACHES).split()) == sorted([*caches, Path(served.cache).parent.name])
    assert (host.unit("vllm", "UnitFileState"), host.unit("sglang", "ActiveState")) == ("enabled", "inactive")
    _configs[host.name] = host.drafter_config()
    assert _configs[host.name]["dflash_config"] == {"mask_token_id": 5, "target_layer_ids": [1, 5]}


@pytest.mark.parametrize("host", ["dflash"], indirect=True)
def test_shifted_taps_after_right_ones_leave_the_former_release_serving_as_it_did(host: Host) -> None:
    good = host.serving()
    config = host.drafter_config()
    refused_for_its_taps(host)
    served = host.serving()
    assert (served.release, served.cache, served.taps) == (good.release, good.cache, "(2, 6)")
    assert "def is_prime" in served.answer
    assert served.length is not None
    assert served.length > RIGHT_LENGTH
    assert host.drafter_config() == config
    assert (host.unit("vllm", "UnitFileState"), host.unit("sglang", "ActiveState")) == ("enabled", "inactive")
    again = host.deploy()
    assert again.ok, again.failure
    assert again.converged, again
    assert not again.changed


def test_one_configuration_is_right_on_both_releases() -> None:
    if len(_configs) < 2:
        pytest.skip("only one of the hosts was deployed to")
    assert _configs["dflash"] == _configs["qwen35"]


def refused_for_its_taps(host: Host) -> deploy.Failure:
    """Deploy with shifted taps: the answers are right, next to nothing is accepted, and the run says why it fails."""
    result = host.deploy(drafter_set={**host.variable("drafter_set"), "target_layer_ids": SHIFTED})
    assert not result.ok
    assert result.failure is not None
    assert result.failure.id == "drafter-low-acceptance", result.failure
    assert "Prove that it answers" in result.failure.task
    assert "(1) taps: the log" in result.failure.message
    assert "The reference formula gives (2, 6): target_layer_ids [1, 5] in place of [0, 4]." in result.failure.message
    assert result.verdict == "right"
    assert result.acceptance is not None
    assert result.acceptance.length is not None
    assert result.acceptance.length < 1.5
    return result.failure
