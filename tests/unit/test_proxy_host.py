"""The proxy on its host: what is done, in which order, and what is refused. A scripted host stands in."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.host_command import CommandResult
from ansible_collections.firstlight.vllm.plugins.module_utils.inputs import check_values
from ansible_collections.firstlight.vllm.plugins.module_utils.inputs_proxy import check_openness, upstream_parts
from ansible_collections.firstlight.vllm.plugins.module_utils.processes import Listener
from ansible_collections.firstlight.vllm.plugins.module_utils.proxy_host import ProxyHost, Site
from ansible_collections.firstlight.vllm.plugins.module_utils.systemd import Systemd, UnitState
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support_release import unit_state

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles" / "proxy"
LOG = ROOT / "tests" / "data" / "logs" / "gpu-0.20.1-dflash-tp2-ok.log"


DEFAULTS = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
TEMPLATE = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False).from_string(
    (ROLE / "templates" / "site.conf.j2").read_text()
)


def site_text(**overrides: Any) -> str:
    return TEMPLATE.render({**DEFAULTS, "proxy_upstream": "127.0.0.1:30000", **overrides})


SITE = Site(text=site_text(), address="0.0.0.0", port=443)


class FakeSystemd(Systemd):
    def __init__(self, host: FakeHost) -> None:
        self.host = host

    def show(self, unit: str) -> UnitState:
        state = "active" if self.host.running else "inactive"
        return unit_state(active_state=state, unit_file_state="enabled" if self.host.enabled else "disabled")

    def start(self, unit: str, **_: Any) -> None:
        self.host.done.append("start")
        self.host.running = True

    def enable(self, unit: str) -> None:
        self.host.enabled = True


class FakeHost:
    """A host in a folder: programs, ports and a service."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.etc = folder, folder / "nginx"
        self.installed = self.running = self.enabled = False
        self.refuses = ""
        self.done: list[str] = []
        self.policy_seen = ""
        self.taken: list[Listener] = []
        self.proxy = ProxyHost(
            etc=self.etc, run=self.run, systemd=FakeSystemd(self), which=self.which, listening=self.listening,
            policy=folder / "policy-rc.d",
        )  # fmt: skip

    def which(self, program: str) -> str | None:
        return f"/usr/sbin/{program}" if self.installed else None

    def listening(self, port: int) -> list[Listener]:
        return [*self.taken, *([Listener(None, "0.0.0.0", port)] if self.done and self.running else [])]

    def run(self, argv: Sequence[str], timeout_s: float) -> CommandResult:
        if "install" in argv:
            self.policy_seen = self.proxy.policy.read_text()
            for part in ("sites-available", "sites-enabled", "conf.d"):
                (self.etc / part).mkdir(parents=True)
            (self.etc / "sites-available" / "default").write_text("welcome")
            (self.etc / "sites-enabled" / "default").symlink_to(self.etc / "sites-available" / "default")
            self.installed = True
            self.done.append("install")
        elif argv[:2] == ["openssl", "req"]:
            Path(argv[argv.index("-keyout") + 1]).write_text("key")
            Path(argv[argv.index("-out") + 1]).write_text(argv[argv.index("-addext") + 1])
            self.done.append("certificate")
        elif argv[:2] == ["openssl", "x509"]:
            asked = argv[-1]
            good = asked in self.proxy.certificate.read_text() or "-checkend" in argv
            return CommandResult(0, "does match certificate" if good else "does NOT match certificate", "")
        elif argv[:2] == ["nginx", "-t"]:
            return CommandResult(1 if self.refuses else 0, "", self.refuses)
        else:
            self.done.append(" ".join(argv[:2]))
        return CommandResult(0, "", "")


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


def test_a_blank_host_in_check_mode_is_told_all_that_would_be_done_and_nothing_is(host: FakeHost) -> None:
    changes = host.proxy.ensure(SITE, check=True)
    assert changes == [
        "install nginx-light", "install openssl", "make a self-signed certificate (there is none)",
        "take the distribution's default site away", "write the site", "start nginx", "enable nginx",
    ]  # fmt: skip
    assert host.done == []
    assert list(host.folder.iterdir()) == []


def test_a_blank_host_is_served_and_a_second_run_does_nothing(host: FakeHost) -> None:
    assert host.proxy.ensure(SITE, check=False)
    assert host.done == ["apt-get -q", "install", "certificate", "start"]
    assert host.proxy.site_file.read_text() == SITE.text
    assert not (host.etc / "sites-enabled" / "default").is_symlink()
    assert host.proxy.key.stat().st_mode & 0o777 == 0o600
    assert host.enabled
    host.done.clear()
    # a stand-in for nginx cannot be told from another program by its process
    host.proxy.listening = lambda port: []
    assert host.proxy.ensure(SITE, check=False) == []
    assert host.done == []


