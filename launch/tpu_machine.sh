# shellcheck shell=bash disable=SC2154
# Sourced by tpu_pod.sh, which sets the options: the machine, and commands on its workers. $state is the last known
# state of the queued resource.

checkout=vit_jax # on the workers, in the home folder
state=""
dry_state=ACTIVE # the state that a dry run assumes; run begins with NOT_FOUND
active_since=""
is_rented="" # yes while the machine may exist, and cost money
is_named=""  # yes once the user was told so

nodes() {
  local number
  if ((slices == 1)); then
    echo "$name"
    return
  fi
  for ((number = 0; number < slices; number++)); do echo "$name-$number"; done
}

first_node() { nodes | head -n 1; }

# on_worker NODE WORKERS COMMAND: through ssh; WORKERS is a number or all.
on_worker() {
  execute gcloud compute tpus tpu-vm ssh "$1" --worker="$2" "${ssh_flags[@]}" --command="$3" "${place[@]}"
}

# everywhere COMMAND: on every worker of every slice, slices in parallel. Fails if one fails.
everywhere() {
  local node processes=() failed=0
  if ((slices == 1)) || [[ -n "$dry_run" ]]; then
    for node in $(nodes); do on_worker "$node" all "$1" || failed=1; done
    return "$failed"
  fi
  for node in $(nodes); do
    on_worker "$node" all "$1" &
    processes+=("$!")
  done
  for node in "${processes[@]}"; do wait "$node" || failed=1; done
  return "$failed"
}

step() { quoted bash "$checkout/launch/tpu_worker.sh" "$@"; }

create() {
  local request answer
  request=(gcloud compute tpus queued-resources create "$name" --accelerator-type="$type"
    --runtime-version="$runtime_version")
  if ((slices == 1)); then request+=(--node-id="$name"); fi
  if ((slices > 1)); then request+=(--node-count="$slices" --node-prefix="$name"); fi
  request+=(${tier:+"$tier"} ${create_flags[@]+"${create_flags[@]}"} --async "${place[@]}")
  if [[ -n "$dry_run" ]]; then
    quoted "${request[@]}"
    dry_state=ACTIVE
    return
  fi
  say "requesting $slices x $type in $zone (${tier:---on-demand})"
  remember_rented
  if answer="$("${request[@]}" 2>&1)"; then return; fi
  get_state # a request may have arrived although its answer was lost
  case "$state" in
    NOT_FOUND) no_machine "$answer" ;;
    UNKNOWN)
      printf '%s\n' "$answer" >&2
      fail "Google Cloud's answer to the request is above, and it is not known whether $name was created."
      ;;
    *) printf '%s\n' "$answer" >&2 ;;
  esac
}

# remember_rented: before a request, also in a file: this computer may be switched off later.
remember_rented() {
  is_rented=yes
  mkdir -p -- "$output"
  costs_money >"$output/rented.txt"
}

forget_rented() {
  is_rented=""
  rm -f -- "$output/rented.txt"
}

# costs_money: what still costs money, and what ends that.
costs_money() {
  local exists="still exists"
  [[ -n "$state" && ! "$state" =~ ^(UNKNOWN|NOT_FOUND)$ ]] || exists="may exist"
  echo "$name ($slices x ${type:-TPU} in $zone) $exists and costs money until it is deleted:"
  echo "  $(quoted ./launch/tpu_pod.sh delete --name="$name" --zone="$zone" ${project:+--project="$project"})"
}

# name_rented: at every exit of the script that leaves the machine behind.
name_rented() {
  local line
  if [[ -z "$is_rented" || -n "$is_named" ]]; then return; fi
  is_named=yes
  costs_money | while IFS= read -r line; do say "$line"; done
}

