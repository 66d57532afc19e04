"""firstlight from Python: ``result = deploy.run(inventory="hosts.yml")``."""

from deploy.errors import (
    AnsibleFailedError,
    ArgumentError,
    DeployError,
    ExtraVarsError,
    InstallationError,
    InventoryError,
    PlaybookError,
)
from deploy.events import Event
from deploy.results import Acceptance, Failure, HostResult, Phase, RunResult
from deploy.runner import run

__all__ = [
    "Acceptance",
    "AnsibleFailedError",
    "ArgumentError",
    "DeployError",
    "Event",
    "ExtraVarsError",
    "Failure",
    "HostResult",
    "InstallationError",
    "InventoryError",
    "Phase",
    "PlaybookError",
    "RunResult",
    "run",
]
