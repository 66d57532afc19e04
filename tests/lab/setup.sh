#!/bin/bash
# Everything the test hosts need on this machine: packages, podman's settings, a key, the image.
# usage: setup.sh        Idempotent; a second run takes a second. Exit 3 where systemd containers cannot run.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/lab/common.sh
. "$here/common.sh"
packages=(podman runc netavark aardvark-dns iptables mmdebstrap zstd openssh-client ca-certificates)

check_machine() {
  [ "$(id -u)" = 0 ] || cannot "systemd containers need root; run this as root on Debian 12."
  command -v apt-get >/dev/null || cannot "the lab installs podman and mmdebstrap with apt-get; use Debian 12."
  local capabilities sys_admin=21
  capabilities=$((16#$(awk '/^CapEff/ {print $2}' /proc/self/status)))
  (((capabilities >> sys_admin) & 1)) ||
    cannot "this container lacks CAP_SYS_ADMIN; use a virtual machine or start the container with --privileged."
}
missing() { for p in "${packages[@]}"; do dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || echo "$p"; done; }
install_packages() { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"; }

podman_settings() {
  # Podman's own default limits (1048576) are refused on a machine without CAP_SYS_RESOURCE: ask for what it allows.
  cat >"$CONTAINERS_CONF.part" <<C
[containers]
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=32768:32768"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
C
  mv "$CONTAINERS_CONF.part" "$CONTAINERS_CONF"
}

check_machine
mkdir -p "$LAB"
# one set-up at a time: two would build the same image
exec 9>"$LAB/.setup.lock"; flock 9
mapfile -t wanted < <(missing)
if [ ${#wanted[@]} -gt 0 ]; then step "packages: ${wanted[*]:0:3} ..." install_packages "${wanted[@]}"; fi
podman_settings
[ -f "$LAB/id_lab" ] || ssh-keygen -q -t ed25519 -N '' -C firstlight-lab -f "$LAB/id_lab"
podman network exists "$NETWORK" || step "network $SUBNET" podman network create --subnet "$SUBNET" "$NETWORK"
step "image $IMAGE" "$here/image.sh"
# the plugin that lets vLLM's CPU build speculate, as the wheel that the test inventories name
python3 "$here/../cpu_plugin/build_wheel.py" "$LAB/wheels" >/dev/null
