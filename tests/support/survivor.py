"""A program that trains and may be killed.

python -m tests.support.survivor DIR MAX_STEPS [every=STEPS] [pause=SECONDS]
"""

import logging
import os
import sys
import time

import jax

if "IPU_PIPELINE_NUM_PROCESSES" not in os.environ:  # else each of several processes has one
    jax.config.update("jax_num_cpu_devices", 2)


def main():
    directory, max_steps, *rest = sys.argv[1:]
    options = dict(option.split("=") for option in rest)
    logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("ipu_pipeline").setLevel(logging.INFO)

    from ipu_pipeline.ipu_session_run_hooks import SessionRunHook
    from tests.support.estimating import input_fn, make_estimator

    class Progress(SessionRunHook):
        """Says where training is, and pauses if the options say so."""

        def after_create_session(self, _session, _coord):
            print("created", flush=True)

        def after_run(self, run_context, _run_values):
            print("step", run_context.global_step, flush=True)
            time.sleep(float(options.get("pause", 0)))

    every = int(options.get("every", 4))
    estimator = make_estimator(directory, save_checkpoints_steps=every, keep_checkpoint_max=2)
    estimator.train(input_fn, hooks=[Progress()], max_steps=int(max_steps))
    print("done", flush=True)


if __name__ == "__main__":
    main()
