"""Proof that it is the old server that serves again: its address, the models that it names, and whose socket answers.

An answer alone proves little: with SO_REUSEPORT any process of the same user can share the port, and names the same
model when it is a forgotten copy of the same server. So the sockets on the port must belong to what was brought back:
the control group of its unit, its container, or the tree of its process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from .cutover import OldServer, ProcessRecipe
from .errors import FirstlightError
from .host_view import Host, View, look_at_processes
from .processes import Listener, Process
from .server_conflicts import Conflict, ask_to_end, name_all, strangers_on_port
from .server_find import container_found, unit_found
from .server_kinds import Found
from .server_probe import Answer, ask, same_server
from .systemd import UnitState

_POLL_S = 0.2
_GIVE_UP_RESTARTS = 3


@dataclass(frozen=True)
class Proof:
    """What was seen at the old server's address.

    Attributes:
        server: the old server, as it was recorded.
        answer: what answers there.
        old: whether that is the old server, or one of those who answer there.
        strangers: who else listens there.
    """

    server: OldServer
    answer: Answer
    old: bool = False
    strangers: tuple[Conflict, ...] = ()


def examine(host: Host, old: OldServer, transient: str) -> Proof:
    """Ask at the old server's address who is there, and look whose sockets take the question.

    Args:
        host: the host.
        old: the old server, as it was recorded.
        transient: the unit in which a process is brought back that was nobody's unit before.
    """
    answer = ask(old.url, old.api_key) if old.url else Answer(False, seen="its address is unknown")
    if not same_server(answer, old.models):
        return Proof(old, answer)
    if old.fronted:  # that other program's sockets are all that can be seen from here
        return Proof(old, answer, old=True)
    own, strangers = _listening(host, old, transient)
    if strangers:  # a process that starts or ends at this very moment seems to belong to nobody
        time.sleep(_POLL_S)
        own, strangers = _listening(host, old, transient)
    # with no socket in sight the address leads elsewhere, as into a container to which the kernel forwards the port
    return Proof(old, answer, own or not strangers, tuple(strangers))


def _listening(host: Host, old: OldServer, transient: str) -> tuple[bool, list[Conflict]]:
    listeners = sockets_at(host, old.url)
    view = dataclasses.replace(look_at_processes(host), listeners=listeners)
    strangers = strangers_on_port(view, _belonging(host, view, old, transient))
    return len(strangers) < len(listeners), strangers


def is_fronted(host: Host, view: View, found: Found, url: str) -> bool:
    """Whether all sockets at the address of a server that was found are another program's, as a reverse proxy's."""
    listeners = sockets_at(host, url) if url else ()
    strangers = strangers_on_port(dataclasses.replace(view, listeners=listeners), found)
    return 0 < len(listeners) == len(strangers)


def sockets_at(host: Host, url: str) -> tuple[Listener, ...]:
    """The listening sockets of this host that may answer at a URL."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    return tuple(each for each in host.listeners(port) if _may_answer(each.address, parts.hostname or ""))


def _may_answer(bound: str, asked: str) -> bool:
    try:
        address, wanted = _plain(bound), _plain(asked)
    except ValueError:  # a name: it may be any of the host's addresses
        return True
    return address.is_unspecified or address == wanted


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    parsed = ipaddress.ip_address(address.strip("[]"))
    return getattr(parsed, "ipv4_mapped", None) or parsed


def is_recipes(process: Process, recipe: ProcessRecipe) -> bool:
    """Whether a living process is the one that a recipe was read from, or would make."""
    return process.cmdline == recipe.argv and process.uid == recipe.uid and process.state not in {"Z", "X"}


def _belonging(host: Host, view: View, old: OldServer, transient: str) -> Found:
    """All that belongs to the old server now."""
    if old.container is not None:
        container = host.engines.inspect(old.container.engine, old.container.name)
        return container_found(host, view, container, "record") if container and container.running else Found("none")
    if old.process is None:
        return unit_found(host, view, host.systemd.show(old.unit), "record")
    members = view.in_unit(transient)
    if not members:  # it was never stopped
        roots = [process for process in view.processes.values() if is_recipes(process, old.process)]
        members = [member for root in roots for member in view.tree(root)]
    return Found("process", "record", processes=tuple(members))


