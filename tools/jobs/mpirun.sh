#!/usr/bin/env bash
# Trains on the hosts of a file by mpirun, and goes on after a crash. What to
# change and what to look at: tools/jobs/README.md.
#
#   tools/jobs/mpirun.sh [--hostfile FILE] [-n PROCESSES] [--max-restarts N]
#                        CONFIG [options of zero train]
#
#   --hostfile FILE    Open MPI's: "node1 slots=1" a line; one process a slot
#   -n PROCESSES       default: one for each slot; without a hostfile 2, here
#   --max-restarts N   start again, up to N times, a run that failed and has
#                      written a checkpoint since it was started (default 0)
#
# Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint and stop. Exit code: zero's, 130
# after such a stop (143 after SIGTERM), 85 after training.max_minutes.
set -uo pipefail
mpirun=${MPIRUN:-mpirun}             # the mpirun of the MPI zero is built with
zero=${ZERO:-out/zero}               # the program, at this path on all hosts
source "$(dirname "$0")/common.sh" || exit 2

usage() { sed -n '5,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
options=() processes= max_restarts=0
while (($#)); do
  case $1 in
    --hostfile) (($# > 1)) || usage; options+=(--hostfile "$2"); shift ;;
    -n|-np) (($# > 1)) || usage; processes=$2; shift ;;
    --max-restarts) (($# > 1)) || usage; max_restarts=$2; shift ;;
    -h|--help) usage ;;
    *) break ;;
  esac
  shift
done
(($#)) || usage
((${#options[@]})) || { processes=${processes:-2}; options+=(--oversubscribe); }
[ -z "$processes" ] || options+=(-n "$processes")
# Else mpirun binds a process, with all its ranks, to one core. When a process
# has failed it gives the others 1 s to say so and to write what they have.
options+=(--bind-to none --mca odls_base_sigkill_timeout 5)
[ "$(id -u)" -ne 0 ] || options+=(--allow-run-as-root)

folder=$(out_dir "$zero" "$@")
stopped= run=
# mpirun passes USR1 on to all processes; of TERM it would make an end.
trap 'stopped=yes; say "saving"; [ -z "$run" ] || kill -USR1 $run' INT TERM USR1
for ((restart = 0; ; ++restart)); do
  before=$(newest "$folder")
  # In a process group of its own: a Ctrl-C must reach it as USR1 only.
  setsid "$mpirun" "${options[@]}" "$zero" train "$@" --resume auto &
  run=$!
  while :; do
    wait $run
    code=$?
    kill -0 $run 2>/dev/null || break
  done
  [ $code -ne 0 ] || exit 0
  if [ -n "$stopped" ] || [ $code -eq $paused ]; then exit $code; fi
  after=$(newest "$folder")
  ((restart < max_restarts)) || exit $code
  [ "$after" != "$before" ] || {
    say "zero ended with $code, and no checkpoint since its start: given up"
    exit $code
  }
  say "zero ended with $code; start $((restart + 2)), after $after"
done
