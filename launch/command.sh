# shellcheck shell=bash
# Sourced by tpu_vm.sh and xpk.sh: complain about settings, print commands.
# For bash 3.2 and later, which is what macOS has.

complain() {
  echo "error: $*" >&2
  exit 2
}

# need name zone ...: exits with 2 and names each of these settings that is not
# set, by flag and by variable.
need() {
  local key variable missing=""
  for key in "$@"; do
    [[ -n ${!key} ]] && continue
    variable=GSPO_$(tr '[:lower:]' '[:upper:]' <<<"$key")
    missing+=" --${key//_/-}= or \$$variable;"
  done
  [[ -z $missing ]] || complain "missing setting:${missing%;}"
}

# quote WORD: as it can be pasted into a shell, quoted only if it has to be.
quote() {
  local mark="'" escaped="'\\''"
  case $1 in
    "" | *[!A-Za-z0-9_./:=@%+,-]*) printf "'%s'" "${1//$mark/$escaped}" ;;
    *) printf '%s' "$1" ;;
  esac
}

# quote_all WORD...: the same for a whole command.
quote_all() {
  local word line=""
  for word in "$@"; do line+=" $(quote "$word")"; done
  printf '%s' "${line# }"
}

dry_run=""

# call COMMAND...: runs it; under --dry-run only prints it, to be pasted.
call() {
  if [[ -n $dry_run ]]; then
    printf '%s\n' "$(quote_all "$@")"
  else
    echo "+ $(quote_all "$@")" >&2
    "$@"
  fi
}

# check_workdir ADDRESS: anything else is a disk of each host's own.
check_workdir() {
  [[ $1 == gs://?* ]] ||
    complain "--workdir=$1: expected a gs:// address, which every host sees"
}

# with_environment WORKDIR SETTINGS COMMAND...: the command with these variables,
# and with a compilation cache that every host and every restart shares.
# SETTINGS: how many words NAME=VALUE come before the command.
with_environment() {
  local workdir=$1 count=$2
  shift 2
  local variables=("${@:1:count}") variable
  for variable in ${variables[@]+"${variables[@]}"}; do
    [[ $variable =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] ||
      complain "--env=$variable: expected --env=NAME=VALUE"
  done
  quote_all env "JAX_COMPILATION_CACHE_DIR=$workdir/compilation_cache" "$@"
}

# slice_size ACCELERATOR_TYPE: "chips 64, hosts 16", or nothing for a family
# unknown here. v5p-N and tpu7x-N count TensorCores, two a chip; v5litepod-N and
# v6e-N count chips. A host holds four chips; eight or fewer of a v5litepod or a
# v6e are one host.
slice_size() {
  local family=${1%-*} count=${1##*-}
  case $family in
    v5p | v5litepod | v6e | tpu7x) ;;
    v5e) complain "$1: expected v5litepod-$count, which is Google's name" ;;
    *) return 0 ;;
  esac
  [[ $count =~ ^[1-9][0-9]*$ ]] || complain "$1: expected $family- and a number"
  if [[ $family == v5p || $family == tpu7x ]]; then
    ((count % 8 == 0)) ||
      complain "$1: expected a multiple of 8: TensorCores, 2 a chip, 8 a host"
    echo "chips $((count / 2)), hosts $((count / 8))"
  elif ((count > 8)); then
    ((count % 16 == 0)) || complain "$1: expected 1, 4, 8 or a multiple of 16"
    echo "chips $count, hosts $((count / 4))"
  else
    echo "chips $count, hosts 1"
  fi
}
