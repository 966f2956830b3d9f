#!/usr/bin/env bash
# One memjax command on several GPU pods of a Kubernetes cluster with JobSet.
#
#   launch/gke/jobset.sh [--dry-run] NAME PODS GPUS IMAGE CLAIM COMMAND...
#   launch/gke/jobset.sh pod1 4 8 REGISTRY/memjax:1 runs \
#     train experiments/quickstart.py --scale pod --run-dir /runs/pod1
#
# NAME   of the JobSet         PODS, GPUS  how many pods, and GPUs in each
# IMAGE  with memjax in PATH   CLAIM       a ReadWriteMany volume claim, mounted at /runs
# --dry-run  print the manifest, apply nothing
#
# `train` gets --stopped-code 75: a run that was told to save and end must not count as
# complete, so that JobSet starts it again.
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

need_count() { [[ $1 =~ ^[1-9][0-9]*$ ]] || usage; }

dry=''
if [[ ${1-} == --dry-run ]]; then dry=1 && shift; fi
[[ $# -ge 6 && $1 =~ ^[a-z][a-z0-9-]*$ ]] || usage
need_count "$2"
need_count "$3"
name=$1 pods=$2 gpus=$3 image=$4 claim=$5
shift 5
if [[ $1 == train ]]; then set -- "$@" --stopped-code 75; fi

# The command as a JSON list, which is YAML too.
quote() {
  local word=${1//\\/\\\\}
  printf '"%s"' "${word//\"/\\\"}"
}
command=$(quote memjax)
for word in "$@"; do command+=", $(quote "$word")"; done

manifest=$(<"$(dirname "${BASH_SOURCE[0]}")/jobset.yaml")
manifest=${manifest//@NAME@/"$name"}
manifest=${manifest//@PODS@/"$pods"}
manifest=${manifest//@GPUS@/"$gpus"}
manifest=${manifest//@IMAGE@/"$image"}
manifest=${manifest//@CLAIM@/"$claim"}
manifest=${manifest//@COMMAND@/"[$command]"}
if [[ $dry ]]; then
  printf '%s\n' "$manifest"
else
  kubectl apply -f - <<<"$manifest"
fi
