# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Runs the module `ready` slice by slice, so that a start of minutes is seen getting on.

A host that cannot be reached for a while does not fail the wait: the start goes on over there, and the next slice
picks it up. Beyond the grace the host counts as unreachable, as for any other task.
"""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()
_RETRY_S = 2.0


class ActionModule(ActionBase):  # type: ignore[misc]  # Ansible ships no types
    """The action behind the task `firstlight.vllm.ready`."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Watch until the server is ready or dead."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        host = (task_vars or {}).get("inventory_hostname", "?")
        arguments = dict(self._task.args)
        grace_s = float(arguments.get("unreachable_grace_s", 120))
        began, shown = time.monotonic(), ""
        lost: float | None = None
        while True:
            try:
                answer = self._execute_module(module_args=arguments, task_vars=task_vars)
            except AnsibleConnectionFailure as error:
                now = time.monotonic()
                lost = now if lost is None else lost
                if now - lost > grace_s:
                    raise
                self._say(host, f"unreachable for {now - lost:.0f} s; the start goes on there ({error})")
                self._connection.reset()
                time.sleep(_RETRY_S)
                continue
            lost = None
            watch = answer.get("watch") or {}
            if answer.get("failed") or answer.get("ready") or not watch:
                result.update(answer)
                return result
            arguments["watch"] = watch
            note = watch.get("note") or watch.get("state", "")
            elapsed = f"{time.monotonic() - began:.0f} s"
            if note != shown:
                self._say(host, f"{note} ({elapsed})")
            shown = note

    @staticmethod
    def _say(host: str, text: str) -> None:
        # one fixed form, which the Python wrapper reads as live progress
        display.display(f"[{host}] firstlight: {text}")
