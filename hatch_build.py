"""Puts the collection into the wheel where ansible-core looks for collections.

The repository's root is the collection. A wheel carries it as ``ansible_collections/firstlight/vllm``
(namespace folders, no ``__init__.py``), so that ``pip install`` is all that ``ansible-playbook
firstlight.vllm.site`` needs. An editable install finds the same tree through ``.collections``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COLLECTION = ("galaxy.yml", "meta", "playbooks", "plugins", "roles", "README.md", "LICENSE")


class CollectionHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the collection's folders to a standard wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Map each part of the collection to its place in the wheel; an editable build needs none."""
        if version == "standard":
            build_data["force_include"].update(
                {str(Path(self.root, part)): f"ansible_collections/firstlight/vllm/{part}" for part in COLLECTION}
            )
