"""Processes and listening sockets, read from ``/proc``, and signals that cannot hit the wrong process.

A process is identified by its pid *and* its start tick: a pid alone may have been given to another process in
the meantime. Every function takes ``proc``, the folder to read, so that tests can hand in a made-up one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LISTEN = "0A"  # TCP_LISTEN in the kernel's enumeration, as /proc/net/tcp prints it
_STAT_FIELDS_AFTER_NAME = 20
_GONE = (FileNotFoundError, ProcessLookupError, NotADirectoryError)  # as the files of a process say it
_SECRET_WORD = r"(?:api[-_]?key|token|secret|passw(?:or)?d|credentials?)"  # noqa: S105 -- a pattern
_SECRET_OPTION = re.compile(rf"^--?[\w-]*{_SECRET_WORD}$", re.IGNORECASE)
_SECRET_VALUE = re.compile(rf"^((?:--?)?[\w.-]*{_SECRET_WORD}(?![a-z])[\w-]*\s*[=:]\s*).+$", re.IGNORECASE | re.DOTALL)
_SECRET_IN_TEXT = re.compile(r"\b(hf_|sk-|nvapi-)[A-Za-z0-9_-]{8,}")
_SECRET_IN_URL = re.compile(r"(://[^/\s:@]*:)[^@/\s]+@")


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        pid: its number now.
        ppid: its parent's; 1 (or a sub-reaper's) once it is orphaned.
        session: the session it was born in; kept when it is orphaned.
        start_time_s: seconds since the epoch, computed as Prometheus' client libraries compute
            ``process_start_time_seconds``, so the two can be compared; up to a second early.
        cmdline: its arguments; empty for kernel threads and zombies.
        uid: the real user.
        cgroup: path of its control group in systemd's hierarchy, ``/`` when it is in none.
        name: the kernel's short name, at most 15 bytes.
        state: one letter, ``Z`` for a zombie.
        start_ticks: clock ticks from boot to its start; with the pid, its identity.
    """

    pid: int
    ppid: int
    session: int
    start_time_s: float
    cmdline: tuple[str, ...]
    uid: int
    cgroup: str
    name: str = ""
    state: str = "S"
    start_ticks: int = 0

    @property
    def command(self) -> str:
        """Its command line for people, with secrets blotted out, at most 200 characters."""
        text = " ".join(redact(self.cmdline)) or f"[{self.name}]"
        return text if len(text) <= 200 else text[:197] + "..."  # noqa: PLR2004


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket. ``pid`` is None when no process that we may look into has it open."""

    pid: int | None
    address: str
    port: int


def read_process(pid: int, proc: Path = PROC) -> Process | None:
    """Read one process; None when it is gone (or was never there)."""
    return _read(pid, proc, boot_time(proc))


def _read(pid: int, proc: Path, booted_s: float) -> Process | None:
    folder = f"{proc}/{pid}"
    try:
        name, fields = parse_stat(_contents(f"{folder}/stat"))
        cmdline = parse_cmdline(_contents(f"{folder}/cmdline"))
        uid = parse_uid(_contents(f"{folder}/status").decode("utf-8", "replace"))
        cgroup = parse_cgroup(_contents(f"{folder}/cgroup").decode("utf-8", "surrogateescape"))
    except _GONE:
        return None
    ticks = int(fields[19])
    return Process(
        pid=pid,
        ppid=int(fields[1]),
        session=int(fields[3]),
        start_time_s=booted_s + ticks / _TICKS_PER_S,
        cmdline=cmdline,
        uid=uid,
        cgroup=cgroup,
        name=name,
        state=fields[0],
        start_ticks=ticks,
    )


def _contents(path: str) -> bytes:
    """A file of /proc, whole. A host may have thousands of processes and a wait looks twice a second: no pathlib."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 -- hot path
        return file.readall()


def list_processes(proc: Path = PROC) -> list[Process]:
    """All processes that live at this moment, zombies included, by pid."""
    pids = sorted(int(entry) for entry in os.listdir(proc) if entry.isdecimal())  # noqa: PTH208 -- hot path
    booted_s = boot_time(proc)
    return [process for process in (_read(pid, proc, booted_s) for pid in pids) if process is not None]