def prove(host: Host, old: OldServer, unit: str, transient: str, no_progress_s: float) -> Proof:
    """Wait until the old server answers as itself.

    Args:
        host: the host.
        old: the old server, as it was recorded.
        unit: the unit to watch; empty for a container.
        transient: the unit in which a process is brought back that was nobody's unit before.
        no_progress_s: seconds in which nothing moves before it is given up.

    Raises:
        FirstlightError: ``restore-failed``: it died, or nothing moved for ``no_progress_s`` seconds.
    """
    if not old.url:
        return Proof(old, _prove_alive(host, old, unit))
    moved_at, seen = time.monotonic(), ""
    while True:
        proof = examine(host, old, transient)
        if proof.old:
            return proof
        state = host.systemd.show(unit) if unit else None
        _require_alive(host, old, state, proof.strangers)
        progress = f"{proof.answer} {_progress(host, old, state)}"
        if progress != seen:
            moved_at, seen = time.monotonic(), progress
        if time.monotonic() - moved_at >= no_progress_s:
            answer = proof.answer
            told = f"it names {', '.join(answer.models)}" if answer.models else f"it says {answer.seen}"
            raise _failed(
                host, old, state, f"nothing moved for {no_progress_s:g} s and {old.url}: {told}", proof.strangers
            )
        time.sleep(_POLL_S)


def shared(proof: Proof) -> FirstlightError:
    """The error for an old server that is back and not alone at its address."""
    return FirstlightError(
        f"the old server runs and listens again, but it is not alone: {name_all(proof.strangers)}.",
        where=proof.server.name,
        why=f"Either may answer at {proof.server.url}, so that it is not proven that the old server serves.",
        fix=f"{ask_to_end(proof.strangers)}, then run `firstlight rollback`, which proves the old server again.",
        kind="restore-unproven",
    )


def _prove_alive(host: Host, old: OldServer, unit: str) -> Answer:
    """Without an address to ask at, the most that can be shown is that it runs and stays."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        state = host.systemd.show(unit) if unit else None
        _require_alive(host, old, state)
        time.sleep(_POLL_S)
    return Answer(False, seen="its address is unknown")


def _require_alive(host: Host, old: OldServer, state: UnitState | None, strangers: tuple[Conflict, ...] = ()) -> None:
    if state is None:
        return
    gone = state.active_state in {"failed", "inactive"} and not state.job
    if gone or state.n_restarts >= _GIVE_UP_RESTARTS:
        how = state.exit_text or state.result or state.load_state
        raise _failed(host, old, state, f"its unit is {state.active_state} ({how})", strangers)


def _progress(host: Host, old: OldServer, state: UnitState | None) -> str:
    """Something that changes as long as the server works on its start: CPU time, states, log."""
    view = look_at_processes(host)
    members = view.in_unit(state.unit) if state is not None else []
    if old.container is not None:
        found = host.engines.inspect(old.container.engine, old.container.name)
        members = view.in_container(found.id) if found else []
        if found is not None and not found.running:
            raise _failed(host, old, state, "its container ended")
    ticks = 0
    for member in members:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{member.pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    busy = ticks // os.sysconf("SC_CLK_TCK") // 2  # a server that merely idles uses less than 2 s in 5 minutes
    return f"{state.sub_state if state else ''} {len(members)} {busy}"


def _failed(
    host: Host, old: OldServer, state: UnitState | None, what: str, strangers: tuple[Conflict, ...] = ()
) -> FirstlightError:
    last = ""
    if state is not None and state.invocation_id:
        with contextlib.suppress(FirstlightError):
            entries, _ = host.systemd.journal_lines(state.invocation_id)
            last = next((entry.text for entry in reversed(entries) if entry.text.strip()), "")
    log = f"journalctl -u {state.unit}" if state is not None else "the log of its container"
    others = f" Another one answers in its place: {name_all(strangers)}." if strangers else ""
    read = f"Read `{log}` on the host, start the old server by hand, and run `firstlight status`."
    return FirstlightError(
        f"the old server does not answer: {what}.{others}" + (f" Its last line: {last[:300]}" if last else ""),
        where=old.name,
        why="The host is without a server now.",
        fix=f"{ask_to_end(strangers)}. {read}" if strangers else read,
        kind="restore-failed",
    )
