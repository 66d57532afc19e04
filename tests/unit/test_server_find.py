"""Finding the old server: what is it, what belongs to it, and what must be left alone."""

from __future__ import annotations

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.gpus import GpuHolder
from ansible_collections.firstlight.vllm.plugins.module_utils.host_view import look, serves_sglang
from ansible_collections.firstlight.vllm.plugins.module_utils.processes import Listener
from ansible_collections.firstlight.vllm.plugins.module_utils.server_conflicts import conflicts, refuse_conflicts
from ansible_collections.firstlight.vllm.plugins.module_utils.server_find import find
from ansible_collections.firstlight.vllm.plugins.module_utils.server_kinds import Found, Wanted
from support_hosts import DOCKER_ID, FakeUnits, MadeUpHost, container, launcher, process

WANTED = Wanted(30000, own_unit="vllm.service")
UNIT = "/system.slice/sglang.service"
CONTAINER = f"/system.slice/docker-{DOCKER_ID}.scope"


def find_on(host: MadeUpHost, wanted: Wanted = WANTED) -> Found:
    return find(host, look(host, wanted.port, wanted.gpus), wanted)


def listening(pid: int | None, port: int = 30000) -> Listener:
    return Listener(pid, "127.0.0.1", port)


@pytest.mark.parametrize(
    "cmdline",
    [
        ("python3", "-m", "sglang.launch_server", "--model-path", "m"),
        ("/venv/bin/python3.12", "-u", "-X", "dev", "-m", "sglang.launch_server"),
        ("/venv/bin/python", "/venv/bin/sglang", "serve", "--port", "1"),
        ("sglang", "serve"),
        ("python", "/src/sglang/launch_server.py"),
    ],
)
def test_every_way_to_start_the_old_server_is_known(cmdline: tuple[str, ...]) -> None:
    assert serves_sglang(process(1, *cmdline))


@pytest.mark.parametrize(
    "cmdline",
    [
        ("vim", "/src/sglang/launch_server.py"),
        ("grep", "-r", "sglang.launch_server"),
        ("python", "-c", "print('sglang.launch_server')"),
        ("python", "-m", "sglang_router.launch_router"),
        ("python", "-m", "sglang.bench_serving", "--port", "30000"),
        ("bash", "-c", "python -m sglang.launch_server"),
        ("python", "train.py", "sglang", "serve"),
        ("sglang::detokenizer",),
        (),
    ],
)
def test_what_merely_mentions_the_old_server_is_not_it(cmdline: tuple[str, ...]) -> None:
    assert not serves_sglang(process(1, *cmdline))


def test_a_named_unit_is_found_with_all_of_its_group_and_nothing_else() -> None:
    units = FakeUnits()
    units.add("sglang.service", MainPID="100")
    mine = [launcher(cgroup=UNIT), process(101, "sglang::scheduler_TP0", ppid=100, cgroup=UNIT)]
    host = MadeUpHost([*mine, process(200, "python", "train.py")], units=units, listeners=[listening(100)])
    found = find_on(host)
    assert (found.kind, found.how, found.name, found.pids) == ("unit", "unit", "sglang.service", {100, 101})


def test_a_unit_by_another_name_is_found_by_its_command() -> None:
    units = FakeUnits()
    exec_start = "{ path=/usr/bin/python3 ; argv[]=/usr/bin/python3 -m sglang.launch_server --port 30000 ; }"
    units.add("llm.service", MainPID="100", ExecStart=exec_start)
    units.add("cron.service", MainPID="50", ExecStart="{ argv[]=/usr/sbin/cron -f ; }")
    host = MadeUpHost([launcher(cgroup="/system.slice/llm.service")], units=units)
    assert find_on(host).name == "llm.service"


def test_a_unit_of_sglang_on_another_port_is_not_the_old_server() -> None:
    units = FakeUnits()
    exec_start = "{ argv[]=/usr/bin/python3 -m sglang.launch_server --port 30001 ; }"
    units.add("embeddings.service", MainPID="100", ExecStart=exec_start)
    host = MadeUpHost([launcher(port=30001, cgroup="/system.slice/embeddings.service")], units=units)
    assert find_on(host).kind == "none"


def test_a_unit_that_waits_to_be_restarted_is_found_although_it_has_no_process() -> None:
    units = FakeUnits()
    units.add("sglang.service", ActiveState="activating", SubState="auto-restart", MainPID="0")
    assert find_on(MadeUpHost(units=units)).kind == "unit"


