#!/usr/bin/env bash
# One memjax command on several SLURM nodes, one process a node with all GPUs of the node.
#
#   launch/slurm.sh [--dry-run] NODES [SBATCH-OPTION...] -- COMMAND...
#   launch/slurm.sh 4 --partition=gpu --gpus-per-node=8 --time=24:00:00 -- \
#     train experiments/quickstart.py --scale pod --run-dir runs/pod
#
# --dry-run  print the sbatch command and the job script, submit nothing
#
# The run folder must lie on a file system that all nodes share. Two minutes before the
# time limit the processes are told to save and end; submit the same command to go on.
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

dry=''
if [[ ${1-} == --dry-run ]]; then dry=1 && shift; fi
[[ ${1-} =~ ^[1-9][0-9]*$ ]] || usage
nodes=$1
shift
options=()
while [[ $# -gt 0 && $1 != -- ]]; do options+=("$1") && shift; done
[[ $# -ge 2 ]] || usage
shift

submit=(sbatch --nodes="$nodes" --ntasks-per-node=1 --job-name=memjax --requeue)
submit+=(--open-mode=append --signal=TERM@120 "${options[@]}")
script="#!/usr/bin/env bash
srun --kill-on-bad-exit=1 memjax$(printf ' %q' "$@")"

if [[ $dry ]]; then
  printf '%q ' "${submit[@]}"
  printf '<<\n%s\n' "$script"
else
  "${submit[@]}" <<<"$script"
fi
