"""`deploy.run`: one playbook through ansible-runner, to a typed result.

What ansible-runner would do by itself and must not: write variables, the environment and the output to disk,
turn host key checking off, leave signal handlers behind, and kill ansible-playbook without a warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy import environment
from deploy import launch as launcher
from deploy.arguments import ExtraVars, Inventory, Plan, plan
from deploy.collect import Collector
from deploy.errors import AnsibleFailedError, DeployError, InventoryError
from deploy.events import Event
from deploy.feeds import Drain, Feed
from deploy.leftovers import MARK, kill_marked
from deploy.results import HostResult, RunResult, Status

OnEvent = Callable[[Event], object]

_TICK_S = 0.2  # how often a running playbook is looked at
_GRACE_S = 3.0  # from asking ansible-playbook to end until it is killed
_IDENT = "run"
_MEMORY = Path("/dev/shm")  # noqa: S108 - only a private folder is made there


def run(
    *,
    inventory: Inventory = None,
    extravars: ExtraVars = None,
    limit: str | None = None,
    check: bool = False,
    diff: bool = False,
    playbook: str = "site",
    on_event: OnEvent | None = None,
    on_tick: Callable[[], object] | None = None,
    timeout: float | None = None,
    verbosity: int = 0,
    forks: int | None = None,
    cancel: threading.Event | None = None,
) -> RunResult:
    """Run one of firstlight's playbooks and return what became of each host.

    A deployment that fails is a result whose ``ok`` is false. An exception means that no host was touched, or
    that the caller's own callback raised. May be called from any thread, and as often as wanted; the working
    folder, the environment and the signal handlers of the caller are as before.

    Args:
        inventory: path or paths of an inventory, ``"host1,host2"``, the inventory itself as a mapping or as
            YAML text, or None for Ansible's own default.
        extravars: variables that win over all others: a mapping, the path of a YAML file (may be encrypted by
            ansible-vault), or several of both, the last one winning. Mappings never touch a disk.
        limit: hosts or pattern to keep to.
        check: say what would change, and change nothing.
        diff: return the differences of changed files in the events' results.
        playbook: the verb: ``site``, ``preflight``, ``status``, ``rollback``, ``remove``, …
        on_event: called in this thread for each step.
        on_tick: called in this thread about five times a second, for live displays.
        timeout: seconds after which the run is stopped, with status ``timeout``.
        verbosity: 0 to 5, as many ``-v``.
        forks: how many hosts at a time; None for Ansible's default.
        cancel: setting it, from any thread, stops the run with status ``canceled``.

    Raises:
        ArgumentError: an argument has a value that no run could use.
        InventoryError: the inventory holds no host for this run.
        InstallationError: the collection or ansible-playbook is missing.
        AnsibleFailedError: ansible-playbook ended before it reached any host.
        KeyboardInterrupt: the user interrupted; ansible-playbook has ended by then.
    """
    checked = plan(
        playbook=playbook,
        inventory=inventory,
        extravars=extravars,
        limit=limit,
        check=check,
        diff=diff,
        timeout=timeout,
        verbosity=verbosity,
        forks=forks,
    )
    cwd = Path.cwd()
    env = environment.settings_for(os.environ, cwd)
    watch = _Watch(checked.timeout_s, cancel, on_event, on_tick)
    began = time.monotonic()
    with _private_folder() as folder, _interrupt_sets(watch.interrupted), contextlib.ExitStack() as stack:
        exit_status = _execute(checked, folder, cwd, env, watch, stack)
        if watch.stopped is not None:
            kill_marked(folder.name)
    if watch.error is not None:
        raise watch.error
    if watch.interrupted.is_set():
        raise KeyboardInterrupt
    if watch.stopped is None and not watch.collector.reached_any:
        raise _reached_no_host(exit_status, watch.collector, checked)
    hosts = watch.collector.hosts(watch.stopped)
    status: Status = watch.stopped or _status(exit_status, hosts)
    return RunResult(status, hosts, time.monotonic() - began)


class _Watch:
    """Looks after a running playbook: events, time limit, cancelling.

    Attributes:
        collector: what the events said so far.
        error: what the caller's callback raised; it ends the run.
        interrupted: set by Ctrl-C.
        stopped: why the run was cut short; None when it ended by itself.
        feeds: pipes to fill once ansible-playbook runs: not before, because a fork beside threads is unsafe.
    """

    def __init__(
        self,
        timeout_s: float | None,
        cancel: threading.Event | None,
        on_event: OnEvent | None,
        on_tick: Callable[[], object] | None,
    ) -> None:
        self.collector = Collector()
        self.error: BaseException | None = None
        self.interrupted = threading.Event()
        self.stopped: Status | None = None
        self.feeds: list[Feed] = []
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._cancel = cancel
        self._on_event, self._on_tick = on_event, on_tick
        self._kill_at: float | None = None

    def event(self, raw: dict[str, Any]) -> bool:
        """Take an event of ansible-runner; False keeps it off the disk."""
        event = self.collector.take(raw)
        if event is not None and self._on_event is not None:
            self._call(self._on_event, event)
        return False

    def tick(self) -> bool:
        """Whether ansible-playbook must be killed now; asks it to end by itself first."""
        for feed in self.feeds:
            feed.start()
        if self._on_tick is not None:
            self._call(self._on_tick)
        self.stopped = self.stopped or self._reason()
        if self.stopped is None:
            return False
        now = time.monotonic()
        if self._kill_at is None:
            self._kill_at = now + _GRACE_S if _interrupt(self.collector.pid) else now
        return now >= self._kill_at

    def _reason(self) -> Status | None:
        cancelled = self._cancel is not None and self._cancel.is_set()
        if self.interrupted.is_set() or cancelled or self.error is not None:
            return "canceled"
        if self._deadline is not None and time.monotonic() > self._deadline:
            return "timeout"
        return None

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if self.error is not None:
            return
        try:
            function(*args)
        except BaseException as error:
            self.error = error


def _execute(
    checked: Plan,
    folder: Path,
    cwd: Path,
    env: Mapping[str, str],
    watch: _Watch,
    stack: contextlib.ExitStack,
) -> int | None:
    """Run ansible-playbook to its end; its exit status."""
    import ansible_runner.exceptions  # noqa: PLC0415 - half a second that commands without a run do not need
    import ansible_runner.interface  # noqa: PLC0415
    import pexpect  # noqa: PLC0415

    artifacts = folder / "artifacts" / _IDENT
    artifacts.mkdir(parents=True, mode=0o700)
    _write_runner_settings(folder)
    arguments = _arguments(checked, folder, watch)
    for feed in watch.feeds:
        stack.callback(feed.close)
    # ansible-runner records the command with the whole environment in this file
    drain = Drain(artifacts / "command")
    stack.callback(drain.close)
    try:
        runner = ansible_runner.interface.init_runner(
            private_data_dir=str(folder),
            project_dir=str(cwd),
            binary=sys.executable,
            cmdline=shlex.join(_command([*arguments, str(checked.playbook)])),
            envvars={**env, **_private_env(checked, folder)},
            ident=_IDENT,
            fact_cache_type="none",
            quiet=True,
            suppress_env_files=True,
            event_handler=watch.event,
            cancel_callback=watch.tick,
            status_handler=lambda data, runner_config: drain.close() if data["status"] == "running" else None,  # noqa: ARG005
        )
        runner.run()
    except BaseException as error:
        kill_marked(folder.name)
        if isinstance(error, pexpect.ExceptionPexpect):
            raise DeployError(f"ansible-playbook's output could not be read to its end: {error}.") from error
        if isinstance(error, SystemExit | ansible_runner.exceptions.AnsibleRunnerException | OSError):
            raise DeployError(f"ansible-runner could not run the playbook: {error}.") from error
        raise
    return runner.rc if isinstance(runner.rc, int) else None


def _command(arguments: list[str]) -> list[str]:
    """Arguments of Python: ansible-playbook, tied to the life of this process."""
    launch = Path(launcher.__file__)
    playbook_command = environment.scripts_dir() / "ansible-playbook"
    return ["-I", "-S", str(launch), str(os.getpid()), str(playbook_command), *arguments]


def _arguments(checked: Plan, folder: Path, watch: _Watch) -> list[str]:
    arguments = list(checked.options)
    sources = list(checked.inventory)
    if checked.inline_inventory is not None:
        feed = Feed(folder / "inventory.yml", checked.inline_inventory)
        watch.feeds.append(feed)
        sources.append(str(feed.path))
    for source in sources:
        arguments += ["-i", source]
    for number, part in enumerate(checked.extravars):
        if isinstance(part, bytes):
            feed = Feed(folder / f"extravars-{number}", part)
            watch.feeds.append(feed)
            part = feed.path  # noqa: PLW2901
        arguments += ["-e", f"@{part}"]
    return arguments


def _private_env(checked: Plan, folder: Path) -> dict[str, str]:
    """Variables that keep Ansible's own temporary files in the private folder."""
    env = {"ANSIBLE_LOCAL_TEMP": str(folder / "tmp"), "ANSIBLE_NOCOLOR": "true", MARK: folder.name}
    env["ANSIBLE_FORCE_COLOR"] = "false"  # the caller may ask for colours, which win over the other
    if checked.inline_inventory is not None:
        env["ANSIBLE_INVENTORY_ENABLED"] = "ansible.builtin.yaml"  # a pipe can be read once, by one parser
    return env


