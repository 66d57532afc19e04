"""Processes and sockets of the real machine, and parsers against what /proc may hold."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import processes
from hypothesis import given
from hypothesis import strategies as st


@contextlib.contextmanager
def child(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(argv)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def test_this_process_is_read_as_it_is() -> None:
    me = processes.read_process(os.getpid())
    assert me is not None
    assert (me.pid, me.ppid, me.session, me.uid) == (os.getpid(), os.getppid(), os.getsid(0), os.getuid())
    assert me.cmdline
    assert me.cgroup.startswith("/")


def test_a_start_time_is_the_one_prometheus_clients_report() -> None:
    with child("sleep", "60") as running:
        found = processes.read_process(running.pid)
        assert found is not None
        # boot time is kept in whole seconds
        assert time.time() - 5 < found.start_time_s <= time.time() + 0.1


def test_a_process_that_is_gone_reads_as_none() -> None:
    with child("true") as running:
        running.wait()
        assert processes.read_process(running.pid) is None


def test_a_zombie_is_listed_but_not_alive() -> None:
    with child("sleep", "60") as running:
        found = processes.read_process(running.pid)
        assert found is not None
        assert processes.alive(found)
        os.kill(running.pid, signal.SIGKILL)
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
        assert not processes.alive(found)
        zombie = next(each for each in processes.list_processes() if each.pid == running.pid)
        assert (zombie.state, zombie.cmdline) == ("Z", ())


def test_a_pid_that_belongs_to_another_process_now_is_not_signalled() -> None:
    with child("sleep", "60") as running:
        found = processes.read_process(running.pid)
        assert found is not None
        predecessor = replace(found, start_ticks=found.start_ticks - 1)
        assert not processes.alive(predecessor)
        assert processes.send_signal(predecessor, signal.SIGKILL) is False
        assert running.poll() is None
        assert processes.send_signal(found, signal.SIGKILL) is True
        assert running.wait(10) == -signal.SIGKILL


def test_children_of_children_are_descendants_and_siblings_are_not() -> None:
    script = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    with child("sleep", "60") as sibling:
        try:
            found = {each.pid for each in processes.descendants(os.getpid())}
            assert {parent.pid, grandchild, sibling.pid} <= found
            assert [each.pid for each in processes.descendants(parent.pid)] == [grandchild]
        finally:
            os.kill(grandchild, signal.SIGKILL)
            parent.wait(10)
            parent.stdout.close()


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "0.0.0.0")]
)
def test_a_listening_socket_is_found_with_its_holder(family: int, address: str) -> None:
    with socket.socket(family) as mine:
        try:
            mine.bind((address, 0))
        except OSError:
            pytest.skip("this machine has no such address")
        port = mine.getsockname()[1]
        assert processes.listeners(port) == []  # bound is not listening
        mine.listen()
        assert processes.listeners(port) == [processes.Listener(os.getpid(), address, port)]
    assert processes.listeners(port) == []


def test_both_holders_of_a_shared_port_are_found() -> None:
    script = (
        "import socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1);"
        "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); print(flush=True); sys.stdin.read()"
    )
    with socket.socket() as mine:
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        argv = [sys.executable, "-c", script, str(port)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            assert {each.pid for each in processes.listeners(port)} == {os.getpid(), other.pid}
            assert {each.pid for each in processes.listeners(port, among=[os.getpid()])} == {os.getpid(), None}
            other.kill()


def test_waiting_ends_when_the_fact_holds_and_gives_up_after_its_time() -> None:
    began = time.monotonic()
    assert processes.wait_until(lambda: time.monotonic() - began > 0.05, 5, poll_s=0.01)
    assert not processes.wait_until(lambda: False, 0.05, poll_s=0.01)
    assert time.monotonic() - began < 2


@given(
    name=st.binary(min_size=1, max_size=15).filter(lambda raw: b"\0" not in raw),
    numbers=st.lists(st.integers(-1, 2**63), min_size=49, max_size=49),
)
def test_a_name_with_spaces_and_parentheses_does_not_shift_the_fields(name: bytes, numbers: list[int]) -> None:
    line = b"7 (" + name + b") S " + b" ".join(str(each).encode() for each in numbers) + b"\n"
    parsed, fields = processes.parse_stat(line)
    assert parsed == name.decode("utf-8", "replace")
    assert fields == ["S", *(str(each) for each in numbers)]


@given(st.binary(max_size=60))
def test_a_stat_that_is_cut_off_reads_as_a_vanished_process(text: bytes) -> None:
    with pytest.raises(ProcessLookupError):
        processes.parse_stat(text)


@given(st.lists(st.binary(min_size=1, max_size=20).filter(lambda raw: b"\0" not in raw), max_size=6), st.integers(0, 9))
def test_a_command_line_keeps_its_arguments_whatever_padding_follows(words: list[bytes], padding: int) -> None:
    raw = b"".join(word + b"\0" for word in words) + b"\0" * padding
    assert processes.parse_cmdline(raw) == tuple(os.fsdecode(word) for word in words)


def test_an_empty_argument_in_the_middle_is_kept() -> None:
    assert processes.parse_cmdline(b"prog\0\0--flag\0") == ("prog", "", "--flag")


@given(st.integers(0, 2**32 - 1), st.integers(1, 65535), st.integers(1, 2**32))
def test_an_ipv4_listener_is_read_in_the_machines_byte_order(address: int, port: int, inode: int) -> None:
    packed = struct.pack("=I", struct.unpack("=I", struct.pack("!I", address))[0])
    digits = f"{struct.unpack('=I', packed)[0]:08X}:{port:04X}"
    line = f"   0: {digits} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0\n"
    header = "  sl  local_address rem_address   st ...\n"
    assert processes.parse_listeners(header + line) == [(str(inode), str(ipaddress.ip_address(address)), port)]


@pytest.mark.parametrize(
    ("digits", "address"),
    [
        ("0100007F", "127.0.0.1"),
        ("00000000000000000000000001000000", "::1"),
        ("B80D01200000000067452301EFCDAB89", "2001:db8::123:4567:89ab:cdef"),
        ("0000000000000000FFFF00000100007F", "::ffff:127.0.0.1"),
    ],
)
@pytest.mark.skipif(sys.byteorder != "little", reason="the digits are those of a little-endian machine")
def test_addresses_as_the_kernel_prints_them(digits: str, address: str) -> None:
    assert ipaddress.ip_address(processes.decode_address(digits)) == ipaddress.ip_address(address)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/system.slice/sglang.service\n", "/system.slice/sglang.service"),
        ("9:name=systemd:/system.slice/a.service\n4:memory:/other\n0::/\n", "/system.slice/a.service"),
        ("9:name=systemd:/\n4:memory:/docker/abc\n0::/\n", "/docker/abc"),
        ("0::/\n", "/"),
        ("", "/"),
        ("1:name=systemd:/a:b/c.service\n", "/a:b/c.service"),
    ],
)
def test_a_control_group_is_read_from_either_version(text: str, path: str) -> None:
    assert processes.parse_cgroup(text) == path


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["s", "--api-key", "abc", "--port", "1"], ["s", "--api-key", "***", "--port", "1"]),
        (["--api-key=abc"], ["--api-key=***"]),
        (["HF_TOKEN=abc", "X_API_KEY_2=abc"], ["HF_TOKEN=***", "X_API_KEY_2=***"]),
        (["http://me:pw@host/p"], ["http://me:***@host/p"]),
        (["x", "hf_abcdefghij", "sk-abcdefghij"], ["x", "hf_***", "sk-***"]),
        (
            ["--tokenizer=foo", "--max-num-batched-tokens=8", "--tokenizer-path", "p"],
            ["--tokenizer=foo", "--max-num-batched-tokens=8", "--tokenizer-path", "p"],
        ),
    ],
)
def test_secrets_are_blotted_out_and_nothing_else(arguments: list[str], shown: list[str]) -> None:
    assert processes.redact(arguments) == shown


def test_a_made_up_proc_is_read_in_full(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu 1\nbtime 1000\n")
    folder = tmp_path / "42"
    folder.mkdir()
    fields = ["S", "1", "42", "40", *["0"] * 15, "300", *["0"] * 10]
    (folder / "stat").write_text(f"42 (sglang::schedul) {' '.join(fields)}\n")
    (folder / "cmdline").write_bytes(b"sglang::scheduler_TP0\0\0\0")
    (folder / "status").write_text("Name:\tx\nUid:\t1000\t0\t0\t0\n")
    (folder / "cgroup").write_text("0::/a.service\n")
    found = processes.list_processes(tmp_path)
    ticks = os.sysconf("SC_CLK_TCK")
    assert found == [
        processes.Process(
            42, 1, 40, 1000 + 300 / ticks, ("sglang::scheduler_TP0",), 1000, "/a.service", "sglang::schedul", "S", 300
        )
    ]


def test_of_processes_outside_the_tree_no_more_than_the_parent_is_read(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu 1\nbtime 1000\n")
    for pid, parent in ((1, 0), (40, 1), (42, 40), (41, 42), (50, 1), (51, 50)):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1 {' '.join(['0'] * 30)}\n")
        if pid in {41, 42}:  # the others would be missed, could their files be wanted
            (folder / "cmdline").write_bytes(b"a\0")
            (folder / "status").write_text("Uid:\t0\t0\t0\t0\n")
            (folder / "cgroup").write_text("0::/\n")
    (tmp_path / "60").mkdir()  # it ended while it was read
    assert [each.pid for each in processes.tree_below(40, tmp_path)] == [42, 41]
    assert processes.tree_below(41, tmp_path) == []
