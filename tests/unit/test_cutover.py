"""The record of a cutover, and the guard that acts on it when nobody else does."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import cutover, cutover_guard, processes
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import (
    ContainerRecipe,
    CutoverStore,
    OldServer,
    ProcessRecipe,
    Record,
    Trigger,
)
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover_guard import Guard, build_program
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.process_recipe import (
    environment_file,
    parse_environment,
    parse_limits,
    read_recipe,
)
from ansible_collections.firstlight.vllm.plugins.module_utils.server_kinds import Wanted, wanted_from
from hypothesis import given
from hypothesis import strategies as st
from support_hosts import FakeUnits, free_port

STANDIN = Path(__file__).parents[1] / "standins" / "sglang.py"
RECIPE = ProcessRecipe(
    "/v/bin/python", ("python", "-m", "x"), "/srv", {"KEY": "v"}, 1, 2, (3,), 0o22, {"NOFILE": "1:2"}
)

text = st.text(max_size=20)
recipes = st.builds(
    ProcessRecipe,
    program=text,
    argv=st.lists(text, max_size=3).map(tuple),
    cwd=text,
    environment=st.dictionaries(text, st.binary(max_size=9).map(os.fsdecode), max_size=3),
    uid=st.integers(0, 2**31),
    gid=st.integers(0, 2**31),
    groups=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    umask=st.integers(0, 0o777),
    limits=st.dictionaries(text, text, max_size=2),
)
servers = st.builds(
    OldServer,
    kind=st.sampled_from(["unit", "process", "container", "release", "none"]),
    unit=text,
    enabled=st.booleans(),
    triggers=st.lists(st.builds(Trigger, text, st.booleans(), st.booleans()), max_size=2).map(tuple),
    process=st.none() | recipes,
    container=st.none() | st.builds(ContainerRecipe, text, text, text, text),
    release=text,
    url=text,
    models=st.lists(text, max_size=2).map(tuple),
    api_key=text,
)
records = st.builds(
    Record,
    old=servers,
    phase=st.sampled_from(["recorded", "stopped", "started", "committed", "restored"]),
    boot_id=text,
    created_s=st.floats(0, 2e9),
    down_since_s=st.none() | st.floats(0, 2e9),
    origin=st.none() | servers,
    note=text,
)


@given(records)
def test_every_record_comes_back_as_it_was_written(record: Record) -> None:
    written = json.dumps(cutover.encode(record))
    assert cutover.decode(json.loads(written)) == record


@given(records)
def test_what_may_be_shown_of_a_record_holds_no_secret(record: Record) -> None:
    old = replace(record.old, api_key="s3cret", process=replace(RECIPE, environment={"A": "s3cret"}))
    told = replace(record, old=old, origin=old)
    assert "s3cret" not in json.dumps(told.public())
    assert "s3cret" not in repr(told)


def test_only_root_can_read_the_record(tmp_path: Path) -> None:
    store = CutoverStore("vllm.service", tmp_path)
    store.save(Record(OldServer("unit", "a.service"), "recorded"))
    assert store.path == tmp_path / "vllm" / "cutover.json"
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert [path.name for path in store.folder.iterdir()] == ["cutover.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"format": 99}', '{"format": 1, "phase": "lost", "old": {}}']
)
def test_a_record_that_cannot_be_understood_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    store = CutoverStore("vllm", tmp_path)
    store.folder.mkdir()
    store.path.write_text(content)
    with pytest.raises(FirstlightError) as caught:
        store.load()
    assert caught.value.kind == "cutover-record-broken"
    assert store.path.read_text() == content


def test_a_phase_without_a_cutover_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FirstlightError, match="no cutover"):
        CutoverStore("vllm", tmp_path).advance("committed")


def test_the_lock_waits_for_its_holder_and_names_it_when_it_gives_up(tmp_path: Path) -> None:
    first, second = CutoverStore("vllm", tmp_path), CutoverStore("vllm", tmp_path)
    with first.lock(), pytest.raises(FirstlightError, match=f"pid {os.getpid()}"), second.lock(timeout_s=0.1):
        pass
    released = threading.Event()

    def hold() -> None:
        with first.lock():
            released.wait(0.3)

    holder = threading.Thread(target=hold)
    holder.start()
    with second.lock(timeout_s=10):
        pass
    holder.join()


@pytest.mark.parametrize(
    ("params", "what"),
    [({"port": 0}, "0 is no TCP port"), ({"port": 70000}, "70000"), ({"command_patterns": ["("]}, "'\\('")],
)
def test_a_bad_option_is_refused_before_anything_is_looked_at(params: dict[str, object], what: str) -> None:
    given_ = {"port": 1, "gpus": [], "own_unit": "vllm", "tolerated_gpu_mib": 0, "units": [], **params}
    with pytest.raises(FirstlightError, match=what):
        wanted_from(given_)


def test_unit_names_may_leave_out_their_type() -> None:
    given_ = {"port": 1, "gpus": [], "own_unit": "vllm", "tolerated_gpu_mib": 0, "units": ["sglang", "b.service"]}
    wanted = wanted_from(given_)
    assert (wanted.own_unit, wanted.units) == ("vllm.service", ("sglang.service", "b.service"))


# --- the recipe of a process -------------------------------------------------------------------------------------


def test_a_recipe_is_read_off_a_running_process(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "LINES": "one\ntwo", "EMPTY": ""}
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path, env=environment, umask=0o027) as running:
        try:
            # its name is there a moment before its arguments
            assert processes.wait_until(lambda: _arguments(running.pid) == ("sleep", "60"), 5)
            found = processes.read_process(running.pid)
            assert found is not None
            recipe = read_recipe(found)
            assert (recipe.argv, recipe.cwd, recipe.environment) == (("sleep", "60"), str(tmp_path), environment)
            assert (recipe.umask, recipe.uid, recipe.gid) == (0o027, os.getuid(), os.getgid())
            assert recipe.program.endswith("/sleep")
            assert set(recipe.limits) == {"NOFILE", "MEMLOCK", "STACK", "CORE"}
        finally:
            running.kill()


def _arguments(pid: int) -> tuple[str, ...]:
    found = processes.read_process(pid)
    return found.cmdline if found else ()


def test_limits_are_read_as_systemd_writes_them() -> None:
    text = (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max core file size        0                    unlimited            bytes     \n"
        "Max open files            1024                 524288               files     \n"
    )
    assert parse_limits(text) == {"CORE": "0:infinity", "NOFILE": "1024:524288"}


def test_a_virtual_environments_python_keeps_its_own_path(tmp_path: Path) -> None:
    link = tmp_path / "bin" / "python"
    link.parent.mkdir()
    link.symlink_to("/bin/sleep")
    with subprocess.Popen(["./bin/python", "60"], cwd=tmp_path) as running:
        try:
            assert processes.wait_until(lambda: _arguments(running.pid)[:1] == ("./bin/python",), 5)
            found = processes.read_process(running.pid)
            assert found is not None
            assert read_recipe(found).program == str(link)
        finally:
            running.kill()


def test_what_systemd_cannot_carry_is_left_out() -> None:
    environment = {"A": "1", "BASH_FUNC_f%%": "()", "INVOCATION_ID": "x", "BAD": os.fsdecode(b"\xff"), "Z": "\uffff"}
    assert environment_file(environment) == 'A="1"\n'


@given(st.text(st.characters(exclude_characters="\0\r\ufeff", exclude_categories=["Cs", "Cn"])))
def test_a_shell_reads_every_value_back_as_it_was(value: str) -> None:
    # systemd's double quotes follow the shell's, line breaks included
    line = environment_file({"A": value})
    assert line.startswith('A="')
    words = shlex.split(line.replace("\\$", "$").replace("\\`", "`"), posix=True)
    assert words == [f"A={value}"]


@given(
    st.dictionaries(
        st.text("ABC_", min_size=1), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
    )
)
def test_an_environment_is_read_whole(environment: dict[str, str]) -> None:
    raw = b"".join(f"{name}={value}".encode() + b"\0" for name, value in environment.items())
    assert parse_environment(raw) == environment


# --- the guard ---------------------------------------------------------------------------------------------------


def guard_in(tmp_path: Path, units: FakeUnits) -> Guard:
    store = CutoverStore("vllm", tmp_path / "var")
    return Guard(store, units.systemd, unit_dir=tmp_path / "units", python="/usr/bin/python3")


def test_the_guard_waits_in_a_timer_and_at_boot(tmp_path: Path) -> None:
    units = FakeUnits()
    units.add("firstlight-guard-vllm.timer")
    guard = guard_in(tmp_path, units)
    guard.arm(1800, Wanted(30000, gpus=(0, 1)))
    service = (tmp_path / "units" / "firstlight-guard-vllm.service").read_text()
    assert "OnActiveSec=1800s" in (tmp_path / "units" / "firstlight-guard-vllm.timer").read_text()
    assert "WantedBy=multi-user.target" in service
    assert "--port 30000 --tolerated-gpu-mib 512 --gpus 0 1" in service
    assert units.runner.ran == [
        "systemctl daemon-reload",
        "systemctl enable --quiet -- firstlight-guard-vllm.service",
        "systemctl restart -- firstlight-guard-vllm.timer",
    ]
    assert stat.S_IMODE(guard.program.stat().st_mode) == 0o700


def test_disarming_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    units = FakeUnits()
    units.add("firstlight-guard-vllm.timer")
    guard = guard_in(tmp_path, units)
    guard.arm(1800, Wanted(30000))
    assert guard.disarm()
    assert not guard.disarm()
    assert list((tmp_path / "units").iterdir()) == []
    assert not guard.program.exists()


def test_the_program_is_whole_and_always_the_same() -> None:
    program = build_program()
    assert program == build_program()
    with zipfile.ZipFile(io.BytesIO(program)) as archive:
        names = archive.namelist()
    assert "__main__.py" in names
    assert "firstlight_guard/cutover_guard.py" in names


@pytest.fixture
def fake_bin(tmp_path: Path) -> Path:
    """A PATH with a `systemd-run` that really starts its program, and a `systemctl` that knows no unit."""
    folder = tmp_path / "bin"
    folder.mkdir()
    run = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nsetsid "$@" >/dev/null 2>&1 &\n'
    show = "#!/bin/sh\n[ $1 = show ] && printf 'Id=x\\nLoadState=loaded\\nActiveState=active\\n'\nexit 0\n"
    for name, script in (("systemd-run", run), ("systemctl", show), ("nvidia-smi", "#!/bin/sh\nexit 0\n")):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder


def test_the_guards_program_restores_a_real_server_by_itself(tmp_path: Path, fake_bin: Path) -> None:
    port = free_port()
    store = CutoverStore("vllm", tmp_path / "var")
    argv = (sys.executable, "-I", "-S", str(STANDIN), "serve", "--port", str(port), "--tp-size", "0")
    recipe = replace(RECIPE, program=sys.executable, argv=argv, cwd=str(tmp_path), uid=os.getuid())
    url = f"http://127.0.0.1:{port}"
    store.save(Record(OldServer("process", process=recipe, url=url, models=("stand-in/old-model",)), "stopped"))
    program = tmp_path / "restore.pyz"
    program.write_bytes(build_program())
    command = [sys.executable, "-I", str(program), "--unit", "vllm", "--state-dir", str(tmp_path / "var")]
    command += ["--config-dir", str(tmp_path / "etc"), "--port", str(port)]
    environment = {"PATH": f"{fake_bin}:{os.environ['PATH']}"}
    try:
        first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (first.returncode, first.stderr) == (0, "")
        assert "the old server serves again (phase restored)" in first.stdout
        assert processes.listeners(port)
        again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert "no unfinished cutover" in again.stdout
    finally:
        holders = [processes.read_process(each.pid or 0) for each in processes.listeners(port)]
        sessions = {holder.session for holder in holders if holder is not None}
        detokenizers = [each for each in processes.list_processes() if each.session in sessions]
        for part in detokenizers:
            processes.send_signal(part, signal.SIGKILL)
    record = store.load()
    assert record is not None
    assert record.note == "nobody committed the cutover in time"


def test_a_guard_that_cannot_restore_says_why_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = CutoverStore("vllm", tmp_path)
    store.folder.mkdir()
    store.path.write_text("{")
    arguments = ["--unit", "vllm", "--state-dir", str(tmp_path), "--config-dir", str(tmp_path), "--port", "1"]
    assert cutover_guard.main(arguments) == 1
    assert "cannot be read" in capsys.readouterr().err
