# shellcheck shell=bash
# Sourced by tpu_vm.sh and xpk.sh: complain about settings, print commands.
# For bash 3.2 and later, which is what macOS has.

complain() {
  echo "error: $*" >&2
  exit 2
}

# no_setting WORD: exits with 2; only a flag is printed, others may be a value.
no_setting() {
  local flag=${1%%=*}
  [[ $flag =~ ^--[a-z-]+$ ]] || flag=...
  complain "$flag: no such setting, expected one of" \
    "launch/$(basename "$0") --help"
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
env=() # the words NAME=VALUE of --env=

# show COMMAND...: quoted, with ... in place of the values of --env= and of user
# and password in addresses.
show() {
  local line words names
  line=$(quote_all "$@")
  if ((${#env[@]})); then
    # In a command of one word, so quoted twice.
    words=$(quote " $(quote_all "${env[@]}") ")
    words=${words#\'} words=${words%\'}
    names=$(printf '%s=... ' "${env[@]%%=*}")
    line=${line/"$words"/ $names}
  fi
  sed -E 's#://[^/ ]*@#://...@#g' <<<"$line"
}

# call COMMAND...: runs it; under --dry-run only prints it, to be pasted.
call() {
  if [[ -n $dry_run ]]; then
    show "$@"
  else
    echo "+ $(show "$@")" >&2
    "$@"
  fi
}

# check_workdir ADDRESS: anything else is a disk of each host's own.
check_workdir() {
  [[ $1 == gs://?* ]] ||
    complain "--workdir=$1: expected a gs:// address, which every host sees"
}

# with_environment WORKDIR COMMAND...: the command with the variables of --env=,
# and with a compilation cache that every host and every restart shares, also for
# programs that compile in under a second.
with_environment() {
  local workdir=$1 variable
  shift
  for variable in ${env[@]+"${env[@]}"}; do
    # What is no name may be a value.
    [[ $variable =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] ||
      complain "--env=...: expected --env=NAME=VALUE, the name of letters," \
        "digits and _"
  done
  quote_all env "JAX_COMPILATION_CACHE_DIR=$workdir/compilation_cache" \
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
    ${env[@]+"${env[@]}"} "$@"
}

# slice_size ACCELERATOR_TYPE: "chips 64, hosts 16", or nothing for a family
# unknown here. v5p-N and tpu7x-N count TensorCores, two a chip; v5litepod-N and
# v6e-N count chips. A host holds four chips; eight or fewer of a v5litepod or a
# v6e are one host. Larger v5p and tpu7x consist of cubes of 4x4x4 chips.
slice_size() {
  local family=${1%-*} count=${1##*-}
  case $family in
    v5p | v5litepod | v6e | tpu7x) ;;
    v5e) complain "$1: expected v5litepod-$count, which is Google's name" ;;
    *) return 0 ;;
  esac
  [[ $count =~ ^[1-9][0-9]*$ ]] || complain "$1: expected $family- and a number"
  if [[ $family == v5p || $family == tpu7x ]]; then
    case $count in
      8 | 16 | 32 | 64) ;;
      *) ((count % 128 == 0)) ||
        complain "$1: expected 8, 16, 32, 64 or a multiple of 128: TensorCores" ;;
    esac
    echo "chips $((count / 2)), hosts $((count / 8))"
  else
    case $count in
      1 | 4 | 8) echo "chips $count, hosts 1" ;;
      16 | 32 | 64 | 128 | 256) echo "chips $count, hosts $((count / 4))" ;;
      *) complain "$1: expected 1, 4, 8, 16, 32, 64, 128 or 256 chips" ;;
    esac
  fi
}
