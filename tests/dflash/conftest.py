"""The hosts are there already (molecule scenario `dflash`); one serves at a time, for the machine's sake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dflashlab import ROOT, Host


@pytest.fixture(autouse=True, scope="session")
def _settings() -> Iterator[None]:
    """Ansible with the checkout's own settings, whatever started the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("ANSIBLE_CONFIG", str(ROOT / "ansible.cfg"))
        patch.chdir(ROOT)
        yield


@pytest.fixture(params=["dflash", "qwen35"], scope="module")
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    print("\n".join(["", *made.figures]))
    made.exec("systemctl", "stop", "vllm.service", check=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """With a failure comes the end of the host's journal."""
    report = yield
    if report.when == "call" and report.failed:
        made = item.funcargs.get("host") if isinstance(item, pytest.Function) else None
        if isinstance(made, Host):
            journal = made.exec("journalctl", "--no-pager", "-n", "80", check=False)
            report.sections.append((f"journal of {made.name}", journal))
    return report