def test_nginx_is_not_started_while_it_is_installed_and_a_killed_run_forbids_nothing(host: FakeHost) -> None:
    host.proxy.ensure(SITE, check=False)
    assert not host.proxy.policy.exists()
    script = host.folder / "left-behind"
    script.write_text(host.policy_seen)
    assert subprocess.run(["sh", script], check=False).returncode == 101, "while this process lives"
    script.write_text(host.policy_seen.replace(f"/proc/{os.getpid()}", "/proc/999999999"))
    assert subprocess.run(["sh", script], check=False).returncode == 0, "and no longer"


def test_a_policy_of_the_host_is_left_alone(host: FakeHost) -> None:
    host.proxy.policy.write_text("#!/bin/sh\nexit 101\n")
    host.proxy.ensure(SITE, check=False)
    assert host.proxy.policy.read_text() == "#!/bin/sh\nexit 101\n"


def test_a_site_that_nginx_refuses_is_taken_back_and_nothing_is_reloaded(host: FakeHost) -> None:
    host.proxy.ensure(SITE, check=False)
    host.done.clear()
    host.proxy.listening = lambda port: []
    host.refuses = 'nginx: [emerg] unknown directive "x" in /etc/nginx/conf.d/firstlight.conf:3\n'
    with pytest.raises(FirstlightError, match='unknown directive "x"') as caught:
        host.proxy.ensure(replace(SITE, text="x"), check=False)
    assert caught.value.kind == "nginx-refuses"
    assert host.proxy.site_file.read_text() == SITE.text
    assert host.done == []


def test_a_first_site_that_nginx_refuses_leaves_none(host: FakeHost) -> None:
    host.refuses = "nginx: [emerg] no"
    with pytest.raises(FirstlightError):
        host.proxy.ensure(SITE, check=False)
    assert not host.proxy.site_file.exists()
    assert not host.running


def test_a_default_site_that_is_the_sites_own_is_left_alone(host: FakeHost) -> None:
    host.proxy.ensure(SITE, check=False)
    own = host.etc / "sites-enabled" / "default"
    own.write_text("server { listen 80; }")
    host.proxy.listening = lambda port: [Listener(None, "0.0.0.0", port)] if host.done else []
    host.done.clear()
    host.proxy.ensure(replace(SITE, text="other"), check=False)
    assert own.read_text() == "server { listen 80; }"
    assert host.done == ["systemctl reload"]


def test_a_self_made_certificate_follows_the_name(host: FakeHost) -> None:
    host.proxy.ensure(SITE, check=False)
    host.proxy.listening = lambda port: []
    (reason, *_) = host.proxy.ensure(replace(SITE, server_name="llm.example.org"), check=True)
    assert reason == "make a self-signed certificate (the one there is not for llm.example.org)"


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.7", "::"])
def test_a_port_that_is_taken_is_refused_before_anything_changes(host: FakeHost, address: str) -> None:
    host.taken = [Listener(os.getpid(), address, 443)]
    with pytest.raises(FirstlightError, match=f"port 443 is held by process {os.getpid()}") as caught:
        host.proxy.ensure(SITE, check=False)
    assert caught.value.where == "proxy_port"
    assert host.done == []


def test_a_port_taken_on_another_address_is_free(host: FakeHost) -> None:
    host.taken = [Listener(os.getpid(), "127.0.0.1", 443)]
    assert host.proxy.ensure(replace(SITE, address="192.0.2.7"), check=True)


def test_a_given_pair_must_be_there_and_its_key_must_be_closed(host: FakeHost, tmp_path: Path) -> None:
    certificate, key = tmp_path / "a.crt", tmp_path / "a.key"
    given = replace(SITE, certificate=str(certificate), certificate_key=str(key))
    certificate.write_text("c")
    with pytest.raises(FirstlightError, match="there is no file"):
        host.proxy.ensure(given, check=True)
    key.write_text("k")
    key.chmod(0o644)
    with pytest.raises(FirstlightError, match="open to every user"):
        host.proxy.ensure(given, check=True)
    key.chmod(0o640)
    assert "make a self-signed certificate (there is none)" not in host.proxy.ensure(given, check=True)


def test_it_can_be_taken_away_and_nginx_stays(host: FakeHost) -> None:
    host.proxy.ensure(SITE, check=False)
    assert len(host.proxy.remove(check=True)) == 3
    assert host.proxy.site_file.exists()
    assert len(host.proxy.remove(check=False)) == 3
    assert host.proxy.remove(check=False) == []
    assert host.done[-1] == "systemctl reload"
    assert host.running


# --- what is written ---------------------------------------------------------------------------------------------

SHAPED = {
    "proxy_address": "192.0.2.7", "proxy_server_name": "llm", "proxy_max_body": "1m", "proxy_upstream": "127.0.0.1:1",
    "proxy_certificate": "/c", "proxy_certificate_key": "/k", "proxy_api_allow": ["192.0.2.1"],
    "proxy_metrics_allow": ["192.0.2.1"],
}  # fmt: skip
PIECES = st.lists(
    st.sampled_from(["a", "1", ".", ":", "/", "::", "%", ";", " ", "{", "}", '"', "'", "\n", "#", "$x", "\\",
                     "include /x", "127.0.0.1", "fe80::1", "/24", "_", "-", "[", "]", "m", "\0", "é"]),
    max_size=5,
).map("".join)  # fmt: skip