# no_machine MESSAGE: Google Cloud's refusal. Returns only for lack of capacity and with --retry_seconds, after these.
no_machine() {
  local refusals='RESOURCE_EXHAUSTED|quota.*(exceed|exhaust|limit)|exceed.*quota'
  refusals+='|no more capacity|stockout|(insufficient|not enough) (capacity|resources)'
  printf '%s\n' "$1" >&2
  if ! grep -qiE "$refusals" <<<"$1"; then
    fail "$name could not be created; Google Cloud's reason is above. Nothing of it costs money."
  fi
  say "no quota or no capacity for $slices x $type in $zone (${tier:---on-demand})." \
    "See the quota 'TPU ... cores' of this zone in the console and request more, try --spot, another zone or a" \
    "smaller --type, or let this script repeat the request: --retry_seconds=600."
  if [[ -z "$retry_seconds" ]]; then exit 3; fi
  say "requesting again in $retry_seconds s"
  sleep "$retry_seconds"
}

# get_state: $state from Google Cloud; NOT_FOUND if there is no such resource, UNKNOWN without a response.
get_state() {
  local question=(gcloud compute tpus queued-resources describe "$name" --format='value(state.state)' "${place[@]}")
  if [[ -n "$dry_run" ]]; then
    quoted "${question[@]}"
    state="$dry_state"
    return
  fi
  local before="$state"
  if ! state="$("${question[@]}" 2>"$scratch/error")"; then
    state=UNKNOWN
    if grep -q NOT_FOUND "$scratch/error"; then state=NOT_FOUND; else cat -- "$scratch/error" >&2; fi
  fi
  [[ "$state" == "$before" ]] || say "$name is $state"
  case "$state" in
    UNKNOWN) ;;
    NOT_FOUND) forget_rented ;;
    *) is_rented=yes ;;
  esac
  if [[ "$state" == ACTIVE ]]; then active_since="${active_since:-$SECONDS}"; else count_chip_seconds; fi
}

# seconds_left: of --max_hours, of all machines that this script has rented.
seconds_left() {
  local now=0
  if [[ -n "$active_since" ]]; then now=$((SECONDS - active_since)); fi
  echo $((max_seconds - chip_seconds / chips - now))
}

is_time_up() { [[ -n "$max_seconds" ]] && (($(seconds_left) <= 0)); }

count_chip_seconds() {
  if [[ -n "$active_since" ]]; then chip_seconds=$((chip_seconds + (SECONDS - active_since) * ${chips:-0})); fi
  active_since=""
}

# bring_up: removes, requests and waits until the resource is ACTIVE.
bring_up() {
  local unknown=0
  while :; do
    get_state
    case "$state" in
      ACTIVE) return ;;
      NOT_FOUND) create ;;
      FAILED)
        explain_failure
        delete
        no_machine "$reason"
        ;;
      SUSPENDING | SUSPENDED | DELETING) delete || pause ;;
      UNKNOWN)
        unknown=$((unknown + 1))
        is_rented=yes # perhaps, by an earlier command
        ((unknown < 10)) || fail "Google Cloud has not responded ten times; its messages are above."
        pause
        ;;
      *) pause ;; # ACCEPTED, CREATING, WAITING_FOR_RESOURCES, PROVISIONING
    esac
  done
}

wait_until_active() {
  while :; do
    get_state
    case "$state" in
      ACTIVE) return ;;
      FAILED)
        explain_failure
        fail "$name failed: $reason"
        ;;
      NOT_FOUND | SUSPENDING | SUSPENDED | DELETING)
        fail "$name is $state and will not become ACTIVE: delete it and create it again."
        ;;
      *) pause ;;
    esac
  done
}

explain_failure() {
  reason="$(gcloud compute tpus queued-resources describe "$name" --format='yaml(state)' "${place[@]}" 2>&1)" || true
}

delete() {
  execute gcloud compute tpus queued-resources delete "$name" --force "${place[@]}" || {
    say "$name could not be deleted; it may still cost money. Check with:"
    say "  $(quoted gcloud compute tpus queued-resources list "${place[@]}")"
    return 1
  }
  if [[ -z "$dry_run" ]]; then
    say "$name is deleted"
    count_chip_seconds
    state=NOT_FOUND
    forget_rented
  fi
}
