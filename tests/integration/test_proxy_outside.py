"""The proxy on a host with systemd, looked at from a second container on the same network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from support_hosts_lab import ROOT, Host, outside, passed, playbook, wait_for

pytestmark = pytest.mark.slow
KEY = "0123456789abcdef0123456789abcdef"
LOG = ROOT / "tests" / "data" / "logs" / "gpu-0.20.1-dflash-tp2-ok.log"
ROUTES = sorted(
    {
        (method, path)
        for path, methods in re.findall(r"Route: (/\S*), Methods: ([A-Z, ]+)$", LOG.read_text(), re.MULTILINE)
        for method in methods.split(", ")
    }
)
STORE = 29500  # torch's store takes any free port; this one stands for it


class Lab:
    def __init__(self, folder: Path) -> None:
        self.host, self.outsider = Host("proxy"), Host("outside")
        self.inventory = self.host.inventory(folder)

    def see(self, *requests: tuple[str, str] | tuple[str, str, int], port: int = 443) -> list[int]:
        given = [[*request, 0][:3] for request in requests]
        return [answer["status"] for answer in outside(self.outsider, self.host.address, port, given)["answers"]]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("proxy"))
    for host in (lab.host, lab.outsider):
        host.boot()
    standins = ROOT / "tests" / "standins"
    lab.outsider.put(standins / "outsider.py", "/opt/outsider.py")
    lab.host.put(standins / "open_upstream.py", "/opt/open_upstream.py")
    lab.host.shell("systemd-run --unit=upstream python3 /opt/open_upstream.py 127.0.0.1 30000")
    wait_for(lab.host, "curl -sf http://127.0.0.1:30000/health")
    # what a site that already has something on port 80 looks like: the package must not trip over it
    lab.host.shell("systemd-run --unit=port80 python3 -m http.server 80 --bind 127.0.0.1 --directory /var/empty")

    check = playbook("proxy", lab.inventory, "--check", "--diff", vllm_server_api_key=KEY)
    assert passed(check) == 1, "check mode on a host without nginx tells of a change"
    assert "+    listen 0.0.0.0:443 ssl;" in check.stdout
    assert lab.host.shell("command -v nginx || echo none") == "none\n", "and changes nothing"
    assert passed(playbook("proxy", lab.inventory, vllm_server_api_key=KEY)) == 1
    assert passed(playbook("proxy", lab.inventory, vllm_server_api_key=KEY)) == 0
    yield lab
    for host in (lab.host, lab.outsider):
        host.down()


def test_no_route_that_vllm_prints_answers_beyond_the_list(lab: Lab) -> None:
    assert len(ROUTES) >= 30
    # the server behind answers everything, so that each status is the proxy's word
    statuses = lab.see(*ROUTES)
    answered = {route for route, status in zip(ROUTES, statuses, strict=True) if status != 404}
    assert answered == {
        (method, path) for method, path in ROUTES if path == "/health" or (path.startswith("/v1/") and "{" not in path)
    }
    assert {statuses[ROUTES.index(route)] for route in answered} == {200}


@pytest.mark.parametrize(
    "target",
    [
        "/v1/../metrics", "//metrics", "/v1//../metrics", "/v1/%2e%2e/metrics", "/v1/%2E%2E/metrics",
        "/v1/..%2fmetrics", "/v1%2f..%2fmetrics", "/%6detrics", "/v1/%252e%252e/metrics", "/v1/..;/metrics",
        "/metrics/../v1/models", "/metrics/..;/v1/models", "/docs/../v1/models", "/./metrics", "/v1/.../metrics",
        "/v1\\..\\metrics", "/v1/models/..%5c..%5cmetrics", "/V1/models", "/v1", "/health/", "/health/../metrics",
        "/metrics?/v1/", "/metrics#/v1/", "/v1/models#/../metrics", "http://x/metrics", "https://x//metrics",
        "http://127.0.0.1:30000/metrics", "*", "/v1/%00", "/v1/%0d%0aX:1", "/inference/v1/generate", "", "/",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_leads_past_the_list(lab: Lab, target: str) -> None:
    assert lab.see(("GET", target)) in ([404], [400])


def test_other_methods_do_no_more(lab: Lab) -> None:
    assert lab.see(("TRACE", "/v1/models"), ("CONNECT", "127.0.0.1:30000")) == [405, 400]
    assert lab.see(("OPTIONS", "*"), ("POST", "/metrics"), ("PUT", "/metrics")) == [400, 404, 404]


def test_a_query_may_hold_what_a_path_may_not(lab: Lab) -> None:
    assert lab.see(("GET", "/v1/models?next=/../metrics%20")) == [200]


def test_the_clients_key_reaches_vllm_and_its_address_cannot_be_made_up(lab: Lab) -> None:
    asked = f"curl -sk -H 'Authorization: Bearer {KEY}' -H 'X-Forwarded-For: 192.0.2.99'"
    headers = json.loads(lab.outsider.shell(f"{asked} https://{lab.host.address}/v1/models"))["headers"]
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert headers["X-Forwarded-For"] == lab.outsider.address
    assert KEY not in lab.host.shell("cat /var/log/nginx/*.log")


def test_events_arrive_one_by_one(lab: Lab) -> None:
    events = outside(lab.outsider, lab.host.address, 443, stream=True)["stream"]
    assert [event["event"] for event in events] == [0, 1, 2, 3, 4]
    # each is seen before the next one is sent
    for event, after in pairwise(events):
        assert event["seen"] < after["sent"]


def test_a_body_beyond_the_limit_is_refused_unread(lab: Lab) -> None:
    assert lab.see(("POST", "/v1/embeddings", 32 * 2**20), ("POST", "/v1/embeddings", 32 * 2**20 + 1)) == [200, 413]


def test_plain_http_is_not_spoken(lab: Lab) -> None:
    asked = f"curl -s -m 5 -o /dev/null -w '%{{http_code}}' http://{lab.host.address}:443/v1/models || true"
    assert lab.outsider.shell(asked) == "400"


def test_metrics_are_for_named_addresses_only(lab: Lab) -> None:
    named = {"vllm_server_api_key": KEY, "proxy_metrics_allow": [lab.outsider.address]}
    assert passed(playbook("proxy", lab.inventory, **named)) == 1
    try:
        assert lab.see(("GET", "/metrics"), ("GET", "/metrics/x"), ("GET", "/metrics?x")) == [200, 404, 200]
        # another client, the host itself by its own address, is told what it is told of every other path
        asked = f"curl -sk -o /dev/null -w '%{{http_code}}' https://{lab.host.address}/metrics"
        assert lab.host.shell(asked) == "404"
    finally:
        passed(playbook("proxy", lab.inventory, vllm_server_api_key=KEY))
    assert lab.see(("GET", "/metrics")) == [404]


def test_the_api_can_be_for_named_addresses_only(lab: Lab) -> None:
    # no key is needed then
    assert passed(playbook("proxy", lab.inventory, proxy_api_allow=["192.0.2.7"])) == 1
    try:
        assert lab.see(("GET", "/v1/models"), ("GET", "/health")) == [403, 200]
    finally:
        passed(playbook("proxy", lab.inventory, vllm_server_api_key=KEY))


def test_a_proxy_that_anybody_could_use_is_refused(lab: Lab) -> None:
    done = playbook("proxy", lab.inventory)
    assert done.returncode != 0
    assert "neither an API key nor a list of clients" in re.sub(r"\s+", " ", done.stdout)


def test_the_self_made_certificate_is_kept_and_its_key_is_roots_alone(lab: Lab) -> None:
    assert lab.host.shell("stat -c '%a %U' /etc/nginx/firstlight.key") == "600 root\n"
    text = lab.host.shell("openssl x509 -noout -text -in /etc/nginx/firstlight.crt")
    assert "DNS:firstlight-proxy" in text


def fingerprint(lab: Lab) -> str:
    asked = (
        f"openssl s_client -connect {lab.host.address}:443 </dev/null 2>/dev/null | openssl x509 -noout -fingerprint"
    )
    return lab.host.shell(asked)


def test_a_given_certificate_is_served_and_a_wrong_one_changes_nothing(lab: Lab) -> None:
    self_made = fingerprint(lab)
    lab.host.shell(
        "mkdir -p /etc/ssl/llm && cd /etc/ssl/llm && for n in a b; do openssl req -x509 -newkey ec -pkeyopt"
        " ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=llm.example.org -keyout $n.key -out $n.crt; done"
    )
    given = {"vllm_server_api_key": KEY, "proxy_server_name": "llm.example.org"}
    pair = {"proxy_certificate": "/etc/ssl/llm/a.crt", "proxy_certificate_key": "/etc/ssl/llm/a.key"}
    assert passed(playbook("proxy", lab.inventory, **given, **pair)) == 1
    theirs = fingerprint(lab)
    assert theirs == lab.host.shell("openssl x509 -noout -fingerprint -in /etc/ssl/llm/a.crt")
    assert theirs != self_made

    wrong = {**pair, "proxy_certificate_key": "/etc/ssl/llm/b.key"}
    done = playbook("proxy", lab.inventory, **given, **wrong)
    assert done.returncode != 0
    assert "key values mismatch" in done.stdout
    assert "a.key" in lab.host.shell("cat /etc/nginx/conf.d/firstlight.conf")
    lab.host.shell("nginx -t -q")
    assert fingerprint(lab) == theirs

    lab.host.shell("chmod 0644 /etc/ssl/llm/a.key")
    done = playbook("proxy", lab.inventory, **given, **pair)
    assert "is open to every user" in re.sub(r"\s+", " ", done.stdout)
    assert passed(playbook("proxy", lab.inventory, vllm_server_api_key=KEY)) == 1
    assert fingerprint(lab) == self_made


def test_all_addresses_of_both_families_can_be_served(lab: Lab) -> None:
    assert passed(playbook("proxy", lab.inventory, vllm_server_api_key=KEY, proxy_address="::", proxy_port=8443)) == 1
    try:
        assert lab.see(("GET", "/health"), port=8443) == [200]
        asked = "curl -sk -o /dev/null -w '%{http_code}' https://[::1]:8443/health"
        assert lab.host.shell(asked) == "200"
    finally:
        passed(playbook("proxy", lab.inventory, vllm_server_api_key=KEY))
    assert lab.see(("GET", "/health")) == [200]


def test_a_port_that_another_program_holds_is_refused_with_its_name(lab: Lab) -> None:
    done = playbook("proxy", lab.inventory, vllm_server_api_key=KEY, proxy_port=22)
    assert done.returncode != 0
    assert re.search(r"port 22 is held by process \d+ \(sshd", re.sub(r"\s+", " ", done.stdout))


def test_exactly_the_intended_ports_are_open_torchs_store_shut(lab: Lab) -> None:
    store = f"python3 -m http.server {STORE} --bind 0.0.0.0 --directory /var/empty"
    walls = "-p IPAddressDeny=any -p IPAddressAllow=127.0.0.0/8 -p IPAddressAllow=::1"
    lab.host.shell("mkdir -p /var/empty")
    lab.host.shell(f"systemd-run --unit=bare {store}")
    wait_for(lab.host, f"curl -sf http://127.0.0.1:{STORE}/")
    assert outside(lab.outsider, lab.host.address, 443, scan=True)["ports"] == [22, 443, STORE], "the scan sees it bare"
    lab.host.shell(f"systemctl stop bare; systemd-run --unit=walled {walls} {store}")
    wait_for(lab.host, f"curl -sf http://127.0.0.1:{STORE}/")
    assert outside(lab.outsider, lab.host.address, 443, scan=True)["ports"] == [22, 443]
    lab.host.shell("systemctl stop walled")


def test_it_comes_up_at_boot_and_can_be_taken_away(lab: Lab) -> None:
    assert lab.host.shell("systemctl is-enabled nginx.service") == "enabled\n"
    assert lab.host.shell("ls /usr/sbin/policy-rc.d 2>/dev/null || echo none") == "none\n"
    assert passed(playbook("proxy", lab.inventory, "--check", proxy_state="absent")) == 1
    assert lab.see(("GET", "/health")) == [200]
    assert passed(playbook("proxy", lab.inventory, proxy_state="absent")) == 1
    assert passed(playbook("proxy", lab.inventory, proxy_state="absent")) == 0
    asked = f"curl -sk -m 3 -o /dev/null https://{lab.host.address}/health; echo $?"
    assert lab.outsider.shell(asked) != "0\n"
