"""How every module ends: with the result of its work and what it warns of, or with what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from .errors import FirstlightError
from .run_claim import seen


class Module(Protocol):
    """What is used of Ansible's own class."""

    def warn(self, warning: str) -> None:
        """Tell a warning."""

    def exit_json(self, **result: Any) -> NoReturn:
        """End well."""

    def fail_json(self, msg: str, **result: Any) -> NoReturn:
        """End badly."""


def finish(
    module: Module, work: Callable[[], Mapping[str, Any]], *, host_faults: tuple[type[Exception], ...] = ()
) -> NoReturn:
    """Do a module's work and end the module.

    Args:
        module: the module.
        work: gives its result. Texts under ``warnings`` are told and left out; a result that holds ``failure`` is
            that of a failure, with its ``msg``.
        host_faults: exceptions by which the host refuses a file, beside those that firstlight explains itself.
    """
    try:
        result = dict(work())
    except FirstlightError as error:
        module.fail_json(msg=error.message, failure=error.as_dict())
    except host_faults as error:
        module.fail_json(msg=f"host: {error}. Fix: see that root may write there and that the disk is not full.")
    finally:
        seen()
    for text in result.pop("warnings", ()):
        module.warn(text)
    if "failure" in result:
        module.fail_json(**result)
    module.exit_json(**result)


def rewritten(path: str, before: str, after: str) -> dict[str, str]:
    """The diff of one file."""
    return {"before_header": path, "after_header": path, "before": before, "after": after}


def appeared(text: str, *, changed: bool) -> dict[str, str]:
    """The diff of something that is there afterwards, and was before unless that is the change."""
    return {"before": "" if changed else text, "after": text}
