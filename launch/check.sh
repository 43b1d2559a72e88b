# shellcheck shell=bash disable=SC2154
# Sourced by tpu_pod.sh and gke.sh: checks a run here, before anything costs money.

data_roots=()  # folders of the machines below which buckets are mounted
data_advice="" # how a path gets there
mounts=()      # "FOLDER gs://BUCKET" or "FOLDER claim:NAME", what the machines mount
read_here=()   # paths that vit-jax has looked for on this computer

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
