#!/usr/bin/env bash
# Run on Kubernetes with JobSet, from the manifest to the end of its log: ./launch/gke.sh COMMAND OPTIONS ...
# render_jobset.py makes the manifest; the JobSet controller restarts the run by its rules.
set -euo pipefail

here="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
# shellcheck source=launch/commands.sh
source "$here/commands.sh"
# shellcheck source=launch/check.sh
source "$here/check.sh"

HELP="\
gke.sh: train on the Kubernetes cluster that kubectl is connected to, with JobSet.

  gke.sh run OPTIONS -- pretrain --config=RECIPE ...   check, print hours and price, submit, and follow the log until
                                                       the run has ended
  gke.sh render OPTIONS -- VERB ...                    print the manifest
  gke.sh submit OPTIONS -- VERB ...                    check, print hours and price, and send it to the cluster
  gke.sh log --name=NAME                               of the first process, continued after every restart
  gke.sh status --name=NAME                            the JobSet, its pods, and the cluster's warnings
  gke.sh delete --name=NAME                            the JobSet; its nodes stay until their pool is made smaller

  --namespace=NAME      of the cluster
  --poll_seconds=N      between two queries of the state (default 30)
  --price=P             of one chip for an hour, to print what the run will cost
  --max_hours=H         from each start, waiting for nodes included; then the run saves and stops (default of run and
                        submit: twice the plan, at least 2; none: no limit)
  --no_check            do not check the recipe here, for images that hold other code or data than this checkout; data
                        of --data_bucket that arguments name are looked for
  --dry-run             print every command, execute none
OPTIONS are those of render_jobset.py (--help lists them): --name, --image, --accelerator, --topology, --workdir, ...
What may go on costing money is named at every exit.

Exit codes: 0 finished (or the step is done), 1 failed, 2 wrong arguments, 75 stopped after --max_hours, 130 Ctrl-C or
a closed terminal.
"

MOST_UNANSWERED=10 # queries of the state in a row, before following ends
name="" shares="" no_check="" place=() render=() words=() options=()
is_submitted="" # yes once the cluster may have the run

main() {
  local command="${1:---help}"
  (($# == 0)) || shift
  case "$command" in
    run | render | submit | log | status | delete) ;;
    --help | -h) printf '%s' "$HELP" && exit ;;
    *) refuse "There is no command '$command'. Commands: run, render, submit, log, status, delete." ;;
  esac
  read_options "$@"
  need_counts poll_seconds
  need_price
  need_max_hours
  [[ "$command" == render ]] || need_program kubectl
  if [[ "$command" =~ ^(log|status|delete)$ ]]; then
    need_dns_name name "$name" 63
    [[ ${#render[@]}${#words[@]}$max_hours == 10 ]] || refuse "$command takes --name, --namespace and nothing of the run."
  fi
  [[ "$command" != run || -z "$shares" ]] ||
    refuse "run follows one JobSet, and --shares makes $shares: submit them, then log --name=$name-0 and so on."
  [[ -z "$no_check" || "$command" =~ ^(run|submit)$ ]] ||
    refuse "--no_check is of run and submit, and $command checks no recipe: leave it out."
  [[ -z "$price" || "$command" =~ ^(run|submit)$ ]] ||
    refuse "--price is of run and submit, and $command prints no price: leave it out."
  trap name_running EXIT
  case "$command" in
    run)
      check_run
      submit && follow
      ;;
    submit)
      check_run
      submit
      ;;
    log) follow ;;
    *) "$command" ;;
  esac
}

read_options() {
  while (($#)); do
    case "$1" in
      --name=*) name="${1#*=}" && render+=("$1") ;;
      --namespace=*)
        [[ "${1#*=}" =~ ^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$ ]] ||
          refuse "$1: must be at most 63 lower-case letters, digits and hyphens, and no hyphen at an end."
        place=("$1")
        ;;
      --poll_seconds=*) poll_seconds="${1#*=}" ;;
      --price=*) price="${1#*=}" ;;
      --max_hours=*) max_hours="${1#*=}" ;;
      --no_check) no_check=yes ;;
      --dry-run) dry_run=yes ;;
      --shares=*) shares="${1#*=}" && render+=("$1") ;;
      --help | -h) printf '%s' "$HELP" && exit ;;
      --)
        words=("$@")
        return
        ;;
      *) render+=("$1") ;;
    esac
    shift
  done
}

# render [--machine]: prints the manifest, or what the run is checked with.
render() {
  local python
  python="$(find_python)" || return 2
  list_options
  "$python" "$repository/launch/render_jobset.py" ${dry_run:+--dry-run} "$@" ${options[@]+"${options[@]}"}
}

# list_options: the arguments of render_jobset.py, in $options.
list_options() {
  options=(${render[@]+"${render[@]}"})
  [[ -z "$max_hours" || "$max_hours" == none ]] || options+=(--max_hours="$max_hours")
  options+=(${words[@]+"${words[@]}"})
}

kube() { execute kubectl "$@" ${place[@]+"${place[@]}"}; }

# check_run: that pretrain or finetune can start on these machines with the code of this checkout.
check_run() {
  local machine key value devices slices workdir chips topology=""
  machine="$(render --machine)" || exit 2 # it has printed the reason
  while read -r key value; do
    case "$key" in
      mount) mounts+=("$value") ;;
      *) printf -v "$key" '%s' "$value" ;;
    esac
  done <<<"$machine"
  if [[ "${words[1]:-}" =~ ^(pretrain|finetune)$ ]]; then check_words; fi
  price_limit "$chips"
}

