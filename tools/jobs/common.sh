# Sourced by slurm.sbatch and mpirun.sh: when a run that ended is worth another
# start.

# `zero train` ends so when it has saved a checkpoint, after a signal or after
# training.max_minutes: the same command with --resume auto goes on.
signalled=130 terminated=143 paused=85

say() { echo "$(date '+%F %T') ${0##*/}: $*" >&2; }

# The folder that a run writes to: of all its arguments CONFIG and --set say so.
out_dir() {  # ZERO CONFIG OPTIONS...
  local words=("$2") i
  for ((i = 3; i <= $#; ++i)); do
    case ${!i} in --set|[!-]*=*) words+=("${!i}") ;; esac
  done
  "$1" config "${words[@]}" 2>/dev/null |
    sed -n 's/^ *"out_dir": "\([^"]*\)".*/\1/p' | head -n 1
}

# The newest checkpoint: a run that failed without a new one would only fail
# again.
newest() {  # OUT_DIR
  ls -td "$1"/checkpoints/step-*/ 2>/dev/null |
    grep -E '/step-[0-9]+/$' | head -n 1  # complete ones have no ending
}
