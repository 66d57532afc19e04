"""What is quick enough for `make unit`, and how property tests are run."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Machines that run tests are often busy with others' work: how long one example takes there says nothing about the
# code. Cost has tests of its own (test_diagnose_cost, tests/bench).
settings.register_profile("firstlight", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
settings.load_profile("firstlight")

# Files that start real processes, run ansible-playbook or walk large corpora: together minutes. `make test` runs them.
_TAKE_LONG = frozenset(
    {
        "test_canary.py",
        "test_deploy_run.py",
        "test_diagnose_cost.py",
        "test_drafter_properties.py",
        "test_hub_fetch.py",
        "test_inputs.py",
        "test_preflight_action.py",
        "test_readiness.py",
        "test_sandbox.py",
        "test_sandbox_hostile_answers.py",
        "test_server_restore.py",
        "test_server_stop.py",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of those files as slow."""
    for item in items:
        if item.path.name in _TAKE_LONG:
            item.add_marker(pytest.mark.slow)
