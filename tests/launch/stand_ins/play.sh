# shellcheck shell=bash
# Sourced by the stand-ins: writes down how one was called, and plays the answer that the test has written for it.
# Scripts call stand-ins side by side (one ssh per node), so that neither function may be torn by another call.

# record PROGRAM ARGUMENT...: into $CALLS, words and calls parted by characters that no argument has.
# bash writes line by line, cat the whole call at once.
record() {
  local call
  call="$(mktemp)"
  { printf '%s\x1f' "$@" && printf '\x1e'; } >"$call"
  cat "$call" >>"$CALLS"
  rm "$call"
}

# play KIND: the n-th call of a kind runs $PLAY/KIND/n, later ones the last of them. Without any, all is well.
play() {
  local folder="$PLAY/$1" number=0
  [[ -d "$folder" ]] || return 0
  # The first number that no other call has taken.
  until (set -o noclobber && : >"$folder/taken-$number") 2>/dev/null; do number=$((number + 1)); done
  while [[ ! -f "$folder/$number" ]]; do number=$((number - 1)); done
  # shellcheck source=/dev/null
  source "$folder/$number"
}
