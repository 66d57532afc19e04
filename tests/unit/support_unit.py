"""Renders the server's unit file as the role would, without Ansible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "vllm_server"


def unit_text(**overrides: Any) -> str:
    """Text of the unit file with the role's defaults."""
    values = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
    values |= {
        "vllm_install_platform": "cuda",
        # what the default's expression gives for a server bound to loopback
        "vllm_server_ip_allow": ["127.0.0.0/8", "::1"],
        "vllm_install_result": {"path": "/opt/firstlight/venvs/0.20.1-abc"},
        **overrides,
    }
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    return environment.from_string((ROLE / "templates" / "unit.service.j2").read_text()).render(values)
