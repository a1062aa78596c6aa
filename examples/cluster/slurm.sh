#!/bin/bash
# sbatch slurm.sh trains with train.py on two nodes.
#SBATCH --job-name=pipeline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
# The launchers get SIGTERM two minutes before the end, and the processes save a checkpoint.
#SBATCH --signal=TERM@120
# If a node fails, the job is queued again. It goes on from its last checkpoint on disk.
#SBATCH --requeue

IPU_PIPELINE_SECRET=$(openssl rand -hex 16)
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MEET_AT=$first:$((20000 + SLURM_JOB_ID % 10000))
export IPU_PIPELINE_SECRET MEET_AT

# One process on each node has all accelerators of the node.
srun sh -c 'exec ipu-pipeline launch --nodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --meet-at "$MEET_AT" -n 1 --restarts 10 --grace 100 train.py'
