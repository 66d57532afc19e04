"""How modules end: what Ansible is told of a result, a warning and a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import appeared, finish


class Ended(Exception):  # noqa: N818 - it is no error
    pass


class FakeModule:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.good: dict[str, Any] | None = None
        self.bad: dict[str, Any] | None = None

    def warn(self, warning: str) -> None:
        self.warnings.append(warning)

    def exit_json(self, **result: Any) -> NoReturn:
        self.good = result
        raise Ended

    def fail_json(self, msg: str, **result: Any) -> NoReturn:
        self.bad = {"msg": msg, **result}
        raise Ended


def ended(work: Callable[[], dict[str, Any]], **arguments: Any) -> FakeModule:
    module = FakeModule()
    with pytest.raises(Ended):
        finish(module, work, **arguments)
    return module


def raising(error: Exception) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        raise error

    return work


def test_a_result_is_told_and_its_warnings_are_told_as_such() -> None:
    module = ended(lambda: {"changed": True, "warnings": ["mind this"]})
    assert (module.good, module.bad, module.warnings) == ({"changed": True}, None, ["mind this"])
    assert ended(lambda: {"changed": False}).good == {"changed": False}


def test_a_fault_is_told_in_words_and_in_its_parts() -> None:
    error = FirstlightError("it is full.", where="/opt", fix="free 9 GiB.", kind="disk-full")
    module = ended(raising(error))
    assert module.bad == {"msg": "/opt: it is full. Fix: free 9 GiB.", "failure": error.as_dict()}
    assert module.good is None


def test_a_result_with_a_failure_fails_with_all_that_it_tells() -> None:
    told = {"msg": "no.", "failure": {"kind": "x"}, "problems": [1]}
    module = ended(lambda: {**told, "warnings": ["mind this"]})
    assert (module.good, module.bad, module.warnings) == (None, told, ["mind this"])


def test_a_host_that_refuses_a_file_is_told_with_the_way_out_where_the_module_asks_for_it() -> None:
    refused = PermissionError(13, "Permission denied", "/etc/firstlight")
    module = ended(raising(refused), host_faults=(OSError,))
    assert module.bad is not None
    assert "/etc/firstlight" in module.bad["msg"]
    assert "Fix: see that root may write there" in module.bad["msg"]
    with pytest.raises(PermissionError):
        finish(FakeModule(), raising(refused))


def test_what_was_there_is_in_the_diff_on_both_sides() -> None:
    assert appeared("x\n", changed=True) == {"before": "", "after": "x\n"}
    assert appeared("x\n", changed=False) == {"before": "x\n", "after": "x\n"}
