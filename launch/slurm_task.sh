#!/usr/bin/env bash
# One task of slurm.sbatch: runs a command and notes how it ended. slurm_task.sh FILE COMMAND ARGUMENT...
# FILE.RANK then holds "CODE NODE SECONDS".
set -euo pipefail

trap : TERM # SLURM signals this shell too: it must live on to note the code
file="$1" code=0
shift
"$@" || code=$?
echo "$code ${SLURMD_NODENAME:-unknown} $(date +%s.%N)" >"$file.$SLURM_PROCID"
# A preempted process has saved. srun must not take it for a failure and kill the others, which are about to end too.
if ((code == 75)); then exit 0; fi
exit "$code"
