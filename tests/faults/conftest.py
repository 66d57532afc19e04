"""One host for all faults; it is there already (molecule scenario `faults`), and each test leaves it serving."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
from faultlab import Lab


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    made = Lab()
    yield made
    print("\n".join(["", *made.figures]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure comes the end of the host's journal."""
    report = yield
    if report.when == "call" and report.failed:
        made = item.funcargs.get("lab") if isinstance(item, pytest.Function) else None
        if isinstance(made, Lab):
            made.serving = ""
            report.sections.append(
                ("journal of the host", made.exec("journalctl", "--no-pager", "-n", "60", check=False))
            )
    return report
