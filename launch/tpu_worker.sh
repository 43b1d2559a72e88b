#!/usr/bin/env bash
# Runs on a worker of a TPU pod, where tpu_pod.sh calls it over ssh: ./launch/tpu_worker.sh STEP ARGUMENTS...
set -euo pipefail

# shellcheck source=launch/commands.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/commands.sh"

HELP="\
tpu_worker.sh: one worker of a TPU pod; tpu_pod.sh calls it on each.

  tpu_worker.sh install [--cache=FOLDER] [gs://BUCKET] [--data=gs://BUCKET...]
                                             Python, the package, Cloud Storage FUSE; mounts the buckets, those of data
                                             with a cache of their files in FOLDER
  tpu_worker.sh start [--seconds=N] WORKDIR VERB ARG...
                                             starts vit-jax in the background; WORKDIR is gs://BUCKET/FOLDER. After N
                                             seconds it gets SIGTERM, and its exit code after saving is 124
  tpu_worker.sh status                       one line: HOST running | exit CODE SECONDS | none
  tpu_worker.sh progress                     vit-jax status of the run that was started last
  tpu_worker.sh log [BYTES]                  the log from byte BYTES, followed until the process ends
  tpu_worker.sh tail                         the end of the log
  tpu_worker.sh stop [SECONDS]               SIGTERM, and SIGKILL if it has not ended after SECONDS

  --dry-run before STEP prints what would be executed, --help this text.
"
GCSFUSE_VERSION=3.8.0 # only where the system's own package sources do not know gcsfuse
APT_TRIES=20
EXIT_PREEMPTED=75
EXIT_TIME_LIMIT=124   # saved at the end of --seconds; as that of timeout
SAVE_SECONDS=600      # from then to SIGKILL
NEW_PYTHON=3.12       # where the image's Python is too old, as on Ubuntu 22.04

venv="$HOME/vit_jax_venv" # not in the checkout, which is replaced at every installation
stamp="$venv/vit-jax-installed"
run="$HOME/vit_jax_run"
mounts="${VIT_JAX_MOUNTS:-/mnt/vit_jax}" # the same on every worker, since the run's config contains it
cache="$HOME/vit_jax_cache"
downloads="$HOME/vit_jax_downloads"

main() {
  if [[ "${1:-}" == --dry-run ]]; then
    dry_run=yes
    shift
  fi
  case "${1:-}" in
    install) install_worker "${@:2}" ;;
    start) start "${@:2}" ;;
    status) printf '%s %s\n' "$(hostname)" "$(status)" ;;
    log) follow_log "${2:-0}" ;;
    progress) progress ;;
    tail) execute tail -n 40 -- "$run/log" ;;
    stop) stop "${2:-90}" ;;
    --help | "") printf '%s' "$HELP" ;;
    *) refuse "There is no step '$1'. Steps: install, start, status, progress, log, tail, stop." ;;
  esac
}

install_worker() {
  local bucket place="${repository%.new}"
  if [[ "$repository" == *.new && -z "$dry_run" ]]; then # the checkout of a run in progress stays
    [[ "$(status)" != running ]] || fail "$(hostname): a run is in progress; nothing was installed"
    rm -rf -- "$place" "$run/exit" "$run/pid"
    mv -- "$repository" "$place"
    exec bash "$place/launch/tpu_worker.sh" install "$@"
  fi
  if [[ "${1:-}" == --cache=* ]]; then
    cache="${1#*=}"
    shift
  fi
  if (($#)); then install_gcsfuse; fi
  for bucket in "$@"; do
    case "$bucket" in
      --data=*) mount_data "${bucket#--data=gs://}" "$#" ;;
      *) mount_workdir "${bucket#gs://}" ;;
    esac
  done
  if [[ -n "$dry_run" ]]; then
    show_installation tpu
    return
  fi
  if [[ ! -x "$venv/bin/python" ]]; then choose_python; fi
  prepare_environment tpu
}