def _write_runner_settings(folder: Path) -> None:
    # only from this file: ansible-runner forgets settings given as an argument when the file is missing
    (folder / "env").mkdir(mode=0o700)
    settings = {"pexpect_timeout": _TICK_S, "suppress_output_file": True, "suppress_ansible_output": True}
    (folder / "env" / "settings").write_text(json.dumps(settings), encoding="utf-8")


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder of mode 0700, in memory where the system has a place for that; removed in the end."""
    where = str(_MEMORY) if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK | os.X_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="firstlight-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _interrupt_sets(flag: threading.Event) -> Iterator[None]:
    """While inside, Ctrl-C sets the flag; a handler of the caller's own is left alone."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda _number, _frame: flag.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(pid: int | None) -> bool:
    """Send Ctrl-C to ansible-playbook's process group; False when there is none to send it to."""
    if pid is None:
        return False
    try:
        os.killpg(os.getpgid(pid), signal.SIGINT)
    except OSError:
        return False
    return True


def _status(exit_status: int | None, hosts: Mapping[str, HostResult]) -> Status:
    bad = [host for host in hosts.values() if not host.ok]
    if bad:
        return "unreachable" if all(host.unreachable for host in bad) else "failed"
    return "successful" if exit_status == 0 else "failed"


def _reached_no_host(exit_status: int | None, collector: Collector, checked: Plan) -> DeployError:
    text = " ".join(line.strip() for line in collector.exit_lines if line.strip())
    if exit_status == 0 or "no hosts" in text or "Could not match supplied host pattern" in text:
        source = ", ".join(checked.inventory) or ("the one given" if checked.inline_inventory else "Ansible's default")
        narrowed = next((f" with {option}" for option in checked.options if option.startswith("--limit=")), "")
        return InventoryError(
            f"inventory: {source}{narrowed} has no host for {checked.playbook.stem!r}. {text}".strip(),
            "Name at least one host of the inventory; `ansible-inventory --graph` shows them.",
        )
    said = text or "it wrote nothing."
    return AnsibleFailedError(
        f"ansible-playbook ended with status {exit_status} before it reached a host: {said}",
        exit_status=exit_status,
    )
