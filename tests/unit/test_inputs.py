"""Variables: each bad value has its own message, and no nonsense ends in anything but one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.action.preflight import controller_files, role_options, typed
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.inputs import (
    check_values,
    is_loopback,
    minimum_batched_tokens,
    tree_digest,
)
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = role_options(ROOT)
# what only a site can know, and what a task before would have found
SITE = {
    "model_path": "/srv/models/Qwen3.6-27B",
    "drafter_path": "/srv/drafters/dflash.safetensors",
    "vllm_server_model": "/srv/models/Qwen3.6-27B",
}


def defaults() -> dict[str, Any]:
    """Every variable with a plain default, as the action would see it."""
    found = {}
    for name, option in OPTIONS.items():
        value = SITE.get(name, option.get("default"))
        if "{{" not in str(value) and not (value is None and option.get("required")):
            found[name] = value
    return found


def check(**changes: Any) -> None:
    values = {**defaults(), **changes}
    check_values(
        {name: typed(name, OPTIONS.get(name, {"type": "raw"}), value) for name, value in values.items()}, OPTIONS
    )


def refused(**changes: Any) -> FirstlightError:
    with pytest.raises(FirstlightError) as caught:
        check(**changes)
    assert "Fix: " in caught.value.message
    return caught.value


def test_there_are_variables_of_every_role() -> None:
    roles = {path.parents[1].name for path in ROOT.glob("roles/*/meta/argument_specs.yml")}
    assert {"preflight", "vllm_install", "vllm_server"} <= roles
    assert all(any(name.startswith(role) for name in OPTIONS) for role in roles)


def test_the_reference_defaults_of_all_roles_pass() -> None:
    check()


BAD: list[tuple[str, Any, str]] = [
    ("vllm_server_port", 0, "0 is not a TCP port"),
    ("vllm_server_port", 65536, "65536 is not a TCP port"),
    ("vllm_server_port", -1, "out of range"),
    ("vllm_server_port", True, "type bool"),
    ("vllm_server_port", "http", "type str"),
    ("vllm_server_port", None, "no value"),
    ("vllm_server_port", float("inf"), "no int"),
    ("vllm_server_port", float("nan"), "cannot be converted"),
    ("vllm_server_port", "1e999999999", "type str"),
    ("sglang_stop_gpus", "1e999999999", "type str"),
    ("sglang_stop_gpus", "0, 1e999999999", "type str"),
    ("proxy_address", "fe80::1%;x", "not an IP address"),
    ("proxy_address", "llm.example.org", "not an IP address"),
    ("proxy_api_allow", ["fe80::1%;}"], "neither an IP address"),
    ("proxy_metrics_allow", ["10.0.0.0/8; allow all"], "neither an IP address"),
    ("proxy_server_name", "a b", "not a host's name"),
    ("proxy_server_name", "x;}", "not a host's name"),
    ("proxy_server_name", "", "not a host's name"),
    ("proxy_upstream", "127.0.0.1", "not an address and a port"),
    ("proxy_upstream", "127.0.0.1:0", "not an address and a port"),
    ("proxy_upstream", "unix:/run/x", "not an address and a port"),
    ("proxy_upstream", "evil.example:80", "not an address and a port"),
    ("proxy_max_body", "32m; return 200", "not a size"),
    ("proxy_max_body", "0", "not a size"),
    ("proxy_certificate", "/etc/ssl/a.pem", "belong together"),
    ("proxy_certificate", "/etc/ssl/a;b", "not a plain absolute path"),
    ("proxy_read_timeout_s", 0, "too short"),
    ("vllm_server_ip_allow", ["fe80::1%n"], "neither an IP address"),
    ("vllm_server_host", "fe80::1%;x", "not an IP address"),
    ("vllm_server_unit", "vllm.service", "ends with .service"),
    ("vllm_server_unit", "", "not a usable name"),
    ("vllm_server_unit", "../etc/passwd", "not a usable name"),
    ("vllm_server_unit", "vllm@", "not a usable name"),
    ("vllm_server_unit", "a b", "not a usable name"),
    ("vllm_server_unit", "vllm\n", "more than one line"),
    ("vllm_server_unit", "%n", "not a usable name"),
    ("vllm_server_unit", "firstlight", "reserved"),
    ("vllm_server_user", "root", "must not run as root"),
    ("vllm_server_user", "Robert'); DROP", "not a usable name"),
    ("vllm_server_group", "0", "not a usable name"),
    ("vllm_server_served_model_name", '"; rm -rf /', "not a usable name"),
    ("vllm_server_served_model_name", "100%", "not a usable name"),
    ("vllm_server_served_model_name", {"a": 1}, "type dict"),
    ("vllm_server_served_model_name", False, "type bool"),
    ("vllm_server_reasoning_parser", "qwen3; x", "not a usable name"),
    ("vllm_server_attention_backend", "$(id)", "not a usable name"),
    ("vllm_server_host", "example.org", "not an IP address"),
    ("vllm_server_host", "127.0.0.1; x", "not an IP address"),
    ("vllm_server_host", "0.0.0.0", "no API key"),
    ("vllm_server_host", "::", "no API key"),
    ("vllm_server_host", "192.0.2.7", "no API key"),
    ("vllm_server_api_key", "short", "shorter than 16"),
    ("vllm_server_api_key", "with a space in the key", "holds a space"),
    ("vllm_server_api_key", "schlüssel-schlüssel", "outside ASCII"),
    ("vllm_server_tensor_parallel_size", 0, "too small"),
    ("vllm_server_max_model_len", 0, "too small"),
    ("vllm_server_max_num_seqs", 0, "too small"),
    ("vllm_server_max_num_seqs", 2**40, "out of range"),
    ("vllm_server_gpu_memory_utilization", 0, "not a share"),
    ("vllm_server_gpu_memory_utilization", 90, "not a share"),
    ("vllm_server_gpu_memory_utilization", float("nan"), "out of range"),
    ("vllm_server_extra_args", {"port": 1}, "set by firstlight"),
    ("vllm_server_extra_args", {"a b": 1}, "not the name of a flag"),
    ("vllm_server_extra_args", {1: 1}, "not text"),
    ("vllm_server_extra_args", "--seed 1", "unable to convert"),
    ("vllm_server_environment", {"A B": "x"}, "not the name"),
    ("vllm_server_environment", {"A": "x\0"}, "control character"),
    ("vllm_server_environment", {"A": {"b": 1}}, "not text"),
    ("vllm_server_environment", {"A": True}, "not text"),
    ("vllm_server_environment", {1: "x", "B": "y"}, "not text"),
    ("vllm_server_environment", {"VLLM_PORT": 1}, "must not be set by hand"),
    ("vllm_server_environment", {"VLLM_CACHE_ROOT": "/x"}, "must not be set by hand"),
    ("vllm_server_environment", {"VLLM_API_KEY": "x"}, "must not be set by hand"),
    ("vllm_server_readable_paths", ["relative"], "not absolute"),
    ("vllm_server_readable_paths", ["/home/a b"], "holds a space"),
    ("vllm_server_readable_paths", ["/a:/b"], "colon"),
    ("vllm_server_readable_paths", [""], "holds a space"),
    ("vllm_server_ip_allow", ["any\nIPAddressAllow=0.0.0.0/0"], "more than one line"),
    ("vllm_server_ip_allow", ["localhost"], "neither an IP address"),
    ("vllm_server_unit_dropin", "MemoryMax=1G", "no section"),
    ("vllm_server_unit_dropin", "[Service]\0", "control character"),
    ("vllm_server_restart_s", -1, "out of range"),
    ("vllm_server_config_dir", "etc/firstlight", "not absolute"),
    ("vllm_server_config_dir", "/etc/../root", "not absolute and plain"),
    ("vllm_server_config_dir", "", "empty"),
    ("vllm_install_root", "/opt/%h", "reads as its own"),
    ("vllm_install_root", "/opt/$(id)", "reads as its own"),
    ("vllm_install_root", "/opt/a;b", "reads as its own"),
    ("vllm_install_python", '/usr/bin/"python3"', "reads as its own"),
    ("vllm_install_platform", "rocm", "one of"),
    ("vllm_install_max_jobs", "all", "type str"),
    ("preflight_min_disk_gib", {"relative": 1}, "not absolute"),
    ("preflight_min_disk_gib", {"/opt": "many"}, "not a number"),
    ("preflight_min_disk_gib", {1: 1}, "not text"),
    ("preflight_shortcut", "perhaps", "not a valid boolean"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_each_bad_value_has_its_own_message_with_the_variables_name(name: str, value: Any, message: str) -> None:
    error = refused(**{name: value})
    assert error.where.startswith(name)
    assert message in error.message
    assert error.message.startswith(name)


def test_a_secret_is_not_shown_by_the_error_about_it() -> None:
    for value in ("canary\ncanary-canary", "canary\x01canary-canary", "canary canary canary", ["canary"]):
        assert "canary" not in refused(vllm_server_api_key=value).message


def test_the_units_name_must_not_be_that_of_the_unit_to_stop() -> None:
    assert "unit to stop" in refused(vllm_server_unit="sglang", sglang_stop_units=["sglang.service"]).message


@pytest.mark.parametrize("name", ["a b", "sglang;x", "%n.service", ""])
def test_a_unit_to_stop_must_have_a_units_name(name: str) -> None:
    assert refused(sglang_stop_units=[name]).where == "sglang_stop_units"


def test_an_old_server_may_be_an_instance_of_a_template() -> None:
    check(sglang_stop_units=["sglang@27b.service"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "2001:db8::7"])
def test_other_addresses_are_fine_with_a_key(host: str) -> None:
    check(vllm_server_host=host, vllm_server_api_key="0123456789abcdef")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("nonsense", False)],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_smallest_budget_of_tokens_is_what_vllm_computes() -> None:
    # max_num_batched_tokens - (k - 1) * max_num_seqs must be above zero: 200 - 14 * 16 = -24 does not start
    assert minimum_batched_tokens(15, 16) == 225
    assert minimum_batched_tokens(1, 16) == 1
    assert minimum_batched_tokens(15, 16, prompt_tokens=32) == 256


def test_a_budget_that_drafting_uses_up_is_refused_with_the_figures() -> None:
    error = refused(
        vllm_server_max_num_batched_tokens=200, vllm_server_max_num_seqs=16, drafter_enabled=True,
        vllm_server_num_speculative_tokens=15,
    )  # fmt: skip
    assert error.where == "vllm_server_max_num_batched_tokens"
    assert "-24 tokens" in error.what
    assert "256" in error.fix
    tokens = {"vllm_server_max_num_seqs": 16, "drafter_enabled": True}
    assert refused(vllm_server_max_num_batched_tokens=224, **tokens).where == "vllm_server_max_num_batched_tokens"
    check(vllm_server_max_num_batched_tokens=225, **tokens)


def test_without_a_drafter_the_budget_must_hold_one_token_of_each_sequence() -> None:
    check(vllm_server_max_num_batched_tokens=16, vllm_server_max_num_seqs=16, drafter_enabled=False)
    refused(vllm_server_max_num_batched_tokens=15, vllm_server_max_num_seqs=16, drafter_enabled=False)


@pytest.mark.parametrize("revision", ["", "main", "v1", "abc123", "A" * 40])
def test_code_from_a_repository_needs_a_pinned_revision(revision: str) -> None:
    error = refused(vllm_server_trust_remote_code=True, model_repo="Qwen/Qwen3.6-27B", model_revision=revision)
    assert error.where == "model_revision"
    check(vllm_server_trust_remote_code=False, model_repo="Qwen/Qwen3.6-27B", model_revision=revision)


def test_code_at_a_pinned_revision_is_accepted() -> None:
    check(vllm_server_trust_remote_code=True, model_repo="Qwen/Qwen3.6-27B", model_revision="0123456789" * 4)


def test_a_required_variable_that_is_not_set_is_told_with_its_description() -> None:
    with pytest.raises(FirstlightError, match=r"x: it has no value.*what x is"):
        typed("x", {"type": "path", "required": True, "description": "what x is"}, None)


def test_negative_numbers_within_a_mapping_are_the_flags_own_business() -> None:
    check(vllm_server_extra_args={"seed": -1, "hf-overrides": {"rope_scaling": None, "factor": -0.5}})


DEFAULTS = defaults()
NONSENSE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from(
        ["", " ", "\n", "\0", "a\nb", "%n", "%", '"', "'", "$(id)", "`id`", "; rm -rf /", "a|b", "relative/path",
         "/a/../b", "../..", "~", "-1", "0", "65536", "1e400", "inf", "nan", "{", '{"a": 1}', "[1, 2]", "a,b",
         "\x1b[31m", "1e999999999",
         "${HOME}", "/home/a b", "ünïcode", "a" * 5000, "no", "null"]
    ),
    st.lists(st.one_of(st.none(), st.booleans(), st.integers(), st.text()), max_size=3),
    st.dictionaries(
        st.one_of(st.text(), st.integers(), st.none(), st.booleans()),
        st.one_of(st.text(), st.integers(), st.lists(st.text(), max_size=2)),
        max_size=3,
    ),
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(OPTIONS))
@settings(max_examples=15, deadline=None)
@given(value=NONSENSE)
def test_nonsense_is_legal_for_its_variable_or_one_clear_error_that_names_it(name: str, value: Any) -> None:
    try:
        taken = typed(name, OPTIONS[name], value)
        check_values({**DEFAULTS, name: taken}, OPTIONS)
    except FirstlightError as caught:
        error = caught
    else:
        require_harmless(name, taken)
        return
    # a value may be at fault only together with another one, whose name is then told first
    assert error.where.split("[")[0] in OPTIONS
    assert name in error.message
    assert error.fix


def require_harmless(name: str, value: Any) -> None:
    """What was accepted holds nothing that a unit file, a shell or a file name would trip over."""
    option = OPTIONS[name]
    if option["type"] == "int" and value is not None:
        assert isinstance(value, int)
        assert value >= 0
        assert not name.endswith("_port") or 1 <= value <= 65535
    if option["type"] == "path" and value and not name.endswith("_controller_path"):
        assert value.startswith("/")
        assert not set(value) & set("\n\0%\"'$`; \\")
    if name.startswith("vllm_server_") and option["type"] == "str" and name != "vllm_server_unit_dropin":
        assert "\n" not in (value or "")


def test_an_upgrade_changes_the_digest_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = tree_digest(tmp_path)
    (tmp_path / "a.pyc").write_text("compiled")
    assert tree_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("2")
    assert tree_digest(tmp_path) != before
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert tree_digest(tmp_path) != before


def test_a_changed_file_on_the_controller_is_a_changed_input(tmp_path: Path) -> None:
    weights = tmp_path / "drafter.safetensors"
    values = {"drafter_controller_path": str(weights), "other": str(weights)}
    assert controller_files(values) == {"drafter_controller_path": None}
    weights.write_text("a")
    before = controller_files(values)
    weights.write_text("longer")
    assert controller_files(values) != before
