#!/usr/bin/env bash
# One task of slurm.sbatch: runs a command and writes "CODE NODE SECONDS" to FILE.RANK:
# slurm_task.sh FILE COMMAND ARGUMENT...
set -euo pipefail

trap : TERM # SLURM signals this shell too: it must continue, to write the code
file="$1" code=0
shift
"$@" || code=$?
echo "$code ${SLURMD_NODENAME:-unknown} $(date +%s.%N)" >"$file.$SLURM_PROCID"
# A preempted process has saved. srun must not count it as a failure and kill the others, which are ending too.
if ((code == 75)); then exit 0; fi
exit "$code"