def test_a_process_is_found_by_its_port_with_its_tree_but_not_its_shell() -> None:
    shell = process(90, "-bash", session=90)
    tree = [
        launcher(ppid=90, session=90),
        process(101, "sglang::scheduler_TP0", ppid=100, session=90),
        process(102, "/opt/sglang/bin/python", "-c", "from multiprocessing.resource_tracker", ppid=100, session=90),
    ]
    notebook = process(300, "python", "-m", "ipykernel", ppid=90, session=90)
    host = MadeUpHost([shell, *tree, notebook], listeners=[listening(100)])
    found = find_on(host)
    assert (found.kind, found.how, found.pids) == ("process", "port", {100, 101, 102})
    assert found.main is not None
    assert found.main.pid == 100


def test_schedulers_adopted_by_init_are_tied_by_the_session_they_came_from() -> None:
    host = MadeUpHost(
        [
            launcher(session=100),
            process(101, "sglang::scheduler_TP0", ppid=1, session=100),
            process(102, "sglang::detokenizer", ppid=1, session=100),
            process(103, "sglang::scheduler_TP0", ppid=1, session=777),  # of somebody else's server
        ],
        listeners=[listening(100)],
    )
    found = find_on(host)
    assert found.pids == {100, 101, 102}
    assert {each.pid for each in found.leftovers} == {101, 102}


def test_schedulers_without_a_launcher_are_found_by_the_gpu_memory_they_hold() -> None:
    host = MadeUpHost(
        [
            process(101, "sglang::scheduler_TP0", ppid=1, session=100),
            process(102, "sglang::detokenizer", ppid=1, session=100),
            process(200, "python", "train.py", ppid=1, session=200),
        ],
        holders=[GpuHolder(101, "GPU-a", 90000)],
    )
    found = find_on(host)
    assert (found.kind, found.how, found.pids) == ("none", "GPU memory", {101, 102})


def test_schedulers_of_another_users_living_server_are_left_alone() -> None:
    other = [launcher(500, port=9999, uid=2000), process(501, "sglang::scheduler_TP0", ppid=500, uid=2000, session=100)]
    host = MadeUpHost(
        [launcher(session=100), *other],
        listeners=[listening(100)],
        holders=[GpuHolder(501, "GPU-a", 60000)],
    )
    found = find_on(host)
    assert found.pids == {100}
    with pytest.raises(FirstlightError) as caught:
        refuse_conflicts(conflicts(look(host, 30000), WANTED, found), "nothing was stopped")
    assert "pid 501" in caught.value.what
    assert "60000 MiB" in caught.value.what
    assert caught.value.kind == "foreign-holder"


def test_schedulers_of_a_second_server_from_the_same_shell_are_left_alone() -> None:
    second = [launcher(500, port=9999, session=90), process(501, "sglang::scheduler_TP0", ppid=500, session=90)]
    host = MadeUpHost([launcher(session=90), *second], listeners=[listening(100)])
    assert find_on(host).pids == {100}


def test_an_orphan_of_another_user_is_not_taken_even_from_the_same_session() -> None:
    orphan = process(101, "sglang::scheduler_TP0", ppid=1, session=100, uid=2000)
    host = MadeUpHost([launcher(session=100), orphan], listeners=[listening(100)])
    assert find_on(host).pids == {100}


def test_a_helper_of_another_program_in_the_session_is_not_taken() -> None:
    tracker = process(101, "/home/me/jupyter/bin/python", "-c", "multiprocessing.resource_tracker", session=100)
    host = MadeUpHost([launcher(session=100), tracker], listeners=[listening(100)])
    assert find_on(host).pids == {100}


def test_a_server_that_is_still_loading_is_found_by_its_command_line() -> None:
    host = MadeUpHost([launcher()])
    found = find_on(host)
    assert (found.kind, found.how) == ("process", "command line")


def test_two_servers_that_could_be_meant_are_refused_by_name() -> None:
    host = MadeUpHost([launcher(100), launcher(200)])
    with pytest.raises(FirstlightError, match=r"pid 100.*pid 200") as caught:
        find_on(host)
    assert caught.value.kind == "server-ambiguous"


