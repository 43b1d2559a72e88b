# shellcheck shell=bash
# Sourced by the scripts that control other machines: dry runs, wrong arguments, pauses, chip-hours.

# shellcheck source=launch/environment.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/environment.sh"

dry_run=""
poll_seconds=30
price=""
max_hours=""
chip_seconds=0

# refuse WORD...: ends with exit code 2: wrong arguments, nothing was executed.
refuse() {
  say "$@"
  exit 2
}

# quoted WORD...: prints the words as one line, quoted for a shell.
quoted() {
  local word line="" quote="'\\''"
  for word in "$@"; do
    case "$word" in
      "" | *[!A-Za-z0-9_./:=,@%+-]*) line+=" '${word//\'/$quote}'" ;;
      *) line+=" $word" ;;
    esac
  done
  printf '%s\n' "${line# }"
}

# execute WORD...: executes the command, or prints it in a dry run.
execute() {
  if [[ -n "$dry_run" ]]; then quoted "$@"; else "$@"; fi
}

# show_installation EXTRA...: prints what prepare_environment would execute.
show_installation() {
  local extras="$*"
  extras="${extras// /,}"
  if is_installed "$@"; then return; fi
  if [[ ! -x "$venv/bin/python" ]]; then quoted "${PYTHON:-python3}" -m venv --clear -- "$venv"; fi
  quoted "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -e "${repository}[$extras]"
}

# need_program NAME: refuses where it is not installed; a dry run does without.
need_program() {
  [[ -n "$dry_run" ]] || command -v "$1" >/dev/null || refuse "$1 is not installed here, or not on the PATH."
}

pause() { if [[ -z "$dry_run" ]]; then sleep "$poll_seconds"; fi; }

# is_count WORD: a whole number from 0.
is_count() { [[ "$1" =~ ^(0|[1-9][0-9]{0,8})$ ]]; }

# need_counts NAME...: refuses unless each of these variables, options of the same name, is a whole number.
need_counts() {
  local option
  for option in "$@"; do
    is_count "${!option}" || refuse "--$option=${!option}: must be a whole number from 0."
  done
}

# need_dns_name OPTION VALUE LENGTH: refuses a name that Google Cloud and Kubernetes do not accept.
need_dns_name() {
  if ! [[ "$2" =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || ((${#2} > $3)); then
    refuse "--$1=$2: must be at most $3 lower-case letters, digits and hyphens, a letter first and no hyphen last."
  fi
}

# chip_hours CHIPS: prints $chip_seconds as chip-hours, and their cost at --price.
chip_hours() {
  awk -v seconds="$chip_seconds" -v price="$price" -v chips="$1" 'BEGIN {
    hours = seconds / 3600
    printf "%.2f chip-hours (%d chips)", hours, chips
    if (price != "") printf ", %.2f at %s a chip-hour", hours * price, price
    printf "\n"
  }'
}

# need_price [NAME]: refuses a $price that is no number; NAME is what sets it.
need_price() {
  [[ -z "$price" || "$price" =~ ^[0-9]+([.][0-9]+)?$ ]] ||
    refuse "${1:---price}=$price: must be the price of one chip for an hour, like 1.2, in any currency."
}

# need_max_hours: sets $max_seconds, "" without a limit.
need_max_hours() {
  max_seconds=""
  [[ -n "$max_hours" && "$max_hours" != none ]] || return 0
  if [[ "$max_hours" =~ ^[0-9]{1,5}([.][0-9]{1,6})?$ ]]; then
    max_seconds="$(awk -v hours="$max_hours" 'BEGIN { printf "%d", hours * 3600 }')"
  fi
  ((max_seconds > 0)) || refuse "--max_hours=$max_hours: must be a number of hours more than 0, like 10 or 0.5, or none."
}