# check_words: that the machine of check_run can start this run; its hours and their limit.
check_words() {
  data_roots=(/workdir /data)
  data_advice="Copy it into a bucket, mount that by --data_bucket=gs://BUCKET and give the path below /data, for a"
  data_advice+=" prepared dataset by input.data_dir. Give --no_check if the image holds it."
  if [[ -n "$no_check" ]]; then
    say "the recipe is not checked here"
    find_named "${words[@]:1}"
  else
    check_start "$devices" "$slices" "$workdir" "${words[@]:1}"
    if [[ -n "$topology" ]]; then
      limit_run "$topology" "$chips" "${words[@]:1}"
    else
      say "plan does not know these machines: hours and price are not known"
    fi
  fi
}

submit() {
  local manifest
  manifest="$(render)" || exit 2 # it has printed the reason
  if [[ -n "$dry_run" ]]; then
    list_options
    printf '%s |\n' "$(quoted ./launch/render_jobset.py ${options[@]+"${options[@]}"})"
    kube apply --filename=-
    return
  fi
  is_submitted=yes # also where the cluster's answer is lost
  if ! kube apply --filename=- <<<"$manifest"; then
    fail "the cluster did not accept the run; its reason is above. An unknown field in failurePolicy, or no kind" \
      "JobSet, means that JobSet 0.10 or newer is not installed there; an immutable field, that a run of this name is" \
      "there: delete it first."
  fi
}

# follow: prints the first process's log. A restart makes a new pod; between two pods there is no log.
follow() {
  local selector="jobset.sigs.k8s.io/jobset-name=$name,jobset.sigs.k8s.io/job-index=0"
  selector+=",batch.kubernetes.io/job-completion-index=0"
  local since=""
  is_submitted=yes
  trap interrupted INT TERM HUP
  while :; do
    # kubectl fails while there is no pod, or its image is being loaded. A pod may end before the JobSet notices:
    # --since-time prevents that its log is printed again.
    kube logs --follow --container=vit-jax --selector="$selector" --tail=-1 ${since:+--since-time="$since"} ||
      say "no log to follow now; for the reason see ./launch/gke.sh status --name=$name"
    since="$(date -u +%Y-%m-%dT%H:%M:%SZ)"
    if has_ended; then return; fi
    pause
  done
}

# has_ended: whether the JobSet has finished; ends the script where it has failed.
has_ended() {
  local answer restarts question=(get jobset "$name" --ignore-not-found)
  question+=(--output='jsonpath={.status.terminalState}/{.status.restarts}')
  if [[ -n "$dry_run" ]]; then
    kube "${question[@]}"
    return
  fi
  if ! answer="$(kube "${question[@]}")"; then
    unanswered=$((${unanswered:-0} + 1))
    ((unanswered < MOST_UNANSWERED)) || fail "the cluster did not answer $MOST_UNANSWERED times; kubectl's messages are" \
      "above. $name may go on."
    return 1
  fi
  unanswered=0
  restarts="${answer#*/}"
  case "$answer" in
    "") fail "there is no JobSet $name" ;;
    Completed/*) say "$name has finished, after ${restarts:-0} restart(s)" ;;
    Failed/*)
      if [[ "$(kube get jobs --selector="jobset.sigs.k8s.io/jobset-name=$name" \
        --output='jsonpath={.items[*].status.conditions[?(@.type=="Failed")].reason}')" == *DeadlineExceeded* ]]; then
        say "$name was stopped after --max_hours. Delete it; the same command resumes from the last checkpoint."
        exit 75
      fi
      kube get jobset "$name" --output='jsonpath={.status.conditions[?(@.type=="Failed")].message}' >&2 || true
      fail "$name has failed, after ${restarts:-0} restart(s). Exit code 2 of a pod is a wrong option or path of" \
        "vit-jax, which is not repeated."
      ;;
    *)
      [[ "$restarts" == "${seen_restarts:-0}" ]] ||
        say "$name was restarted ($restarts so far): preempted, or a process was lost"
      seen_restarts="${restarts:-0}"
      return 1
      ;;
  esac
}

status() {
  kube get jobset "$name"
  kube get pods --selector="jobset.sigs.k8s.io/jobset-name=$name" --output=wide
  kube get events --field-selector=type=Warning --sort-by=.lastTimestamp
}

delete() { kube delete jobset "$name"; }

# name_running: at every exit of a command that has submitted or followed a run.
name_running() {
  local each="--name=$name" others=""
  if [[ -z "$is_submitted" || -n "$dry_run" ]]; then return; fi
  if [[ -n "$shares" ]]; then each+=-0 others=" and so on to --name=$name-$((shares - 1))"; fi
  each+="${place[0]:+ ${place[0]}}"
  {
    say "the nodes of $name cost money until it has ended and their pool is smaller, which autoscaling does:"
    say "  ./launch/gke.sh log $each"
    say "  ./launch/gke.sh delete $each$others"
  } || true # a closed terminal
}

interrupted() {
  trap - INT TERM HUP
  say "stopped following; $name continues" || true # a closed terminal
  exit 130
}

main "$@"
