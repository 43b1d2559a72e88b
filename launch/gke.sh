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

  gke.sh run OPTIONS -- pretrain --config=RECIPE ...   check, submit, and follow the log until the run has ended
  gke.sh render OPTIONS -- VERB ...                    print the manifest
  gke.sh submit OPTIONS -- VERB ...                    check, and send it to the cluster
  gke.sh log --name=NAME                               of the first process, continued after every restart
  gke.sh status --name=NAME                            the JobSet, its pods, and the cluster's warnings
  gke.sh delete --name=NAME                            the JobSet; its nodes stay until their pool is made smaller

  --namespace=NAME      of the cluster
  --poll_seconds=N      between two queries of the state (default 30)
  --no_check            do not check the recipe here, for images that hold other code or data than this checkout; data
                        of --data_bucket that arguments name are looked for
  --dry-run             print every command, execute none
OPTIONS are those of render_jobset.py (--help lists them): --name, --image, --accelerator, --topology, --workdir, ...

Exit codes: 0 finished (or the step is done), 1 failed, 2 wrong arguments, 130 Ctrl-C.
"

MOST_UNANSWERED=10 # queries of the state in a row, before following ends
name="" shares="" no_check="" place=() render=() words=()

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
  [[ "$command" == render ]] || need_program kubectl
  if [[ "$command" =~ ^(log|status|delete)$ ]]; then
    need_dns_name name "$name" 63
    ((${#render[@]} == 1 && ${#words[@]} == 0)) || refuse "$command takes --name, --namespace and nothing of the run."
  fi
  [[ "$command" != run || -z "$shares" ]] ||
    refuse "run follows one JobSet, and --shares makes $shares: submit them, then log --name=$name-0 and so on."
  [[ -z "$no_check" || "$command" =~ ^(run|submit)$ ]] ||
    refuse "--no_check is of run and submit, and $command checks no recipe: leave it out."
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
  "$python" "$repository/launch/render_jobset.py" ${dry_run:+--dry-run} "$@" ${render[@]+"${render[@]}"} ${words[@]+"${words[@]}"}
}

kube() { execute kubectl "$@" ${place[@]+"${place[@]}"}; }

# check_run: that pretrain or finetune can start on these machines with the code of this checkout.
check_run() {
  local machine key value devices slices workdir
  [[ "${words[1]:-}" =~ ^(pretrain|finetune)$ ]] || return 0
  machine="$(render --machine)" || exit 2 # it has printed the reason
  while read -r key value; do
    case "$key" in
      mount) mounts+=("$value") ;;
      *) printf -v "$key" '%s' "$value" ;;
    esac
  done <<<"$machine"
  data_roots=(/workdir /data)
  data_advice="Copy it into a bucket, mount that by --data_bucket=gs://BUCKET and give the path below /data, for a"
  data_advice+=" prepared dataset by input.data_dir. Give --no_check if the image holds it."
  if [[ -n "$no_check" ]]; then
    say "the recipe is not checked here"
    find_named "${words[@]:1}"
  else
    check_start "$devices" "$slices" "$workdir" "${words[@]:1}"
  fi
}

submit() {
  local manifest
  manifest="$(render)" || exit 2 # it has printed the reason
  if [[ -n "$dry_run" ]]; then
    printf '%s |\n' "$(quoted ./launch/render_jobset.py ${render[@]+"${render[@]}"} ${words[@]+"${words[@]}"})"
    kube apply --filename=-
  elif ! kube apply --filename=- <<<"$manifest"; then
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
  trap interrupted INT TERM
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
      "above. $name may go on, and its nodes cost money: ./launch/gke.sh status --name=$name"
    return 1
  fi
  unanswered=0
  restarts="${answer#*/}"
  case "$answer" in
    "") fail "there is no JobSet $name; where it was deleted, its nodes stay until their pool is made smaller" ;;
    Completed/*) say "$name has finished, after ${restarts:-0} restart(s)" ;;
    Failed/*)
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

interrupted() {
  trap - INT TERM
  say "stopped following. $name continues and its nodes cost money. Follow again or delete it:"
  say "  ./launch/gke.sh log --name=$name"
  say "  ./launch/gke.sh delete --name=$name"
  exit 130
}

main "$@"
