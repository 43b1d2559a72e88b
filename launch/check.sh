# shellcheck shell=bash disable=SC2154
# Sourced by tpu_pod.sh, gke.sh and slurm.sbatch: checks and prices a run, before anything costs money.

data_roots=()  # folders of the machines below which buckets are mounted
data_advice="" # how a path gets there
mounts=()      # "FOLDER gs://BUCKET" or "FOLDER claim:NAME", what the machines mount
read_here=()   # paths that vit-jax has looked for on this computer
chip_unit=chip # or GPU, in messages
plan_hours=""  # of the run, by `vit-jax plan`; "" where they are not known

# check_start DEVICES SLICES WORKDIR VERB ARGUMENT...: refuses a run that these machines could not start. Each absolute
# path is one of the machines, never of this computer.
check_start() {
  local extra lines line place="$3" size=(--devices="$1" --slices="$2") request
  shift 3
  request=("$venv/bin/vit-jax" "$@" --workdir="$place" --check "${size[@]}" --remote=/)
  if [[ -n "$dry_run" ]]; then
    quoted "${request[@]}"
    find_named "$@"
    return
  fi
  extra="$(accelerator /)"
  prepare_environment "$extra"
  lines="$(cd -- "$repository" && "${request[@]}")" || refuse "vit-jax refuses the command (above). Nothing was created."
  while IFS= read -r -u 3 line; do # 0 stays the user's
    case "$line" in
      "not visible from here: "*) find_in_bucket "${line#*: }" ;;
      "looked for here: "*) read_here+=("${line#*: }") ;;
      "") ;;
      *) say "$line" ;;
    esac
  done 3<<<"$lines"
}

# find_named ARGUMENT...: the paths below $data_roots that arguments name. Without vit-jax no others are known: of a
# prepared dataset the folder of all datasets.
find_named() {
  local word root
  for word in "$@"; do
    [[ "$word" =~ ^(--[^=]*=)?([a-z]+:)?(/.*)$ ]] || continue
    word="${BASH_REMATCH[3]}"
    for root in "${data_roots[@]}"; do
      [[ "$word/" != "$root"/* ]] || find_in_bucket "$word"
    done
  done
}

# find_in_bucket PATH: refuses a path of the machines that no mounted bucket holds.
find_in_bucket() {
  local mount address=""
  for mount in "${mounts[@]}"; do
    if [[ "$1/" == "${mount%% *}"/* ]]; then address="${mount#* }${1#"${mount%% *}"}"; fi
  done
  case "$address" in
    "") refuse "$1: the machines of the run do not have this path. $data_advice Nothing was created." ;;
    claim:*)
      say "$1 is on the volume ${address%%/*} and is not looked for"
      return
      ;;
  esac
  if [[ -n "$dry_run" ]]; then
    quoted gcloud storage ls "$address"
  elif ! command -v gcloud >/dev/null; then
    say "gcloud is not installed here: $address is not looked for"
  else
    gcloud storage ls "$address" >/dev/null ||
      refuse "$1: $address was looked for and not found; gcloud's message is above. Nothing was created. Copy it there:" \
        "gcloud storage rsync --recursive FOLDER $(quoted "$address") for a folder, gcloud storage cp FILE" \
        "$(quoted "$address") for a file."
  fi
}

# price_run TOPOLOGY CHIPS ARGUMENT...: prints hours and price by `vit-jax plan`, before anything is rented, and sets
# $plan_hours. A plan that cannot be made stops no run.
price_run() {
  local plan word days request=("$venv/bin/vit-jax" plan --topology="$1" --arithmetic --json)
  for word in "${@:3}"; do
    [[ ! "$word" =~ ^--(config|allow_code)[.=] ]] || request+=("$word")
  done
  if [[ -n "$dry_run" ]]; then
    quoted "${request[@]}"
    return
  fi
  if ! plan="$(cd -- "$repository" && "${request[@]}" 2>&1)"; then
    say "hours and price are not known: $(tail -n 1 <<<"$plan")"
    return
  fi
  days="$(figure days "$plan")"
  if [[ -z "$days" ]]; then
    say "plan has no time for this run"
    return
  fi
  plan_hours="$(awk -v days="$days" 'BEGIN { printf "%.4f", 24 * days }')"
  say "$(awk -v hours="$plan_hours" -v chip_hours="$(figure chip_hours "$plan")" -v chips="$2" -v price="$price" \
    -v unit="$chip_unit" 'BEGIN {
      printf "plan, by arithmetic: %.1f hours on %d %ss, %.0f %s-hours", hours, chips, unit, chip_hours, unit
      if (price != "") printf ", %.2f at %s a %s-hour", chip_hours * price, price, unit
      print "; evaluation, checkpoints, input and interruptions are not included"
    }')"
  [[ "$plan" != *'"fits": false'* ]] || say "by this plan the run does not fit into the memory of the ${chip_unit}s"
}

# compare_limit HOURS MESSAGE: says so where these hours are less than those of the plan.
compare_limit() {
  [[ -n "$plan_hours" && -n "$1" && "$1" != none ]] || return 0
  if awk -v hours="$plan_hours" -v limit="$1" 'BEGIN { exit !(hours > limit) }'; then say "$2"; fi
}

# limit_run TOPOLOGY CHIPS ARGUMENT...: price_run, with the default of --max_hours, or a comparison with the one given.
limit_run() {
  price_run "$@"
  compare_limit "$max_hours" \
    "--max_hours=$max_hours is less: the run is stopped before its end, and the same command goes on"
  choose_max_hours
}

# choose_max_hours: twice the hours of the plan, at least 2, unless --max_hours is given.
choose_max_hours() {
  [[ -z "$max_hours" ]] || return 0
  if [[ -n "$dry_run" ]]; then say "--max_hours: twice the hours of this plan, at least 2"; fi
  [[ -n "$plan_hours" ]] || return 0
  max_hours="$(awk -v hours="$plan_hours" 'BEGIN { printf "%.1f", hours < 1 ? 2 : 2 * hours }')"
  need_max_hours
  say "--max_hours=$max_hours is the default, twice the plan; --max_hours=none sets no limit"
}

# figure NAME JSON: a number of a plan, "" where it is null.
figure() { sed -n "s/^ *\"$1\": \([-+0-9.e]*\),\{0,1\}$/\1/p" <<<"$2"; }

# price_limit CHIPS: the most that --max_hours lets the machines cost.
price_limit() {
  [[ -n "$max_hours" && "$max_hours" != none ]] || return 0
  say "--max_hours=$max_hours: at most $(awk -v hours="$max_hours" -v chips="$1" -v price="$price" 'BEGIN {
    printf "%.1f chip-hours", hours * chips
    if (price != "") printf ", %.2f at %s a chip-hour", hours * chips * price, price
  }'), then the run is saved and stopped"
}