def test_a_server_started_over_ssh_never_has_the_ssh_unit_stopped_for_it() -> None:
    units = FakeUnits()
    units.add("ssh.service", MainPID="50")
    ssh = "/system.slice/ssh.service"
    host = MadeUpHost(
        [process(50, "sshd: /usr/sbin/sshd -D", cgroup=ssh, name="sshd"), launcher(cgroup=ssh)],
        units=units,
        listeners=[listening(100)],
    )
    found = find_on(host)
    assert (found.kind, found.unit, found.pids) == ("process", None, {100})


def test_a_server_that_cron_started_never_has_cron_stopped_for_it() -> None:
    units = FakeUnits()
    units.add("cron.service", MainPID="50")
    cron = "/system.slice/cron.service"
    chain = [
        process(50, "/usr/sbin/cron", "-f", cgroup=cron, name="cron"),
        process(60, "/bin/sh", "-c", "run.sh", ppid=50, cgroup=cron, name="sh"),
        launcher(ppid=60, cgroup=cron),
    ]
    found = find_on(MadeUpHost(chain, units=units, listeners=[listening(100)]))
    assert (found.kind, found.pids) == ("process", {100})


def test_a_unit_that_runs_a_script_around_the_server_is_the_unit() -> None:
    units = FakeUnits()
    units.add("model.service", MainPID="60")
    group = "/system.slice/model.service"
    chain = [process(60, "/bin/bash", "/opt/run.sh", cgroup=group, name="bash"), launcher(ppid=60, cgroup=group)]
    found = find_on(MadeUpHost(chain, units=units, listeners=[listening(100)]))
    assert (found.kind, found.name) == ("unit", "model.service")


def test_a_transient_unit_is_recorded_as_a_process_since_it_vanishes_when_stopped() -> None:
    units = FakeUnits()
    units.add("run-u5.service", MainPID="100", FragmentPath="/run/systemd/transient/run-u5.service")
    host = MadeUpHost([launcher(cgroup="/system.slice/run-u5.service")], units=units, listeners=[listening(100)])
    found = find_on(host)
    assert found.kind == "process"
    assert found.unit is not None
    assert found.unit.unit == "run-u5.service"


def test_a_users_own_service_is_refused_with_the_command_to_stop_it() -> None:
    group = "/user.slice/user-1000.slice/user@1000.service/app.slice/sglang.service"
    host = MadeUpHost([launcher(cgroup=group)], listeners=[listening(100)])
    with pytest.raises(FirstlightError) as caught:
        find_on(host)
    assert "systemctl --user --machine=1000@ stop sglang.service" in caught.value.fix


def test_a_container_is_found_through_the_proxy_that_holds_its_port() -> None:
    host = MadeUpHost(
        [
            process(80, "/usr/bin/docker-proxy", "-host-port", "30000", uid=0, cgroup="/system.slice/docker.service"),
            launcher(cgroup=CONTAINER, uid=0),
            process(101, "sglang::scheduler_TP0", ppid=100, cgroup=CONTAINER, uid=0),
        ],
        listeners=[listening(80)],
        containers=[container()],
    )
    found = find_on(host)
    assert (found.kind, found.name, found.pids) == ("container", "docker container sglang", {100, 101})
    assert conflicts(look(host, 30000), WANTED, found) == []


def test_a_published_container_is_found_when_nothing_listens_for_it() -> None:
    host = MadeUpHost([launcher(cgroup=CONTAINER)], containers=[container()])
    assert find_on(host).kind == "container"


def test_a_container_with_the_port_inside_only_is_not_the_old_server() -> None:
    host = MadeUpHost([launcher(cgroup=CONTAINER)], containers=[container(ports={})])
    assert find_on(host).kind == "none"


def test_a_container_of_an_orchestrator_is_refused_by_name() -> None:
    pod = f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{DOCKER_ID}.scope"
    host = MadeUpHost([launcher(cgroup=pod)], listeners=[listening(100)])
    with pytest.raises(FirstlightError) as caught:
        find_on(host)
    assert caught.value.kind == "server-unmanageable"


def test_a_server_started_inside_a_notebooks_container_does_not_have_it_stopped() -> None:
    chain = [
        process(70, "jupyter-lab", cgroup=CONTAINER, name="jupyter-lab"),
        launcher(ppid=70, cgroup=CONTAINER),
    ]
    host = MadeUpHost(chain, listeners=[listening(100)], containers=[container("notebooks")])
    with pytest.raises(FirstlightError, match="beside other programs"):
        find_on(host)


