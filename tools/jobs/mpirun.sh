#!/usr/bin/env bash
# Trains on the hosts of a file by mpirun, and resumes after a crash. What to
# change and what to look at: tools/jobs/README.md.
#
#   tools/jobs/mpirun.sh [--hostfile FILE] [-n PROCESSES] [--max-restarts N]
#                        [--elastic MIN:MAX] CONFIG [options of zero train]
#
#   --hostfile FILE    Open MPI's: "node1 slots=1" a line; one process a slot
#   -n PROCESSES       default: one for each slot; without a hostfile 2, here
#   --max-restarts N   start again, up to N times, a run that crashed before
#                      training, as in MPI_Init, or that failed and has written
#                      a checkpoint since it was started (default 0)
#   --elastic MIN:MAX  each start uses the hosts of the file that answer, at
#                      most MAX and at least MIN, with the same global batch
#
# It adds --resume auto; a --resume of yours is used at the first start only.
# Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint and stop. Exit code: zero's, 130
# after such a stop (143 after SIGTERM), 85 after training.max_minutes.
set -uo pipefail
mpirun=${MPIRUN:-mpirun}             # the mpirun of the MPI zero is built with
zero=${ZERO:-out/zero}               # the program, at this path on all hosts
source "$(dirname "$0")/common.sh" || exit 2

usage() { sed -n '5,19s/^# \{0,1\}//p' "$0" >&2; exit 2; }
hostfile= processes= max_restarts=0 elastic=
while (($#)); do
  case $1 in
    --hostfile|-n|-np|--max-restarts|--elastic)
      (($# > 1)) || { say "$1 lacks its value"; usage; }
      case $1 in
        --hostfile) hostfile=$2 ;;
        --max-restarts) max_restarts=$2 ;;
        --elastic) elastic=$2 ;;
        *) processes=$2 ;;
      esac
      shift ;;
    -h|--help) usage ;;
    *) break ;;
  esac
  shift
done
if [ -n "$hostfile" ] && [ ! -r "$hostfile" ]; then
  say "--hostfile $hostfile cannot be read; want a line \"HOST slots=N\" for each host"
  exit 2
