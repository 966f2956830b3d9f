#!/usr/bin/env bash
# Several processes of one memjax command on this machine.
#
#   launch/local.sh [--dry-run] [--cpu-devices K | --gpus K] N COMMAND...
#   launch/local.sh --gpus 4 2 train experiments/quickstart.py --scale gpu
#   launch/local.sh --cpu-devices 2 2 train experiments/quickstart.py --debug
#
# --gpus K         process i sees GPUs i*K .. i*K+K-1 and no others
# --cpu-devices K  K simulated CPU devices a process
# --dry-run        print the commands, start nothing
# PORT=12345       the coordinator's port; a random one otherwise
#
# Ctrl-C and SIGTERM go to every process, which saves and ends. When one fails, the others
# get 15 seconds to say so. The exit status is that of the first that failed.
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

need_count() { [[ $1 =~ ^[1-9][0-9]*$ ]] || usage; }

dry='' gpus='' cpus=''
while [[ ${1-} == -* ]]; do
  case $1 in
    --dry-run) dry=1 ;;
    --gpus) shift && need_count "${1-}" && gpus=$1 ;;
    --cpu-devices) shift && need_count "${1-}" && cpus=$1 ;;
    *) usage ;;
  esac
  shift
done
[[ $# -ge 2 && -z ${gpus:+$cpus} ]] || usage
need_count "$1"
n=$1
shift
port=${PORT:-$((20000 + RANDOM % 20000))}

pids=()
for ((i = 0; i < n; i++)); do
  settings=()
  if [[ $gpus ]]; then
    mine=$(seq -s, $((i * gpus)) $((i * gpus + gpus - 1)))
    settings+=("CUDA_VISIBLE_DEVICES=$mine")
  fi
  if [[ $cpus ]]; then
    settings+=(JAX_PLATFORMS=cpu)
    flags="${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$cpus"
    settings+=("XLA_FLAGS=$flags")
  fi
  words=(env "${settings[@]}" memjax "$@" --coordinator "127.0.0.1:$port")
  words+=(--num-processes "$n" --process-id "$i")
  if [[ $dry ]]; then
    printf '%q ' "${words[@]}"
    echo
  else
    "${words[@]}" </dev/null &
    pids+=($!)
  fi
done
[[ -z $dry ]] || exit 0

trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' INT TERM

status=0 patience=15
while ((${#pids[@]} > 0)); do
  sleep 1
  left=()
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then
      left+=("$pid")
    else
      code=0
      wait "$pid" || code=$?
      ((status != 0)) || status=$code
    fi
  done
  pids=("${left[@]}")
  # The others were told of a failure, or hang in a collective that will never end.
  if ((status != 0 && ${#pids[@]} > 0)); then
    patience=$((patience - 1))
    ((patience > 0)) || kill -KILL "${pids[@]}" 2>/dev/null || true
  fi
done
exit "$status"
