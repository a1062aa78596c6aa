#!/bin/bash
# sbatch slurm_ray.sh starts a Ray cluster on two nodes, runs job.py on the first one, and ends the cluster.
# job.py calls ipu_pipeline.ray.train.
#SBATCH --job-name=pipeline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
# The other nodes go on when one fails.
#SBATCH --no-kill

RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(openssl rand -hex 32)
export RAY_AUTH_MODE RAY_AUTH_TOKEN
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --no-kill ray symmetric-run --address "$first:6379" --min-nodes "$SLURM_NNODES" -- python job.py