def tree_below(pid: int, proc: Path = PROC) -> list[Process]:
    """As `descendants` of all that live at this moment; of the others no more than the parent is read."""
    parents: dict[int, int] = {}
    for entry in filter(str.isdecimal, os.listdir(proc)):  # noqa: PTH208 -- hot path
        with contextlib.suppress(*_GONE, IndexError):
            stat = _contents(f"{proc}/{entry}/stat")
            parents[int(entry)] = int(stat[stat.rfind(b")") + 1 :].split(maxsplit=2)[1])
    children: dict[int, list[int]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    wanted: list[int] = [pid]
    for each in wanted:  # grows while it is walked
        wanted += [child for child in children.get(each, []) if child not in wanted]
    booted_s = boot_time(proc)
    read = (_read(each, proc, booted_s) for each in wanted[1:])
    return descendants(pid, [process for process in read if process is not None])


def descendants(pid: int, among: Iterable[Process] | None = None) -> list[Process]:
    """Children of ``pid``, their children and so on, parents first; not ``pid`` itself."""
    if among is None:
        return tree_below(pid)
    children: dict[int, list[Process]] = {}
    for process in among:
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    queue = [pid]
    seen = {pid}
    while queue:
        for child in children.get(queue.pop(0), []):
            if child.pid not in seen:
                seen.add(child.pid)
                found.append(child)
                queue.append(child.pid)
    return found


def listeners(port: int, proc: Path = PROC, among: Iterable[int] | None = None) -> list[Listener]:
    """Sockets that listen on a TCP port of this network namespace, with the processes that hold them.

    Several processes may hold one socket (inherited) or one port each (SO_REUSEPORT); all are told. With ``among``
    only these processes are looked at, which is far less work; a socket that none of them holds has no pid.
    """
    sockets: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # no tcp6 where IPv6 is off
            text = (proc / "net" / table).read_text("ascii", "replace")
            sockets.update((inode, address) for inode, address, at in parse_listeners(text) if at == port)
    if not sockets:
        return []
    pids = os.listdir(proc) if among is None else map(str, among)  # noqa: PTH208 -- hot path
    holders = _socket_holders(set(sockets), proc, filter(str.isdecimal, pids))
    found = []
    for inode, address in sockets.items():
        holding: list[int] | list[None] = sorted(holders.get(inode, set())) or [None]
        found += [Listener(pid, address, port) for pid in holding]
    return found


def alive(process: Process, proc: Path = PROC) -> bool:
    """Whether this very process still runs; a zombie does not, it holds neither memory nor sockets."""
    try:
        _, fields = parse_stat((proc / str(process.pid) / "stat").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(fields[19]) == process.start_ticks and fields[0] not in {"Z", "X"}


def send_signal(process: Process, number: signal.Signals) -> bool:
    """Signal this very process, never another that got its pid. Returns whether it was still there."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def wait_until(reached: Callable[[], bool], timeout_s: float, poll_s: float = 0.05) -> bool:
    """Look at a fact every ``poll_s`` seconds until it holds; False when ``timeout_s`` passed first."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return True


def boot_time(proc: Path = PROC) -> float:
    """When the host was booted, in whole seconds since the epoch."""
    for line in (proc / "stat").read_text("ascii").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def redact(arguments: Iterable[str]) -> list[str]:
    """Replace the values of keys, tokens and passwords by ``***``."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        if hide_next:
            shown.append("***")
            hide_next = False
            continue
        hide_next = bool(_SECRET_OPTION.match(argument))
        text = _SECRET_VALUE.sub(r"\1***", argument)
        text = _SECRET_IN_URL.sub(r"\1***@", _SECRET_IN_TEXT.sub(r"\1***", text))
        shown.append(text)
    return shown


def parse_stat(text: bytes) -> tuple[str, list[str]]:
    """Split ``/proc/PID/stat`` into the name and the fields after it (state first).

    The name stands in parentheses and may itself hold spaces and parentheses, so the last one ends it.

    Raises:
        ProcessLookupError: the text is cut off, as when the process vanished while it was read.
    """
    start, end = text.find(b"("), text.rfind(b")")
    fields = text[end + 1 :].decode("ascii", "replace").split()
    if start < 0 or end < start or len(fields) < _STAT_FIELDS_AFTER_NAME:
        raise ProcessLookupError(f"no process in {text[:40]!r}")
    return text[start + 1 : end].decode("utf-8", "replace"), fields


def parse_cmdline(text: bytes) -> tuple[str, ...]:
    """Split ``/proc/PID/cmdline``. Programs that set their title leave one argument and padding behind it."""
    return tuple(os.fsdecode(part) for part in text.rstrip(b"\0").split(b"\0")) if text.strip(b"\0") else ()


def parse_uid(text: str) -> int:
    """The real user out of ``/proc/PID/status``."""
    for line in text.splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    raise ProcessLookupError("no Uid line")


def parse_cgroup(text: str) -> str:
    """The path in systemd's hierarchy out of ``/proc/PID/cgroup``, of either cgroup version.

    A container engine may use another hierarchy alone; then the first path below the root is taken.
    """
    paths: dict[str, str] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path:
            paths["systemd" if controllers == "name=systemd" else number] = path
    ordered = [paths.get("systemd", "/"), paths.get("0", "/"), *paths.values()]
    return next((path for path in ordered if path != "/"), "/")


def parse_listeners(text: str) -> list[tuple[str, str, int]]:
    """Read ``/proc/net/tcp`` or ``tcp6``: (inode, address, port) of each listening socket."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTEN:  # noqa: PLR2004 -- the inode is the tenth column
            address, _, port = fields[1].rpartition(":")
            found.append((fields[9], decode_address(address), int(port, 16)))
    return found


def decode_address(digits: str) -> str:
    """Turn the kernel's hexadecimal address into text: each 32-bit word is in the machine's byte order."""
    raw = bytes.fromhex(digits)
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return str(ipaddress.ip_address(b"".join(words)))


def _socket_holders(inodes: set[str], proc: Path, pids: Iterable[str]) -> dict[str, set[int]]:
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[str, set[int]] = {}
    for pid in pids:
        folder = f"{proc}/{pid}/fd"
        # a process may vanish, or be another user's: then it cannot be told
        with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError, NotADirectoryError):
            for number in os.listdir(folder):  # noqa: PTH208
                with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
                    inode = wanted.get(os.readlink(f"{folder}/{number}"))  # noqa: PTH115
                    if inode is not None:
                        found.setdefault(inode, set()).add(int(pid))
    return found
