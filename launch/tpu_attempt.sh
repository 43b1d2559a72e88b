# shellcheck shell=bash disable=SC2154
# Sourced by tpu_pod.sh, which sets the options: one attempt at the run, from installing to its result.
# $outcome is then finished, running, preempted, saved, limit, mistake, unreachable or failed.

seen=0 # bytes of the attempt's log that were received

install_everywhere() {
  local buckets=() archive="$scratch/checkout.tar.gz" command
  [[ -z "$dry_run" ]] || archive=checkout.tar.gz
  if [[ -n "$workdir" ]]; then buckets+=("$(cut -d/ -f1-3 <<<"$workdir")"); fi
  buckets+=(${data_buckets[@]+"${data_buckets[@]/#/--data=}"})
  if [[ -n "$cache_dir" ]]; then buckets=("--cache=$cache_dir" "${buckets[@]}"); fi
  say "installing on every worker"
  if [[ -n "$repository_url" ]]; then
    command="rm -rf $checkout.new && $(quoted git clone --quiet "$repository_url" "$checkout.new")"
    [[ -z "$ref" ]] || command+=" && $(quoted git -C "$checkout.new" checkout --quiet "$ref")"
  else
    pack "$archive" || return 1
    local node
    for node in $(nodes); do
      execute gcloud compute tpus tpu-vm scp "$archive" "$node:$checkout.tar.gz" --worker=all \
        ${ssh_flags[@]+"${ssh_flags[@]//--ssh-flag=/--scp-flag=}"} "${place[@]}" || return 1
    done
    command="rm -rf $checkout.new && mkdir $checkout.new && tar -xzf $checkout.tar.gz -C $checkout.new"
  fi
  command+=" && $(quoted bash "$checkout.new/launch/tpu_worker.sh" install ${buckets[@]+"${buckets[@]}"})"
  everywhere "$command"
}

