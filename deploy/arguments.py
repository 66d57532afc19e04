"""Checks what `deploy.run` is given, before anything starts, and makes ansible-playbook's arguments of it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from deploy import environment
from deploy.errors import ArgumentError, ExtraVarsError, InventoryError

Inventory = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str | os.PathLike[str]] | None
_Vars = Mapping[str, Any] | str | os.PathLike[str]
ExtraVars = _Vars | Sequence[_Vars] | None

_GROUP_KEYS = ("hosts", "vars", "children")
_MAX_VERBOSITY = 5
_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """A checked run.

    Attributes:
        playbook: the file to run.
        inventory: sources for ``-i``; none means Ansible's own default.
        inline_inventory: the content of an inventory given in place, YAML or JSON; None when it is in files.
        extravars: in order, a file for ``-e @file`` or the JSON of a mapping.
        options: further arguments of ansible-playbook.
        timeout_s: wall clock after which the run is stopped; None for no limit.
    """

    playbook: Path
    inventory: tuple[str, ...]
    inline_inventory: bytes | None
    extravars: tuple[Path | bytes, ...]
    options: tuple[str, ...]
    timeout_s: float | None


def plan(
    *,
    playbook: str,
    inventory: Inventory,
    extravars: ExtraVars,
    limit: str | None,
    check: bool,
    diff: bool,
    timeout: float | None,
    verbosity: int,
    forks: int | None,
) -> Plan:
    """Check every argument of `deploy.run`; see there for what each means.

    Raises:
        ArgumentError: one of them, named in the message, has a value that no run could use.
    """
    path = environment.playbook_path(_typed("playbook", playbook, str))
    sources, inline = check_inventory(inventory)
    options = []
    if _typed("check", check, bool):
        options.append("--check")
    if _typed("diff", diff, bool):
        options.append("--diff")
    if limit is not None:
        options.append(f"--limit={_limit(limit)}")
    if level := _whole("verbosity", verbosity, 0, _MAX_VERBOSITY):
        options.append("-" + "v" * level)
    if forks is not None:
        options.append(f"--forks={_whole('forks', forks, 1, 10_000)}")
    return Plan(path, sources, inline, check_extravars(extravars), tuple(options), _timeout(timeout))


def check_inventory(inventory: Inventory) -> tuple[tuple[str, ...], bytes | None]:
    """Sources for ``-i``, and the content of an inventory given in place.

    Raises:
        InventoryError: a file is missing, or the content is no inventory.
    """
    if inventory is None:
        return (), None
    if isinstance(inventory, Mapping):
        return (), _inline(inventory)
    if isinstance(inventory, str) and "\n" in inventory:
        return (), _inline(_parse(inventory))
    listed: Sequence[Any] = [inventory] if isinstance(inventory, str | os.PathLike) else inventory
    if not isinstance(listed, Sequence) or not listed:
        raise InventoryError(
            f"inventory: {inventory!r} is neither a path, a list of paths, nor a mapping of groups.",
            "Give the path of an inventory, such as inventory/hosts.yml.",
        )
    return tuple(_source(item) for item in listed), None


def check_extravars(extravars: ExtraVars) -> tuple[Path | bytes, ...]:
    """Extra variables in order: a file each, or the JSON of a mapping.

    Raises:
        ExtraVarsError: a file is missing, a value is not JSON-able, or a name is no name of a variable.
    """
    if extravars is None:
        return ()
    listed: Sequence[Any] = [extravars] if isinstance(extravars, str | os.PathLike | Mapping) else extravars
    if not isinstance(listed, Sequence):
        raise ExtraVarsError(f"extravars: {extravars!r} is neither a mapping nor the path of a YAML file.")
    return tuple(part for part in map(_extravars, listed) if part != b"{}")


def _source(item: object) -> str:
    if not isinstance(item, str | os.PathLike):
        raise InventoryError(f"inventory: {item!r} is not a path.", "Give paths only.")
    text = os.fspath(item)
    if isinstance(item, str) and "," in text:  # Ansible's own notation for a list of hosts
        return text
    path = Path(text).expanduser()
    if not text or not path.exists():
        raise InventoryError(f"inventory: {str(path.absolute())!r} does not exist.", "Give the path of an inventory.")
    return str(path.absolute())


def _parse(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InventoryError(f"inventory: the text is not YAML: {error}.", "Mend the text at that place.") from error


def _inline(groups: object) -> bytes:
    fix = "Write {'all': {'hosts': {'gpu1': {'ansible_host': '192.0.2.10'}}}}."
    if not isinstance(groups, Mapping) or not groups:
        raise InventoryError(f"inventory: expected a mapping of groups, found {groups!r}.", fix)
    for name, group in groups.items():
        _check_group(name, group, fix)
    try:
        return json.dumps(groups, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise InventoryError(
            f"inventory: not JSON-able: {error}.", "Use strings, numbers, lists and mappings."
        ) from error


def _check_group(name: object, group: object, fix: str) -> None:
    if not isinstance(name, str) or not isinstance(group, Mapping | None):
        raise InventoryError(f"inventory: group {name!r} is {group!r}, not a mapping.", fix)
    for key, value in (group or {}).items():
        if key not in _GROUP_KEYS:
            raise InventoryError(
                f"inventory: group {name!r} has a key {key!r}, which is none of {', '.join(_GROUP_KEYS)}.",
                f"Put hosts under {name}.hosts and variables under {name}.vars.",
            )
        if not isinstance(value, Mapping | None):
            raise InventoryError(f"inventory: {name}.{key} is {value!r}, not a mapping.", fix)
        if key == "children":
            for child, content in (value or {}).items():
                _check_group(child, content, fix)


def _extravars(item: object) -> Path | bytes:
    if isinstance(item, Mapping):
        return _extravars_json(item)
    if not isinstance(item, str | os.PathLike):
        raise ExtraVarsError(f"extravars: {item!r} is neither a mapping nor the path of a YAML file.")
    path = Path(os.fspath(item)).expanduser().absolute()
    if not path.is_file():
        raise ExtraVarsError(f"extravars: the file {str(path)!r} does not exist.", "Give the path of a YAML file.")
    return path


def _extravars_json(values: Mapping[Any, Any]) -> bytes:
    for name in values:
        if not isinstance(name, str) or not name.isidentifier():
            raise ExtraVarsError(
                f"extravars: {name!r} is no name of a variable.",
                "Use letters, digits and underscores.",
            )
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=False, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            # the value itself may be a secret: only its type and the reason are told
            raise ExtraVarsError(
                f"extravars: {name} ({type(value).__name__}) is not JSON-able: {error}.",
                "Use strings, numbers, true, false, lists and mappings.",
            ) from error
    return json.dumps(values, default=_plain).encode()


def _plain(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _limit(limit: object) -> str:
    text = _typed("limit", limit, str).strip()
    if not text or any(ord(char) < ord(" ") for char in text):
        raise ArgumentError(f"limit: {limit!r} names no host.", "Give a host, a group or a pattern, or leave it out.")
    return text


def _timeout(timeout: object) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ArgumentError(f"timeout: {timeout!r} is not a number of seconds above 0.", "Give seconds, or None.")
    return float(timeout)


def _whole(name: str, value: object, lowest: int, highest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ArgumentError(f"{name}: {value!r} is not a whole number from {lowest} to {highest}.")
    return value


def _typed(name: str, value: object, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise ArgumentError(f"{name}: expected {kind.__name__}, found {value!r}.")
    return value
