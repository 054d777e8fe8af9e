# Sourced by tools/quickstart and tools/check: names each part before it runs
# and remembers how long it took.

step_names=() step_seconds=()

# step NAME COMMAND...: returns the command's status. COMMAND is a program, not
# a function: `set -e` would not hold inside one called from an `||`.
step() {
  local name=$1 start=$SECONDS code=0
  shift
  printf '\n==> %s\n' "$name"
  "$@" || code=$?
  step_names+=("$name")
  step_seconds+=($((SECONDS - start)))
  if [ $code -ne 0 ]; then
    printf '==> %s: failed (exit %d) after %d s\n' "$name" $code \
      $((SECONDS - start))
  fi
  return $code
}

time_table() {
  local i
  printf '\n'
  for i in "${!step_names[@]}"; do
    printf '%6d s  %s\n' "${step_seconds[i]}" "${step_names[i]}"
  done
  printf '%6d s  in all\n' "$SECONDS"
}
