#!/bin/bash
# Boots systemd in namespaces of its own over this machine's root, for a machine whose own PID 1 is not systemd.
#   boot.sh SYSTEMD PIDFILE    SYSTEMD: the program; PIDFILE: where its process id (of this machine) is written
# Only with DEVICE=1, on a machine kept for this: it takes the tree of cgroups over, which breaks every container there.
# Everything but process ids, mounts, cgroups, host name and IPC is the machine's own: GPUs, network, files.
set -euo pipefail

inner() {
  mount --make-rprivate /
  echo "cgroups: $(tr '\n' ' ' </proc/self/cgroup)"
  mount -t proc proc /proc
  mount -t tmpfs -o mode=755,nosuid,nodev tmpfs /run
  mkdir -p /run/lock
  # a fresh tree of cgroups, seen from our own group down; never the machine's mounts themselves
  local unified=/sys/fs/cgroup line controllers
  if grep -q '^[1-9]' /proc/self/cgroup; then
    mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
    unified=/sys/fs/cgroup/unified
    while IFS=: read -r _ controllers _; do
      [ -n "$controllers" ] || continue
      line=/sys/fs/cgroup/${controllers#name=}
      mkdir -p "$line"
      case $controllers in
        name=*) mount -t cgroup -o "none,$controllers,xattr" cgroup "$line" || mount -t cgroup -o "none,$controllers" cgroup "$line" ;;
        *) mount -t cgroup -o "$controllers" cgroup "$line" || rmdir "$line" ;;
      esac
    done </proc/self/cgroup
    mkdir -p "$unified"
  fi
  [ "$unified" != /sys/fs/cgroup ] || umount -l /sys/fs/cgroup
  if grep -q '^0::' /proc/self/cgroup; then mount -t cgroup2 -o nsdelegate cgroup2 "$unified" || mount -t cgroup2 cgroup2 "$unified"; fi
  # "container" keeps systemd away from what only a machine of its own may do (udev, modules, console)
  exec env -i container=firstlight PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb \
    "$1" --system --show-status=no --log-target=journal --log-level=notice --unit=firstlight-proof.target
}

if [ "${1:-}" = --inner ]; then inner "$2"; fi
[ "${DEVICE:-}" = 1 ] || { echo "boot.sh: takes this machine's cgroups over; set DEVICE=1 on a machine kept for it" >&2; exit 2; }
systemd=$1 pidfile=$2
mkdir -p /etc/systemd/system
getent passwd messagebus >/dev/null || useradd --system --no-create-home --shell /usr/sbin/nologin --user-group messagebus
# only the journal, the bus and what the proof starts
cat >/etc/systemd/system/firstlight-proof.target <<'U'
[Unit]
Description=What the proof needs of a booted host
Wants=systemd-journald.service dbus.service
After=systemd-journald.service dbus.service
AllowIsolate=yes
U
for unit in systemd-udevd.service systemd-udev-trigger.service systemd-logind.service systemd-networkd.service \
  systemd-resolved.service systemd-timesyncd.service systemd-modules-load.service systemd-remount-fs.service \
  getty.target console-getty.service tmp.mount dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount \
  systemd-tmpfiles-setup.service systemd-tmpfiles-setup-dev.service systemd-tmpfiles-clean.timer systemd-sysusers.service \
  systemd-update-utmp.service ldconfig.service systemd-journal-catalog-update.service systemd-binfmt.service \
  systemd-sysctl.service systemd-firstboot.service systemd-machine-id-commit.service systemd-pcrphase-sysinit.service \
  systemd-pcrphase.service apt-daily.timer apt-daily-upgrade.timer fstrim.timer e2scrub_all.timer; do
  ln -sfn /dev/null "/etc/systemd/system/$unit"
done
[ -s /etc/machine-id ] || cut -d- -f1-5 /proc/sys/kernel/random/uuid | tr -d - >/etc/machine-id
mkdir -p /var/log/journal
name=firstlight-proof
for group in $(awk '$3 == "cgroup" || $3 == "cgroup2" {print $2}' /proc/mounts | sort -u); do
  mkdir -p "$group/$name" || continue
  for file in cpuset.cpus cpuset.mems; do
    if [ -w "$group/$name/$file" ] && [ -r "$group/$file" ]; then cat "$group/$file" >"$group/$name/$file" || true; fi
  done
  if [ -w "$group/$name/cgroup.clone_children" ]; then echo 1 >"$group/$name/cgroup.clone_children" || true; fi
  echo $$ >"$group/$name/cgroup.procs" || echo "boot: $group takes no process" >&2
done
setsid unshare --mount --pid --fork --cgroup --uts --ipc -- /bin/bash "$0" --inner "$systemd" \
  </dev/null >/var/log/firstlight-boot.log 2>&1 &
outer=$!
for _ in $(seq 50); do
  child=$(cat "/proc/$outer/task/$outer/children" 2>/dev/null | tr -d ' ') || true
  [ -n "$child" ] && [ "$(cat "/proc/$child/comm" 2>/dev/null)" = systemd ] && break
  sleep 0.1
done
[ "$(cat "/proc/${child:-0}/comm" 2>/dev/null)" = systemd ] || { cat /var/log/firstlight-boot.log >&2; exit 1; }
echo "$child" >"$pidfile"