choose_python() {
  if PYTHON="$(find_python 2>/dev/null)"; then
    if "$PYTHON" -c 'import ensurepip' 2>/dev/null; then return; fi
    apt_get update # Debian and Ubuntu have what makes virtual environments in a package of its own
    apt_get install "${PYTHON##*/}-venv"
    return
  fi
  say "no Python of 3.11 or newer here; installing $NEW_PYTHON"
  python3 -m pip --version >/dev/null 2>&1 || apt_get install python3-pip
  python3 -m pip install --user --quiet uv
  python3 -m uv python install --quiet "$NEW_PYTHON"
  PYTHON="$(python3 -m uv python find "$NEW_PYTHON")"
}

install_gcsfuse() {
  if [[ -z "$dry_run" ]] && command -v gcsfuse >/dev/null; then return; fi
  apt_get update
  if [[ -z "$dry_run" ]] && apt-cache show gcsfuse >/dev/null 2>&1; then
    apt_get install gcsfuse
  else
    local file="gcsfuse_${GCSFUSE_VERSION}_amd64.deb"
    execute mkdir -p -m 700 -- "$downloads" # root installs what is there: no other user may write it
    execute curl --fail --location --silent --show-error --output "$downloads/$file" \
      "https://github.com/GoogleCloudPlatform/gcsfuse/releases/download/v$GCSFUSE_VERSION/$file"
    apt_get install "$downloads/$file"
    execute rm -f -- "$downloads/$file"
  fi
}

# apt_get WORD...: waits while another program installs, as a new machine does by itself, and tries again: DPkg's
# time-out is not for the lock of the lists.
apt_get() {
  local turn
  for ((turn = 1; turn <= APT_TRIES; turn++)); do
    if execute sudo apt-get -o DPkg::Lock::Timeout=600 -o Acquire::Retries=5 --yes --quiet "$@"; then return; fi
    say "apt-get $1 failed, $turn of at most $APT_TRIES times"
    sleep 15
  done
  fail "apt-get $* has failed $APT_TRIES times; its messages are above"
}

# mount_workdir BUCKET: at $mounts/BUCKET, where every worker immediately sees the writes of others.
mount_workdir() {
  # No cache: the first process writes what the others look for. Checkpoints are written under another name and
  # renamed: one operation in a bucket with hierarchical namespace, otherwise up to this many files.
  mount_bucket "$1" "$mounts/$1" --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 \
    --rename-dir-limit=200000
}

# mount_data BUCKET NUMBER: at ${mounts}_data/BUCKET, for reading. Of data that do not change everything may be
# remembered, and files that were read, or read in part, are kept on the disk: half of what is free, for NUMBER buckets.
mount_data() {
  local megabytes=0
  if [[ -z "$dry_run" ]]; then
    mkdir -p -- "$cache" || fail "$(hostname): the cache of data has no folder $cache: mount its disk there first"
    megabytes="$(df --output=avail --block-size=1M -- "$cache" | tail -n 1)"
  fi
  mount_bucket "$1" "${mounts}_data/$1" -o ro --metadata-cache-ttl-secs=-1 --stat-cache-max-size-mb=-1 \
    --type-cache-max-size-mb=-1 --cache-dir="$cache/$1" --file-cache-max-size-mb="$((megabytes / 2 / $2))" \
    --file-cache-cache-file-for-range-read
}

# mount_bucket BUCKET FOLDER FLAG...: unless it is mounted already.
mount_bucket() {
  if [[ -z "$dry_run" ]] && mountpoint -q "$2"; then return; fi
  execute sudo mkdir -p -- "$2"
  execute sudo chown -- "$(id -un)" "$2"
  execute gcsfuse --implicit-dirs "${@:3}" "$1" "$2"
}

