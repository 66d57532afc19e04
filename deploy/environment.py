"""Finds the collection and Ansible, and the settings that a run needs from whatever folder it starts in."""

from __future__ import annotations

import configparser
import contextlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from deploy.errors import InstallationError, PlaybookError

COLLECTION = Path("ansible_collections", "firstlight", "vllm")

# (section, key) of ansible.cfg -> (environment variable, value); the checkout's own ansible.cfg says the same
SETTINGS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("defaults", "gathering"): ("ANSIBLE_GATHERING", "explicit"),
    ("defaults", "interpreter_python"): ("ANSIBLE_PYTHON_INTERPRETER", "/usr/bin/python3"),
    # ansible-runner turns host key checking off when nobody has said anything
    ("defaults", "host_key_checking"): ("ANSIBLE_HOST_KEY_CHECKING", "true"),
    ("defaults", "timeout"): ("ANSIBLE_TIMEOUT", "10"),
    ("ssh_connection", "pipelining"): ("ANSIBLE_PIPELINING", "true"),
    ("ssh_connection", "ssh_args"): (
        "ANSIBLE_SSH_ARGS",
        "-C -o ControlMaster=auto -o ControlPersist=60s -o ServerAliveInterval=2 -o ServerAliveCountMax=3",
    ),
}
DEFAULT_COLLECTIONS_PATH = "~/.ansible/collections:/usr/share/ansible/collections"


def checkout() -> Path | None:
    """The root of the checkout that this package runs from; None when it runs from an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "galaxy.yml").is_file() else None


def collections_root() -> Path:
    """The folder that holds ``ansible_collections/firstlight/vllm``.

    Raises:
        InstallationError: the collection is neither beside this package nor in its checkout.
    """
    parent = Path(__file__).resolve().parent.parent
    for root in (parent, parent / ".collections"):
        if (root / COLLECTION / "playbooks").is_dir():
            return root
    raise InstallationError(
        f"The collection firstlight.vllm is missing: neither {parent / COLLECTION} nor "
        f"{parent / '.collections' / COLLECTION} exists.",
        "Install the wheel again, or run from a whole checkout.",
    )


def verbs() -> tuple[str, ...]:
    """The names of the playbooks, sorted."""
    return tuple(sorted(path.stem for path in (collections_root() / COLLECTION / "playbooks").glob("*.yml")))


def playbook_path(verb: str) -> Path:
    """The file of a playbook verb.

    Raises:
        PlaybookError: there is no such verb.
    """
    known = verbs()
    if verb not in known:
        raise PlaybookError(f"playbook: there is no {verb!r}.", f"Give one of {', '.join(known)}.")
    return collections_root() / COLLECTION / "playbooks" / f"{verb}.yml"


def scripts_dir() -> Path:
    """The folder of this interpreter's ansible-playbook.

    Raises:
        InstallationError: it has none.
    """
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (folder / "ansible-playbook").is_file():
            return folder
    found = shutil.which("ansible-playbook")
    if found:
        return Path(found).parent
    raise InstallationError(
        f"ansible-playbook is missing from {Path(sys.executable).parent}.",
        f"Run `{sys.executable} -m pip install 'ansible-core>=2.20,<2.22'`.",
    )


def settings_for(environ: Mapping[str, str], cwd: Path) -> dict[str, str]:
    """Environment variables to add so that Ansible behaves as the checkout's ansible.cfg asks.

    What the user has set, in the environment or in the ansible.cfg that Ansible would read, stays in force.
    """
    config_path, config = _user_config(environ, cwd)
    added = {
        name: value
        for (section, key), (name, value) in SETTINGS.items()
        if name not in environ and not config.has_option(section, key)
    }
    if "host_key_checking" in config["defaults"] and "ANSIBLE_HOST_KEY_CHECKING" not in environ:
        added["ANSIBLE_HOST_KEY_CHECKING"] = config["defaults"]["host_key_checking"]
    scripts = str(scripts_dir())
    added["PATH"] = os.pathsep.join([scripts, environ.get("PATH", os.defpath)])
    added["ANSIBLE_COLLECTIONS_PATH"] = os.pathsep.join(
        [str(collections_root()), _collections_path(environ, config_path, config)]
    )
    return added


def _user_config(environ: Mapping[str, str], cwd: Path) -> tuple[Path | None, configparser.RawConfigParser]:
    """The ansible.cfg that Ansible would read, by its own order of search."""
    config = configparser.RawConfigParser(strict=False, inline_comment_prefixes=(";",))
    config["defaults"] = {}
    named = environ.get("ANSIBLE_CONFIG")
    candidates = [Path(named).expanduser()] if named else []
    candidates = [path / "ansible.cfg" if path.is_dir() else path for path in candidates]
    # Ansible ignores the file of a folder that everyone may write to
    if not cwd.stat().st_mode & 0o002:
        candidates.append(cwd / "ansible.cfg")
    candidates += [Path("~/.ansible.cfg").expanduser(), Path("/etc/ansible/ansible.cfg")]
    for path in candidates:
        if path.is_file() and os.access(path, os.R_OK):
            with contextlib.suppress(configparser.Error, UnicodeDecodeError):  # Ansible says what is wrong
                config.read(path, encoding="utf-8")
            return path, config
    return None, config


def _collections_path(
    environ: Mapping[str, str], config_path: Path | None, config: configparser.RawConfigParser
) -> str:
    """Where else Ansible would look for collections: other collections of the user's stay in reach."""
    if environ.get("ANSIBLE_COLLECTIONS_PATH"):
        return environ["ANSIBLE_COLLECTIONS_PATH"]
    listed = config["defaults"].get("collections_path")
    if not listed or config_path is None:
        return DEFAULT_COLLECTIONS_PATH
    folder = config_path.resolve().parent
    return os.pathsep.join(str(folder / Path(part).expanduser()) for part in listed.split(os.pathsep) if part)
