#!/usr/bin/env bash
# One or more slices of a GKE cluster, through xpk. launch/README.md.
set -euo pipefail

usage() {
  cat <<'END'
launch/xpk.sh VERB [--dry-run] [SETTINGS] [-- FLAGS OF gspo_jax.main]

verbs
  run       submit the workload          list      what the cluster runs
  delete    SIGTERM it, then remove it

settings, each also as a variable: --cluster= is $GSPO_CLUSTER
  --cluster= --project= --zone=   always needed
  --name=                         run, delete: of the workload
  --accelerator-type=             run: of a slice, v5p-128, v6e-64, tpu7x-128, ...
  --slices=                       run: default 1
  --image=                        run: built by launch/Dockerfile
  --workdir=gs://...              run
  --config=                       run: default configs/moe_tpu_v5.py
  --env=NAME=VALUE                run: a variable of the process; may be repeated
  --grace=                        run: seconds from SIGTERM to kill, default 900
  --restarts=                     run: default 10

--dry-run prints the command, ready to paste, and runs nothing.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=command.sh
. "$root/launch/command.sh"

settings() {
  name=${GSPO_NAME-} project=${GSPO_PROJECT-} zone=${GSPO_ZONE-}
  cluster=${GSPO_CLUSTER-} accelerator_type=${GSPO_ACCELERATOR_TYPE-}
  slices=${GSPO_SLICES-1} image=${GSPO_IMAGE-} workdir=${GSPO_WORKDIR-}
  config=${GSPO_CONFIG-configs/moe_tpu_v5.py}
  grace=${GSPO_GRACE-900} restarts=${GSPO_RESTARTS-10}
  flags=()
  while (($#)); do
    case $1 in
      --dry-run) dry_run=1 ;;
      --name=*) name=${1#*=} ;;
      --project=*) project=${1#*=} ;;
      --zone=*) zone=${1#*=} ;;
      --cluster=*) cluster=${1#*=} ;;
      --accelerator-type=*) accelerator_type=${1#*=} ;;
      --slices=*) slices=${1#*=} ;;
      --image=*) image=${1#*=} ;;
      --workdir=*) workdir=${1#*=} ;;
      --config=*) config=${1#*=} ;;
      --env=*) env+=("${1#*=}") ;;
      --grace=*) grace=${1#*=} ;;
      --restarts=*) restarts=${1#*=} ;;
      --) shift && flags=("$@") && break ;;
      *) no_setting "$1" ;;
    esac
    shift
  done
}

workload() {
  call xpk workload "$@" \
    --cluster="$cluster" --project="$project" --zone="$zone"
}

run() {
  need name accelerator_type image workdir config
  check_workdir "$workdir"
  local slice command
  slice=$(slice_size "$accelerator_type")
  command=$(with_environment "$workdir" \
    python -m gspo_jax.main --config="$config" --workdir="$workdir" \
    ${flags[@]+"${flags[@]}"})
  echo "# $slices x $accelerator_type: ${slice:-size unknown here}, each"
  # exec: xpk starts the command in a subshell and sends SIGTERM to that.
  # gspo_jax.main's codes: 75 for a run that SIGTERM stopped, 1 for a fault or
  # an outage. Not 2, for a mistaken flag.
  workload create --workload="$name" --tpu-type="$accelerator_type" \
    --num-slices="$slices" --docker-image="$image" \
    --max-restarts="$restarts" --restart-on-exit-codes=1,75 \
    --termination-grace-period-seconds="$grace" \
    --command="exec $command"
}

list() { workload list; }

delete() {
  need name
  workload delete --workload="$name"
}

verb=${1---help}
case $verb in
  run | list | delete) shift ;;
  -h | --help) usage && exit ;;
  *) complain "$verb: no such verb; launch/xpk.sh --help names them" ;;
esac
settings "$@"
need cluster project zone
"$verb"
