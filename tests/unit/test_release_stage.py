"""Staging: what is judged before any file is written, and what the release is then made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import release_stage
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.release import ENVIRONMENT, Layout, load
from ansible_collections.firstlight.vllm.plugins.module_utils.release_stage import Settings, stage_release
from support_hosts import gpu
from support_models import DRAFTER, TARGET
from support_release import layout_in

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
KEY = "canary-canary-canary"


@pytest.fixture(autouse=True)
def same_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_stage, "query", list)
    monkeypatch.setattr(release_stage, "ensure_account", lambda *_, **__: False)
    # pytest's folders lie under /tmp, which a unit does not see
    monkeypatch.setattr(release_stage, "_HIDDEN", (Path("/home"),))
    monkeypatch.setattr(release_stage, "_readable", lambda settings: [])


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return layout_in(tmp_path)


@pytest.fixture
def settings(tmp_path: Path, layout: Layout) -> Settings:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    return Settings(
        config="port: 30000\n", unit_text=f"[Service]\nExecStart=/v --config {layout.releases}/@RELEASE@/serve.yaml\n",
        dropin="", environment={"HOME": "/elsewhere", "TRITON_CACHE_DIR": "/elsewhere"}, user="root", group="root",
        serve={"port": 30000, "served-model-name": "m", "tensor-parallel-size": 2, "max-model-len": 1024,
               "gpu-memory-utilization": 0.9, "max-num-seqs": 16, "max-num-batched-tokens": 32768},
        target=str(target), drafter="", venv="/opt/firstlight/venvs/0.20.1-abc", vllm_version="0.20.1",
        platform="cpu", base_url="http://127.0.0.1:30000",
    )  # fmt: skip


def staged(layout: Layout, settings: Settings, **arguments: Any) -> dict[str, Any]:
    return stage_release(layout, settings, secrets={"VLLM_API_KEY": KEY}, **{"check": False, "diff": True, **arguments})


def refused(layout: Layout, settings: Settings) -> FirstlightError:
    with pytest.raises(FirstlightError) as caught:
        staged(layout, settings)
    assert not layout.config_dir.exists()
    return caught.value


def test_staging_tells_what_it_wrote_and_shows_no_secret(layout: Layout, settings: Settings) -> None:
    result = staged(layout, settings)
    assert result["changed"]
    assert KEY not in json.dumps(result)
    assert KEY in layout.secrets.read_text()
    again = staged(layout, settings)
    assert (again["changed"], again["release"]) == (False, result["release"])


def test_the_caches_are_keyed_and_not_the_sites_to_set(layout: Layout, settings: Settings) -> None:
    result = staged(layout, settings)
    environment = load(layout, result["release"]).files[ENVIRONMENT]
    assert f'TRITON_CACHE_DIR="{result["cache_root"]}/triton"' in environment
    assert f'VLLM_CACHE_ROOT="{result["cache_root"]}/vllm"' in environment
    assert 'HOME="/elsewhere"' in environment
    other = staged(layout, replace(settings, serve={**settings.serve, "port": 30001}, config="port: 30001\n"))
    assert other["cache_root"] == result["cache_root"]
    assert other["release"] != result["release"]


def test_the_gpus_are_asked_once_and_shape_both_the_verdict_and_the_cache(
    layout: Layout, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [[gpu(0), gpu(1)], [gpu(0, driver_version="585.1"), gpu(1)]]
    monkeypatch.setattr(release_stage, "query", lambda: answers.pop(0))
    Path(settings.target, "config.json").write_text(json.dumps(TARGET))
    first = staged(layout, replace(settings, platform="cuda"))
    assert first["memory"]["budget"] == pytest.approx(143771 / 1024 * 0.9, abs=0.01)
    second = staged(layout, replace(settings, platform="cuda"))
    assert second["cache_root"] != first["cache_root"]
    assert answers == []


def test_graphs_that_lose_attention_are_warned_of_before_anything_stops(
    layout: Layout, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_stage, "query", lambda: [gpu(0), gpu(1)])
    Path(settings.target, "config.json").write_text(json.dumps(TARGET))
    drafter = Path(settings.target).with_name("drafter")
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(DRAFTER))
    wanted = replace(settings, platform="cuda", drafter=str(drafter))
    assert [problem["id"] for problem in staged(layout, wanted)["problems"]] == ["full-graphs-lose-attention"]
    safe = {**settings.serve, "compilation-config": {"cudagraph_mode": "PIECEWISE"}}
    assert staged(layout, replace(wanted, serve=safe))["problems"] == []


def test_a_cpu_build_asks_no_gpu(layout: Layout, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise AssertionError

    monkeypatch.setattr(release_stage, "query", broken)
    assert staged(layout, settings)["memory"] is None


def test_check_mode_on_a_blank_host_writes_nothing(layout: Layout, settings: Settings) -> None:
    result = staged(layout, replace(settings, target="/opt/firstlight/models/none"), check=True)
    assert result["changed"]
    assert not layout.config_dir.exists()


@pytest.mark.parametrize(
    ("text", "kind"), [(None, "model-dir-invalid"), ("{", "model-json-broken"), ("5", "model-json-broken")]
)
def test_a_target_without_a_readable_config_is_refused(
    layout: Layout, settings: Settings, text: str | None, kind: str
) -> None:
    path = Path(settings.target, "config.json")
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert refused(layout, settings).kind == kind


def test_gpus_that_cannot_share_the_heads_are_refused(layout: Layout, settings: Settings) -> None:
    serve = {**settings.serve, "tensor-parallel-size": 3}
    assert refused(layout, replace(settings, serve=serve)).kind == "tp-not-dividing-heads"


def test_another_services_unit_is_not_overwritten(layout: Layout, settings: Settings) -> None:
    layout.unit_dir.mkdir()
    layout.unit_file.write_text("[Service]\nExecStart=/usr/bin/other\n")
    assert refused(layout, settings).kind == "unit-name-taken"


def test_a_masked_unit_is_told_before_anything_is_stopped(layout: Layout, settings: Settings) -> None:
    layout.unit_dir.mkdir()
    layout.unit_file.symlink_to("/dev/null")
    error = refused(layout, settings)
    assert error.kind == "unit-masked"
    assert "systemctl unmask vllm.service" in error.fix


def test_what_the_sandbox_hides_must_be_named(layout: Layout, settings: Settings) -> None:
    hidden = replace(settings, venv="/home/me/venv")
    error = refused(layout, hidden)
    assert (error.kind, error.where) == ("path-hidden", "vllm_server_readable_paths")
    assert "/home/me/venv" in error.fix
    shown = replace(hidden, unit_text=hidden.unit_text + "BindReadOnlyPaths=/home/me\n")
    assert staged(layout, shown)["changed"]


def test_all_that_is_wrong_is_told_at_once(layout: Layout, settings: Settings) -> None:
    serve = {**settings.serve, "tensor-parallel-size": 3}
    message = refused(layout, replace(settings, serve=serve, venv="/home/me/venv")).message
    assert "attention heads" in message
    assert "/home/me/venv" in message


def test_a_model_that_the_services_user_may_not_read_is_refused_with_the_command(
    layout: Layout, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(release_stage, "query", list)
    monkeypatch.setattr(release_stage, "_HIDDEN", (Path("/home"),))
    folder = Path(settings.target)
    folder.chmod(0o700)
    error = refused(layout, replace(settings, user="nobody", group="nogroup"))
    assert error.kind == "model-not-readable"
    assert f"chmod o+x {folder}" in error.message
