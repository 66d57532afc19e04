# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Runs the module `server_restore` and says for whom; past a run that was cut off on this controller.

A way back on request is most urgent just then, and must not wait for such a run's claim to lapse.
"""

from __future__ import annotations

import os
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.firstlight.vllm.plugins.module_utils.run_identity import claiming


class ActionModule(ActionBase):  # type: ignore[misc]  # Ansible ships no types
    """The action behind the task `firstlight.vllm.server_restore`."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the module."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        result.update(
            claiming(
                lambda more: self._execute_module(module_args={**arguments, **more}, task_vars=task_vars),
                os.getppid(),  # of a worker: ansible-playbook
            )
        )
        return result
