#!/usr/bin/env bash
# A SLURM cluster of two nodes on this machine, for tests: slurm_cluster.sh start FOLDER | stop FOLDER | check
# start: writes the configuration, keys, state and logs to FOLDER, an empty folder, and starts munged, slurmctld and two
#   slurmd on free ports. Nothing outside FOLDER is changed; no system service is used. sbatch, srun and scontrol find the
#   cluster by SLURM_CONF=FOLDER/slurm.conf.
# check: prints why SLURM cannot be started here, and exits with 1; prints nothing where it can.
# SLURM starts a requeued job after KillWait, 20 seconds, since its nodes clean up: earlier, it may lose the job's script.
# The nodes are named n1 and n2, both with the address 127.0.0.1. Each has two GPUs in name only. Partition "low" is the default; jobs of partition
# "high" preempt its jobs and requeue them.
set -euo pipefail

DAEMONS=(munged slurmctld slurmd)

check() {
  local program
  for program in "${DAEMONS[@]}" munge sbatch scontrol; do
    command -v "$program" >/dev/null || fail "$program is not installed: apt-get install slurm-wlm munge"
  done
  [[ "$(id -u)" == 0 ]] || fail "SLURM is started by root: jobs of other users need a system service"
}

fail() {
  echo "$*" >&2
  exit 1
}

free_ports() {
  python3 - "$1" <<'PYTHON'
import socket, sys

sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(one.getsockname()[1] for one in sockets))
PYTHON
}

start() {
  local folder="$1" ports memory
  mkdir -p -- "$folder"/{state,spool-n1,spool-n2,logs}
  chmod 755 -- "$folder"
  read -r -a ports < <(free_ports 3)
  memory="$(awk '/MemTotal/ {print int($2 / 1024 / 4)}' /proc/meminfo)"
  head -c 1024 /dev/urandom >"$folder/munge.key"
  chmod 600 -- "$folder/munge.key"
  cat >"$folder/cgroup.conf" <<'CONF'
CgroupPlugin=cgroup/v1
CONF
  touch -- "$folder"/gpu{0,1}
  echo "Name=gpu File=$folder/gpu[0-1]" >"$folder/gres.conf"
  cat >"$folder/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
SlurmctldPort=${ports[0]}
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/logs/slurmctld
SlurmdLogFile=$folder/logs/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
MinJobAge=600
KillWait=20
SlurmctldParameters=enable_configless
GresTypes=gpu
NodeName=n1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=2 Gres=gpu:2 RealMemory=$memory
NodeName=n2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=2 Gres=gpu:2 RealMemory=$memory
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 OverSubscribe=EXCLUSIVE
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF OverSubscribe=EXCLUSIVE
CONF
  export SLURM_CONF="$folder/slurm.conf"
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/logs/munged" --seed-file="$folder/munge.seed"
  slurmctld -f "$SLURM_CONF"
  slurmd -N n1 -f "$SLURM_CONF"
  slurmd -N n2 -f "$SLURM_CONF"
  for _ in {1..3000}; do
    if [[ "$(sinfo --noheader --partition=low --states=idle --Format=nodes 2>/dev/null | tr -d ' ')" == 2 ]]; then return; fi
    sleep 0.1
  done
  tail -n 20 "$folder"/logs/* >&2
  stop "$folder"
  fail "the nodes did not come; the logs are above"
}

stop() {
  local file pid
  for file in "$1"/{slurmd-n1,slurmd-n2,slurmctld,munged}.pid; do
    if [[ -f "$file" ]]; then
      pid="$(cat -- "$file")"
      kill -9 "$pid" 2>/dev/null || true
    fi
  done
}

case "${1:-}" in
  check) check ;;
  start | stop) "$1" "$(readlink -m -- "${2:?a folder}")" ;;
  *) fail "usage: slurm_cluster.sh check | start FOLDER | stop FOLDER" ;;
esac
