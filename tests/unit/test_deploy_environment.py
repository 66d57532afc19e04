"""Where `deploy` finds things, and what of the user's settings stays in force."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

import pytest

from deploy import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)


def test_the_settings_say_the_same_as_the_checkouts_ansible_cfg() -> None:
    config = configparser.RawConfigParser()
    config.read(ROOT / "ansible.cfg")
    for (section, key), (_, value) in environment.SETTINGS.items():
        assert config[section][key] == value, key


def test_from_an_empty_folder_all_settings_are_added(tmp_path: Path) -> None:
    added = environment.settings_for({"PATH": "/usr/bin"}, tmp_path)
    assert "ServerAliveInterval=2" in added["ANSIBLE_SSH_ARGS"]
    assert added["ANSIBLE_HOST_KEY_CHECKING"] == "true"
    first, *rest = added["ANSIBLE_COLLECTIONS_PATH"].split(os.pathsep)
    assert (Path(first) / environment.COLLECTION / "galaxy.yml").is_file()
    assert os.pathsep.join(rest) == environment.DEFAULT_COLLECTIONS_PATH
    scripts, *rest = added["PATH"].split(os.pathsep)
    assert (Path(scripts) / "ansible-playbook").is_file()
    assert rest == ["/usr/bin"]


def test_what_the_users_environment_says_stays(tmp_path: Path) -> None:
    environ = {"ANSIBLE_SSH_ARGS": "-J jump", "ANSIBLE_COLLECTIONS_PATH": "/mine"}
    added = environment.settings_for(environ, tmp_path)
    assert "ANSIBLE_SSH_ARGS" not in added
    assert added["ANSIBLE_COLLECTIONS_PATH"].endswith(f"{os.pathsep}/mine")


def test_what_the_users_ansible_cfg_says_stays(tmp_path: Path) -> None:
    (tmp_path / "ansible.cfg").write_text(
        "[defaults]\nhost_key_checking = false\ncollections_path = extra:/abs\n[ssh_connection]\nssh_args = -J jump\n"
    )
    added = environment.settings_for({}, tmp_path)
    assert "ANSIBLE_SSH_ARGS" not in added
    assert added["ANSIBLE_HOST_KEY_CHECKING"] == "false"  # else ansible-runner would decide
    assert added["ANSIBLE_COLLECTIONS_PATH"].endswith(f"{os.pathsep}{tmp_path / 'extra'}{os.pathsep}/abs")
    assert added["ANSIBLE_PIPELINING"] == "true"


def test_the_ansible_cfg_of_a_folder_that_everyone_may_write_to_is_ignored_as_ansible_does(tmp_path: Path) -> None:
    (tmp_path / "ansible.cfg").write_text("[ssh_connection]\nssh_args = -J jump\n")
    tmp_path.chmod(0o777)
    assert "ANSIBLE_SSH_ARGS" in environment.settings_for({}, tmp_path)


def test_an_ansible_cfg_that_does_not_parse_is_left_to_ansible_to_report(tmp_path: Path) -> None:
    (tmp_path / "ansible.cfg").write_text("no section\n")
    assert "ANSIBLE_SSH_ARGS" in environment.settings_for({"ANSIBLE_CONFIG": str(tmp_path)}, Path("/"))


def test_the_verbs_are_the_collections_playbooks() -> None:
    assert environment.playbook_path("site").is_file()
    assert set(environment.verbs()) == {path.stem for path in (ROOT / "playbooks").glob("*.yml")}
