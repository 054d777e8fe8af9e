# Sourced by slurm.sbatch and mpirun.sh: whether to restart a run
# that ended, and on how many hosts.

# Exit statuses of `zero train` with a checkpoint saved, after a signal or after
# training.max_minutes: the same command with --resume auto continues.
signalled=130 terminated=143 paused=85

say() { echo "$(date '+%F %T') ${0##*/}: $*" >&2; }

# The output of `zero config` for a run of RANKS ranks.
config_of() {  # RANKS ZERO CONFIG OPTIONS...
  local ranks=$1 zero=$2 words=("$3") i
  for ((i = 4; i <= $#; ++i)); do
    case ${!i} in --set|[!-]*=*) words+=("${!i}") ;; esac
  done
  "$zero" config "${words[@]}" --ranks "$ranks"
}

# The folder that a run writes to.
out_dir() {  # RANKS ZERO CONFIG OPTIONS...
  config_of "$@" 2>/dev/null |
    sed -n 's/^ *"out_dir": "\([^"]*\)".*/\1/p' | head -n 1
}

# The newest checkpoint: a run that failed without a new one would only fail
# again.
newest() {  # OUT_DIR
  ls -td "$1"/checkpoints/step-*/ 2>/dev/null |
    grep -E '/step-[0-9]+/$' | head -n 1  # complete ones have no ending
}

# The ranks of each process: --ranks of `zero train`.
ranks_of() {  # OPTIONS...
  local ranks=1
  while (($#)); do
    case $1 in
      --ranks) ranks=${2:-1} ;;
      --ranks=*) ranks=${1#*=} ;;
    esac
    shift
  done
  echo "$ranks"
}

# Sets `resume`, the user's --resume or auto, and `words`, the other options.
take_resume() {  # CONFIG OPTIONS...
  resume=auto words=()
  while (($#)); do
    case $1 in
      --resume) (($# > 1)) || usage; resume=$2; shift ;;
      --resume=*) resume=${1#*=} ;;
      *) words+=("$1") ;;
    esac
    shift
  done
}

sum_of() {  # NUMBERS...
  local sum=0 number
  for number; do sum=$((sum + number)); done
  echo "$sum"
}

# Sets `least` and `most`, numbers of hosts.
read_elastic() {  # MIN:MAX
  [[ $1 =~ ^([1-9][0-9]*):([1-9][0-9]*)$ ]] &&
    least=${BASH_REMATCH[1]} most=${BASH_REMATCH[2]} && ((least <= most)) &&
    return
  say "--elastic $1: want MIN:MAX hosts, for example 3:4"
  exit 2
}

# Sets `chosen`: how many hosts to take from the front of the list, at least
# `least` and at most `most`, so that their ranks can share the global batch, as
# `zero config` says. Prints the reason and returns 1 if no number will do.
choose_hosts() {  # RANKS_OF_EACH... -- ZERO CONFIG OPTIONS...
  local ranks=() sum why=
  while [ "$1" != -- ]; do ranks+=("$1"); shift; done
  shift
  chosen=${#ranks[@]}
  ((chosen <= most)) || chosen=$most
  for (( ; chosen >= least; --chosen)); do
    sum=$(sum_of "${ranks[@]:0:chosen}")
    why=$(config_of "$sum" "$@" 2>&1 >/dev/null) && return
    say "not on $chosen hosts: $why"
  done
  [ -n "$why" ] || say "${#ranks[@]} hosts, and --elastic needs $least"
  return 1
}