fi
(($#)) || usage
# Without these mpirun binds a process, with all its ranks, to one core, and
# gives the other processes only 1 s to report and write after one has failed.
options=(--bind-to none --mca odls_base_sigkill_timeout 5)
root=()
[ "$(id -u)" -ne 0 ] || root=(--allow-run-as-root)
if [ -n "$elastic" ]; then
  read_elastic "$elastic"
  if [ -z "$hostfile" ] || [ -n "$processes" ]; then
    say "--elastic takes the hosts of --hostfile, and all slots of each: no -n"
    exit 2
  fi
fi
[ -n "$hostfile" ] ||
  { processes=${processes:-2}; options+=(--oversubscribe); }
[ -z "$processes" ] || options+=(-n "$processes")

take_resume "$@"
set -- "${words[@]}"

temporary=$(mktemp -d) || exit 2
trap 'rm -rf "$temporary"' EXIT

# The lines of the hostfile; with --elastic those whose host runs a program.
host_lines() {
  local line number=0
  while read -r line; do
    case $line in ''|'#'*) continue ;; esac
    number=$((number + 1))
    # Several mpiruns at once would make, and remove, one session directory.
    mkdir -p "$temporary/session-$number"
    { [ -z "$elastic" ] ||
        OMPI_MCA_orte_local_tmpdir_base=$temporary/session-$number timeout -k 5 30 "$mpirun" "${root[@]}" --host "${line%%[ 	:]*}" -n 1 \
          true </dev/null >/dev/null 2>&1
    } && echo "$line" >"$temporary/$(printf %06d $number)" &
  done <"$hostfile"
  wait
  cat "$temporary"/[0-9]* 2>/dev/null
  rm -f "$temporary"/[0-9]*
}

# Sets `hosts`, the lines of a start, and `world`, its ranks. 1: too few answer.
find_hosts() {  # CONFIG OPTIONS...
  local lines=() each=() line ranks
  ranks=$(ranks_of "$@")
  world=$((${processes:-1} * ranks)) hosts=
  [ -n "$hostfile" ] || return 0
  mapfile -t lines < <(host_lines)
  for line in "${lines[@]}"; do
    [[ $line =~ slots=([0-9]+) ]] || BASH_REMATCH=(1 1)
    each+=($((BASH_REMATCH[1] * ranks)))
  done
  if [ -n "$elastic" ]; then
    choose_hosts "${each[@]}" -- "$zero" "$@" || return 1
    lines=("${lines[@]:0:chosen}") each=("${each[@]:0:chosen}")
    say "on ${#lines[@]} hosts: ${lines[*]%%[ 	:]*}"
  fi
  hosts=$(printf '%s\n' "${lines[@]}")
  echo "$hosts" >"$temporary/hosts"
  [ -n "$processes" ] || world=$(sum_of "${each[@]}")
}

# Passes on mpirun's output. After the end of the run mpirun may wait a quarter
# of an hour for an unreachable host; here it gets $patience seconds.
patience=30
pass_on() {
  local line
  while IFS= read -r line; do
    printf '%s\n' "$line" >&2
    case $line in
      *'job has been aborted'*|*'mpirun noticed that process'*|*'lost communication'*)
        [ -e "$temporary/over" ] ||
          say "a process has ended: mpirun ends the others, in at most $patience s"
        touch "$temporary/over" ;;
    esac
  done
}
# Sleeps that outlive this script must not hold its output.
end_when_over() {  # PID
  until [ -e "$temporary/over" ]; do sleep 1 >/dev/null 2>&1; done
  sleep $patience >/dev/null 2>&1
  say "mpirun waits for an unreachable host: ending"
  kill -9 -- "-$1"
}

stopped= run= code=1 failed_on= failure=
# mpirun passes USR1 on to all processes; at TERM it would kill them.
stop() {  # STATUS
  stopped=$1
  say "saving"
  [ -z "$run" ] || kill -USR1 $run
}
trap 'stop $signalled' INT USR1
trap 'stop $terminated' TERM
for ((restart = 0; ; ++restart)); do
  find_hosts "$@" || exit $code
  [ -z "$stopped" ] || exit $stopped
  if [ "$failed_on" = "on $hosts" ]; then
    say "zero ended with status $code, and $failure: giving up"
    exit $code
  fi
  find_folder "$world" "$zero" "$@"
  before=$(newest "$folder") run_before=$(run_in "$folder")
  rm -f "$temporary/over"
  [ $restart -eq 0 ] ||
    say "zero ended with status $code; start $((restart + 1)), after ${before:-nothing}"
  # In a process group of its own: a Ctrl-C must reach it as USR1 only.
  setsid "$mpirun" "${root[@]}" ${hosts:+--hostfile "$temporary/hosts"} \
    "${options[@]}" "$zero" train "$@" --resume "$resume" 2> >(pass_on) &
  run=$!
  end_when_over $run &
  watch=$!
  while :; do
    wait $run
    code=$?
    kill -0 $run 2>/dev/null || break
  done
  kill $watch 2>/dev/null
  run=
  [ $code -ne 0 ] || exit 0
  [ $code -ne $signalled ] || [ -z "$stopped" ] || code=$stopped
  if [ -n "$stopped" ] || [ $code -eq $paused ]; then exit $code; fi
  ((restart < max_restarts)) || exit $code
  failed_on= failure="training did not start, for the reason above"
  if [ "$(run_in "$folder")" = "$run_before" ]; then
    # A refusal would come again; SIGABRT, SIGBUS or SIGSEGV may not.
    case $code in 134|135|139) ;; *) failed_on="on $hosts" ;; esac
  elif [ "$(newest "$folder")" = "$before" ]; then
    failed_on="on $hosts" failure="no checkpoint since its start"
  else resume=auto
  fi
done
