#!/usr/bin/env bash
# ./launch/test.sh: everything CI checks. ./launch/test.sh ARGUMENTS...: pytest alone, with these arguments.
# pytest runs in one process per core, up to four; -n 0 among the arguments keeps it in one.
# Runs in the root of the repository wherever it is called from.
set -euo pipefail

# shellcheck source=launch/environment.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/environment.sh"

extra="$(accelerator /)"
prepare_environment "$extra" test
cd -- "$repository"
if (($# == 0)); then
  "$venv/bin/ruff" check .
  "$venv/bin/ruff" format --check .
  "$venv/bin/mypy"
fi
exec "$venv/bin/python" -m pytest -n auto --maxprocesses=4 "$@"
