# shellcheck shell=bash
# Sourced by local.sh and test.sh: creates the virtual environment of this checkout and keeps it up to date.
# Machines only: Python, accelerator, packages. No option of a run belongs here.

repository="$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")"
venv="${VIT_JAX_VENV:-$repository/.venv}"
[[ "$venv" == /* ]] || venv="$PWD/$venv"
stamp="$venv/vit-jax-installed" # first line: extras; then everything else an installation depends on

say() { printf 'vit-jax: %s\n' "$*" >&2; }

fail() {
  say "$@"
  exit 1
}

# prepare_environment EXTRA...: when it returns, the package and these extras are installed in $venv.
prepare_environment() {
  check_chosen_python
  if is_installed "$@"; then return; fi
  if ! command -v flock >/dev/null; then
    install "$@"
    return
  fi
  ( # One installation at a time; the next finds it done. The lock ends with the subshell, before the run.
    flock 9 || say "this file system has no locks: let one installation end before another begins"
    if ! is_installed "$@"; then install "$@"; fi
  ) 9>"$repository/.venv.lock"
}

# accelerator ROOT: prints the extra that fits this machine. ROOT is /, or its replacement in a test.
accelerator() {
  local root="${1%/}" gpus
  case "${VIT_JAX_ACCELERATOR:=detect}" in
    detect) ;;
    cpu | cuda | tpu) echo "$VIT_JAX_ACCELERATOR" && return ;;
    *) fail "VIT_JAX_ACCELERATOR=$VIT_JAX_ACCELERATOR is none of cpu, cuda, tpu." ;;
  esac
  # nvidia-smi may be installed without a card or a driver.
  if gpus="$(nvidia-smi -L 2>/dev/null)" && [[ "$gpus" == "GPU "* ]]; then
    echo cuda
  # TPU v2 to v4 appear as /dev/accel0 and on. Later ones are PCI devices of Google (0x1ae0) behind the vfio-pci
  # driver; /dev/vfio alone proves nothing, and network cards of Google VMs have the same vendor.
  elif compgen -G "$root/dev/accel[0-9]*" >/dev/null ||
    grep -qsx 0x1ae0 "$root"/sys/bus/pci/drivers/vfio-pci/*/vendor; then
    echo tpu
  else
    echo cpu
  fi
}

python_version() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

# is_suitable VERSION: 3.11 or newer.
is_suitable() {
  local major minor
  IFS=. read -r major minor _ <<<"$1"
  ((${major:-0} == 3 && ${minor:-0} >= 11))
}

find_python() {
  local candidate candidates=(python3 python3.13 python3.12 python3.11)
  if [[ -n "${PYTHON:-}" ]]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if is_suitable "$(python_version "$candidate")"; then
      echo "$candidate"
      return
    fi
  done
  if [[ -n "${PYTHON:-}" ]]; then
    fail "PYTHON=$PYTHON is $(python_version "$PYTHON" || echo "not a Python that runs"); 3.11 or newer is needed."
  fi
  fail "Python 3.11 or newer is needed; python3 is $(python_version python3 || echo "not found")." \
    "Install one, or set PYTHON: PYTHON=/path/to/python3.12 ./launch/local.sh ..."
}

# A Python given by PYTHON must not be ignored because an environment with another one exists.
check_chosen_python() {
  local chosen present
  [[ -n "${PYTHON:-}" && -x "$venv/bin/python" ]] || return 0
  chosen="$(python_version "$PYTHON")" || return 0 # find_python reports the error
  present="$(python_version "$venv/bin/python")" || return 0
  [[ "$chosen" == "$present" ]] ||
    fail "$venv was made with Python $present and PYTHON=$PYTHON is $chosen: remove it, or set VIT_JAX_VENV."
}

# What an installation depends on besides its extras; as text, so that no hashing tool is needed. The path is included
# because installed scripts contain it: a moved checkout installs again.
fingerprint() {
  printf '%s\n' "$repository" "$(python_version "$venv/bin/python")"
  cat -- "$repository/setup.py" "$repository/pyproject.toml"
}

recorded_extras() { if [[ -f "$stamp" ]]; then head -n 1 -- "$stamp"; fi; }

is_installed() {
  local extra recorded
  [[ -x "$venv/bin/vit-jax" && -f "$stamp" ]] || return 1
  [[ "$(tail -n +2 -- "$stamp")" == "$(fingerprint)" ]] || return 1
  recorded="$(recorded_extras)"
  for extra in "$@"; do
    [[ " $recorded " == *" $extra "* ]] || return 1
  done
}

install() {
  local extras extra state log="$venv/install.log"
  extras="$*"
  for extra in $(recorded_extras); do # so that local.sh and test.sh do not undo each other
    [[ " $extras " == *" $extra "* ]] || extras+=" $extra"
  done
  rm -f -- "$stamp" # written last: an interrupted installation is repeated
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then make_venv; fi
  state="$(fingerprint)"
  say "installing into $venv (${extras// /, }); this takes a few minutes the first time. Log: $log"
  if ! (cd -- "$repository" && "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
    -e ".[${extras// /,}]") >"$log" 2>&1; then
    tail -n 25 -- "$log" >&2
    fail "the installation failed; the end of its log is above, the complete log in $log"
  fi
  printf '%s\n' "$extras" "$state" >"$stamp.new"
  mv -- "$stamp.new" "$stamp"
}

make_venv() {
  local python
  if [[ -e "$venv" && ! -f "$venv/pyvenv.cfg" && -n "$(ls -A -- "$venv")" ]]; then
    fail "$venv exists and is not a virtual environment: remove it, or set VIT_JAX_VENV to another folder."
  fi
  python="$(find_python)"
  say "making $venv with Python $(python_version "$python")"
  "$python" -m venv --clear -- "$venv" || fail "$python could not make a virtual environment in $venv."
}
