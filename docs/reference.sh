#!/usr/bin/env bash
# docs/reference.sh [FOLDER]: writes the reference of all modules, made of their docstrings, as HTML into FOLDER (site).
# Needs pip install '.[docs]'. Every module is named, because pdoc follows __all__, which lists no modules here.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."

modules=()
while read -r file; do
  module="${file%.py}"
  module="${module%/__init__}"
  modules+=("${module//\//.}")
done < <(git ls-files 'vit_jax/*.py' | grep -v __main__)
exec python -m pdoc --docformat=google --output-directory="${1:-site}" "${modules[@]}"
