# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Gathers and judges all variables of all roles on the controller, then runs the module `preflight` once.

Every role checks its own arguments too, but only when its turn comes; by then earlier roles have changed the host.
Here all of them are checked before the host is touched at all.

A run that was cut off on this controller does not keep a new one from the host: the module runs once more for it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleError, AnsibleUndefinedVariable
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.template import trust_as_template
from ansible_collections.firstlight.vllm.plugins.module_utils.canonical_json import digest
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.inputs import check_values, tree_digest
from ansible_collections.firstlight.vllm.plugins.module_utils.run_identity import claiming

_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")
COLLECTION = Path(__file__).resolve().parents[2]


def role_options(collection: Path) -> dict[str, dict[str, Any]]:
    """Variable name to its argument spec, of every role's main entry point.

    Each default is the role's own: a spec can only hold one that is a plain value or becomes text.
    """
    options: dict[str, dict[str, Any]] = {}
    for path in sorted(collection.glob("roles/*/meta/argument_specs.yml")):
        specs = _yaml(path)["argument_specs"]["main"].get("options") or {}
        defaults = _yaml(path.parents[1] / "defaults" / "main.yml") or {}
        options.update(
            {name: {**spec, "default": defaults[name]} if name in defaults else spec for name, spec in specs.items()}
        )
    return options


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def bad_input(name: str, what: str, fix: str) -> FirstlightError:
    """The error for one variable."""
    return FirstlightError(what, where=name, fix=fix, kind="bad-input")


def _mistyped(kind: str, value: Any) -> bool:
    """Whether Ansible would take the value only by turning it into something that nobody meant."""
    if isinstance(value, bool):
        return kind not in {"bool", "raw"}
    if kind == "int" and isinstance(value, str):
        return not _WHOLE.fullmatch(value)  # "1e999999999" would take hours and all memory to become an integer
    return isinstance(value, (dict, list, tuple)) and kind in {"str", "path", "int", "float", "bool"}


def _stripped(entry: Any) -> Any:
    return entry.strip() if isinstance(entry, str) else entry


def typed(name: str, option: dict[str, Any], value: Any) -> Any:
    """The value in the type that its argument spec asks for; None for a variable that may be absent and is.

    Raises:
        FirstlightError: it is missing, or of another type.
    """
    if value is None:
        if not option.get("required") and option.get("default") is None:
            return None
        raise bad_input(name, "it has no value.", f"set {name} in the inventory; {option.get('description', '')}")
    kind, elements = option.get("type", "str"), option.get("elements", "raw")
    # Ansible makes a list of text by its commas
    entries = value.split(",") if isinstance(value, str) and kind == "list" else value
    if _mistyped(kind, value) or (
        isinstance(entries, list) and any(_mistyped(elements, _stripped(entry)) for entry in entries)
    ):
        seen = kind if isinstance(value, list) else type(value).__name__
        raise bad_input(
            name,
            f"a value of type {seen} stands where {kind} is asked for.",
            "put text in quotes, and a number in none.",
        )
    try:
        outcome = ArgumentSpecValidator({name: option}).validate({name: value})
    except (ArithmeticError, TypeError, ValueError) as error:
        raise bad_input(name, f"the value is no {kind} ({error}).", f"give a value of type {kind}.") from error
    if outcome.error_messages:
        raise bad_input(
            name,
            outcome.error_messages[0].rstrip(".") + ".",
            "see the variable's description in its role's defaults/main.yml.",
        )
    return outcome.validated_parameters[name]


def controller_files(values: dict[str, Any]) -> dict[str, Any]:
    """Size and time of the files on the controller that variables name."""
    facts: dict[str, Any] = {}
    for name, value in values.items():
        if name.endswith("_controller_path") and value:
            path = Path(str(value)).expanduser()
            facts[name] = [path.stat().st_size, path.stat().st_mtime_ns] if path.is_file() else None
    return facts


class ActionModule(ActionBase):  # type: ignore[misc]  # Ansible ships no types
    """The action behind the task `firstlight.vllm.preflight`."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Judge the variables, then read and judge the host."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        options = role_options(COLLECTION)
        try:
            values = self._values(options, variables)
            check_values(values, options)
        except FirstlightError as error:
            result.update(failed=True, msg=error.message, failure=error.as_dict())
            return result
        secret = {name for name, option in options.items() if option.get("no_log")}
        plain = {name: value for name, value in values.items() if name not in secret}
        # how closely to look is no part of what is to be there
        asked = {name: value for name, value in plain.items() if not name.startswith("preflight_")}
        inputs = digest([asked, controller_files(values), self._code()])
        arguments = {
            **self._task.args,
            "settings": plain,
            "secrets": {name: str(values[name]) for name in secret if values.get(name)},
            "inputs": inputs,
        }
        result.update(
            claiming(
                lambda more: self._execute_module(module_args={**arguments, **more}, task_vars=variables),
                os.getppid(),  # of a worker: ansible-playbook
            )
        )
        return result

    def _values(self, options: dict[str, dict[str, Any]], variables: dict[str, Any]) -> dict[str, Any]:
        """Value of every variable, typed; a default that hangs on a later task's result is left out.

        What was given comes before what is derived from it, so that an error names the variable to correct.
        """
        raw = {name: variables.get(name, option.get("default")) for name, option in options.items()}
        derived = {name for name, text in raw.items() if "{{" in str(text) and text == options[name].get("default")}
        values = {}
        for name in sorted(raw, key=lambda name: name in derived):
            text = raw[name]
            if name not in variables and isinstance(text, str):
                text = trust_as_template(text)  # the collection's own text, which Ansible has not read itself
            try:
                value = self._templar.template(text)
            except AnsibleError as error:
                if isinstance(error, AnsibleUndefinedVariable) and name in derived:
                    continue
                raise bad_input(
                    name, f"the value cannot be computed ({error}).", "correct the expression, or give a plain value."
                ) from error
            values[name] = typed(name, options[name], value)
        return values

    @staticmethod
    def _code() -> str:
        return digest([tree_digest(COLLECTION / part) for part in ("roles", "plugins")])
