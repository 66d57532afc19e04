"""Makes the calling process unable to do harm, and proves it before anything foreign is let in.

Runs in a process of its own that is thrown away afterwards: nothing here can be undone. Linux only. Walls, each
tried on its own so that one that a host lacks does not take the others with it:

* namespaces: no network but an unconnected loopback, own mounts, own process numbers, own IPC, own host name;
* a root directory that is empty and read-only;
* a user without rights: uid and gid 65534, no groups, no capabilities, no new privileges;
* resource limits: CPU, memory, file size, processes, open files, no core dump, no locked memory;
* seccomp: a list of some twenty system calls that a computing interpreter needs; all others fail with EPERM.

:func:`prove` then tries the forbidden things and reports what held. The list of what must hold is the judge's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
from collections.abc import Callable, Mapping
from typing import Any

NOBODY = 65534
_EPERM = 1

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 38, 39, 2
_CAPABILITY_VERSION_3 = 0x20080522
_SIGKILL, _AF_INET, _SOCK_DGRAM = 9, 2, 2

_BPF_LOAD_WORD, _BPF_JUMP_EQUAL, _BPF_RETURN = 0x20, 0x15, 0x06
_RET_KILL_PROCESS, _RET_ERRNO, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
#: machine -> (AUDIT_ARCH, numbers of: read write close lseek mmap mprotect munmap brk rt_sigprocmask rt_sigreturn
#: mremap madvise getpid exit exit_group futex clock_gettime sigaltstack getrandom sched_yield restart_syscall gettid)
_SYSCALLS: dict[str, tuple[int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 8, 9, 10, 11, 12, 14, 15, 25, 28, 39, 60, 231, 202, 228, 131, 318, 24, 219, 186),
    ),
    "aarch64": (
        0xC00000B7,
        (63, 64, 57, 62, 222, 226, 215, 214, 135, 139, 216, 233, 172, 93, 94, 98, 113, 132, 278, 124, 128, 178),
    ),
}


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Caps(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


_libc = ctypes.CDLL(None, use_errno=True)


def unshare() -> list[str]:
    """Leave the host's namespaces; the next child is the first process of its own. Returns those that were left."""
    left: list[str] = []
    uid, gid = os.getuid(), os.getgid()
    if uid != 0 and _unshare(_CLONE_NEWUSER) and _map_ids(uid, gid):
        left.append("user")
    for name, flag in (
        ("mount", _CLONE_NEWNS),
        ("network", _CLONE_NEWNET),
        ("pid", _CLONE_NEWPID),
        ("ipc", _CLONE_NEWIPC),
        ("host name", _CLONE_NEWUTS),
    ):
        if _unshare(flag):
            left.append(name)
    return left


def confine(limits: Mapping[str, int], empty_dir: str, namespaces: list[str]) -> dict[str, Any]:
    """Give up everything but computing.

    Args:
        limits: ``cpu_s`` (s), ``memory_bytes`` (beyond what the interpreter holds already).
        empty_dir: an empty directory that becomes the root.
        namespaces: as :func:`unshare` returned them.

    Returns:
        What was put in force: ``namespaces``, ``root``, ``uid``, ``limits``, ``seccomp``.
    """
    held = _virtual_bytes()
    report: dict[str, Any] = {"namespaces": namespaces, "root": _empty_root(empty_dir, "mount" in namespaces)}
    os.umask(0o077)
    report["limits"] = _limit(limits, held)
    _drop_user()
    _drop_capabilities()
    report["uid"] = os.getuid()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)  # after the change of user, which clears it
    no_new_privileges = _prctl(_PR_GET_NO_NEW_PRIVS, 0) == 1
    capabilities = _capabilities()
    report["seccomp"] = _install_seccomp(os.uname().machine)
    report["held"] = prove(no_new_privileges, capabilities, report["limits"], "network" in namespaces)
    return report


def prove(no_new_privileges: bool, capabilities: int, limits: Mapping[str, int], own_network: bool) -> dict[str, bool]:
    """Try what must fail; True where it did.

    Args:
        no_new_privileges: as read from the kernel before seccomp closed the question.
        capabilities: the same, effective and permitted together.
        limits: resource limits as read back.
        own_network: whether the host's network was left.
    """
    signals_denied = _fails(lambda: os.kill(os.getpid(), 0))
    return {
        "unprivileged": 0 not in (os.getuid(), os.geteuid(), os.getgid())
        and capabilities == 0
        and no_new_privileges
        and _fails(lambda: os.setuid(0)),
        "no-network": _no_network(own_network),
        "no-files": all(
            _fails(lambda path=path, flags=flags: os.open(path, flags, 0o600))  # type: ignore[misc]
            for path, flags in (
                ("/etc/passwd", os.O_RDONLY),
                ("/proc/self/status", os.O_RDONLY),
                ("/tmp/firstlight-probe", os.O_WRONLY | os.O_CREAT),  # noqa: S108 - it must not come to be
                ("probe", os.O_WRONLY | os.O_CREAT),
            )
        ),
        "no-new-processes": _fails(_fork),
        "no-other-processes": signals_denied or os.getpid() == 1,
        "limits": all(limits.get(name) is not None for name in ("cpu_s", "memory_bytes", "file_bytes", "processes")),
    }


