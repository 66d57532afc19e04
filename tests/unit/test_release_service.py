"""Releases into service and out of it, against a service manager kept in memory with real processes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import release_service
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.host_command import CommandResult
from ansible_collections.firstlight.vllm.plugins.module_utils.release import (
    UNIT,
    Layout,
    Release,
    load_state,
    release_ids,
)
from ansible_collections.firstlight.vllm.plugins.module_utils.release_service import (
    Account,
    commit,
    ensure_account,
    foreign_unit_file,
    prune,
    release_in_force,
    running_release,
    serves,
    stage,
    start,
    withdraw,
)
from support_release import FakeSystemd, layout_in, release_of


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return layout_in(tmp_path)


@pytest.fixture
def systemd(layout: Layout) -> Iterator[FakeSystemd]:
    manager = FakeSystemd(layout)
    yield manager
    manager.stop("vllm.service")


def staged(layout: Layout, number: int = 0, secret: str = "", dropin: str = "") -> Release:
    release = release_of(layout, number)
    stage(layout, release, secrets={"VLLM_API_KEY": secret}, dropin=dropin, check=False)
    return release


def committed(layout: Layout, systemd: FakeSystemd, number: int = 0, keep: int = 3) -> Release:
    release = staged(layout, number)
    start(layout, release, systemd, check=False)
    commit(layout, release, systemd, inputs=f"i{number}", watched=[], report={"n": number}, keep=keep, check=False)
    systemd.calls.clear()
    return release


def test_staging_writes_beside_what_is_in_force(layout: Layout) -> None:
    release = staged(layout, secret="canary-canary-canary")
    assert release_ids(layout) == [release.id]
    assert not layout.unit_file.exists()
    assert stat.S_IMODE(layout.secrets.stat().st_mode) == 0o600
    assert "canary" not in "".join(path.read_text() for path in layout.releases.rglob("*") if path.is_file())


def test_staging_again_changes_nothing_and_check_mode_writes_nothing(layout: Layout) -> None:
    release = release_of(layout)
    told = stage(layout, release, secrets={}, dropin="[Service]\n", check=True)
    assert not layout.config_dir.exists()
    assert stage(layout, release, secrets={}, dropin="[Service]\n", check=False) == told
    assert stage(layout, release, secrets={}, dropin="[Service]\n", check=False) == []


def test_a_drop_in_that_is_no_longer_asked_for_is_taken_away_and_a_sites_own_is_kept(layout: Layout) -> None:
    staged(layout, dropin="[Service]\nMemoryMax=1G\n")
    own = layout.dropin.parent / "override.conf"
    own.write_text("[Service]\n")
    changed = stage(layout, release_of(layout), secrets={}, dropin="", check=False)
    assert changed == [str(layout.dropin)]
    assert not layout.dropin.exists()
    assert own.exists()


def test_an_empty_secret_is_left_out_of_the_file(layout: Layout) -> None:
    staged(layout)
    assert layout.secrets.read_text() == ""


def test_a_started_release_serves_and_is_not_enabled(layout: Layout, systemd: FakeSystemd) -> None:
    release = staged(layout)
    changed, state = start(layout, release, systemd, check=False)
    assert changed
    assert systemd.calls == ["daemon-reload", "reset-failed", "restart"]
    assert running_release(state) == release_in_force(layout) == release.id
    assert serves(layout, release.id, state)
    assert not systemd.enabled
    assert load_state(layout) == {}


def test_starting_what_serves_already_leaves_it_alone(layout: Layout, systemd: FakeSystemd) -> None:
    release = staged(layout)
    _, before = start(layout, release, systemd, check=False)
    systemd.calls.clear()
    changed, after = start(layout, release, systemd, check=False)
    assert not changed
    assert systemd.calls == []
    assert after.main_pid == before.main_pid


def test_check_mode_starts_nothing(layout: Layout, systemd: FakeSystemd) -> None:
    changed, _ = start(layout, staged(layout), systemd, check=True)
    assert changed
    assert systemd.calls == []
    assert not layout.unit_file.exists()


def test_a_masked_unit_is_refused_with_the_way_out(layout: Layout, systemd: FakeSystemd) -> None:
    systemd.masked = True
    with pytest.raises(FirstlightError) as caught:
        start(layout, staged(layout), systemd, check=False)
    assert caught.value.kind == "unit-masked"
    assert "systemctl unmask vllm.service" in caught.value.fix
    assert systemd.calls == []


def later(path: Path) -> None:
    moment = path.stat().st_mtime + 60
    os.utime(path, (moment, moment))


def test_a_new_secret_or_drop_in_needs_a_restart(layout: Layout, systemd: FakeSystemd) -> None:
    release = staged(layout, dropin="[Service]\n")
    for path in (layout.secrets, layout.dropin, layout.dropin.parent):
        start(layout, release, systemd, check=False)
        before = path.stat().st_mtime
        later(path)
        assert not serves(layout, release.id, systemd.show("vllm.service"))
        os.utime(path, (before, before))
        assert serves(layout, release.id, systemd.show("vllm.service"))


def test_another_release_takes_the_place_of_the_one_that_runs(layout: Layout, systemd: FakeSystemd) -> None:
    old = committed(layout, systemd, 0)
    new = staged(layout, 1)
    assert release_in_force(layout) == old.id
    _, state = start(layout, new, systemd, check=False)
    assert running_release(state) == new.id
    assert load_state(layout)["release"] == old.id


def test_only_the_commit_enables_and_records(layout: Layout, systemd: FakeSystemd) -> None:
    release = staged(layout)
    start(layout, release, systemd, check=False)
    changed, removed = commit(
        layout, release, systemd, inputs="i", watched=[], report={"answer": "x"}, keep=3, check=False
    )
    assert changed
    assert removed == []
    assert systemd.enabled
    state = load_state(layout)
    assert (state["inputs"], state["release"], state["previous_release"]) == ("i", release.id, None)
    assert state["report"] == {"answer": "x"}
    assert str(layout.unit_file) in state["files"]


def test_committing_the_same_again_changes_nothing(layout: Layout, systemd: FakeSystemd) -> None:
    release = committed(layout, systemd)
    changed, _ = commit(layout, release, systemd, inputs="i0", watched=[], report={"n": 1}, keep=3, check=False)
    assert not changed
    assert load_state(layout)["report"] == {"n": 1}


def test_check_mode_commits_nothing(layout: Layout, systemd: FakeSystemd) -> None:
    release = staged(layout)
    changed, _ = commit(layout, release, systemd, inputs="i", watched=[], report={}, keep=3, check=True)
    assert changed
    assert not systemd.enabled
    assert load_state(layout) == {}


def test_a_withdrawn_first_release_leaves_no_unit(layout: Layout, systemd: FakeSystemd) -> None:
    start(layout, staged(layout), systemd, check=False)
    withdraw(layout, systemd)
    assert systemd.child is None
    assert not layout.unit_file.exists()
    assert not systemd.enabled
    systemd.calls.clear()
    withdraw(layout, systemd)
    assert systemd.calls == []


def test_a_withdrawn_upgrade_puts_the_committed_unit_file_back_and_stays_enabled(
    layout: Layout, systemd: FakeSystemd
) -> None:
    old = committed(layout, systemd, 0)
    start(layout, staged(layout, 1), systemd, check=False)
    withdraw(layout, systemd)
    assert systemd.child is None
    assert systemd.enabled
    assert layout.unit_file.read_text() == old.files[UNIT]
    assert systemd.calls[-3:] == ["stop", "daemon-reload", "reset-failed"]


def test_a_start_that_fails_can_be_withdrawn(layout: Layout, systemd: FakeSystemd) -> None:
    old = committed(layout, systemd, 0)
    systemd.refuses_to_start = True
    with pytest.raises(FirstlightError):
        start(layout, staged(layout, 1), systemd, check=False)
    withdraw(layout, systemd)
    assert release_in_force(layout) == old.id


def test_a_committed_release_that_serves_is_not_stopped(layout: Layout, systemd: FakeSystemd) -> None:
    old = committed(layout, systemd, 0)
    staged(layout, 1, secret="another-key-another-key")
    later(layout.secrets)
    withdraw(layout, systemd)
    assert systemd.calls == []
    assert systemd.child is not None
    # nor would the next run restart it: the key is back, with the time that it had
    assert serves(layout, old.id, systemd.show("vllm.service"))


def test_a_unit_that_firstlight_did_not_write_is_never_touched(layout: Layout, systemd: FakeSystemd) -> None:
    layout.unit_dir.mkdir()
    layout.unit_file.write_text("[Service]\nExecStart=/usr/bin/vllm serve\n")
    systemd.run_unit_file()
    assert foreign_unit_file(layout) == layout.unit_file
    withdraw(layout, systemd)
    assert systemd.calls == []
    assert systemd.child is not None
    assert layout.unit_file.exists()


def test_a_distributions_unit_of_the_same_name_is_told(layout: Layout, tmp_path: Path) -> None:
    vendor = tmp_path / "vendor"
    vendor.mkdir()
    assert foreign_unit_file(layout, [vendor]) is None
    (vendor / "vllm.service").write_text("[Service]\n")
    assert foreign_unit_file(layout, [vendor]) == vendor / "vllm.service"


def test_firstlights_own_unit_is_not_foreign(layout: Layout, systemd: FakeSystemd) -> None:
    start(layout, staged(layout), systemd, check=False)
    assert foreign_unit_file(layout, []) is None


def aged(layout: Layout, release: Release, moment: int) -> None:
    os.utime(layout.releases / release.id, (moment, moment))


def test_pruning_keeps_the_newest_and_those_to_protect(layout: Layout) -> None:
    releases = [staged(layout, number) for number in range(5)]
    for number, release in enumerate(releases):
        aged(layout, release, 1000 + number)
    ids = [release.id for release in releases]
    doomed = prune(layout, keep=2, protect={ids[0], None}, check=True)
    assert doomed == ids[1:3]
    assert release_ids(layout) == ids
    assert prune(layout, keep=2, protect={ids[0], None}, check=False) == doomed
    assert release_ids(layout) == [ids[0], *ids[3:]]


def test_a_commit_keeps_the_previous_release_even_when_one_is_to_be_kept(layout: Layout, systemd: FakeSystemd) -> None:
    ids = []
    for number in range(4):
        ids.append(committed(layout, systemd, number, keep=1).id)
        aged(layout, release_of(layout, number), 1000 + number)
    assert release_ids(layout) == ids[2:]
    assert load_state(layout)["previous_release"] == ids[2]


def test_a_missing_account_is_made_and_joins_the_gpu_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(argv: Sequence[str], timeout_s: float) -> CommandResult:
        asked.append(list(argv))
        return CommandResult(0, "", "")

    account = Account("firstlight-none", "firstlight-none", gpu_groups=("root", "firstlight-no-group"))
    assert ensure_account(account, "/var/lib/vllm", check=True, run=run)
    assert asked == []
    assert ensure_account(account, "/var/lib/vllm", check=False, run=run)
    assert [argv[0] for argv in asked] == ["groupadd", "useradd", "usermod"]
    assert asked[2][-2:] == ["root", "firstlight-none"]
    assert "--no-create-home" in asked[1]


def test_an_account_that_cannot_be_made_is_told() -> None:
    def run(argv: Sequence[str], timeout_s: float) -> CommandResult:
        return CommandResult(1, "", "groupadd: cannot lock /etc/group\n")

    with pytest.raises(FirstlightError, match="cannot lock /etc/group"):
        ensure_account(Account("firstlight-none", "firstlight-none"), "/", check=False, run=run)


def test_an_account_that_is_there_changes_nothing() -> None:
    account = Account("root", "root", gpu_groups=())
    assert not ensure_account(account, "/root", check=False, run=release_service.run_command)


def tried(
    layout: Layout, systemd: FakeSystemd, secret: str = "new", dropin: str = "[Service]\nMemoryMax=1G\n"
) -> Release:
    """A further release with a key and a drop-in of its own, started and not committed."""
    release = staged(layout, 1, secret, dropin)
    start(layout, release, systemd, check=False)
    return release


def test_a_try_that_does_not_pass_leaves_the_key_and_the_drop_in_of_the_deployment_in_force(
    layout: Layout, systemd: FakeSystemd
) -> None:
    first = staged(layout, 0, secret="old")
    start(layout, first, systemd, check=False)
    commit(layout, first, systemd, inputs="i", watched=[], report={}, keep=3, check=False)
    times = (layout.secrets.stat().st_mtime_ns, layout.dropin.parent.exists())
    tried(layout, systemd)
    tried(layout, systemd, secret="newer")
    assert "newer" in layout.secrets.read_text()
    assert stat.S_IMODE(layout.before.stat().st_mode) == 0o600
    withdraw(layout, systemd)
    assert layout.secrets.read_text() == 'VLLM_API_KEY="old"\n'
    assert (layout.secrets.stat().st_mtime_ns, layout.dropin.parent.exists()) == times
    assert not layout.before.exists()


def test_a_drop_in_that_a_try_took_away_comes_back(layout: Layout, systemd: FakeSystemd) -> None:
    first = staged(layout, 0, dropin="[Service]\nMemoryMax=2G\n")
    start(layout, first, systemd, check=False)
    commit(layout, first, systemd, inputs="i", watched=[], report={}, keep=3, check=False)
    tried(layout, systemd, dropin="")
    assert not layout.dropin.exists()
    withdraw(layout, systemd)
    assert "2G" in layout.dropin.read_text()


def test_what_a_try_brought_stays_once_it_is_committed(layout: Layout, systemd: FakeSystemd) -> None:
    committed(layout, systemd)
    second = tried(layout, systemd)
    commit(layout, second, systemd, inputs="i", watched=[], report={}, keep=3, check=False)
    assert not layout.before.exists()
    withdraw(layout, systemd)
    assert "new" in layout.secrets.read_text()
    assert "1G" in layout.dropin.read_text()


def test_what_was_kept_for_another_deployment_is_not_put_back(layout: Layout, systemd: FakeSystemd) -> None:
    committed(layout, systemd)
    second = tried(layout, systemd)
    kept = layout.before.read_text()
    commit(layout, second, systemd, inputs="i", watched=[], report={}, keep=3, check=False)
    layout.before.write_text(kept)  # as when the power is lost in the middle of the commit
    withdraw(layout, systemd)
    assert "new" in layout.secrets.read_text()
