#!/bin/bash
# Test hosts: real systemd hosts in containers, reached over ssh.
#   lab.sh up NAME ADDRESS    boot a host (a fresh one each time) at ADDRESS of the lab's network
#   lab.sh down NAME          remove it
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
usage() { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }

down() {
  # --volumes takes the host's own models and drafters along
  podman rm --force --time 5 --volumes --ignore "$1" >/dev/null
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

up() {
  local name=$1 address=$2 mac
  # a fixed MAC: the neighbour table of this machine stays right when a host is killed and started
  # shellcheck disable=SC2046,SC2086
  mac=$(printf '02:42:%02x:%02x:%02x:%02x' ${address//./ })
  down "$name"
  mkdir -p "$LAB/opt"
  # Never mount /sys/fs/cgroup of this machine into a host: that makes this machine's own read-only.
  # A machine's /dev/shm is half its memory; a container's 64 MB is too little for two ranks.
  podman --runtime runc run --detach --name "$name" --hostname "$name" --privileged --cgroupns=private --systemd=always \
    --network "$NETWORK" --ip "$address" --mac-address "$mac" --shm-size 4g \
    --volume "$LAB/opt:/opt/firstlight" --volume /opt/firstlight/models --volume /opt/firstlight/drafters \
    "$IMAGE" /usr/local/sbin/host-init >/dev/null ||
    cannot "podman could not start a systemd container (see above); use a Debian 12 virtual machine with root."
  if ! booted "$name"; then
    podman logs "$name" 2>&1 | tail -n 20 >&2
    down "$name"
    cannot "systemd did not boot in a container within 30 s (see above); use a Debian 12 virtual machine with root."
  fi
  for _ in $(seq 40); do (: <"/dev/tcp/$address/22") 2>/dev/null && return 0; sleep 0.25; done
  printf 'lab: %s booted, but nothing answers on %s port 22\n' "$name" "$address" >&2
  return 1
}

[ -f "$CONTAINERS_CONF" ] || { echo "lab: run tests/lab/setup.sh first" >&2; exit 1; }
case ${1:-}:$# in
  up:3) up "$2" "$3" ;;
  down:2) down "$2" ;;
  exec:*) [ $# -ge 3 ] || usage; name=$2; shift 2; exec podman exec "$name" "$@" ;;
  shell:2) exec podman exec -it "$2" bash -l ;;
  journal:2) podman exec "$2" journalctl --no-pager -n "${LINES_WANTED:-300}" -o short-iso ;;
  list:1) podman ps -a --filter "network=$NETWORK" --format '{{.Names}} {{.Status}}' ;;
  purge:1)
    podman ps -aq --filter "network=$NETWORK" | xargs -r podman rm --force --time 5 --volumes >/dev/null
    podman network rm --force "$NETWORK" >/dev/null; podman image rm --force "$IMAGE" >/dev/null ;;
  *) usage ;;
esac
