#!/usr/bin/env bash
# One memjax command on all hosts of a Cloud TPU VM slice.
#
#   launch/tpu_vm.sh [--dry-run] TPU ZONE COMMAND...
#   FOLDER=/mnt/share/memjax launch/tpu_vm.sh my-v5p us-east5-a \
#     train experiments/quickstart.py --scale pod --run-dir /mnt/share/runs/pod
#
# --dry-run         print the command, connect to nothing
# FOLDER=memjax     the checkout on every host, with a virtual environment in .venv
#
# The run folder must lie on a file system that all hosts share. After a preemption, make
# the slice anew and give the same command: it goes on from the newest checkpoint.
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

dry=''
if [[ ${1-} == --dry-run ]]; then dry=1 && shift; fi
[[ $# -ge 3 && $1 != -* && $2 != -* ]] || usage
tpu=$1 zone=$2
shift 2

remote="cd $(printf '%q' "${FOLDER:-memjax}") && .venv/bin/memjax$(printf ' %q' "$@")"
words=(gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=all)
words+=(--command="$remote --cluster tpu")
if [[ $dry ]]; then
  printf '%q ' "${words[@]}"
  echo
else
  exec "${words[@]}"
fi
