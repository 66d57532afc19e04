#!/bin/bash
# Builds the test hosts' image with mmdebstrap: a plain Debian 12 server with ssh and Python, nothing of firstlight.
# Kept as a tarball: the same inputs give the same file, and podman is given it only when it lacks it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/lab/common.sh
. "$here/common.sh"
# libnuma1 is what a CPU build of vLLM asks of a host (a GPU host needs it for NCCL as well)
include=systemd,systemd-sysv,dbus,python3,python3-venv,openssh-server,sudo,ca-certificates,curl,iproute2,iptables,procps,netbase,kmod,libnuma1
authorities=/usr/local/share/ca-certificates
sources=/etc/apt/sources.list.d/debian.sources
[ -f "$sources" ] || sources=/etc/apt/sources.list
key=$(cat "$here/image.sh" "$here/host-init" "$LAB/id_lab.pub" "$sources" /etc/pip.conf $authorities/*.crt 2>/dev/null | sha256sum | cut -c1-16)
tarball=$LAB/host-$key.tar.zst

build() {
  # A machine that reaches its registries through its own certificate authority or pip settings hands them on.
  local hooks=()
  if compgen -G "$authorities/*.crt" >/dev/null; then
    hooks+=(--customize-hook="cp $authorities/*.crt \"\$1$authorities/\"" --customize-hook='chroot "$1" update-ca-certificates')
  fi
  if [ -f /etc/pip.conf ]; then hooks+=(--customize-hook='cp /etc/pip.conf "$1/etc/pip.conf"'); fi
  # shellcheck disable=SC2016 # $1 is mmdebstrap's
  mmdebstrap --variant=apt --include=$include \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-include=/usr/share/locale/locale.alias' \
    --customize-hook="install -m 0755 $here/host-init \"\$1/usr/local/sbin/host-init\"" \
    --customize-hook="install -D -m 0600 $LAB/id_lab.pub \"\$1/root/.ssh/authorized_keys\"" \
    --customize-hook='echo SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt >> "$1/etc/environment"' \
    --customize-hook='install -d "$1/etc/systemd/system.conf.d"; printf "[Manager]\nDefaultEnvironment=SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt\n" > "$1/etc/systemd/system.conf.d/10-ca.conf"' \
    --customize-hook='chroot "$1" systemctl mask apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer getty.target systemd-modules-load.service' \
    --customize-hook='install -d "$1/var/log/journal"; : > "$1/etc/machine-id"' \
    "${hooks[@]}" bookworm - "$sources" | zstd -q -3 -T0 -f -o "$tarball.part"
  mv "$tarball.part" "$tarball"
}

[ -s "$tarball" ] || build
if [ "$(podman image inspect -f '{{index .Labels "firstlight.key"}}' "$IMAGE" 2>/dev/null)" != "$key" ]; then
  zstd -dc "$tarball" | podman import -q --change 'CMD ["/usr/local/sbin/host-init"]' --change 'STOPSIGNAL SIGRTMIN+3' \
    --change "LABEL firstlight.key=$key" - "$IMAGE"
fi
