"""Units and journals as systemctl and journalctl print them."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.host_command import CommandResult, run_command
from ansible_collections.firstlight.vllm.plugins.module_utils.systemd import Systemd, parse_journal, parse_show
from hypothesis import given
from hypothesis import strategies as st
from support_hosts import FakeRunner

ACTIVE = """\
Type=exec
Restart=always
MainPID=4711
NRestarts=2
Result=success
ExecMainStartTimestampMonotonic=5000000
ExecMainExitTimestampMonotonic=0
ExecMainCode=0
ExecMainStatus=0
ExecStart={ path=/usr/bin/python3 ; argv[]=/usr/bin/python3 -m sglang.launch_server --x=a=b ; ignore_errors=no ; }
ExecStart={ path=/bin/second ; }
ControlGroup=/system.slice/sglang.service
Id=sglang.service
TriggeredBy=sglang.socket sglang.timer
LoadState=loaded
ActiveState=active
SubState=running
FragmentPath=/etc/systemd/system/sglang.service
UnitFileState=enabled
NeedDaemonReload=yes
InvocationID=5ad1f5fbd7f14d3bbde4f1d4a8f4b1a2
ActiveEnterTimestampMonotonic=6500000
"""
DEAD = """\
Id=vllm.service
LoadState=loaded
ActiveState=failed
SubState=failed
Result=oom-kill
MainPID=0
ExecMainCode=2
ExecMainStatus=9
UnitFileState=disabled
"""


def entry(message: object, **more: object) -> str:
    record = {"MESSAGE": message, "__CURSOR": "s=1;i=2", "__REALTIME_TIMESTAMP": "1700000000123456", "_PID": "42"}
    return json.dumps({**record, **more})


def test_a_running_unit_is_read_with_its_times() -> None:
    [state] = parse_show(ACTIVE, 1000.0)
    assert (state.unit, state.main_pid, state.n_restarts) == ("sglang.service", 4711, 2)
    assert (state.exec_main_start, state.exec_main_exit, state.active_enter) == (1005.0, None, 1006.5)
    assert state.triggered_by == ("sglang.socket", "sglang.timer")
    assert state.exec_start.startswith("{ path=/usr/bin/python3 ; argv[]=/usr/bin/python3 -m sglang")
    assert "--x=a=b" in state.exec_start
    assert (state.running, state.enabled, state.need_daemon_reload, state.exit_text) == (True, True, True, "")


def test_a_dead_unit_tells_how_it_ended() -> None:
    [state] = parse_show(DEAD, 0.0)
    assert (state.result, state.exec_main_code, state.exit_text) == ("oom-kill", "killed", "signal 9 (SIGKILL)")
    assert (state.running, state.enabled, state.exists) == (False, False, True)


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [("1", "2", "exit status 2"), ("2", "15", "signal 15 (SIGTERM)"), ("3", "11", "signal 11 (SIGSEGV)"),
     ("2", "99", "signal 99"), ("0", "0", "")],
)  # fmt: skip
def test_every_way_to_end_has_words(code: str, status: str, text: str) -> None:
    [state] = parse_show(f"Id=a\nExecMainCode={code}\nExecMainStatus={status}\n", 0.0)
    assert state.exit_text == text


def test_several_units_come_apart_at_the_empty_line() -> None:
    assert [state.unit for state in parse_show(f"{ACTIVE}\n{DEAD}\n", 0.0)] == ["sglang.service", "vllm.service"]


def test_an_unknown_unit_does_not_exist_and_a_masked_one_does() -> None:
    unknown, masked = parse_show("Id=a\nLoadState=not-found\n\nId=b\nLoadState=masked\n", 0.0)
    assert (unknown.exists, unknown.masked) == (False, False)
    assert (masked.exists, masked.masked) == (True, True)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ([112, 195, 188, 0, 255], "pü\0\ufffd"),
        (["first", "second"], "first\nsecond"),
        (["first", [115]], "first\ns"),
        ([], ""),
    ],
)
def test_a_message_is_read_in_all_the_forms_that_json_output_has(message: object, text: str) -> None:
    [read] = parse_journal(entry(message) + "\n")
    assert (read.text, read.time_s, read.pid, read.manager) == (text, 1700000000.123456, 42, False)


@given(st.lists(st.one_of(st.none(), st.text(), st.lists(st.integers(0, 255), min_size=1)), max_size=8))
def test_a_journal_keeps_every_entry_in_order(messages: list[object]) -> None:
    text = "".join(entry(message, __CURSOR=str(at)) + "\n" for at, message in enumerate(messages))
    assert [read.cursor for read in parse_journal(text)] == [str(at) for at in range(len(messages))]


def test_a_line_break_inside_a_message_does_not_split_the_entry() -> None:
    separators = "a\u2028b\x0cc\nd\x1ce"
    assert [read.text for read in parse_journal(entry(separators) + "\n")] == [separators]


def test_the_journal_of_one_start_is_asked_for_by_its_invocation_and_read_on_from_the_cursor() -> None:
    runner = FakeRunner({"journalctl": lambda argv: entry("x") + "\n"})
    systemd = Systemd(runner)
    entries, cursor = systemd.journal_lines("abc")
    assert ([read.text for read in entries], cursor) == (["x"], "s=1;i=2")
    assert runner.ran[0].endswith(" _SYSTEMD_INVOCATION_ID=abc")
    runner.answers["journalctl"] = lambda argv: ""
    assert systemd.journal_lines("abc", cursor) == ([], "s=1;i=2")
    assert "--after-cursor=s=1;i=2" in runner.ran[1]


def test_the_managers_own_words_can_be_read_with_it_or_alone() -> None:
    runner = FakeRunner({"journalctl": lambda argv: entry("oom", INVOCATION_ID="abc", _PID="1") + "\n"})
    [read], _ = Systemd(runner).journal_lines("abc", unit="vllm.service")
    assert read.manager
    words = "UNIT=vllm.service INVOCATION_ID=abc _PID=1"
    assert runner.ran[0].endswith(f" _SYSTEMD_INVOCATION_ID=abc + {words}")
    Systemd(runner).unit_messages("vllm.service", "abc")
    assert runner.ran[1].endswith(f"INVOCATION_ID {words}")


@pytest.mark.parametrize(
    ("verb", "command"),
    [
        (lambda systemd: systemd.start("a.service"), "systemctl start -- a.service"),
        (lambda systemd: systemd.stop("a.service", wait=False), "systemctl stop --no-block -- a.service"),
        (lambda systemd: systemd.restart("a.service"), "systemctl restart -- a.service"),
        (lambda systemd: systemd.kill("a.service", signal.SIGKILL), "systemctl kill --signal=SIGKILL -- a.service"),
        (lambda systemd: systemd.enable("a.service"), "systemctl enable --quiet -- a.service"),
        (lambda systemd: systemd.disable("a.service"), "systemctl disable --quiet -- a.service"),
        (lambda systemd: systemd.daemon_reload(), "systemctl daemon-reload"),
    ],
)
def test_a_verb_runs_its_command_and_a_failure_names_the_unit(verb, command) -> None:  # type: ignore[no-untyped-def]
    runner = FakeRunner()
    verb(Systemd(runner))
    assert runner.ran == [command]
    runner.answers["systemctl"] = lambda argv: CommandResult(1, "", "Job failed.\nSee journalctl -xe.")
    with pytest.raises(FirstlightError, match="failed: See journalctl -xe") as caught:
        verb(Systemd(runner))
    assert caught.value.kind == "systemctl-failed"


def test_resetting_a_unit_that_is_not_loaded_is_no_failure() -> None:
    runner = FakeRunner({"systemctl reset-failed": lambda argv: CommandResult(1, "", "Unit a.service not loaded.")})
    Systemd(runner).reset_failed("a.service")
    runner.answers["systemctl reset-failed"] = lambda argv: CommandResult(1, "", "Access denied")
    with pytest.raises(FirstlightError, match="Access denied"):
        Systemd(runner).reset_failed("a.service")


def test_a_host_that_systemd_did_not_boot_is_told_so() -> None:
    said = "System has not been booted with systemd as init system (PID 1). Can't operate."
    runner = FakeRunner({"systemctl": lambda argv: CommandResult(1, "", said)})
    with pytest.raises(FirstlightError) as caught:
        Systemd(runner).show("a.service")
    assert caught.value.kind == "no-systemd"


def test_a_name_that_systemd_cannot_take_is_refused() -> None:
    with pytest.raises(FirstlightError, match="no unit by the name"):
        Systemd(FakeRunner()).show("")


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(FirstlightError) as caught:
        run_command(["no-such-program-here"], 5)
    assert caught.value.kind == "command-missing"


def test_a_program_that_overruns_is_ended_and_named() -> None:
    with pytest.raises(FirstlightError, match=r"no answer within 0\.2 s") as caught:
        run_command(["sleep", "60"], 0.2)
    assert caught.value.kind == "command-timed-out"


def test_output_is_kept_apart_and_the_last_line_is_the_complaint() -> None:
    result = run_command(["sh", "-c", "echo out; echo one >&2; echo two >&2; exit 3"], 10)
    assert (result.status, result.stdout, result.complaint) == (3, "out\n", "two")


@pytest.mark.skipif(shutil.which("journalctl") is None, reason="needs journalctl")
def test_this_machines_journalctl_takes_the_options() -> None:
    entries, cursor = Systemd().journal_lines("0" * 32, unit="no-such.service")
    assert (entries, cursor) == ([], None)


OOM = """\
python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/system.slice/vllm.service,\
task_memcg=/system.slice/vllm.service,task=VLLM::Worker_TP,pid=27511,uid=999
oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,\
task_memcg=/system.slice/other-vllm.service,task=python,pid=1,uid=0
"""


def test_the_kernels_word_on_a_units_memory_is_told_by_its_control_group() -> None:
    runner = FakeRunner({"journalctl": lambda argv: OOM})
    [line] = Systemd(runner).oom_kills("vllm.service", 1700000000.9)
    assert "pid=27511" in line
    assert "--since=@1700000000" in runner.ran[-1]
