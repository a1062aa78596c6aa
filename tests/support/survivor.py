"""A program that trains and may be killed.

python -m tests.support.survivor DIR MAX_STEPS [option=value ...]
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
    from tests.support.resumable import MICRO_BATCHES

    class Progress(SessionRunHook):
        """Says where training is, and does to the process what the options say."""

        session = None

        def after_create_session(self, session, _coord):
            self.session = session
            print("created", flush=True)

        def after_run(self, run_context, _run_values):
            step = run_context.global_step
            print("step", step, flush=True)
            if "pause" in options:
                time.sleep(float(options["pause"]))

    class SlowInput:
        """Blocks before an element, if the options say so."""

        def __iter__(self):
            for number, element in enumerate(input_fn()):
                if number == int(options.get("block_at", -1)):
                    while progress.session.most_updates() < number // MICRO_BATCHES:
                        time.sleep(0.01)
                    print("blocked", flush=True)  # and what can be done is done
                    time.sleep(600)
                yield element

    def slow_input_fn():
        return SlowInput()

    estimator = make_estimator(
        directory,
        save_checkpoints_steps=int(options.get("every", 4)),
        keep_checkpoint_max=int(options.get("keep", 2)),
        iterations_per_loop=int(options.get("loop", 8)),
    )
    progress = Progress()
    chosen = slow_input_fn if "block_at" in options else input_fn
    estimator.train(chosen, hooks=[progress], max_steps=int(max_steps))
    print("done", flush=True)


if __name__ == "__main__":
    main()
