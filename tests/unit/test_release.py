"""A release's files: quoting, atomic writing, its id, its diff, and the record of the deployment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.files import write_atomically
from ansible_collections.firstlight.vllm.plugins.module_utils.release import (
    CONFIG,
    ENVIRONMENT,
    META,
    PLACEHOLDER,
    UNIT,
    Layout,
    Release,
    compose,
    diff_of,
    environment_file,
    file_facts,
    load,
    load_state,
    put,
    release_ids,
    save_state,
)
from hypothesis import given
from hypothesis import strategies as st
from support_release import layout_in


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return layout_in(tmp_path)


def make(**changes: Any) -> Release:
    texts: dict[str, Any] = {
        "config": f"# release {PLACEHOLDER}\nport: 30000\n",
        "unit": f"[Service]\nExecStart=/v/bin/vllm serve --config /etc/f/vllm/releases/{PLACEHOLDER}/serve.yaml\n",
        "environment": {"HOME": "/var/lib/vllm"},
        "meta": {"model": "m", "base_url": "http://127.0.0.1:30000"},
    }
    return compose(**{**texts, **changes})


def write(layout: Layout, release: Release) -> None:
    for name, text in release.files.items():
        put(layout.releases / release.id / name, text, 0o644, check=False)


def as_systemd_reads(text: str) -> dict[str, str]:
    """The rules of systemd.exec(5) for an EnvironmentFile, for values in double quotes.

    Within double quotes a backslash protects one of ``"``, ``\\``, a backtick and ``$``, swallows a line break,
    and otherwise stands for itself.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        name, _, rest = text[at:].partition("=")
        assert rest[0] == '"', rest
        at += len(name) + 2
        value = ""
        while text[at] != '"':
            if text[at] == "\\":
                at += 1
                value += text[at] if text[at] in '"\\`$' else "" if text[at] == "\n" else "\\" + text[at]
            else:
                value += text[at]
            at += 1
        assert text[at : at + 2] == '"\n'
        at += 2
        found[name] = value
    return found


LINE = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\t"))


@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True), LINE))
def test_any_line_comes_back_from_the_environment_file_as_it_was(environment: dict[str, str]) -> None:
    assert as_systemd_reads(environment_file(environment)) == environment


def test_quotes_dollars_percents_and_comments_survive() -> None:
    hard = {"A": 'a "b" $c `d` \\e %h # f', "B": "", "C": "  spaces  ", "D": "'"}
    assert as_systemd_reads(environment_file(hard)) == hard


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "a\x1bb", "\x7f", "\ud800"])
def test_a_value_that_systemd_would_drop_is_refused_by_name(value: str) -> None:
    with pytest.raises(FirstlightError, match="NAME"):
        environment_file({"NAME": value})


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A-B", "ä"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(FirstlightError, match="not a legal name"):
        environment_file({name: "x"})


def test_the_id_is_stable_and_the_placeholder_is_gone() -> None:
    release = make()
    assert make().id == release.id
    assert len(release.id) == 12
    assert all(PLACEHOLDER not in text for text in release.files.values())
    assert f"/releases/{release.id}/serve.yaml" in release.files[UNIT]


@pytest.mark.parametrize(
    "changes",
    [
        {"config": "port: 30001\n"},
        {"unit": "[Service]\n"},
        {"environment": {"HOME": "/x"}},
        {"environment": {"HOME": "/var/lib/vllm", "A": "1"}},
        {"meta": {"model": "other"}},
    ],
)
def test_any_change_makes_another_release(changes: dict[str, Any]) -> None:
    assert make(**changes).id != make().id


def test_a_release_is_read_back_as_it_was_written(layout: Layout) -> None:
    release = make()
    write(layout, release)
    assert load(layout, release.id) == release


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_text("{")])
def test_a_release_that_is_not_whole_is_refused(layout: Layout, damage: Any) -> None:
    release = make()
    write(layout, release)
    damage(layout.releases / release.id / META)
    with pytest.raises(FirstlightError) as caught:
        load(layout, release.id)
    assert caught.value.kind == "release-missing"