def _prctl(option: int, *values: int) -> int:
    # the kernel reads five whole registers and refuses some options when an unused one is not 0
    padded = (*values, 0, 0, 0, 0)[:4]
    return int(_libc.prctl(option, *(ctypes.c_ulong(value) for value in padded)))


def _unshare(flag: int) -> bool:
    return int(_libc.unshare(flag)) == 0


def _map_ids(uid: int, gid: int) -> bool:
    try:
        for path, text in (
            ("/proc/self/setgroups", "deny"),
            ("/proc/self/uid_map", f"{NOBODY} {uid} 1"),
            ("/proc/self/gid_map", f"{NOBODY} {gid} 1"),
        ):
            with open(path, "w") as file:  # noqa: PTH123 - pathlib would be one more thing to load
                file.write(text)
    except OSError:
        return False
    return True


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * resource.getpagesize()


def _empty_root(empty_dir: str, own_mounts: bool) -> str:
    """Make the empty directory the root; returns how: ``tmpfs``, ``directory``, or ``none``."""
    how = "directory"
    if own_mounts and _libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) == 0:
        flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        if _libc.mount(b"tmpfs", os.fsencode(empty_dir), b"tmpfs", flags, b"size=4k,mode=0555") == 0:
            how = "tmpfs"
    try:
        os.chroot(empty_dir)
        os.chdir("/")
    except OSError:
        return "none"
    return how


def _limit(limits: Mapping[str, int], held: int) -> dict[str, int]:
    wanted = {
        "cpu_s": (resource.RLIMIT_CPU, limits["cpu_s"]),  # soft = hard: the kernel kills, nothing can catch it
        "memory_bytes": (resource.RLIMIT_AS, held + limits["memory_bytes"]),
        "file_bytes": (resource.RLIMIT_FSIZE, 0),
        "processes": (resource.RLIMIT_NPROC, 0),
        "open_files": (resource.RLIMIT_NOFILE, 8),
        "core_bytes": (resource.RLIMIT_CORE, 0),
        "locked_bytes": (resource.RLIMIT_MEMLOCK, 0),
    }
    in_force: dict[str, int] = {}
    for name, (which, value) in wanted.items():
        with contextlib.suppress(OSError, ValueError):  # a stricter limit may be in force already
            resource.setrlimit(which, (value, value))
        soft, _hard = resource.getrlimit(which)
        if 0 <= soft <= value:
            in_force[name] = soft
    return in_force


def _drop_user() -> None:
    if os.getuid() != 0:
        return
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _drop_capabilities() -> None:
    header = _Header(_CAPABILITY_VERSION_3, 0)
    _libc.capset(ctypes.byref(header), (_Caps * 2)())


def _capabilities() -> int:
    header, data = _Header(_CAPABILITY_VERSION_3, 0), (_Caps * 2)()
    if _libc.capget(ctypes.byref(header), data) != 0:
        return -1
    return int(data[0].effective | data[0].permitted | data[1].effective | data[1].permitted)


def _install_seccomp(machine: str) -> bool:
    """Deny every system call but the listed ones; False where the machine or its kernel does not allow it."""
    if machine not in _SYSCALLS or struct.calcsize("P") != 8:  # noqa: PLR2004
        return False
    architecture, allowed = _SYSCALLS[machine]
    code = [
        (_BPF_LOAD_WORD, 0, 0, 4),  # seccomp_data.arch
        (_BPF_JUMP_EQUAL, 1, 0, architecture),
        (_BPF_RETURN, 0, 0, _RET_KILL_PROCESS),
        (_BPF_LOAD_WORD, 0, 0, 0),  # seccomp_data.nr
    ]
    for position, number in enumerate(allowed):
        code.append((_BPF_JUMP_EQUAL, len(allowed) - position, 0, number))
    code += [(_BPF_RETURN, 0, 0, _RET_ERRNO | _EPERM), (_BPF_RETURN, 0, 0, _RET_ALLOW)]
    packed = b"".join(struct.pack("HBBI", *entry) for entry in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = _Program(len(code), ctypes.cast(buffer, ctypes.c_void_p))
    return _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program)) == 0


def _no_network(own_network: bool) -> bool:
    """Whether no socket can be made, or it is of a network of its own and leads nowhere; no packet is sent."""
    descriptor = int(_libc.socket(_AF_INET, _SOCK_DGRAM, 0))
    if descriptor < 0:
        return True
    address = struct.pack("=H", _AF_INET) + struct.pack("!H4s8x", 9, bytes((192, 0, 2, 1)))
    connected = int(_libc.connect(descriptor, address, len(address))) == 0
    os.close(descriptor)
    return own_network and not connected


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _fails(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return True
    return False
