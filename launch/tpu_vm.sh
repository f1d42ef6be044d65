#!/usr/bin/env bash
# Train on one Cloud TPU VM: create it, copy this checkout, install, train, and fetch the run folder.
#
#   launch/tpu_vm.sh --name NAME --zone ZONE --type v5litepod-8 --project PROJECT [--dry-run] -- CONFIG [--field value ...]
#
# --dry-run prints the exact commands and runs none of them. The VM is left running: the last line printed deletes it.
set -euo pipefail

name="" zone="" type="" project="" version="v2-alpha-tpuv5-lite" dry_run=""
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
  case "$1" in
    --dry-run) dry_run=yes; shift; continue ;;
    --name | --zone | --type | --project | --version)
      [ $# -ge 2 ] || { echo "launch: $1 has no value" >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"; shift 2 ;;
    *) echo "launch: there is no option $1; use --name, --zone, --type, --project, --version, --dry-run" >&2; exit 2 ;;
  esac
done
[ "${1:-}" = "--" ] && shift
for option in name zone type project; do
  [ -n "${!option}" ] || { echo "launch: --$option is missing; for example --type v5litepod-8 --zone us-west4-a" >&2; exit 2; }
done
[ $# -gt 0 ] || { echo "launch: no configuration; end with -- CONFIG, for example -- quickstart" >&2; exit 2; }

run() {
  printf '+'; printf ' %q' "$@"; printf '\n'
  [ -n "$dry_run" ] || "$@"
}
here=(--project "$project" --zone "$zone")
checkout=$(cd "$(dirname "$0")/.." && pwd)

run gcloud compute tpus tpu-vm create "$name" "${here[@]}" --accelerator-type "$type" --version "$version"
run gcloud compute tpus tpu-vm scp --recurse "$checkout" "$name:titans_jax" "${here[@]}"
run gcloud compute tpus tpu-vm ssh "$name" "${here[@]}" --command "sudo apt-get install --yes python3.11-venv && cd titans_jax && python3.11 -m venv .venv && .venv/bin/pip install --quiet '.[tpu]'"
run gcloud compute tpus tpu-vm ssh "$name" "${here[@]}" --command "cd titans_jax && .venv/bin/titans train $(printf '%q ' "$@")"
run gcloud compute tpus tpu-vm scp --recurse "$name:titans_jax/runs" "$checkout" "${here[@]}"
echo "delete the VM: gcloud compute tpus tpu-vm delete $name ${here[*]}"
