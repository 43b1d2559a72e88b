#!/usr/bin/env bash
# Runs a verb of vit-jax on this machine: ./launch/local.sh [--dry-run] VERB ARGUMENTS... (see launch/README.md).
# Installs on the first run and passes every argument on unchanged; relative paths are relative to the working folder.
# One process uses every GPU of the machine; variables that hide some are printed.
set -euo pipefail

# shellcheck source=launch/commands.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/commands.sh"

# describe EXTRA: prints the accelerators and the variables that hide some of them; nothing for a CPU.
describe() {
  local all names
  if [[ "$1" == tpu ]]; then say "TPU: one process uses every chip of this machine"; fi
  if [[ "$1" != cpu && -n "${JAX_PLATFORMS:-}" ]]; then say "JAX_PLATFORMS=$JAX_PLATFORMS chooses what JAX uses"; fi
  if [[ "$1" != cuda ]]; then return; fi
  names="$(nvidia-smi -L 2>/dev/null | sed -n 's/^GPU [0-9]*: \(.*\) (UUID.*/\1/p')" || names=""
  if [[ -z "$names" ]]; then return; fi # VIT_JAX_ACCELERATOR=cuda without nvidia-smi
  all="$(wc -l <<<"$names" | tr -d ' ')"
  names="$(sort <<<"$names" | uniq -c | sed 's/^ *\([0-9]*\) /\1 x /' | paste -sd, - | sed 's/,/, /g')"
  say "$(visible "$all"): $names"
}

# visible ALL: prints how many of ALL GPUs the run sees, and the variable that decides.
visible() {
  local variable value
  for variable in CUDA_VISIBLE_DEVICES JAX_CUDA_VISIBLE_DEVICES; do
    value="${!variable-all}"
    if [[ "$value" != all ]]; then
      echo "$variable=$value chooses among $1 GPU(s)"
      return
    fi
  done
  echo "$1 GPU(s), all of them used by one process"
}

if [[ "${1:-}" == --dry-run ]]; then
  dry_run=yes
  shift
fi
(($#)) || set -- --help
extra="$(accelerator /)"
if [[ -z "$dry_run" ]]; then
  prepare_environment "$extra" figures hub onnx
else
  show_installation "$extra" figures hub onnx
fi
describe "$extra"
# JAX need not look for an absent accelerator; with libtpu, installed for plans, it would print many warnings.
if [[ "$extra" == cpu ]]; then export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"; fi
if [[ -n "$dry_run" ]]; then
  quoted "$venv/bin/vit-jax" "$@"
  exit
fi
exec "$venv/bin/vit-jax" "$@"
