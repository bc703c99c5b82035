#!/usr/bin/env bash
# One slice of Cloud TPU VMs, from `create` to `delete`. launch/README.md.
set -euo pipefail

usage() {
  cat <<'END'
launch/tpu_vm.sh VERB [--dry-run] [SETTINGS] [-- FLAGS OF gspo_jax.main]

verbs
  create    a slice now, or an error     queue     ask for one and wait in line
  setup     install on every worker      run       start on every worker
  logs      follow one worker's log      stop      SIGTERM: save, exit with 75
  delete    what `create` made           unqueue   what `queue` made

settings, each also as a variable: --git-url= is $GSPO_GIT_URL
  --name= --project= --zone=   of the slice: always needed
  --accelerator-type=          create, queue: v5p-128, v5litepod-64, v6e-64
  --runtime-version=           create, queue: known for these families
  --spot or --reserved         create, queue: instead of on demand
  --git-url=                   setup: clone this instead of copying the checkout
  --workdir=gs://...           run
  --config=                    run: default configs/moe_tpu_v5.py
  --env=NAME=VALUE             run: a variable of the process; may be repeated
  --worker=                    logs: a number (default 0) or `all`
  --grace=                     stop: seconds to wait, default 900

--dry-run prints the commands, ready to paste, and runs none.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=command.sh
. "$root/launch/command.sh"

settings() {
  name=${GSPO_NAME-} project=${GSPO_PROJECT-} zone=${GSPO_ZONE-}
  accelerator_type=${GSPO_ACCELERATOR_TYPE-}
  runtime_version=${GSPO_RUNTIME_VERSION-}
  git_url=${GSPO_GIT_URL-} workdir=${GSPO_WORKDIR-}
  config=${GSPO_CONFIG-configs/moe_tpu_v5.py}
  worker=${GSPO_WORKER-0} grace=${GSPO_GRACE-900}
  capacity=() flags=()
  while (($#)); do
    case $1 in
      --dry-run) dry_run=1 ;;
      --spot | --reserved) capacity=("$1") ;;
      --name=*) name=${1#*=} ;;
      --project=*) project=${1#*=} ;;
      --zone=*) zone=${1#*=} ;;
      --accelerator-type=*) accelerator_type=${1#*=} ;;
      --runtime-version=*) runtime_version=${1#*=} ;;
      --git-url=*) git_url=${1#*=} ;;
      --workdir=*) workdir=${1#*=} ;;
      --config=*) config=${1#*=} ;;
      --env=*) env+=("${1#*=}") ;;
      --worker=*) worker=${1#*=} ;;
      --grace=*) grace=${1#*=} ;;
      --) shift && flags=("$@") && break ;;
      *) no_setting "$1" ;;
    esac
    shift
  done
}

# tpus GROUP VERB REST...
tpus() {
  call gcloud compute tpus "$@" --project="$project" --zone="$zone"
}

# on WORKERS COMMAND: in the login shell, starting in the home directory.
on() {
  tpus tpu-vm ssh "$name" --worker="$1" --command="$2"
}

# Names the runtime and says what is about to be paid for.
size() {
  need accelerator_type
  local slice
  slice=$(slice_size "$accelerator_type")
  case $accelerator_type in
    tpu7x-*) complain "$accelerator_type: only GKE has it: launch/xpk.sh" ;;
    v6e-*) : "${runtime_version:=v2-alpha-tpuv6e}" ;;
    v5p-*) : "${runtime_version:=v2-alpha-tpuv5}" ;;
    v5litepod-*) : "${runtime_version:=v2-alpha-tpuv5-lite}" ;;
  esac
  need runtime_version
  echo "# $accelerator_type: ${slice:-size unknown here}, paid until deleted"
}

create() {
  size
  tpus tpu-vm create "$name" --accelerator-type="$accelerator_type" \
    --version="$runtime_version" ${capacity[@]+"${capacity[@]}"}
}

queue() {
  size
  tpus queued-resources create "$name" --node-id="$name" \
    --accelerator-type="$accelerator_type" \
    --runtime-version="$runtime_version" ${capacity[@]+"${capacity[@]}"}
}

setup() {
  local src=gspo_jax/src
  if [[ -n $git_url ]]; then
    on all "rm -rf $src && git clone --depth=1 $(quote "$git_url") $src"
  else
    local archive=$root/build/gspo_jax.tar.gz
    call mkdir -p "$root/build"
    call tar -C "$root" --exclude=__pycache__ -czf "$archive" \
      LICENSE README.md configs gspo_jax pyproject.toml setup.cfg
    tpus tpu-vm scp "$archive" "$name:" --worker=all
    on all "rm -rf $src && mkdir -p $src && tar -xzf gspo_jax.tar.gz -C $src"
  fi
  # The image's Python is 3.10, too old for JAX; uv brings one of its own.
  on all "cd gspo_jax && { test -x .venv/bin/python || \
{ python3 -m pip install --user uv && \
python3 -m uv venv --seed --python=3.11 .venv; }; } && \
.venv/bin/pip install './src[tpu]'"
  # After every install, which puts back the libtpu that jax[tpu] pins: with jax
  # 0.10.2 that is 0.0.42, and it computes the gradient of the experts densely.
  on all "cd gspo_jax && .venv/bin/pip install --upgrade 'libtpu>=0.0.48,<0.0.52'"
}

# Is it this run still, and not another process that has got its number?
alive="grep -qs gspo_jax.main /proc/\$(cat train.pid 2>/dev/null)/cmdline"

run() {
  need workdir config
  check_workdir "$workdir"
  local train
  train=$(with_environment "$workdir" \
    ../.venv/bin/python -u -m gspo_jax.main --config="$config" \
    --workdir="$workdir" ${flags[@]+"${flags[@]}"})
  # exec all the way down: $! is Python itself, and a SIGTERM reaches it.
  on all "cd gspo_jax && \
if $alive; then echo 'already running' >&2; exit 1; fi && cd src && \
{ exec nohup $train >>../train.log 2>&1 </dev/null & \
echo \$! >../train.pid; }"
}

logs() {
  if [[ $worker == all ]]; then
    on all "tail -n 20 gspo_jax/train.log"
  else
    on "$worker" "tail -n 100 -F gspo_jax/train.log"
  fi
}

stop() {
  [[ $grace =~ ^[1-9][0-9]*$ ]] || complain "--grace=$grace: expected seconds"
  on all "cd gspo_jax && if ! $alive; then echo 'not running'; exit 0; fi; \
kill -TERM \$(cat train.pid); for i in \$(seq $grace); do \
if ! $alive; then echo stopped; exit 0; fi; sleep 1; done; \
echo 'still running after $grace s: look at the log' >&2; exit 1"
}

delete() { tpus tpu-vm delete "$name"; }

unqueue() { tpus queued-resources delete "$name" --force; }

verb=${1---help}
case $verb in
  create | queue | setup | run | logs | stop | delete | unqueue) shift ;;
  -h | --help) usage && exit ;;
  *) complain "$verb: no such verb; launch/tpu_vm.sh --help names them" ;;
esac
settings "$@"
need name project zone
"$verb"
