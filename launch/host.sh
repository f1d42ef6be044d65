#!/usr/bin/env bash
# What a launcher runs on each host of a TPU slice, over ssh.
#
#   host.sh setup BUCKET MOUNT               install this checkout, mount the bucket; again is quick
#   host.sh start CONFIG [--field value ...] start training in the background, unless it runs
#   host.sh status RUN_DIR                   one line: titans-host NAME running|exited|absent CODE STEP
#   host.sh follow                           show the log until training ends; its exit code
#   host.sh stop                             save a checkpoint and stop: SIGTERM, then wait
#
# Training is a systemd unit and not a child of the ssh session: it outlives the connection, and when the machine is
# taken away systemd sends it SIGTERM and waits for it before the bucket is unmounted (After=).
set -euo pipefail

checkout=$(cd "$(dirname "$0")/.." && pwd)
log=$HOME/titans.log

property() {
  systemctl show "$1" --property "$2" --value
}

setup() {
  local bucket=$1 mount=$2
  if ! command -v gcsfuse >/dev/null; then
    local keys=/usr/share/keyrings/cloud.google.asc repository
    repository=gcsfuse-$(lsb_release --codename --short)
    curl --fail --silent --show-error https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee "$keys" >/dev/null
    echo "deb [signed-by=$keys] https://packages.cloud.google.com/apt $repository main" |
      sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
    # A machine that has just started holds apt's lock for its own updates.
    sudo apt-get --option DPkg::Lock::Timeout=600 --quiet update
    sudo apt-get --option DPkg::Lock::Timeout=600 --quiet --yes install gcsfuse
  fi
  if ! mountpoint --quiet "$mount"; then
    sudo install --directory --owner "$(id --user)" --group "$(id --group)" "$mount"
    sudo systemctl reset-failed titans-bucket 2>/dev/null || true
    sudo systemd-run --quiet --unit titans-bucket --uid "$(id --user)" --gid "$(id --group)" \
      gcsfuse --foreground --implicit-dirs "$bucket" "$mount"
    until mountpoint --quiet "$mount"; do
      if [ "$(property titans-bucket SubState)" != running ]; then
        echo "host: gs://$bucket cannot be mounted; sudo journalctl --unit titans-bucket says why" >&2
        exit 1
      fi
      sleep 0.5
    done
  fi
  # The system's Python is older than 3.11.
  python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --allow-existing --python 3.12 "$checkout/.venv"
  python3 -m uv pip install --quiet --python "$checkout/.venv" "${checkout}[tpu,huggingface,wandb]"
}

# Also while it saves after SIGTERM. A unit that has ended is failed, or active with nothing running.
running() {
  case "$(property titans ActiveState) $(property titans SubState)" in
    "active running" | deactivating* | activating*) return 0 ;;
    *) return 1 ;;
  esac
}

start() {
  if running; then return; fi
  sudo systemctl stop titans 2>/dev/null || true
  sudo systemctl reset-failed titans 2>/dev/null || true
  # KillMode=mixed: one SIGTERM, to supervise.py, which hands it on; a second one would end training at once.
  # JAX_COORDINATOR_PORT: jax's own choice, 8482, is closed in the firewall that comes with some TPU pods.
  sudo systemd-run --quiet --unit titans --uid "$(id --user)" --gid "$(id --group)" --remain-after-exit \
    --property After=titans-bucket.service --property KillMode=mixed --property TimeoutStopSec=15min \
    --property "WorkingDirectory=$checkout" \
    --property "StandardOutput=append:$log" --property "StandardError=append:$log" \
    --setenv "HOME=$HOME" --setenv JAX_COORDINATOR_PORT="${JAX_COORDINATOR_PORT:-8476}" \
    "$checkout/.venv/bin/python" "$checkout/launch/supervise.py" "$checkout/.venv/bin/titans" train "$@"
}

status() {
  local state=absent code=- step=0
  if [ "$(property titans LoadState)" = loaded ]; then
    if running; then state=running; else state=exited code=$(exit_code); fi
    step=$(python3 "$checkout/launch/supervise.py" --step "$1")
  fi
  echo "titans-host $(hostname) $state $code $step"
}

# ExecMainCode is 1 for a process that exited and 2 or 3 for one that a signal ended.
exit_code() {
  local code
  code=$(property titans ExecMainStatus)
  if [ "$(property titans ExecMainCode)" = 1 ]; then echo "$code"; else echo $((128 + code)); fi
}

follow() {
  if running; then
    tail --lines 1000 --follow=name --retry --pid "$(property titans MainPID)" "$log"
    while running; do sleep 0.2; done
  else
    tail --lines 1000 "$log"
  fi
  return "$(exit_code)"
}

stop() {
  sudo systemctl stop titans
}

case "${1:-}" in
  setup | start | status | follow | stop) "$@" ;;
  *) echo "host: there is no command ${1:-}; use setup, start, status, follow or stop" >&2; exit 2 ;;
esac