start() {
  local seconds="" workdir command
  if [[ "$1" == --seconds=* ]]; then
    seconds="${1#*=}"
    shift
  fi
  workdir="$mounts/${1#gs://}"
  shift
  command="$(quoted "$@" --workdir="$workdir")"
  if [[ -n "$dry_run" ]]; then
    quoted ${seconds:+timeout "$seconds"} "$venv/bin/vit-jax" "$@" --workdir="$workdir"
    return
  fi
  if [[ "$(status)" == running ]]; then
    [[ "$(cat -- "$run/command")" == "$command" ]] || fail "$(hostname) runs another command: $(cat -- "$run/command")"
    say "$(hostname) is already running the command"
    return
  fi
  mkdir -p -- "$run"
  if [[ -f "$run/log" ]]; then mv -- "$run/log" "$run/log.before"; fi
  rm -f -- "$run/exit"
  printf '%s\n' "$command" >"$run/command"
  printf '%s\n' "$workdir" >"$run/workdir"
  cd -- "$repository" # paths of recipes are relative to the checkout
  start_apart "$seconds" "$@" --workdir="$workdir" </dev/null >"$run/log" 2>&1 &
  local pid="$!" turn session
  for ((turn = 0; turn < 50; turn++)); do # this shell must not end before, and ssh with it
    session="$(ps -o sid= -p "$pid" | tr -d ' ')" || true # it may have ended
    [[ -n "$session" && "$session" != "$pid" ]] || break
    sleep 0.1
  done
  printf '%s\n' "$pid" >"$run/pid"
}

# start_apart SECONDS WORD...: in its own session, which survives the ssh that started it. The shell in it waits for
# vit-jax even if both get SIGTERM, as at a preemption, so that the exit code is written. The limit is kept here, and not
# by the computer that follows the run, which may be switched off.
start_apart() {
  local limit=()
  if [[ -n "$1" ]]; then limit=(timeout --foreground --preserve-status --kill-after="$SAVE_SECONDS" "$1"); fi
  # shellcheck disable=SC2016 # expanded by the inner shell
  PYTHONUNBUFFERED=1 exec setsid bash -c '
    trap : TERM INT HUP
    file="$1" seconds="$2" saved="$3" at_limit="$4" code=0
    shift 4
    "$@" || code=$?
    if [[ -n "$seconds" && "$code" == "$saved" ]] && ((SECONDS >= seconds)); then code="$at_limit"; fi
    printf "%s %s\n" "$code" "$(date +%s.%N)" >"$file.new"
    mv -- "$file.new" "$file"
  ' vit-jax-run "$run/exit" "$1" "$EXIT_PREEMPTED" "$EXIT_TIME_LIMIT" ${limit[@]+"${limit[@]}"} "$venv/bin/vit-jax" "${@:2}"
}

# progress: of the run that was started last; no device is used.
progress() {
  local workdir=WORKDIR
  if [[ -z "$dry_run" ]]; then
    [[ -f "$run/workdir" ]] || fail "$(hostname): no run was started here"
    workdir="$(cat -- "$run/workdir")"
  fi
  execute env JAX_PLATFORMS=cpu "$venv/bin/vit-jax" status "$workdir"
}

status() {
  if [[ -f "$run/exit" ]]; then
    echo "exit $(cat -- "$run/exit")"
  elif [[ ! -f "$run/pid" ]]; then
    echo none
  elif kill -0 "$(cat -- "$run/pid")" 2>/dev/null; then
    echo running
  elif [[ -f "$run/exit" ]]; then # it ended between the two tests
    echo "exit $(cat -- "$run/exit")"
  else
    echo "exit 137 $(date +%s)" # even the shell around it was killed
  fi
}

process() { cat -- "$run/pid" 2>/dev/null || echo 0; }

# The first line contains where the text begins: gcloud repeats a command after a lost connection, with its output.
follow_log() {
  [[ -n "$dry_run" ]] || printf '\nvit-jax-log %s\n' "$1"
  execute tail -c "+$(($1 + 1))" --follow --sleep-interval=0.2 --pid="$(process)" -- "$run/log"
}

stop() {
  local second
  if [[ -n "$dry_run" ]]; then
    quoted kill -TERM -- "-$(process)"
    return
  fi
  if [[ "$(status)" != running ]]; then return; fi
  kill -TERM -- "-$(process)"
  for ((second = 0; second < $1; second++)); do
    if [[ "$(status)" != running ]]; then return; fi
    sleep 1
  done
  kill -KILL -- "-$(process)" || true # gone meanwhile
}

main "$@"
