# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Gathers and judges all variables of all roles on the controller, then runs the module `preflight` once.

Every role checks its own arguments too, but only when its turn comes; by then earlier roles have changed the host.
Here all of them are checked before the host is touched at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleError, AnsibleUndefinedVariable
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible_collections.firstlight.vllm.plugins.module_utils.cache_key import digest
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.inputs import check_values, tree_digest

COLLECTION = Path(__file__).resolve().parents[2]


def role_options(collection: Path) -> dict[str, dict[str, Any]]:
    """Variable name to its argument spec, of every role's main entry point."""
    options: dict[str, dict[str, Any]] = {}
    for path in sorted(collection.glob("roles/*/meta/argument_specs.yml")):
        specs = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]
        options.update(specs["main"].get("options") or {})
    return options


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
            self._validate(options, values)
            check_values(values)
        except FirstlightError as error:
            result.update(failed=True, msg=error.message, failure=error.as_dict())
            return result
        secret = {name for name, option in options.items() if option.get("no_log")}
        plain = {name: value for name, value in values.items() if name not in secret}
        inputs = digest([plain, controller_files(values), self._code()], length=64)
        result.update(
            self._execute_module(
                module_args={
                    **self._task.args,
                    "settings": plain,
                    "secrets": {name: str(values[name]) for name in secret if values.get(name)},
                    "inputs": inputs,
                },
                task_vars=variables,
            )
        )
        return result

    def _values(self, options: dict[str, dict[str, Any]], variables: dict[str, Any]) -> dict[str, Any]:
        """Value of every variable; one that hangs on a later task's result is left out."""
        values = {}
        for name, option in options.items():
            raw = variables.get(name, option.get("default"))
            try:
                values[name] = self._templar.template(raw)
            except AnsibleUndefinedVariable:
                continue
            except AnsibleError as error:
                raise FirstlightError(
                    f"the value cannot be computed ({error}).",
                    where=name,
                    fix="correct the expression, or give a plain value.",
                    kind="bad-input",
                ) from error
        return values

    @staticmethod
    def _validate(options: dict[str, dict[str, Any]], values: dict[str, Any]) -> None:
        known = {name: options[name] for name in values}
        outcome = ArgumentSpecValidator(known).validate(values)
        if outcome.error_messages:
            message = outcome.error_messages[0]
            name = next((name for name in sorted(known, key=len, reverse=True) if name in message), "variables")
            raise FirstlightError(
                message.rstrip(".") + ".",
                where=name,
                fix="see the variable's description in its role's defaults/main.yml.",
                kind="bad-input",
            )
        values.update({name: outcome.validated_parameters[name] for name in values})

    @staticmethod
    def _code() -> str:
        return digest([tree_digest(COLLECTION / part) for part in ("roles", "plugins")], length=64)
