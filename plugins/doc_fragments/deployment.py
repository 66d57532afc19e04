# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Options by which modules find a deployment on its host and its server."""

from __future__ import annotations


class ModuleDocFragment:
    """Each group of options that some modules share and others do without."""

    DOCUMENTATION = r"""
options:
  config_dir:
    description: Folder of all units' configuration.
    type: path
    default: /etc/firstlight
"""

    STATE_DIR = r"""
options:
  state_dir:
    description: Folder of all units' state.
    type: path
    default: /var/lib/firstlight
"""

    UNIT = r"""
options:
  unit:
    description: Name of the systemd unit, without C(.service).
    type: str
    default: vllm
"""

    API_KEY = r"""
options:
  api_key:
    description: Key for C(/v1/models).
    type: str
    default: ''
"""

    CLAIM = r"""
options:
  run:
    description: Who runs this; filled in by the action.
    type: dict
    default: {}
  gone:
    description: Runs that the controller knows to have ended; filled in by the action.
    type: list
    elements: str
    default: []
"""
