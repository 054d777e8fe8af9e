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

# Sets `folder`, which a run writes to. A config that cannot run ends the script:
# all processes would say so, and srun would tell the status of those it ended.
find_folder() {  # RANKS ZERO CONFIG OPTIONS...
  local config
  config=$(config_of "$@") || exit 2
  # A folder that the config does not name is a comment.
  folder=$(sed -n 's|^ *\(// \)*"out_dir": "\([^"]*\)".*|\2|p' <<<"$config" | head -n 1)
}

# The run that wrote to a folder last: each start writes config.json anew.
run_in() { stat -c '%i %y' "$1/config.json" 2>/dev/null; }  # OUT_DIR

# Whether it was stopped by a signal, or by training.max_minutes, and saved.
was_stopped() {  # OUT_DIR
  grep -q '"interrupted": *true' "$1/summary.json" 2>/dev/null
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
  case $1 in -*) say "$1: CONFIG comes first, then the options of zero train"; usage ;; esac
  while (($#)); do
    case $1 in
      --elastic|--hostfile|--max-restarts)
        say "$1 is the script's own option: it comes before CONFIG"; usage ;;
      --resume)
        case ${2:-} in
          ''|-*) say "--resume lacks its value: auto, latest or a checkpoint's folder"; usage ;;
        esac
        resume=$2; shift ;;
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
  if ((${#ranks[@]} >= least)); then
    sum=$(sum_of "${ranks[@]:0:least}")
    if ! why=$(config_of "$sum" "$@" 2>&1 >/dev/null); then
      say "not on $least hosts, the fewest of --elastic: $why"
      return 1
    fi
  fi
  for (( ; chosen >= least; --chosen)); do
    sum=$(sum_of "${ranks[@]:0:chosen}")
    why=$(config_of "$sum" "$@" 2>&1 >/dev/null) && return
    say "not on $chosen hosts: $why"
  done
  [ -n "$why" ] || say "${#ranks[@]} hosts, and --elastic needs $least"
  return 1
}