# pack ARCHIVE: what git tracks, as it is now, and what --upload names.
pack() {
  local others line
  if [[ -n "$dry_run" ]]; then
    line="$(quoted git -C "$repository" ls-files -z --cached)"
    if ((${#uploads[@]})); then
      line="($line && $(quoted git -C "$repository" ls-files -z --others -- "${uploads[@]}"))"
    fi
    echo "$line | $(quoted tar -czf "$1" -C "$repository" --null -T -)"
    return
  fi
  list_files | tar -czf "$1" -C "$repository" --null -T - || return 1
  say "$(list_files | tr -cd '\0' | wc -c | tr -d ' ') files, $(awk -v bytes="$(wc -c <"$1")" \
    'BEGIN { printf "%.1f MB", bytes / 1e6 }') compressed, are copied to every worker"
  others="$(git -C "$repository" ls-files --others --exclude-standard | wc -l | tr -d ' ')"
  [[ "$others" == 0 ]] || say "without $others file(s) that git does not track; git add them, or give --upload=PATH"
}

# list_files: those that are copied, each ended by a zero byte.
list_files() {
  local file
  {
    git -C "$repository" ls-files -z --cached
    if ((${#uploads[@]})); then git -C "$repository" ls-files -z --others -- "${uploads[@]}"; fi
  } | while IFS= read -r -d '' file; do
    if [[ -e "$repository/$file" ]]; then printf '%s\0' "$file"; fi # it may be removed and not yet committed
  done
}

start_everywhere() {
  local limit="" left
  if [[ -n "$max_seconds" ]]; then
    left="$(seconds_left)"
    limit="--seconds=$((left > 0 ? left : 1))"
  fi
  say "starting on every worker: vit-jax $(quoted "${words[@]}")"
  seen=0
  everywhere "$(step start ${limit:+"$limit"} "$workdir" "${words[@]}")"
}

# follow_log: prints worker 0's and stores it in $output/log.txt; continues after a broken connection.
follow_log() {
  [[ -n "$dry_run" ]] || mkdir -p -- "$output"
  while :; do
    if [[ -n "$dry_run" ]]; then
      on_worker "$(first_node)" 0 "$(step log 0)"
    else
      receive_log 3< <(on_worker "$(first_node)" 0 "$(step log "$seen")")
    fi
    judge
    [[ "$outcome" == running ]] || return 0
    say "the connection to worker 0 was lost and the run continues: following again"
    pause
  done
}

# receive_log: prints and stores text from descriptor 3 that is new. After a line "vit-jax-log N" the text begins at
# byte N. The end of line before it completes a line that the lost connection has cut; that line is received again.
receive_log() {
  local LC_ALL=C line position="$seen" before="$seen" is_empty="" cut="" # lengths in bytes
  while IFS= read -r -u 3 line || { cut=yes && [[ -n "$line" ]]; }; do # 0 is the user's, for the question at Ctrl-C
    if [[ "$line" =~ ^vit-jax-log\ [0-9]+$ ]]; then
      position="${line#* }" is_empty=""
      seen="$before" # the line before this one was not of the log
      continue
    fi
    if [[ -n "$is_empty" ]]; then echo | tee -a "$output/log.txt"; fi
    is_empty=""
    before="$seen"
    position=$((position + ${#line} + 1))
    ((position > seen)) || continue
    seen="$position"
    if [[ -z "$line" ]]; then is_empty=yes; else printf '%s\n' "$line" | tee -a "$output/log.txt"; fi
    if [[ -n "$cut" ]]; then seen="$before"; fi # if the run continues, the complete line is received again
  done
}

# get_statuses: lines "HOST running | none | exit CODE SECONDS" of every worker in $scratch/status, NODE before them.
get_statuses() {
  local node failed=0
  : >"$scratch/status"
  for node in $(nodes); do
    if [[ -n "$dry_run" ]]; then
      on_worker "$node" all "$(step status)"
    elif on_worker "$node" all "$(step status)" >"$scratch/answer"; then
      grep -E '^[^ ]+ (running|none|exit [0-9]+ [0-9.]+)$' "$scratch/answer" |
        sed "s/^/$node /" >>"$scratch/status" || true
    else
      failed=1
    fi
  done
  if [[ -n "$dry_run" ]]; then echo "$name $name-w-0 exit 0 0" >"$scratch/status"; fi
  return "$failed"
}

codes() { awk '$3 == "exit" { print $4 } $3 == "none" { print "none" }' "$scratch/status" | sort -u; }

is_any() { grep -q " $1\b" "$scratch/status"; }

# judge: $outcome of an attempt: finished, running, preempted, saved, limit, mistake, unreachable, failed.
judge() {
  local wait unanswered=0
  for ((wait = 0; wait < 5; )); do # processes that lose another end by themselves within a minute
    get_state # ssh to a preempted machine fails some time before its state changes
    outcome=preempted
    if [[ "$state" != ACTIVE && "$state" != UNKNOWN ]]; then return; fi
    if ! get_statuses; then
      # A single failure proves little, and nothing while this computer is offline: a machine is given up only if
      # Google Cloud responds and a worker repeatedly does not.
      if [[ "$state" == ACTIVE ]]; then unanswered=$((unanswered + 1)); fi
      outcome=unreachable
      if ((unanswered == 5)) && name_unreachable; then return; fi
      ((unanswered < 5)) || unanswered=0
      pause
      continue
    fi
    outcome=running
    if is_any running && ! is_any exit && ! is_any none; then return; fi
    if ! is_any running; then break; fi
    wait=$((wait + 1))
    ((wait == 5)) || pause
  done
  judge_codes
}

judge_codes() {
  local found
  found="$(codes)"
  if is_any running; then
    outcome=failed
  elif [[ "$found" == 0 ]]; then
    outcome=finished
    if [[ -z "$workdir" ]] || is_finished; then return; fi
    say "every process ended with 0, but $workdir/summary.json is not there"
    outcome=failed
  elif ! grep -qvxE '0|75' <<<"$found"; then
    outcome=saved
  elif ! grep -qvxE '0|75|124' <<<"$found"; then
    outcome=limit
  elif grep -qx 2 <<<"$found"; then
    outcome=mistake
  else
    outcome=failed
  fi
  if [[ ! "$outcome" =~ ^(saved|limit)$ ]]; then show_dead_worker; fi
}

# show_dead_worker: prints the first worker that failed and the end of its log, also stored in $output.
show_dead_worker() {
  local node host code worker
  [[ -n "$dry_run" ]] || mkdir -p -- "$output"
  # Workers that never started come first, those that only lost another process (76) last.
  read -r node host code < <(awk '$3 == "none" { print 0, 0, $1, $2, "none" }
    $3 == "exit" && $4 != 0 && $4 != 75 { print ($4 == 76), $5, $1, $2, $4 }' "$scratch/status" |
    sort -k1,1n -k2,2n | head -n 1 | cut -d' ' -f3-) || true
  if [[ -z "${host:-}" ]]; then
    node="$(first_node)" host="worker 0" code=0 worker=0
  else
    worker="${host##*-w-}" # Google Cloud ends a worker's host name like this
    is_count "$worker" || worker=0
    say "a dead worker: $host (worker $worker of $node) $(ending "$code"). The end of its log:"
  fi
  on_worker "$node" "$worker" "$(step tail)" | tee "$output/worker-$worker-of-$node.txt" >&2 || true
}

ending() {
  case "$1" in
    none) echo "never started" ;;
    76) echo "ended with exit code 76: it lost another process, or a step did not end" ;;
    137) echo "was killed (exit code 137; often the machine's memory was full)" ;;
    *) echo "ended with exit code $1" ;;
  esac
}

# name_unreachable: contacts each worker alone, since a lost one makes a command to all fail. Fails if all respond.
name_unreachable() {
  local node worker number found=1
  for node in $(nodes); do
    number="$(gcloud compute tpus tpu-vm describe "$node" --format='value(networkEndpoints[].ipAddress)' "${place[@]}" |
      tr ';' '\n' | grep -c .)" || number=1
    for ((worker = 0; worker < number; worker++)); do
      if ! on_worker "$node" "$worker" true >/dev/null 2>&1; then
        say "a dead worker: worker $worker of $node cannot be reached by ssh"
        found=0
      fi
    done
  done
  return "$found"
}

# clear_away: stops the processes of a failed attempt. A machine with an unreachable worker is deleted.
clear_away() {
  if [[ "$outcome" == unreachable ]] || ! everywhere "$(step stop)"; then delete; fi
}

is_finished() {
  if [[ -n "$dry_run" ]]; then
    quoted gcloud storage cat "$workdir/summary.json"
    [[ "$dry_state" == ACTIVE ]]
    return
  fi
  gcloud storage cat "$workdir/summary.json" >/dev/null 2>&1
}

show_status() {
  local code=0
  get_state
  [[ "$state" != UNKNOWN ]] || exit 1
  [[ "$state" == ACTIVE ]] || exit 3
  get_statuses || code=1
  ((code == 0)) || say "not every worker responds"
  cat -- "$scratch/status"
  on_worker "$(first_node)" 0 "$(step progress)" || say "the progress of the run is not known; worker 0's message is above"
  if ((code == 0)) && is_any running && ! is_any exit && ! is_any none; then exit 0; fi
  if ((code == 0)) && [[ "$(codes)" == 0 ]] && ! is_any running; then exit 0; fi
  if ((code == 0)) && ! is_any running && [[ -n "$(codes)" ]] && ! grep -qvxE '0|75|124' <<<"$(codes)"; then exit 75; fi
  exit 1
}

fetch() {
  local request=(gcloud storage rsync --recursive)
  [[ -n "$with_checkpoints" ]] || request+=(--exclude='(^|/)checkpoints/')
  [[ -n "$dry_run" ]] || mkdir -p -- "$output"
  execute "${request[@]}" "$workdir" "$output" && return
  say "the results stay in $workdir; they could not be fetched"
  return 1
}