def test_firstlights_own_unit_is_an_upgrade_and_no_stranger() -> None:
    units = FakeUnits()
    units.add("vllm.service", MainPID="100")
    group = "/system.slice/vllm.service"
    host = MadeUpHost(
        [process(100, "/opt/v/bin/vllm", "serve", cgroup=group), process(101, "VLLM::Worker", ppid=100, cgroup=group)],
        units=units,
        listeners=[listening(100)],
        holders=[GpuHolder(101, "GPU-a", 90000)],
    )
    found = find_on(host)
    assert (found.kind, found.pids) == ("release", {100, 101})
    assert conflicts(look(host, 30000), WANTED, found) == []


def test_something_else_on_the_port_is_refused_and_named() -> None:
    host = MadeUpHost([process(400, "nginx: master", uid=0)], listeners=[listening(400)])
    found = find_on(host)
    assert found.kind == "none"
    with pytest.raises(FirstlightError) as caught:
        refuse_conflicts(conflicts(look(host, 30000), WANTED, found), "nothing was stopped")
    assert "pid 400 (root): nginx: master" in caught.value.what
    assert "kill 400" in caught.value.fix


def test_a_server_whose_command_line_the_user_allows_is_found_by_port() -> None:
    host = MadeUpHost([process(400, "python", "/usr/bin/vllm", "serve", "m")], listeners=[listening(400)])
    assert find_on(host).kind == "none"
    assert find_on(host, Wanted(30000, patterns=(r"vllm serve",))).kind == "process"


def test_a_desktops_few_mib_are_tolerated_and_a_training_job_is_not() -> None:
    desktop = GpuHolder(600, "GPU-a", 60, "Xorg", graphics=True)
    host = MadeUpHost([process(600, "/usr/lib/xorg/Xorg", uid=0), process(700, "python", "t.py")], holders=[desktop])
    assert conflicts(look(host, 30000), WANTED, Found("none")) == []
    host.holders.append(GpuHolder(700, "GPU-a", 2000))
    assert {each.pid for each in conflicts(look(host, 30000), WANTED, Found("none"))} == {600, 700}


def test_a_job_on_a_gpu_that_is_not_needed_is_no_conflict() -> None:
    host = MadeUpHost([process(700, "t")], holders=[GpuHolder(1, "GPU-a", 0), GpuHolder(700, "GPU-b", 9000)])
    wanted = Wanted(30000, gpus=(0,))
    assert conflicts(look(host, 30000, wanted.gpus), wanted, Found("none")) == []


def test_a_holder_whose_memory_is_not_told_counts_as_a_conflict() -> None:
    host = MadeUpHost([process(700, "t")], holders=[GpuHolder(700, "GPU-a", None)])
    assert conflicts(look(host, 30000), WANTED, Found("none"))


def test_secrets_on_a_strangers_command_line_are_not_told() -> None:
    host = MadeUpHost([process(400, "python", "s.py", "--api-key", "hunter2")], listeners=[listening(400)])
    with pytest.raises(FirstlightError) as caught:
        refuse_conflicts(conflicts(look(host, 30000), WANTED, Found("none")), "nothing was stopped")
    assert "hunter2" not in str(caught.value.as_dict())


def test_a_host_inside_a_container_sees_its_units_below_its_own_root() -> None:
    base = f"/machine.slice/libpod-{DOCKER_ID}.scope"
    units = FakeUnits()
    units.add("sglang.service", MainPID="100")
    host = MadeUpHost([launcher(cgroup=f"{base}/system.slice/sglang.service")], units=units, listeners=[listening(100)])
    host.everyone[0] = process(1, "/sbin/init", ppid=0, cgroup=f"{base}/init.scope", name="systemd")
    assert find_on(host).pids == {100}


def test_a_socket_that_systemd_holds_for_the_old_server_is_no_stranger() -> None:
    units = FakeUnits()
    units.add("sglang.service", MainPID="100", TriggeredBy="sglang.socket")
    host = MadeUpHost([launcher(cgroup=UNIT)], units=units, listeners=[listening(1)])
    found = find_on(host)
    assert found.kind == "unit"
    assert conflicts(look(host, 30000), WANTED, found) == []
