#!/bin/bash
# sbatch slurm.sh trains with train.py on two nodes, without Ray. At its top, train.py calls
# ipu_pipeline.distributed.initialize(local_device_ids=[0, 1, 2, 3]): a task has all accelerators of its node.
#SBATCH --job-name=pipeline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
# The processes get SIGTERM two minutes before the end. Estimators then save a checkpoint.
#SBATCH --signal=TERM@120
# If a node fails, the job is queued again. It goes on from its last checkpoint on disk.
#SBATCH --requeue

srun --kill-on-bad-exit=1 python train.py
