# shellcheck shell=bash
# What the lab's scripts share: where things lie, what they are called, and how they report. Sourced, not run.
LAB=${FIRSTLIGHT_LAB:-/var/cache/firstlight-lab}
IMAGE=localhost/firstlight-host:bookworm
NETWORK=firstlight-lab
SUBNET=10.89.90.0/24
export CONTAINERS_CONF=$LAB/containers.conf

# Exit 3 says "this machine cannot host a test bed"; anything else is a fault of the lab.
cannot() { printf 'No test hosts here: %s\n' "$*" >&2; exit 3; }

# step TEXT COMMAND...: one line a step with its time; the whole output only when it fails
step() {
  local text=$1 from log; shift
  log=$(mktemp); from=$(date +%s%N)
  if ! "$@" >"$log" 2>&1; then tail -n 40 "$log" >&2; rm -f "$log"; printf 'lab: %s failed\n' "$text" >&2; return 1; fi
  rm -f "$log"; printf 'lab: %-34s %6d ms\n' "$text" $((($(date +%s%N) - from) / 1000000))
}
