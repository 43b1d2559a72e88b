#!/usr/bin/env bash
# Runs a verb of vit-jax on this machine: ./launch/local.sh VERB ARGUMENTS... (see launch/README.md).
# Installs on the first run; passes every argument on untouched; relative paths stay relative to where you are.
set -euo pipefail

# shellcheck source=launch/environment.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/environment.sh"

extra="$(accelerator /)"
prepare_environment "$extra"
(($#)) || set -- --help
exec "$venv/bin/vit-jax" "$@"
