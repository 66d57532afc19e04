"""From weights to a folder for vLLM: existing configurations, placing, idempotence, nothing written when wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import drafter_deploy, drafter_place
from ansible_collections.firstlight.vllm.plugins.module_utils.canonical_json import digest
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_deploy import Job, Plan, apply, inspect
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from support_drafters import DATA, QWEN36_27B, families, ids, plain_layout, published_row, write_target, write_weights

TINY = DATA / "tiny"
TARGET = str(TINY / "tiny-qwen3")
SOURCE = TINY / "drafter-qwen3" / "drafter-step-300.safetensors"
GIVEN = {"mask_token_id": 5, "block_size": 16}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "incoming" / "drafter-step-300.safetensors"
    path.parent.mkdir()
    path.write_bytes(SOURCE.read_bytes())
    path.chmod(0o644)
    return path


def job(path: Path, dest: Path | str = "", user: dict[str, Any] = GIVEN, **more: Any) -> Job:
    return Job(str(path), TARGET, str(dest), user=user, families=families(), **more)


def run(path: Path, dest: Path | str = "", **more: Any) -> Plan:
    plan = inspect(job(path, dest, **more))
    assert plan.report.usable, plan.report.problems
    apply(plan)
    return plan


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def author_config(**change: Any) -> dict[str, Any]:
    return json.loads((TINY / "drafter-qwen3" / "published-config.json").read_text()) | change


# --- placing -------------------------------------------------------------------------------------------------------


def test_weights_of_another_name_are_linked_as_model_safetensors(source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "drafters" / "x"
    plan = run(source, dest)
    assert plan.changed
    assert [item.how for item in plan.placements] == ["hardlink"]
    assert (dest / "model.safetensors").samefile(source)
    assert sorted(file.name for file in dest.iterdir()) == [".firstlight.json", "config.json", "model.safetensors"]


def test_a_second_run_changes_nothing(source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "x"
    run(source, dest)
    before = {file: file.stat().st_mtime_ns for file in dest.iterdir()}
    again = run(source, dest)
    assert not again.changed
    assert {file: file.stat().st_mtime_ns for file in dest.iterdir()} == before


def test_the_folders_and_files_are_readable_whatever_the_umask(source: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        run(source, tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "a" / "b" / "config.json").stat().st_mode & 0o777 == 0o644


def test_weights_that_the_server_could_not_read_are_copied(source: Path, tmp_path: Path) -> None:
    source.chmod(0o600)
    plan = run(source, tmp_path / "x")
    placed = tmp_path / "x" / "model.safetensors"
    assert [item.how for item in plan.placements] == ["copy"]
    assert placed.stat().st_mode & 0o777 == 0o644
    assert source.stat().st_mode & 0o777 == 0o600
    assert placed.read_bytes() == source.read_bytes()
    assert not run(source, tmp_path / "x").changed


def test_a_refused_hard_link_gives_way_to_the_next_way(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setitem(drafter_place._MAKERS, "hardlink", refuse)
    done = apply(inspect(job(source, tmp_path / "x")))
    # pytest's folders lie under /tmp, which the unit hides from the server
    assert [item.how for item in done] == ["copy"]
    monkeypatch.setattr(drafter_place, "_reachable", lambda _: True)
    done = apply(inspect(job(source, tmp_path / "y")))
    assert [item.how for item in done] == ["symlink"]
    assert (tmp_path / "y" / "model.safetensors").is_symlink()
    assert not inspect(job(source, tmp_path / "y")).changed


@pytest.mark.parametrize("path", ["/root/x/model.safetensors", "/home/me/model.safetensors", "/tmp/model.safetensors"])
def test_a_link_into_a_folder_that_the_unit_hides_is_not_reachable(path: str) -> None:
    assert not drafter_place._reachable(path)


def test_changed_weights_replace_the_old_ones(source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "x"
    run(source, dest)
    other = source.with_name("drafter-step-400.safetensors")
    other.write_bytes(source.read_bytes())
    plan = run(other, dest)
    assert plan.changed
    assert (dest / "model.safetensors").samefile(other)


def test_weights_in_place_keep_their_name(source: Path) -> None:
    plan = run(source)
    assert [item.how for item in plan.placements] == ["in-place"]
    assert sorted(file.name for file in source.parent.iterdir()) == [".firstlight.json", "config.json", source.name]
    assert not run(source.parent).changed


def test_weights_in_place_that_vllm_would_not_find_get_its_name(source: Path) -> None:
    odd = source.rename(source.with_name("drafter.weights"))
    run(odd)
    assert (source.parent / "model.safetensors").samefile(odd)


def test_shards_keep_their_names_and_the_index_gets_vllms(tmp_path: Path) -> None:
    layout = plain_layout(published_row("Qwen3-4B-DFlash-b16"))
    names = list(layout)
    parts = {"d-00001-of-00002.safetensors": names[:9], "d-00002-of-00002.safetensors": names[9:]}
    for part, some in parts.items():
        write_weights(tmp_path / "in" / part, {name: layout[name] for name in some})
    weight_map = {name: part for part, some in parts.items() for name in some}
    (tmp_path / "in" / "d.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    target = {"hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936, "max_position_embeddings": 40960}
    folder = write_target(tmp_path / "t", target)
    plan = inspect(Job(str(tmp_path / "in"), str(folder), str(tmp_path / "out"), families=families()))
    assert plan.report.usable, plan.report.problems
    apply(plan)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *parts, "model.safetensors.index.json", "config.json", ".firstlight.json",
    }  # fmt: skip


def test_a_mask_embedding_comes_along(source: Path, tmp_path: Path) -> None:
    (source.parent / "mask_embedding.pt").write_bytes(b"x")
    run(source, tmp_path / "x")
    assert (tmp_path / "x" / "mask_embedding.pt").exists()


def test_other_weights_in_the_folder_are_refused_because_vllm_would_load_them(source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "x"
    write_weights(dest / "old.safetensors", {"a": ("BF16", (1,))})
    plan = inspect(job(source, dest))
    assert ids(plan.report.errors) == ["stray-weights"]
    with pytest.raises(FirstlightError, match=r"old\.safetensors"):
        apply(plan)
    assert [file.name for file in dest.iterdir()] == ["old.safetensors"]


def test_a_copy_that_would_not_fit_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.chmod(0o600)
    usage = drafter_place.shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(drafter_place.shutil, "disk_usage", lambda _: usage)
    plan = inspect(job(source, tmp_path / "x"))
    assert ids(plan.report.errors) == ["disk-full"]
    assert not (tmp_path / "x").exists()


def test_nothing_is_written_for_an_unusable_drafter(source: Path, tmp_path: Path) -> None:
    plan = inspect(job(source, tmp_path / "x", user={}))
    with pytest.raises(FirstlightError, match=r"mask_token_id.*block_size"):
        apply(plan)
    assert not (tmp_path / "x").exists()


def test_a_failed_write_leaves_the_old_configuration(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = tmp_path / "x"
    run(source, dest)
    before = (dest / "config.json").read_text()
    replace = os.replace

    def refuse(old: str, new: str) -> None:
        if str(new).endswith("config.json"):
            raise OSError(28, "No space left on device")
        replace(old, new)

    monkeypatch.setattr(drafter_place.os, "replace", refuse)
    with pytest.raises(FirstlightError, match="No space left"):
        apply(inspect(job(source, dest, user=GIVEN | {"block_size": 8})))
    assert (dest / "config.json").read_text() == before
    assert sorted(file.name for file in dest.iterdir()) == [".firstlight.json", "config.json", "model.safetensors"]


# --- an existing config.json ---------------------------------------------------------------------------------------


def test_what_firstlight_wrote_itself_never_overrules_later_values(source: Path, tmp_path: Path) -> None:
    dest = tmp_path / "x"
    run(source, dest, user=GIVEN | {"target_layer_ids": [0, 4]})
    assert config_of(dest)["eagle_aux_hidden_state_layer_ids"] == [1, 5]
    run(source, dest)
    assert config_of(dest)["eagle_aux_hidden_state_layer_ids"] == [2, 6]


def test_the_authors_configuration_is_kept_and_completed(source: Path, tmp_path: Path) -> None:
    published = author_config(auto_map={"AutoConfig": "x.Y"}, author_note="mine")
    (source.parent / "config.json").write_text(json.dumps(published))
    plan = run(source.parent, tmp_path / "x", user={})
    written = config_of(tmp_path / "x")
    del published["auto_map"]
    assert written == published | {"eagle_aux_hidden_state_layer_ids": [2, 6]}
    warning = next(problem for problem in plan.report.problems if problem.id == "config-amended")
    assert "auto_map" in warning.message
    assert "eagle_aux_hidden_state_layer_ids" in warning.message
    assert plan.report.fields["mask_token_id"].source == "user"


def test_in_place_the_authors_configuration_is_saved_and_still_respected(source: Path) -> None:
    published = author_config()
    (source.parent / "config.json").write_text(json.dumps(published))
    run(source.parent, user={})
    saved = source.parent / "config.json.published"
    assert json.loads(saved.read_text()) == published
    assert not run(source.parent, user={}).changed
    assert config_of(source.parent)["author_note" if "author_note" in published else "block_size"] == 16


def test_a_complete_configuration_is_kept_to_the_letter(source: Path) -> None:
    text = json.dumps(author_config(eagle_aux_hidden_state_layer_ids=[2, 6]), indent=7)
    (source.parent / "config.json").write_text(text)
    plan = run(source.parent, user={})
    assert not plan.changed
    assert (source.parent / "config.json").read_text() == text


def test_newer_layouts_are_understood(source: Path, tmp_path: Path) -> None:
    published = author_config()
    nested = published["dflash_config"] | {"block_size": published.pop("block_size")}
    theta = published.pop("rope_theta")
    published |= {"dflash_config": nested, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    (source.parent / "config.json").write_text(json.dumps(published))
    plan = run(source.parent, tmp_path / "x", user={})
    assert plan.report.fields["rope_theta"].value == 1000000
    assert config_of(tmp_path / "x")["rope_parameters"] == {"rope_theta": 1000000, "rope_type": "default"}
    assert config_of(tmp_path / "x")["dflash_config"]["mask_token_id"] == 5


def test_a_speculators_configuration_is_understood(source: Path, tmp_path: Path) -> None:
    published = {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 6],
        "mask_token_id": 5,
        "block_size": 16,
        "transformer_layer_config": {"hidden_size": 128, "num_hidden_layers": 2, "rope_theta": 1000000},
    }
    (source.parent / "config.json").write_text(json.dumps(published))
    run(source.parent, tmp_path / "x", user={})
    assert config_of(tmp_path / "x")["dflash_config"]["target_layer_ids"] == [1, 5]


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 256), ("num_hidden_layers", 3), ("head_dim", 32)])
def test_a_configuration_that_the_weights_disprove_is_refused(source: Path, name: str, value: int) -> None:
    (source.parent / "config.json").write_text(json.dumps(author_config(**{name: value})))
    report = inspect(job(source.parent, user={})).report
    assert [(problem.id, problem.field) for problem in report.errors] == [("contradicts-weights", name)]


def test_taps_beside_the_formula_are_kept_with_a_warning_when_no_row_vouches(source: Path, tmp_path: Path) -> None:
    other = {"mask_token_id": 5, "target_layer_ids": [0, 4]}
    (source.parent / "config.json").write_text(json.dumps(author_config(dflash_config=other)))
    plan = run(source.parent, tmp_path / "x", user={})
    assert config_of(tmp_path / "x")["eagle_aux_hidden_state_layer_ids"] == [1, 5]
    assert "config-differs" in ids(plan.report.problems)


GUESSED = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248064, "target_layer_ids": [1, 17, 33, 49, 63]},
}


def big(tmp_path: Path, user: dict[str, Any] | None = None, **more: Any) -> Plan:
    weights = write_weights(tmp_path / "d" / "x.safetensors", plain_layout(published_row("Qwen3.6-27B-DFlash")))
    (tmp_path / "d" / "config.json").write_text(json.dumps(GUESSED))
    target = write_target(tmp_path / "Qwen3.6-27B", QWEN36_27B)
    return inspect(
        Job(str(weights.parent), str(target), str(tmp_path / "o"), user=user or {}, families=families(), **more)
    )


def test_guessed_values_against_a_published_row_are_refused(tmp_path: Path) -> None:
    report = big(tmp_path).report
    differing = {problem.field: problem.message for problem in report.errors}
    assert set(differing) == {"mask_token_id", "target_layer_ids"}
    assert "248070" in differing["mask_token_id"]
    assert "[1, 16, 31, 46, 61]" in differing["target_layer_ids"]


def test_guessed_values_can_be_confirmed_or_discarded(tmp_path: Path) -> None:
    given = {"mask_token_id": 248064, "target_layer_ids": [1, 17, 33, 49, 63]}
    plan = big(tmp_path, given)
    assert plan.report.usable
    assert plan.report.config["eagle_aux_hidden_state_layer_ids"] == [2, 18, 34, 50, 64]
    plan = big(tmp_path, keep_existing=False)
    assert plan.report.usable
    assert plan.report.config["dflash_config"]["mask_token_id"] == 248070


def test_the_configuration_of_another_model_in_the_drafters_folder_is_refused(source: Path, tmp_path: Path) -> None:
    (source.parent / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert ids(inspect(job(source.parent, tmp_path / "x")).report.errors) == ["wrong-model"]
    # beside a file that was named itself it does not matter, unless it would have to be overwritten
    beside = inspect(job(source, tmp_path / "x")).report
    assert beside.usable
    assert "wrong-model" in ids(beside.problems)
    assert ids(inspect(job(source)).report.errors) == ["wrong-model"]
    assert inspect(job(source, writing=False)).report.usable


@pytest.mark.parametrize("text", ["{", "[]", "\x00", '{"a": ' + "[" * 99999])
def test_a_broken_configuration_is_refused(source: Path, tmp_path: Path, text: str) -> None:
    (source.parent / "config.json").write_text(text)
    assert ids(inspect(job(source.parent, tmp_path / "x")).report.errors) == ["bad-config"]
    assert inspect(job(source.parent, tmp_path / "x", keep_existing=False)).report.usable


def test_a_fifo_as_configuration_does_not_block(source: Path) -> None:
    os.mkfifo(source.parent / "config.json")
    assert ids(inspect(job(source.parent)).report.errors) == ["not-a-file"]
    assert inspect(job(source.parent, keep_existing=False)).before is None


def test_the_digest_follows_the_configuration_and_not_its_layout(source: Path, tmp_path: Path) -> None:
    plan = inspect(job(source, tmp_path / "x"))
    same = digest(json.loads(plan.after))
    assert plan.report.config_digest == same
    other = inspect(job(source, tmp_path / "x", user=GIVEN | {"target_layer_ids": [0, 4]}))
    assert other.report.config_digest != same


def test_all_errors_stand_in_the_one_that_stops_the_run(source: Path, tmp_path: Path) -> None:
    error = drafter_deploy.failure(inspect(job(source, tmp_path / "x", user={})).report)
    assert error.kind == "missing-field"
    assert "mask_token_id" in error.message
    assert "block_size" in error.message
    assert error.message.count("Fix:") == 2
