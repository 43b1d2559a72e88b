#!/usr/bin/env bash
# A run on a Cloud TPU pod, or one step of it: ./launch/tpu_pod.sh COMMAND OPTIONS [-- VERB ARG...]
# tpu_machine.sh controls the machine, tpu_attempt.sh one attempt at the run, tpu_worker.sh runs on the workers.
set -euo pipefail

here="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
# shellcheck source=launch/commands.sh
source "$here/commands.sh"
# shellcheck source=launch/check.sh
source "$here/check.sh"
# shellcheck source=launch/tpu_machine.sh
source "$here/tpu_machine.sh"
# shellcheck source=launch/tpu_attempt.sh
source "$here/tpu_attempt.sh"

manifest=vit_jax_data.txt # of vit-jax prepare, in the folder of datasets: the words by which a run reads the last one

HELP="\
tpu_pod.sh: train on a Cloud TPU pod, from creating it to deleting it.

  tpu_pod.sh run --zone=ZONE --type=TYPE --data_bucket=gs://BUCKET [OPTIONS] -- pretrain --config=RECIPE
      Check the recipe, look for its data in the bucket, print hours and price; create, wait, install, start on every
      worker, follow the log; start again after a preemption, on a new machine where the old one is gone; at the end
      fetch the results and delete. The same command again continues with a run that is in progress. Without arguments
      on data it trains on what the command data copied to the bucket. Give --workdir before --, not among the
      arguments of vit-jax.

  tpu_pod.sh data --data_bucket=gs://BUCKET -- DATASET --data_dir=FOLDER [...]
      Write data as ArrayRecord files here, by vit-jax prepare with these words, and copy FOLDER to gs://BUCKET/tfds.
      Interrupted, the same command goes on. No machine is rented. The bucket gets tfds/$manifest, from which a run
      has dataset, split and folder.

  One step alone:
  tpu_pod.sh create  --name= --zone= --type=                       requests the machine and returns at once
  tpu_pod.sh wait    --name= --zone=                               until it is ACTIVE
  tpu_pod.sh install --name= --zone= [--workdir=gs://...]          the package and the buckets on every worker
  tpu_pod.sh start   --name= --zone= --workdir=gs://... -- VERB .. on every worker, in the background
  tpu_pod.sh log     --name= --zone=                               worker 0, followed until its process ends
  tpu_pod.sh status  --name= --zone=                               the machine, every worker, vit-jax status of the run
  tpu_pod.sh fetch   --name= --zone= --workdir=gs://...            results from the bucket into --output
  tpu_pod.sh delete  --name= --zone=                               the machine; the bucket stays

Machine:
  --name=NAME               of the queued resource and its TPU (default of run: the last folder of --workdir, or the recipe)
  --zone=ZONE  --project=P  --zone is needed; the project is gcloud's own unless given
  --type=TYPE               v2-N, v3-N, v4-N, v5litepod-N, v5p-N, v6e-N, tpu7x-N as Google Cloud names them
  --slices=N                number of such slices, one run over all (default 1)
  --spot | --reserved       spot capacity, or that of your reservation (default: on demand)
  --runtime_version=V       the machine's image (default: the one for the type)
  --create_flag=FLAG        passed to gcloud's create; may be repeated (--create_flag=--network=mine)
  --internal_ip             reach the workers by their internal addresses
Run:
  --workdir=gs://...        the bucket is mounted on every worker, and vit-jax gets the mounted folder (default of run:
                            runs/NAME in the first --data_bucket)
  --data_bucket=gs://...    mounted for reading, with a cache on the disk, at /mnt/vit_jax_data/BUCKET; may be repeated
  --cache_dir=FOLDER        of every worker, for the cache: a local SSD or a RAM disk (default: in the home folder)
  --upload=PATH             copied with what git tracks: a file or folder of this checkout; may be repeated
  --repository=URL --ref=R  install this commit instead of copying this checkout; the recipe is not checked then
  --no_check                do not check the recipe here; data of --data_bucket that arguments name are looked for
