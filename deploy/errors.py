"""What `deploy.run` raises when it cannot begin; a deployment that fails is a result, not an exception."""

from __future__ import annotations


class DeployError(Exception):
    """Base of every exception that `deploy` raises on purpose.

    Args:
        what: one sentence, what is wrong, with the value seen.
        fix: one imperative sentence, how to mend it.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        self.what, self.fix = what, fix
        super().__init__(f"{what} Fix: {fix}" if fix else what)


class ArgumentError(DeployError, ValueError):
    """An argument has a value that no run could use."""


class InventoryError(ArgumentError):
    """The inventory is missing, is not an inventory, or holds no host for this run."""


class ExtraVarsError(ArgumentError):
    """The extra variables are missing, are not JSON-able, or have names that are none."""


class PlaybookError(ArgumentError):
    """There is no such playbook verb."""


class InstallationError(DeployError):
    """A part of firstlight itself, or Ansible, is not where it should be."""


class AnsibleFailedError(DeployError):
    """ansible-playbook ended before it reached any host.

    Args:
        what: one sentence with the last lines that ansible-playbook wrote.
        exit_status: that of ansible-playbook; None when it could not be run.
    """

    def __init__(self, what: str, fix: str = "", exit_status: int | None = None) -> None:
        super().__init__(what, fix)
        self.exit_status = exit_status
