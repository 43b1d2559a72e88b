#!/usr/bin/env bash
# ./launch/test.sh: ruff, mypy and the fast tests. ./launch/test.sh --all: ruff, mypy and all tests, as in CI.
# ./launch/test.sh ARGUMENTS...: pytest alone, with these arguments.
# pytest runs in one process more than there are cores, up to four; -n 0 among the arguments keeps it in one.
# Runs in the root of the repository wherever it is called from.
set -euo pipefail

# shellcheck source=launch/environment.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/environment.sh"

extra="$(accelerator /)"
prepare_environment "$extra" test
cd -- "$repository"

# Containers often set it. Each of some hundred processes would compile the package again.
unset PYTHONDONTWRITEBYTECODE

check() {
  "$venv/bin/ruff" check .
  "$venv/bin/ruff" format --check .
  "$venv/bin/mypy"
}

case "${1-}" in
  "")
    check
    set -- --fast
    ;;
  --all)
    check
    shift
    # Three times the limit of CONTRIBUTING.md: a busy machine has raised 1.9 CPU seconds to 5.0.
    if [[ -n "${CI:-}" ]]; then set -- --cpu-limit=15 "$@"; fi
    ;;
esac
exec "$venv/bin/python" -m pytest -n auto --maxprocesses=4 --dist=loadgroup "$@"
