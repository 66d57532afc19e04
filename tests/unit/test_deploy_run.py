"""`deploy.run` against a real ansible-playbook, with a small collection of its own on this machine."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.processes import wait_until
from support_deploy import LOCAL, build_collection, hosts, running

import deploy
from deploy import environment, runner

CANARY = "canary-7c1f"
# pytest's own threads, and those of these tests, are idle while a process is started
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def _collection(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = build_collection(tmp_path_factory.mktemp("collections"))
    patch = pytest.MonkeyPatch()
    patch.setattr(environment, "collections_root", lambda: root)
    patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs' private folders come to lie."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(runner, "_MEMORY", memory)
    return memory


def read_all(folder: Path) -> str:
    """Everything that a file under the folder holds; pipes are not files."""
    texts = []
    for path in folder.rglob("*"):
        try:
            if stat.S_ISREG(path.lstat().st_mode):
                texts.append(path.read_text(errors="replace"))
        except OSError:
            continue  # gone meanwhile
    return "\n".join(texts)


def test_a_report_becomes_a_typed_result_and_nothing_of_the_callers_process_changes(memory: Path) -> None:
    cwd, env, handler = Path.cwd(), dict(os.environ), signal.getsignal(signal.SIGINT)
    result = deploy.run(inventory=hosts("h1"), on_event=lambda event: None)
    assert result.ok
    assert result.status == "successful"
    host = result.hosts["h1"]
    assert host.answer == "def is_prime(n): ..."
    assert host.verdict == "right"
    assert host.acceptance == deploy.Acceptance(10, 150, 100, 0.667, 11.0, (10, 9))
    assert host.phases == (deploy.Phase("imports", 2.0), deploy.Phase("load weights", 1.5))
    assert host.ready_s == sum(phase.seconds for phase in host.phases)
    assert (host.downtime_s, host.converged, host.release, host.model) == (4.0, False, "r1", "m")
    assert host.warnings == ("the window is smaller than max_model_len",)
    assert host.failure is None
    assert json.loads(json.dumps(result.as_dict()))["hosts"]["h1"]["acceptance"]["length"] == 11.0
    assert (Path.cwd(), dict(os.environ), signal.getsignal(signal.SIGINT)) == (cwd, env, handler)
    assert list(memory.iterdir()) == []


def test_a_failure_that_was_rescued_before_the_run_ended_is_the_one_reported() -> None:
    result = deploy.run(inventory=hosts("h1"), playbook="rescued")
    assert not result.ok
    assert result.status == "failed"
    failure = result.hosts["h1"].failure
    assert failure is not None
    assert (failure.id, failure.cause, failure.remedy) == (
        "token-budget",
        "the token budget is -24",
        "Set it to 256.",
    )
    assert failure.task == "Wait until ready"
    assert failure.outcome == "The old server answers again."


@pytest.mark.slow
def test_a_failure_that_was_mended_is_none() -> None:
    result = deploy.run(inventory=hosts("h1"), playbook="mended")
    assert result.ok
    assert result.hosts["h1"].failure is None


@pytest.mark.slow
def test_it_works_from_a_thread_and_twice_at_once() -> None:
    results: list[deploy.RunResult] = []
    threads = [
        threading.Thread(target=lambda name=name: results.append(deploy.run(inventory=hosts(name))))
        for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for result in results for name in result.hosts) == ["a", "b"]
    assert all(result.ok for result in results)


@pytest.mark.slow
def test_an_unreachable_host_is_told_apart_from_a_failed_one() -> None:
    inventory = hosts("near")
    inventory["all"]["hosts"]["far"] = {  # type: ignore[index]
        "ansible_host": "127.0.0.1",
        "ansible_port": 1,
        "ansible_connection": "ssh",
    }
    result = deploy.run(inventory=inventory, playbook="mended")
    assert result.status == "unreachable"
    assert result.hosts["near"].ok
    far = result.hosts["far"]
    assert far.unreachable
    assert far.failure is not None
    assert far.failure.id == "unreachable"


def test_secrets_are_in_no_file_and_no_argument_during_the_run_nor_after(
    monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    seen: list[str] = []
    modes: set[int] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for folder in memory.iterdir():
                try:
                    modes.add(stat.S_IMODE(folder.stat().st_mode))
                except OSError:
                    continue
                seen.append(read_all(folder))
            for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.append(cmdline.read_bytes().decode(errors="replace"))
                except OSError:
                    continue
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = deploy.run(
            inventory=hosts("h1", inventory_secret=CANARY),
            extravars=[{"secret": CANARY}, {"more": "x" * 200_000}],
            playbook="secret",
        )
    finally:
        done.set()
        watcher.join()
    assert result.ok
    assert len(seen) > 20
    assert any("ansible-playbook" in text for text in seen), "the watcher has seen the run"
    assert modes == {0o700}
    assert [text[:200] for text in seen if CANARY in text] == []
    assert CANARY not in json.dumps(result.as_dict())
    assert list(memory.iterdir()) == []


@pytest.mark.slow
def test_the_time_limit_ends_the_run_and_says_where_it_was() -> None:
    before = time.monotonic()
    result = deploy.run(inventory=hosts("h1"), playbook="slow", timeout=6)
    assert time.monotonic() - before < 20
    assert result.status == "timeout"
    assert not result.ok
    failure = result.hosts["h1"].failure
    assert failure is not None
    assert failure.id == "timeout"
    assert "'Sleep'" in failure.cause


def started(action: Callable[[], object]) -> Callable[[deploy.Event], None]:
    """A callback that acts once the long task runs."""
    return lambda event: None if event.kind != "start" else action()  # type: ignore[func-returns-value, return-value]


@pytest.mark.slow
def test_setting_the_event_cancels_the_run() -> None:
    cancel = threading.Event()
    result = deploy.run(inventory=hosts("h1"), playbook="slow", on_event=started(cancel.set), cancel=cancel)
    assert result.status == "canceled"
    assert running("playbooks/slow.yml") == []


@pytest.mark.slow
def test_an_interrupt_is_raised_after_ansible_has_ended() -> None:
    # a program that a shell put into the background is started deaf to interrupts
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        deploy.run(
            inventory=hosts("h1"),
            playbook="slow",
            on_event=started(lambda: os.kill(os.getpid(), signal.SIGINT)),
        )
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, before)
    assert running("playbooks/slow.yml") == []


@pytest.mark.slow
def test_what_the_callback_raises_ends_the_run_and_comes_out() -> None:
    def fail() -> None:
        raise SystemExit(7)

    with pytest.raises(SystemExit, match="7"):
        deploy.run(inventory=hosts("h1"), playbook="slow", on_event=started(fail))
    assert running("playbooks/slow.yml") == []


def test_an_exit_in_ansible_runner_does_not_end_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(**_kwargs: object) -> None:
        raise SystemExit(1)

    monkeypatch.setattr("ansible_runner.interface.init_runner", leave)
    with pytest.raises(deploy.DeployError, match="ansible-runner could not run the playbook"):
        deploy.run(inventory=hosts("h1"))


@pytest.mark.slow
def test_a_limit_that_matches_no_host_is_an_inventory_error() -> None:
    with pytest.raises(deploy.InventoryError, match="--limit=nowhere has no host for 'site'"):
        deploy.run(inventory=hosts("h1"), limit="nowhere")


@pytest.mark.slow
def test_an_inventory_file_and_a_variables_file_are_read_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(json.dumps({"all": {"hosts": {"h1": {**LOCAL, "inventory_secret": "b"}}}}))
    (tmp_path / "vars.yml").write_text("secret: a\n")
    result = deploy.run(
        inventory=tmp_path / "hosts.yml", extravars=str(tmp_path / "vars.yml"), playbook="secret", limit="h1"
    )
    assert result.ok


CONTROLLER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import deploy
from deploy import environment, runner
from support_deploy import hosts
environment.collections_root = lambda: Path(sys.argv[2])
runner._MEMORY = Path(sys.argv[3])
deploy.run(inventory=hosts("h1"), playbook="slow", on_event=lambda event: print(event.kind, flush=True))
"""


@pytest.mark.slow
def test_ansible_ends_when_the_controller_is_killed(memory: Path, tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-c",
        CONTROLLER,
        str(Path(__file__).parent),
        str(environment.collections_root()),
        str(memory),
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        assert any(line.strip() == "start" for line in controller.stdout)
        # a worker that is being forked at that moment would miss the signal, and do its one task
        assert wait_until(lambda: bool(running("sleep 60.125")), 30)
        controller.kill()
    assert wait_until(lambda: not running("playbooks/slow.yml"), 10), running("playbooks/slow.yml")