Behaviour:
  --max_hours=H             of run: hours of the machine, from ACTIVE on, preempted ones included; then the run saves and
                            stops, also where this computer is switched off, and the machine is deleted (default: twice
                            the plan's, at least 2; none: no limit)
  --max_failures=N          how often a run that failed is started again from its checkpoint (default 3)
  --retry_seconds=N         request again after N seconds without quota or capacity (default: stop)
  --poll_seconds=N          between two queries of the state (default 30)
  --keep                    do not delete the machine at the end; it still costs money
  --output=FOLDER           log and results here (default runs/NAME)
  --with_checkpoints        fetch them as well
  --price=P                 of one chip for an hour, to print what the run will cost, and what it cost
  --dry-run                 print every command, execute none; BUCKET and the like may stand for names

A machine that is left behind is named at every exit, and in rented.txt of --output until it is deleted.

Exit codes: 0 finished (or the step is done), 1 failed more than --max_failures times, 2 wrong arguments or
options of the run, 3 no quota or capacity, 75 stopped after --max_hours, 130 Ctrl-C or a closed terminal.
Of status: 0 every process runs, or has finished, 1 one has failed, was not started or does not answer, 3 there is no
machine, or it is not ACTIVE, 75 ended by a signal, after saving.
"

failures=0 outcome="" chips=0 devices=0
name="" zone="" project="" type="" slices=1 tier="" runtime_version="" workdir="" repository_url="" ref="" output=""
max_failures=3 retry_seconds="" no_check="" keep="" with_checkpoints="" max_seconds="" cache_dir=""
create_flags=() data_buckets=() uploads=() words=() ssh_flags=()

main() {
  local command="${1:---help}"
  (($# == 0)) || shift
  case "$command" in
    run | data | create | wait | install | start | log | status | fetch | delete) ;;
    --help | -h) printf '%s' "$HELP" && exit ;;
    *) refuse "There is no command '$command': run, data, create, wait, install, start, log, status, fetch, delete." ;;
  esac
  read_options "$@"
  if [[ "$command" == run ]]; then fill_names; fi
  check_options "$command"
  scratch="$(mktemp -d)"
  trap leave EXIT
  # shellcheck disable=SC2034 # read in tpu_steps.sh
  case "$command" in
    run)
      read_manifest
      run
      ;;
    data) provide_data ;;
    wait) wait_until_active ;;
    install) install_everywhere || fail "the installation failed; its messages are above" ;;
    start) start_everywhere || fail "not every worker has started; their messages are above" ;;
    log) follow_log && say "no process runs any more: $outcome" ;;
    create | fetch | delete) "$command" ;;
    status) show_status ;;
  esac
}

leave() {
  rm -rf -- "$scratch"
  name_rented || true # a closed terminal
}

read_options() {
  local option
  while (($#)); do
    case "$1" in
      --name=* | --zone=* | --project=* | --type=* | --slices=* | --runtime_version=* | --workdir=* | --ref=* | \
        --max_failures=* | --retry_seconds=* | --poll_seconds=* | --output=* | --price=* | --max_hours=* | \
        --cache_dir=*)
        option="${1%%=*}"
        printf -v "${option#--}" '%s' "${1#*=}"
        ;;
      --repository=*) repository_url="${1#*=}" ;;
      --create_flag=*) create_flags+=("${1#*=}") ;;
      --data_bucket=*) data_buckets+=("${1#*=}") ;;
      --upload=*) uploads+=("${1#*=}") ;;
      --spot | --reserved)
        [[ -z "$tier" || "$tier" == "$1" ]] || refuse "--spot and --reserved exclude each other: give one of them."
        tier="$1"
        ;;
      --internal_ip) ssh_flags+=(--internal-ip) ;;
      --keep) keep=yes ;;
      --with_checkpoints) with_checkpoints=yes ;;
      --no_check) no_check=yes ;;
      --dry-run) dry_run=yes ;;
      --help | -h) printf '%s' "$HELP" && exit ;;
      --)
        shift
        words=("$@")
        return
        ;;
      *) refuse "'$1' is not an option of tpu_pod.sh (see --help). Arguments of vit-jax come after --." ;;
    esac
    shift
  done
}

