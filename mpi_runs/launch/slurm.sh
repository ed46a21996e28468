#!/usr/bin/env bash
# An experiment as a Slurm job of several machines, one rank a GPU, NCCL between them.
#
#   sbatch --nodes=2 mpi_runs/launch/slurm.sh break-even --shape deepseek-v3 --json deepseek-v3_tp16.json
#
# What follows the script is given to `python -m vpa.run`. Change the lines below, or override them on sbatch's command
# line, to what the site has. Submit from the checkout, on a file system that all machines see.
#SBATCH --job-name=vpa
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=00:15:00
#SBATCH --output=vpa-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

# A rank takes the GPU of its place on its machine, so each has to see all of them: no --gpus-per-task, whose binding
# would hide the others and with them NVLink. mpi4py needs Slurm's interface of its MPI: SLURM_MPI_TYPE=pmi2 for MPICH
# (PyPI's too), pmix for Open MPI, where the site's default is another; `srun --mpi=list` says what there is.
exec srun --gpu-bind=none --kill-on-bad-exit=1 .venv/bin/python -m vpa.run "$@"
