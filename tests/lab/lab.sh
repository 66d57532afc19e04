#!/bin/bash
# Test hosts: real systemd hosts in containers, reached over ssh.
#   lab.sh up NAME            boot a host as the job finds it: an old server in service, the target's weights in place
#   lab.sh boot NAME          boot a bare host (a fresh one each time)
#   lab.sh furnish NAME       put the old server and the targets' weights on it
#   lab.sh down NAME          remove it
#   lab.sh address NAME       its address
#   lab.sh exec NAME CMD...   run a command in it
#   lab.sh shell NAME         a shell in it
#   lab.sh journal NAME       the end of its journal, for a failed test
#   lab.sh list               the hosts there are
#   lab.sh purge              remove the hosts, the network and the image (not the cache under $FIRSTLIGHT_LAB)
# /opt/firstlight of every host is one folder of this machine, so that an installed vLLM and uv's cache are kept and
# lie on one file system; models and drafters in it are each host's own.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/lab/common.sh
. "$here/common.sh"
tests=$(dirname "$here")
usage() { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# The hosts that inventories name, each at an address of its own.
address_of() {
  case $1 in
    demo) echo 10.89.90.10 ;;
    default) echo 10.89.90.11 ;;
    faults) echo 10.89.90.12 ;;
    proxy) echo 10.89.90.13 ;;
    outside) echo 10.89.90.14 ;;
    qwen35) echo 10.89.90.15 ;;
    bench) echo 10.89.90.16 ;;
    try) echo 10.89.90.17 ;;
    dflash) echo 10.89.90.18 ;;
    *) printf 'lab: %s has no address; add it to address_of in tests/lab/lab.sh\n' "$1" >&2; return 1 ;;
  esac
}

down() {
  # Killed, not shut down: the systemd of a host that ends in order tidies up control groups of its neighbours too,
  # after which `podman exec` into those fails.
  # --volumes takes the host's own models and drafters along
  podman rm --force --time 0 --volumes --ignore "firstlight-$1" >/dev/null 2>&1
}

booted() {
  local state
  for _ in $(seq 120); do
    state=$(podman exec "$1" systemctl is-system-running 2>/dev/null || true)
    case $state in running | degraded) return 0 ;; esac
    sleep 0.25
  done
  return 1
}

boot() {
  local name=$1 host=firstlight-$1 address mac
  address=$(address_of "$name")
  # a fixed MAC: the neighbour table of this machine stays right when a host is killed and started
  # shellcheck disable=SC2046,SC2086
  mac=$(printf '02:42:%02x:%02x:%02x:%02x' ${address//./ })
  down "$name"
  mkdir -p "$LAB/opt"
  # Never mount /sys/fs/cgroup of this machine into a host: that makes this machine's own read-only.
  # A machine's /dev/shm is half its memory; a container's 64 MB is too little for two ranks.
  podman --runtime runc run --detach --name "$host" --hostname "$host" --privileged --cgroupns=private --systemd=always \
    --network "$NETWORK" --ip "$address" --mac-address "$mac" --shm-size 4g \
    --volume "$LAB/opt:/opt/firstlight" --volume /opt/firstlight/models --volume /opt/firstlight/drafters \
    "$IMAGE" /usr/local/sbin/host-init >/dev/null ||
    cannot "podman could not start a systemd container (see above); use a Debian 12 virtual machine with root."
  if ! booted "$host"; then
    podman logs "$host" 2>&1 | tail -n 20 >&2
    down "$name"
    cannot "systemd did not boot in a container within 30 s (see above); use a Debian 12 virtual machine with root."
  fi
  for _ in $(seq 40); do (: <"/dev/tcp/$address/22") 2>/dev/null && return 0; sleep 0.25; done
  printf 'lab: %s booted, but nothing answers on %s port 22\n' "$host" "$address" >&2
  return 1
}

furnish() {
  local host=firstlight-$1
  podman exec "$host" mkdir -p /opt/sglang /srv/models
  podman cp "$tests/standins/sglang.py" "$host:/opt/sglang/sglang.py"
  podman cp "$tests/lab/sglang.service" "$host:/etc/systemd/system/sglang.service"
  local target
  for target in "$tests"/data/tiny/tiny-*; do podman cp "$target" "$host:/srv/models/${target##*/}"; done
  podman exec "$host" chown -R root:root /opt/sglang /srv/models /etc/systemd/system/sglang.service
  podman exec "$host" systemctl daemon-reload
  podman exec "$host" systemctl enable --quiet --now sglang.service
  for _ in $(seq 80); do
    podman exec "$host" curl -sf -o /dev/null http://127.0.0.1:30000/health && return 0
    sleep 0.25
  done
  podman exec "$host" journalctl --no-pager -u sglang -n 30 >&2
  printf 'lab: the old server of %s does not answer within 20 s\n' "$host" >&2
  return 1
}

[ -f "$CONTAINERS_CONF" ] || { echo "lab: run tests/lab/setup.sh first" >&2; exit 1; }
case ${1:-}:$# in
  up:2) boot "$2"; furnish "$2" ;;
  boot:2) boot "$2" ;;
  furnish:2) furnish "$2" ;;
  down:2) down "$2" ;;
  address:2) address_of "$2" ;;
  exec:*) [ $# -ge 3 ] || usage; host=firstlight-$2; shift 2; exec podman exec "$host" "$@" ;;
  shell:2) exec podman exec -it "firstlight-$2" bash -l ;;
  journal:2) podman exec "firstlight-$2" journalctl --no-pager -n "${LAB_JOURNAL_LINES:-300}" -o short-iso ;;
  list:1) podman ps -a --filter "network=$NETWORK" --format '{{.Names}} {{.Status}}' ;;
  purge:1)
    podman ps -aq --filter "network=$NETWORK" | xargs -r podman rm --force --time 0 --volumes >/dev/null
    podman network rm --force "$NETWORK" >/dev/null; podman image rm --force "$IMAGE" >/dev/null ;;
  *) usage ;;
esac