# need_folder PATH: refuses what leads out of the mounted bucket, and what a shell could expand.
need_folder() {
  local word='[-a-zA-Z0-9._=+@,]+'
  [[ "$1" =~ ^$word(/$word)*$ && ! "/$1/" =~ /[.]{1,2}/ ]] ||
    refuse "--workdir=gs://$1: parts of the folder must be of letters, digits and . _ = + @ , - and none may be . or" \
      ".. or empty."
}

# check_options COMMAND: validates all options before a machine is requested.
check_options() {
  local word bucket upload bucket_name='[a-z0-9][-a-z0-9_.]{1,61}[a-z0-9]'
  [[ -z "$dry_run" ]] || bucket_name='[a-zA-Z0-9][-a-zA-Z0-9_.]{1,61}[a-zA-Z0-9]' # commands of the README, to be read
  if [[ "$1" != data ]]; then
    need_dns_name name "$name" 48
    [[ "$zone" =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || refuse "--zone=$zone: must be a zone like us-west4-a."
  fi
  need_counts slices max_failures poll_seconds
  [[ -z "$retry_seconds" ]] || need_counts retry_seconds
  ((slices > 0)) || refuse "--slices=$slices: must be 1 or more."
  need_price
  need_max_hours
  [[ -z "$max_hours" || "$1" == run ]] || refuse "--max_hours is of run, and '$1' limits nothing: leave it out."
  [[ -z "$ref" || -n "$repository_url" ]] || refuse "--ref=$ref is of a --repository=URL: give that too."
  if [[ "$1" =~ ^(run|create)$ ]]; then check_type; fi
  [[ -z "$no_check" || "$1" == run ]] || refuse "--no_check is of run, and '$1' checks no recipe: leave it out."
  if [[ "$1" =~ ^(run|start|fetch)$ || -n "$workdir" ]]; then
    workdir="${workdir%/}"
    [[ "$workdir" =~ ^gs://$bucket_name/.+$ ]] ||
      refuse "--workdir=$workdir: must be gs://BUCKET/FOLDER with your bucket's name, of lower-case letters, in the" \
        "place of BUCKET: all workers write to it, and it stays after them."
    need_folder "${workdir#gs://}"
  fi
  for bucket in ${data_buckets[@]+"${data_buckets[@]}"}; do
    [[ "$bucket" =~ ^gs://$bucket_name$ ]] ||
      refuse "--data_bucket=$bucket: must be gs://BUCKET, without a folder; your bucket's name in the place of BUCKET."
  done
  [[ -z "$cache_dir" || "$cache_dir" =~ ^/[-a-zA-Z0-9._/]+$ ]] ||
    refuse "--cache_dir=$cache_dir: must be an absolute path on the workers, of letters, digits and . _ - /"
  [[ -z "$cache_dir" || ("$1" =~ ^(run|install)$ && -n "${data_buckets[*]-}") ]] ||
    refuse "--cache_dir is of run and install with a --data_bucket: leave it out."
  if [[ "$1" == data ]]; then
    ((${#data_buckets[@]} == 1)) || refuse "data copies to one --data_bucket=gs://BUCKET: give it."
    [[ " ${words[*]-}" == *" --data_dir="?* ]] ||
      refuse "Give the words of vit-jax prepare after --, with --data_dir=FOLDER: ... -- imagenet2012 --data_dir=tfds"
  elif [[ "$1" =~ ^(run|start)$ ]]; then
    ((${#words[@]})) || refuse "Give the command to run after --: ... -- pretrain --config=RECIPE"
    [[ "${words[0]}" =~ ^(pretrain|finetune)$ ]] ||
      refuse "'${words[0]}' follows --: this script runs pretrain or finetune, which leave a summary in the workdir."
    for word in "${words[@]}"; do
      [[ "$word" != --workdir* ]] || refuse "$word follows --: give --workdir=gs://BUCKET/FOLDER before it."
    done
  elif ((${#words[@]})); then
    refuse "'$1' takes no command of vit-jax: leave out -- and what follows, or use run or start."
  fi
  [[ -z "$repository_url" || -z "${uploads[*]-}" ]] || refuse "--upload is of this checkout: leave out --repository."
  if [[ "$1" =~ ^(run|install)$ && -z "$repository_url" ]]; then need_checkout; fi
  for upload in ${uploads[@]+"${uploads[@]}"}; do
    [[ "$upload" != /* && "$upload" != *..* && -e "$repository/$upload" ]] ||
      refuse "--upload=$upload: must be a file or folder in $repository, by its path from there."
  done
  need_program gcloud
  output="${output:-runs/$name}"
  place=(--zone="$zone" --quiet)
  [[ -z "$project" ]] || place+=(--project="$project")
  # A dead connection is noticed after two minutes.
  ssh_flags+=(--ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=4)
}

# provide_data: prepares a dataset here and copies it; both go on where they were interrupted.
provide_data() {
  local word folder="" bucket="${data_buckets[0]}"
  for word in "${words[@]}"; do [[ "$word" != --data_dir=* ]] || folder="${word#*=}"; done
  if [[ -z "$dry_run" ]]; then prepare_environment "$(accelerator /)"; fi
  execute "$venv/bin/vit-jax" prepare "${words[@]}"
  execute gcloud storage rsync --recursive "$folder" "$bucket/tfds"
  [[ -z "$dry_run" ]] || return 0
  say "$(du -sh -- "$folder" | cut -f1) in $bucket/tfds. A run with --data_bucket=$bucket trains on it:" \
    "./launch/tpu_pod.sh run --zone=ZONE --type=TYPE --data_bucket=$bucket -- pretrain --config=RECIPE"
}

# read_manifest: adds the words of the first bucket's manifest, unless the command itself names data. The value "." is the
# folder of the manifest.
read_manifest() {
  local word line address found=()
  if ((${#data_buckets[@]} == 0)) || [[ "${words[1]:-}" != --* ]]; then return; fi # or data as a word
  address="${data_buckets[0]}/tfds/$manifest"
  if [[ -n "$dry_run" ]]; then
    quoted gcloud storage cat "$address"
    return
  fi
  while IFS= read -r line; do
    [[ "$line" =~ ^--[a-z_.]+=[-a-zA-Z0-9_.:/]+$ ]] ||
      refuse "$address: '$line' is not a word that vit-jax prepare writes. Remove the file, or name the data."
    for word in "${words[@]}"; do
      [[ "$word" != "${line%%=*}"=* ]] || return 0
    done
    [[ "$line" != *=. ]] || line="${line%.}/mnt/vit_jax_data/${data_buckets[0]#gs://}/tfds"
    found+=("$line")
  done < <(gcloud storage cat "$address" 2>/dev/null || true)
  ((${#found[@]})) || return 0
  words+=("${found[@]}")
  say "data of $address: ${found[*]}"
}

# fill_names: --name from the workdir or the recipe, and --workdir from the first data bucket and the name.
fill_names() {
  local word from="${workdir%/}"
  from="${from##*/}"
  for word in ${words[@]+"${words[@]}"}; do
    if [[ -z "$workdir" && "$word" == --config=* ]]; then
      from="${word#--config=}"
      from="${from#configs/}"
      from="${from/.py/}"
    fi
  done
  if [[ -z "$name" && -n "$from" ]]; then
    name="$(tr '[:upper:]' '[:lower:]' <<<"$from" | tr -cs 'a-z0-9\n' '-' | cut -c 1-48 | sed 's/^[-0-9]*//; s/-*$//')"
    say "--name=$name"
  fi
  if [[ -z "$workdir" && -n "$name" && ${#data_buckets[@]} -gt 0 ]]; then
    workdir="${data_buckets[0]}/runs/$name"
    say "--workdir=$workdir"
  fi
}

# need_checkout: git decides which files are copied; checked before a machine costs money.
need_checkout() {
  git -C "$repository" rev-parse --is-inside-work-tree >/dev/null 2>&1 ||
    refuse "$repository is not a git checkout, so its files are not known: give --repository=URL --ref=COMMIT."
}

# check_run: that the recipe with its changes can start on the workers, and that they will have its files.
check_run() {
  local word bucket recipe=""
  data_roots=(/mnt/vit_jax /mnt/vit_jax_data)
  data_advice="Copy it into a bucket, mount that by --data_bucket=gs://BUCKET and give the path below"
  data_advice+=" /mnt/vit_jax_data/BUCKET, for a prepared dataset by input.data_dir."
  bucket="$(cut -d/ -f3 <<<"$workdir")"
  mounts=("/mnt/vit_jax/$bucket gs://$bucket")
  for bucket in ${data_buckets[@]+"${data_buckets[@]}"}; do mounts+=("/mnt/vit_jax_data/${bucket#gs://} $bucket"); done
  if [[ -n "$repository_url$no_check" ]]; then
    say "the recipe is ${repository_url:+that of $repository_url, and is }not checked here"
    find_named "${words[@]}"
    price_limit "$chips"
    return
  fi
  for word in "${words[@]}"; do
    if [[ "$word" == --config=* ]]; then recipe="${word#--config=}" recipe="${recipe%%:*}"; fi
  done
  [[ "$recipe" != /* ]] || refuse "--config=$recipe: must be a path from $repository, which the workers have elsewhere."
  if [[ -f "$repository/$recipe" ]]; then need_shipped "${recipe#./}"; fi
  check_start "$devices" "$slices" "/mnt/vit_jax/${workdir#gs://}" "${words[@]}"
  for word in ${read_here[@]+"${read_here[@]}"}; do need_shipped "$word"; done
  case "$type" in
    v2-* | v3-* | tpu7x-*) say "plan does not know $type: hours and price are not known" ;;
    *) limit_run "$slices*$type" "$chips" "${words[@]}" ;;
  esac
  price_limit "$chips"
}

# need_shipped PATH: refuses a file or folder of this checkout that is not copied to the workers.
need_shipped() {
  local file
  while IFS= read -r -d '' file; do
    [[ "$file/" != "$1"/* ]] || return 0
  done < <(list_files)
  refuse "$1 is not known to git and would not be on the workers: git add it, or give --upload=$1."
}

# check_type: $chips, $devices as JAX counts them, and $runtime_version from the type.
check_type() {
  local image number
  [[ "$type" != v5e-* ]] || type="v5litepod-${type#v5e-}" # a usual name; gcloud knows the other
  number="${type##*-}"
  is_count "$number" || number=0
  devices="$number" # a core, or a chip that has one; of v4 and v5p JAX joins the two of a chip
  case "$type" in
    v5litepod-*) image=v2-alpha-tpuv5-lite chips=$number ;;
    v6e-*) image=v2-alpha-tpuv6e chips=$number ;;
    tpu7x-*) image=v2-alpha-tpu7-ubuntu2404 chips=$((number / 2)) ;; # these are counted in cores, two to a chip
    v5p-*) image=v2-alpha-tpuv5 chips=$((number / 2)) devices=$((number / 2)) ;;
    v4-*) image=tpu-ubuntu2204-base chips=$((number / 2)) devices=$((number / 2)) ;;
    v2-* | v3-*) image=tpu-ubuntu2204-base chips=$((number / 2)) ;;
    *) chips=0 ;;
  esac
  ((chips > 0)) || refuse "--type=$type: must be v2-N, v3-N, v4-N, v5litepod-N, v5p-N, v6e-N or tpu7x-N, like v5litepod-256."
  need_slice "$number"
  chips=$((chips * slices)) devices=$((devices * slices))
  runtime_version="${runtime_version:-$image}"
}

# need_slice NUMBER: refuses a size that Google Cloud does not have, also in a dry run.
need_slice() {
  local size below="" above="" most=8192 kind="${type%-*}" sizes=()
  case "$kind" in
    v5litepod | v6e) sizes=(1 4 8 16 32 64 128 256) ;;
    v4 | v5p)
      # From 64 chips on, cubes of 4 x 4 x 4
      [[ "$kind" == v4 ]] || most=12288
      if (($1 % 128 == 0 && $1 <= most)); then return; fi
      sizes=(8 16 32 64 128 256 512 1024 2048 4096 "$most")
      ;;
    *) return 0 ;;
  esac
  for size in "${sizes[@]}"; do
    ((size != $1)) || return 0
    if ((size < $1)); then below="$size"; else above="${above:-$size}"; fi
  done
  refuse "--type=$type: there is no slice of this size. Use ${below:+$kind-$below}${below:+${above:+ or }}${above:+$kind-$above}."
}

# run: from creation to deletion; continues with an existing machine and a run in progress.
run() {
  check_run
  trap interrupted INT TERM HUP
  dry_state=NOT_FOUND
  if is_finished; then
    say "$workdir/summary.json exists: the run has finished. Nothing is created."
    fetch || true
    get_state # a machine that was left behind is named
    return
  fi
  get_state
  if [[ "$state" == ACTIVE ]] && get_statuses && is_any running; then
    start_everywhere || fail "$name runs another command (above). Give another --name, or delete it first."
    follow_log # starting changes nothing if this run is in progress
    end_attempt
  fi
  while :; do
    bring_up
    attempt
    end_attempt
  done
}

# attempt: installs, starts, follows to the end; the result is in $outcome.
attempt() {
  outcome=""
  if install_everywhere && start_everywhere; then
    follow_log
  else
    judge
    [[ "$outcome" =~ ^(preempted|unreachable|mistake)$ ]] || outcome=failed # others belong to an earlier attempt
  fi
}

# end_attempt: returns if the run must be started again, otherwise ends the script.
end_attempt() {
  if [[ "$outcome" != finished ]] && is_time_up; then outcome=limit; fi
  count_chip_seconds
  case "$outcome" in
    finished) if fetch; then end_with 0 "finished: $output"; else end_with 0 "finished: $workdir"; fi ;;
    preempted) say "$name was preempted ($state). A new one is requested; the run resumes from its last checkpoint." ;;
    saved) say "the run was ended by a signal and has saved; it is started again" && pause ;;
    limit)
      fetch || true
      end_with 75 "stopped after --max_hours. The same command resumes from the last checkpoint in $workdir."
      ;;
    mistake) end_with 2 "vit-jax reports a wrong option, path or recipe (code 2). Starting again would not help." ;;
    *)
      failures=$((failures + 1))
      ((failures <= max_failures)) || end_with 1 "failed $failures times; --max_failures=$max_failures allows no more."
      say "starting again from the last checkpoint, $failures of at most $max_failures times"
      clear_away
      ;;
  esac
}

# end_with CODE WORD...: ends the run and deletes the machine unless --keep is given.
end_with() {
  local code="$1"
  shift
  trap - INT TERM HUP
  say "$@"
  if [[ -n "$keep" ]]; then name_rented; else delete || code=$((code > 0 ? code : 1)); fi
  [[ -n "$dry_run" ]] || say "$(chip_hours "$chips") while this script was running"
  exit "$code"
}

interrupted() {
  local answer=""
  trap - INT TERM HUP
  count_chip_seconds
  if [[ -z "$is_rented" ]]; then
    say "stopped; this command has rented nothing"
    exit 130
  fi
  say "stopped following. The request or run continues; the same command again follows it." || true # a closed terminal
  name_rented || true
  if [[ -t 0 ]]; then
    read -r -p "Delete it now? [y/N] " answer || true
    [[ "$answer" != [yY]* ]] || delete
  fi
  exit 130
}

main "$@"
