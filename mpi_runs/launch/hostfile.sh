#!/usr/bin/env bash
# An experiment over the machines of a host file, one rank a GPU, NCCL between them, without a batch system.
#
#   mpi_runs/launch/hostfile.sh HOSTS RANKS_PER_HOST NAME [options of python -m vpa.run]
#   mpi_runs/launch/hostfile.sh hosts.txt 8 break-even --shape deepseek-v3 --json deepseek-v3_tp16.json
#
# HOSTS: a machine a line, reached by ssh without a password; the checkout lies at the same path on all. NCCL's own
# variables of this shell (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, NCCL_DEBUG, ...) reach all ranks.
set -euo pipefail

if [ $# -lt 3 ] || [ ! -r "$1" ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
hosts=$1 per_host=$2
shift 2
case $per_host in '' | *[!0-9]* | 0*) echo "hostfile.sh: RANKS_PER_HOST is $per_host; a number from 1 on" >&2; exit 2 ;; esac
count=$(grep -cEv '^[[:space:]]*(#|$)' "$hosts") || { echo "hostfile.sh: $hosts names no machine" >&2; exit 2; }

root=$(cd "$(dirname "$0")/../.." && pwd)
bin=$root/.venv/bin
python=$([ -x "$bin/python" ] && echo "$bin/python" || command -v python3)
mpirun=$([ -x "$bin/mpirun" ] && echo "$bin/mpirun" || command -v mpirun)
ranks=$((count * per_host))

if "$mpirun" --version 2>/dev/null | grep -qi 'open.\?mpi\|prrte\|openrte'; then
    exported=()
    for name in $(compgen -e | grep '^NCCL_'); do exported+=(-x "$name"); done
    # Not bound to a core, on which Python and NCCL's threads would take turns.
    exec "$mpirun" --hostfile "$hosts" --map-by "ppr:$per_host:node" --bind-to none -n "$ranks" \
        ${exported[@]+"${exported[@]}"} "$python" -m vpa.run "$@"
fi
exec "$mpirun" -f "$hosts" -ppn "$per_host" -n "$ranks" "$python" -m vpa.run "$@" # Hydra: MPICH, Intel MPI
