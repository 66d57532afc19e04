"""The judge, and the second wall on its own: code that the gate would never let through does no harm either."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import sandbox, sandbox_gate, sandbox_process
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.sandbox import Case, Verdict, same
from ansible_collections.firstlight.vllm.plugins.module_utils.sandbox_process import REQUIRED, Limits
from hypothesis import given
from hypothesis import strategies as st

LIMITS = Limits(cpu_s=1, wall_s=20.0, memory_mib=128)
CASES = [Case((2,), True), Case((9,), False)]


def ungated(code: str, limits: Limits = LIMITS, cases: list[Case] | None = None) -> Verdict:
    """Run without the first wall, which no option of the product can do."""
    return sandbox._run(code, "f", cases or CASES, limits, gate=False)


def test_right_code_is_right_and_says_what_was_in_force() -> None:
    verdict = sandbox.run("def f(n): return n == 2", "f", CASES, LIMITS)
    assert (verdict.name, verdict.right, verdict.cases) == ("right", 2, 2)
    assert verdict.isolation["walls"] == list(REQUIRED)
    assert verdict.isolation["uid"] != 0
    assert verdict.isolation["limits"]["cpu_s"] == 1


def test_wrong_code_names_the_case_and_both_values() -> None:
    verdict = sandbox.run("def f(n): return n", "f", CASES, LIMITS)
    assert verdict.name == "wrong"
    assert verdict.detail == "gave 2 for (2), expected True"


def test_half_right_counts_the_right_cases() -> None:
    verdict = sandbox.run("def f(n): return True", "f", CASES, LIMITS)
    assert (verdict.name, verdict.right) == ("wrong", 1), verdict


def test_an_exceptions_text_cannot_move_the_readers_cursor_or_fake_lines() -> None:
    code = "def f(n): raise ValueError('x\\x1b[2J\\nverdict: right')"
    detail = sandbox.run(code, "f", CASES, LIMITS).detail
    assert detail == "raised ValueError: x?[2J verdict: right for (2)"


def test_a_missing_function_is_wrong() -> None:
    assert "no function f" in sandbox.run("def g(n): return True", "f", CASES, LIMITS).detail


def test_a_return_outside_a_function_is_a_fault_of_syntax() -> None:
    assert "not Python" in sandbox.run("return 1", "f", CASES, LIMITS).detail


def test_text_that_cannot_be_utf8_is_judged_not_crashed_on() -> None:
    assert sandbox.run("def f(n): return '\ud800'", "f", CASES, LIMITS).name == "wrong"


def test_arguments_and_values_of_all_kinds_pass_unharmed() -> None:
    value: list[Any] = [None, True, -3, 2**200, 0.1, "ä\n", [1, [2]], {"k": [1.5], "z": {}}]
    verdict = sandbox.run("def f(x): return x", "f", [Case((value,), value)], LIMITS)
    assert verdict.name == "right", verdict


def test_a_tuple_passes_for_a_list_since_known_answers_have_one_kind_of_sequence() -> None:
    assert sandbox.run("def f(): return (1, 2)", "f", [Case((), [1, 2])], LIMITS).name == "right"


def test_a_wall_clock_limit_ends_what_uses_no_cpu() -> None:
    started = time.monotonic()
    code = "import time\ndef f(n):\n    e = time.monotonic() + 60\n    while time.monotonic() < e:\n        pass\n"
    verdict = ungated(code, Limits(cpu_s=60, wall_s=1.0, memory_mib=128))
    assert verdict.name == "contained"
    assert "wall-clock" in verdict.detail
    assert time.monotonic() - started < 10


# --- the second wall, without the first ------------------------------------------------------------------------


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    path = tmp_path / "canary"
    path.write_text("alive")
    for folder in (path, *path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o007 if folder.is_relative_to(tmp_path) else folder.stat().st_mode)
    return path


@pytest.mark.parametrize(
    "action",
    [
        "os.remove(PATH)",
        "os.open(PATH, os.O_WRONLY | os.O_TRUNC)",
        "open(PATH).read()",
        "os.listdir('/')[0]",
        "os.mkdir('/x')",
        "os.open('/proc/self/environ', os.O_RDONLY)",
    ],
)
def test_ungated_code_reaches_no_file(canary: Path, action: str) -> None:
    verdict = ungated(f"import os\nPATH = {str(canary)!r}\ndef f(n):\n    {action}\n    return n == 2\n")
    assert verdict.name in ("contained", "wrong"), verdict
    assert verdict.right == 0
    assert canary.read_text() == "alive"


def test_ungated_code_reaches_no_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        port = server.getsockname()[1]
        code = (
            "import ctypes, struct\n"
            "libc = ctypes.CDLL(None)\n"
            "def f(n):\n"
            "    s = libc.socket(2, 1, 0)\n"
            f"    a = struct.pack('=H', 2) + struct.pack('!H4s8x', {port}, bytes((127, 0, 0, 1)))\n"
            "    return s < 0 or libc.connect(s, a, len(a)) != 0\n"
        )
        assert ungated(code, cases=[Case((1,), True)]).name == "right"
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    "call",
    [
        "os.fork()",
        "os.kill(1, 9)",
        f"os.kill({os.getpid()}, 9)",
        "os.setuid(0)",
        "os.execv('/bin/sh', ['sh'])",
        "os.chroot('..')",
        "os.pipe()",
        "os.setsid()",
        "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "os.sched_setaffinity(0, [0])",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN) and None or [][1]",
    ],
)
def test_ungated_code_is_refused_by_the_kernel(call: str) -> None:
    code = (
        "import os, resource, signal\n"
        f"def f(n):\n    try:\n        {call}\n    except (OSError, IndexError, ValueError):\n"
        "        return 'refused'\n"
        "    return 'done'\n"
    )
    verdict = ungated(code, cases=[Case((1,), "refused")])
    assert verdict.name == "right", verdict


@pytest.mark.parametrize(
    "code",
    [
        "import ctypes\ndef f(n): ctypes.string_at(0)\n",
        "import os\ndef f(n): os.abort()\n",
        "import os\ndef f(n): os._exit(0)\n",
        "import os\nos._exit(0)\n",
        "import os\ndef f(n): os.close(3)\n",
        "def f(n): raise SystemExit\n",
        "import os\ndef f(n):\n    while True: os.write(3, b'A' * 65536)\n",
        "import os\ndef f(n):\n    while True: os.write(2, b'A' * 65536)\n",
        "import os\ndef f(n): os.write(3, b'\\xff' * 100 + b'\\n[' + b'[' * 100000 + b'\\n'); return 0\n",
        "import signal\ntry: signal.signal(24, signal.SIG_IGN)\nexcept OSError: pass\nwhile True: pass\n",
        "def f(n): return 10 ** 10 ** 10\n",
    ],
)
def test_ungated_code_that_breaks_its_process_is_never_right(code: str) -> None:
    started = time.monotonic()
    verdict = ungated(code)
    assert verdict.name in ("contained", "wrong"), verdict
    assert verdict.right == 0
    assert time.monotonic() - started < 25


def test_forged_messages_need_the_right_values_which_the_process_is_not_told() -> None:
    code = (
        "import sys, os, json\n"
        "frame = sys._getframe()\n"
        "while 'nonce' not in frame.f_locals:\n    frame = frame.f_back\n"
        "nonce, job = frame.f_locals['nonce'], frame.f_locals['job']\n"
        "assert set(job) == {'nonce', 'code', 'function', 'calls', 'gate'}\n"
        "for n in range(len(job['calls'])):\n"
        "    line = json.dumps({'nonce': nonce, 'call': n, 'value': ['bool', True]})\n"
        "    os.write(3, line.encode() + b'\\n')\n"
        "os.write(3, json.dumps({'nonce': nonce, 'done': True, 'verdict': 'right'}).encode() + b'\\n')\n"
        "os._exit(0)\n"
    )
    verdict = ungated(code)
    assert (verdict.name, verdict.right) == ("wrong", 1), verdict


def test_nothing_of_a_run_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_process.tempfile, "tempdir", str(tmp_path))
    seen: list[int] = []
    spawn = sandbox_process._spawn

    def remember(write_fd: int) -> Any:
        process = spawn(write_fd)
        seen.append(process.pid)
        return process

    monkeypatch.setattr(sandbox_process, "_spawn", remember)
    before = set(Path("/proc/self/fd").iterdir())
    ungated("def f(n):\n    while True: pass\n")
    assert list(tmp_path.iterdir()) == []
    assert set(Path("/proc/self/fd").iterdir()) == before
    with pytest.raises(ProcessLookupError):
        os.killpg(seen[0], 0)


def test_the_interpreter_gets_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "canary-7f3a")
    code = "import os\ndef f(n): return sorted(os.environ)\n"
    assert ungated(code, cases=[Case((1,), ["LC_ALL"])]).name == "right"


def test_runs_side_by_side_do_not_disturb_each_other() -> None:
    verdicts: list[str] = []

    def one() -> None:
        verdicts.append(sandbox.run("def f(n): return n == 2", "f", CASES, LIMITS).name)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == ["right"] * 4


# --- refusal ---------------------------------------------------------------------------------------------------

_NO_SECCOMP = ("_install_seccomp(os.uname().machine)", "False")
_NO_NAMESPACES = ("namespaces = sandbox_isolation.unshare()", "namespaces = []")
_NO_ROOT = ('_empty_root(empty_dir, "mount" in namespaces)', '"none"')
_AS_ROOT = ("    _drop_user()\n    _drop_capabilities()\n", "")
_NO_LIMITS = ('    report["limits"] = _limit(limits, held)\n', '    report["limits"] = {}\n')


def _without(monkeypatch: pytest.MonkeyPatch, *patches: tuple[str, str]) -> list[bytes]:
    """Make the host poorer by taking walls out of what is sent; returns what is sent to the process."""
    sources = sandbox_process._sources()
    for old, new in patches:
        assert any(old in source for _, source in sources)
        sources = [(name, source.replace(old, new)) for name, source in sources]
    monkeypatch.setattr(sandbox_process, "_sources", lambda: sources)
    sent: list[bytes] = []
    send: Callable[..., None] = sandbox_process._Talk.send

    def record(self: Any, data: bytes, deadline: float) -> None:
        sent.append(data)
        send(self, data, deadline)

    monkeypatch.setattr(sandbox_process._Talk, "send", record)
    return sent


@pytest.mark.skipif(os.getuid() != 0, reason="without root some of these walls are not there to be taken away")
@pytest.mark.parametrize(
    ("patches", "missing"),
    [
        ([_NO_SECCOMP, _NO_NAMESPACES], "no-network"),
        ([_NO_SECCOMP, _NO_ROOT], "no-files"),
        ([_AS_ROOT], "unprivileged"),
        ([_NO_LIMITS], "limits"),
        ([_NO_SECCOMP, _NO_LIMITS, _AS_ROOT], "no-new-processes"),
        ([_NO_SECCOMP, _NO_NAMESPACES], "no-other-processes"),
    ],
)
def test_code_is_refused_and_never_sent_when_a_wall_is_missing(
    monkeypatch: pytest.MonkeyPatch, patches: list[tuple[str, str]], missing: str
) -> None:
    sent = _without(monkeypatch, *patches)
    with pytest.raises(FirstlightError) as error:
        sandbox.run("def f(n): return 'sent-canary'", "f", CASES, LIMITS)
    assert error.value.kind == "sandbox-unavailable"
    assert missing in error.value.message
    assert len(sent) == 1
    assert b"sent-canary" not in sent[0]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root for namespaces without seccomp")
@pytest.mark.parametrize("patches", [[_NO_SECCOMP], [_NO_NAMESPACES], [_NO_NAMESPACES, _NO_ROOT]])
def test_one_kind_of_wall_stands_in_for_the_other(
    monkeypatch: pytest.MonkeyPatch, patches: list[tuple[str, str]]
) -> None:
    _without(monkeypatch, *patches)
    assert sandbox.run("def f(n): return n == 2", "f", CASES, LIMITS).name == "right"


def test_a_process_that_dies_before_it_reports_means_no_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_process, "_BOOTSTRAP", "raise SystemExit('no ctypes here')")
    with pytest.raises(FirstlightError, match="no ctypes here"):
        sandbox.run("def f(n): return 1", "f", CASES, LIMITS)


def test_an_interpreter_that_cannot_be_started_means_no_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_process.sys, "executable", "/nonexistent/python")
    with pytest.raises(FirstlightError, match="could not be started"):
        sandbox.run("def f(n): return 1", "f", CASES, LIMITS)


def test_what_this_host_gives_can_be_asked_without_foreign_code() -> None:
    assert sandbox.isolation(LIMITS)["walls"] == list(REQUIRED)


# --- the gate --------------------------------------------------------------------------------------------------


@given(st.text(max_size=300))
def test_the_gate_never_raises_on_any_text(text: str) -> None:
    tree, syntax, tried = sandbox_gate.check(text)
    assert (tree is None) == bool(syntax or tried)


_NAMES = st.sampled_from(
    ["__class__", "_x", "gi_frame", "f_globals", "tb_frame", "format", "mro", "__dict__", "cr_code"]
)


@given(_NAMES, st.sampled_from(["n.{}", "(lambda: n.{})()", "[n.{} for n in [1]]", "f'{{n.{}}}'", "max(n, key=n.{})"]))
def test_no_expression_reads_an_unlisted_attribute(name: str, shape: str) -> None:
    tree, _, tried = sandbox_gate.check(f"def f(n):\n    return {shape.format(name)}\n")
    assert tree is None
    assert any(name in finding for finding in tried)


def test_no_listed_attribute_leads_out() -> None:
    forbidden = {"format", "format_map", "gi_frame", "f_back", "tb_frame", "mro", "func", "cr_frame", "obj"}
    assert not forbidden & sandbox_gate.ATTRIBUTES
    assert not any(name.startswith("_") for name in sandbox_gate.ATTRIBUTES)


def test_the_offered_modules_hold_only_their_listed_names() -> None:
    offered = sandbox_gate.environment()["__builtins__"]["__import__"]
    for module, names in sandbox_gate.MODULES.items():
        assert set(vars(offered(module))) - {"annotations"} == set(names)
    with pytest.raises(ImportError):
        offered("os")


# --- comparison ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (["int", "0x1"], True),
        (["bool", True], 1),
        (["bool", 1], True),
        (["float", "1.0"], 1),
        (["str", "1"], 1),
        (["int", "one"], 1),
        (["int", None], 1),
        (["other", "True"], True),
        (["list", [["int", "0x1"]]], [1, 2]),
        (["list", "ab"], ["a", "b"]),
        (["dict", [[["str", "a"]]]], {"a": 1}),
        (["NoneType", 0], None),
        ("True", True),
        ([], []),
        (None, None),
        ({}, True),
    ],
)
def test_values_that_only_look_alike_are_not_the_same(described: Any, expected: Any) -> None:
    assert not same(described, expected)