def shape(text: str) -> list[tuple[str, int]]:
    """The directives in order, each with its number of words."""
    return [(words[0], len(words)) for line in text.splitlines() if (words := line.split()) and words[0][0] != "#"]


@pytest.mark.parametrize("name", sorted(SHAPED))
@given(piece=st.one_of(PIECES, st.text(max_size=12)))
@example(piece="fe80::1%;x")
@example(piece="fe80::1%}")
@example(piece="1m;x")
@example(piece="a;b")
@example(piece="/a;b")
@example(piece="127.0.0.1:1;x")
@settings(max_examples=60, deadline=None)
def test_no_value_that_is_accepted_changes_what_nginx_is_told_to_do(name: str, piece: str) -> None:
    value = [piece] if isinstance(SHAPED[name], list) else piece
    try:
        check_values({**SHAPED, name: value})
    except FirstlightError:
        return
    # beside the address of all, which takes a word of its own
    expected = {**SHAPED, name: "::" if value == "::" else SHAPED[name]}
    text = site_text(**{**SHAPED, name: value})
    assert shape(text) == shape(site_text(**expected))
    assert [text.count(mark) for mark in ";{}\"'"] == [site_text(**expected).count(mark) for mark in ";{}\"'"]


# --- what goes on ------------------------------------------------------------------------------------------------


def plain(target: str) -> bool:
    """Whether the site's own pattern lets a request's target on to the locations."""
    found = re.search(r'"~(\S+)" 1;', site_text())
    assert found
    return re.search(found.group(1), target) is not None


@pytest.mark.parametrize("target", ["/v1/models", "/v1/chat/completions", "/health", "/v1/responses/resp_1-a.b~c",
                                    "/v1/models?a=%2e%2e/../x"])  # fmt: skip
def test_plainly_written_paths_go_on(target: str) -> None:
    assert plain(target)


@pytest.mark.parametrize(
    "target",
    ["/v1/../metrics", "//metrics", "/v1/%2e%2e/metrics", "/metrics/../v1/models", "/v1//models", "/v1/.", "/v1/.x",
     "/v1/a;b", "/v1/a\\b", "/v1/ä", "", "v1/models", "/v1/models#x", "/v1/", "/"],
)  # fmt: skip
def test_paths_that_two_servers_could_read_in_two_ways_do_not(target: str) -> None:
    assert not plain(target)


def test_every_route_of_vllm_that_is_to_be_served_is_written_plainly() -> None:
    routes = set(re.findall(r"Route: (/v1/[^,{]*[^,{/])(?:/\{[^}]*\}[^,]*)?, Methods", LOG.read_text()))
    assert len(routes) >= 9
    assert [route for route in routes if not plain(route)] == []


def test_each_upstream_is_named_with_a_path_so_that_nginxs_reading_goes_on() -> None:
    text = site_text(proxy_metrics_allow=["192.0.2.1"])
    passed = re.findall(r"proxy_pass (\S+);", text)
    assert passed == [f"http://firstlight_vllm{path}" for path in ("/v1/", "/health", "/metrics")]
    assert "/metrics" not in site_text(), "not even a location without named addresses"


def test_nginx_ends_an_idle_connection_before_vllm_does() -> None:
    # uvicorn's limit is 5 s: the one that ends it second may just have sent a request
    found = re.search(r"upstream firstlight_vllm \{[^}]*keepalive_timeout (\d+)s;", site_text())
    assert found
    assert int(found.group(1)) < 5


def test_an_ipv6_address_is_put_in_brackets() -> None:
    assert "listen [::]:443 ssl ipv6only=off;" in site_text(proxy_address="::"), "and all of them take IPv4 along"
    assert "listen [2001:db8::7]:8443 ssl;" in site_text(proxy_address="2001:db8::7", proxy_port=8443)


@pytest.mark.parametrize(
    ("text", "parts"),
    [("127.0.0.1:30000", ("127.0.0.1", 30000)), ("[::1]:8000", ("::1", 8000)), ("localhost:1", ("localhost", 1)),
     ("::1:8000", None), ("x.example:80", None), ("127.0.0.1:70000", None), ("127.0.0.1:80;", None)],
)  # fmt: skip
def test_an_upstream_is_an_address_and_a_port(text: str, parts: tuple[str, int] | None) -> None:
    assert upstream_parts(text) == parts


def test_a_proxy_needs_a_key_a_list_of_clients_or_loopback() -> None:
    check_openness(address="127.0.0.1", api_key=False, api_allow=[])
    check_openness(address="0.0.0.0", api_key=True, api_allow=[])
    check_openness(address="::", api_key=False, api_allow=["192.0.2.0/24"])
    with pytest.raises(FirstlightError, match="Anyone who reaches the port could use the GPUs"):
        check_openness(address="0.0.0.0", api_key=False, api_allow=[])