def test_releases_are_told_oldest_first_and_half_written_ones_not_at_all(layout: Layout) -> None:
    assert release_ids(layout) == []
    made = [make(environment={"N": number}) for number in range(3)]
    for number, release in enumerate(made):
        write(layout, release)
        os.utime(layout.releases / release.id, (1000 + number, 1000 + number))
    (layout.releases / "aaaaaaaaaaaa").mkdir()
    assert release_ids(layout) == [release.id for release in made]


def test_a_file_is_written_with_its_mode_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, "text\n", 0o600)
    assert path.read_text() == "text\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_text_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new", 0o644)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_secret_is_never_readable_by_others_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    real = os.fsync

    def spy(descriptor: int) -> None:
        modes.append(os.fstat(descriptor).st_mode)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    write_atomically(tmp_path / "secrets.env", "KEY=x", 0o600)
    assert modes[0] & 0o077 == 0


def test_put_changes_text_and_mode_and_nothing_in_check_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert put(path, "a", 0o600, check=True)
    assert not path.exists()
    assert put(path, "a", 0o600, check=False)
    assert not put(path, "a", 0o600, check=False)
    path.chmod(0o644)
    assert put(path, "a", 0o600, check=False)
    assert path.stat().st_mode & 0o777 == 0o600
    assert put(path, "b", 0o600, check=False)


def test_the_diff_shows_the_files_that_differ(layout: Layout) -> None:
    old, new = make(), make(config="port: 30001\n")
    write(layout, old)
    names = {Path(part["after_header"]).name for part in diff_of(layout, new, old.id)}
    assert names == {CONFIG, UNIT}  # the unit names the release
    assert {Path(part["after_header"]).name for part in diff_of(layout, new, None)} == {CONFIG, ENVIRONMENT, META, UNIT}
    assert diff_of(layout, old, old.id) == []


def test_the_diff_never_holds_a_secret(layout: Layout) -> None:
    write_atomically(layout.secrets, 'VLLM_API_KEY="canary"\n', 0o600)
    assert "canary" not in json.dumps(diff_of(layout, make(), None))


def record(**changes: Any) -> dict[str, Any]:
    return {"inputs": "i", "release": "r", "files": {}, "meta": {}, **changes}


def test_the_record_of_the_deployment_is_for_root_alone_and_comes_back(layout: Layout) -> None:
    assert load_state(layout) == {}
    save_state(layout, record())
    assert load_state(layout) == record()
    assert layout.state.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "5", '"x"', '[["inputs", 1]]', "{}", '{"inputs": "i"}', "[" * 100_000,
        json.dumps(record(files=[])), json.dumps(record(release=None)), "\0\0\0", "\udcff",
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_understood_is_an_error_that_names_it(layout: Layout, text: str) -> None:
    layout.state.parent.mkdir(parents=True)
    layout.state.write_text(text, errors="surrogateescape")
    with pytest.raises(FirstlightError) as caught:
        load_state(layout)
    assert caught.value.where == str(layout.state)
    assert caught.value.kind == "state-broken"


def test_a_small_file_is_told_by_its_content_and_a_large_one_by_size_and_time(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_text("a")
    before = file_facts(small)
    os.utime(small, (1, 1))
    assert file_facts(small) == before
    small.write_text("b")
    assert file_facts(small) != before
    large.write_bytes(bytes((1 << 20) + 1))
    before = file_facts(large)
    os.utime(large, (1, 1))
    assert file_facts(large) != before


def test_a_missing_file_and_a_folder_are_facts_too(tmp_path: Path) -> None:
    assert file_facts(tmp_path / "missing") == {"missing": True}
    assert file_facts(tmp_path) == {"not_a_file": True}
