#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: proxy
short_description: Serve one site with nginx and TLS in front of vLLM
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - Installs the distribution's nginx without its default site, makes a self-signed certificate when none is given,
    writes the site and brings nginx to serve it.
  - A configuration that nginx refuses is taken back before anything is reloaded.
  - A proxy that anybody could use is refused.
options:
  state:
    description: Whether the site is to be there. V(absent) leaves nginx and its other sites alone.
    type: str
    choices: [present, absent]
    default: present
  site:
    description: Text of nginx's configuration of the site.
    type: str
    default: ''
  settings:
    description: The role's variables that the site was made of, which are judged before anything changes.
    type: dict
    default: {}
  api_key:
    description: Whether the server asks its clients for a key.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Can run in check mode and tell what would change, on a host without nginx as well.
  diff_mode:
    support: full
    description: Shows the site's configuration before and after.
"""

EXAMPLES = r"""
- name: Put a proxy in front of vLLM
  firstlight.vllm.proxy:
    site: "{{ lookup('ansible.builtin.template', 'site.conf.j2') }}"
    settings:
      proxy_address: 0.0.0.0
      proxy_port: 443
      proxy_server_name: _
      proxy_upstream: 127.0.0.1:30000
    api_key: true
"""

RETURN = r"""
changes:
  description: What was, or in check mode would be, done.
  type: list
  elements: str
  returned: success
  sample: [install nginx-light, write the site, start nginx]
failure:
  description: What is wrong, where, why, and how to mend it.
  type: dict
  returned: failure
  sample:
    {kind: disk-full, what: only 3 GiB are free., where: /opt/firstlight, why: 12 GiB are needed., fix: free 9 GiB.}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.inputs import check_values
from ansible_collections.firstlight.vllm.plugins.module_utils.inputs_proxy import check_openness
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import finish, rewritten
from ansible_collections.firstlight.vllm.plugins.module_utils.proxy_host import ProxyHost, Site

ARGUMENTS = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "site": {"type": "str", "default": ""},
    "settings": {"type": "dict", "default": {}},
    "api_key": {"type": "bool", "default": False},
}


def run(params: dict[str, Any], host: ProxyHost, *, check: bool) -> dict[str, Any]:
    """Do what the state asks for; returns the module's result.

    Raises:
        FirstlightError: a variable is at fault, or the host cannot do it.
    """
    before = host.current()
    if params["state"] == "absent":
        changes, after = host.remove(check=check), ""
    else:
        settings = params["settings"]
        check_values(settings)
        check_openness(
            address=settings["proxy_address"],
            api_key=params["api_key"],
            api_allow=settings.get("proxy_api_allow") or [],
        )
        site = Site(
            text=params["site"],
            address=settings["proxy_address"],
            port=int(settings["proxy_port"]),
            server_name=settings.get("proxy_server_name", "_"),
            certificate=settings.get("proxy_certificate", ""),
            certificate_key=settings.get("proxy_certificate_key", ""),
        )
        changes, after = host.ensure(site, check=check), site.text
    return {"changed": bool(changes), "changes": changes, "diff": rewritten(str(host.site_file), before, after)}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec=ARGUMENTS, supports_check_mode=True, required_if=[("state", "present", ["site", "settings"])]
    )
    finish(module, lambda: run(module.params, ProxyHost(), check=module.check_mode), host_faults=(OSError,))


if __name__ == "__main__":
    main()
