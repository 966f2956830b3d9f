#!/usr/bin/env bash
# One memjax command on TPU slices of a GKE cluster, by xpk.
#
#   launch/gke/xpk.sh [--dry-run] NAME CLUSTER TPU-TYPE SLICES IMAGE COMMAND...
#   launch/gke/xpk.sh pod1 my-cluster v6e-256 2 REGISTRY/memjax:1 \
#     train experiments/quickstart.py --scale pod --run-dir /runs/pod1
#
# --dry-run  print the command, submit nothing
# OPTIONS='--project=P --zone=Z'  more options of `xpk workload create`, divided by spaces
#
# memjax joins the hosts by the variables that GKE sets for TPU pods. `train` gets
# --stopped-code 75: a run that was told to save and end is started again.
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

dry=''
if [[ ${1-} == --dry-run ]]; then dry=1 && shift; fi
[[ $# -ge 6 && $1 != -* && ${4-} =~ ^[1-9][0-9]*$ ]] || usage
name=$1 cluster=$2 tpu=$3 slices=$4 image=$5
shift 5
if [[ $1 == train ]]; then set -- "$@" --stopped-code 75; fi

read -ra more <<<"${OPTIONS:-}"
words=(xpk workload create --workload="$name" --cluster="$cluster" --tpu-type="$tpu")
words+=(--num-slices="$slices" --docker-image="$image" --max-restarts=20)
words+=(--restart-on-user-code-failure "${more[@]}")
words+=(--command="memjax$(printf ' %q' "$@")")
if [[ $dry ]]; then
  printf '%q ' "${words[@]}"
  echo
else
  exec "${words[@]}"
fi
