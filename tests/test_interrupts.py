"""Ctrl-C, in processes of their own."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from ipu_pipeline.session import interrupts

PROGRAM = """
    import os, signal, sys, threading, time
    import numpy as np
    import ipu_pipeline as ipu
    from tests import front
    mapping = [int(ipu) for ipu in sys.argv[2]]
    model = front.Model(
        repeat_count=int(sys.argv[1]), gradient_accumulation_count=8, device_mapping=mapping
    )
    with ipu.Session() as session:
        # JAX's own start, which this does, is no place for an interrupt.
        session.run([model.initializer, ipu.global_variables_initializer()])
        if sys.argv[1] == "100000":
            def watch():
                while session.update_count() == 0:
                    time.sleep(0.02)
                print("updated", flush=True)
            threading.Thread(target=watch, daemon=True).start()
        print("ready", flush=True)
        try:
            while True:
                is_running = True
                session.run(model.program, {model.rate: 0.01})
                is_running = False  # from here the thread may fetch ahead
                print("ran", flush=True)
                session.run(model.outfeed.dequeue())
        except KeyboardInterrupt:
            updates = session.update_count()
            if is_running:
                assert not [t for t in threading.enumerate() if t.name == "ipu-infeed"]
            assert len(session.run(model.outfeed.dequeue())) % 8 == 0
            assert all(np.isfinite(value).all() for value in session.variables.values())
        # The session goes on where it was.
        count = session.update_count()
        model.options["infeed_queue"].stop()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        thread = threading.Timer(0, lambda: None)
        thread.start()
        model2 = front.Model(repeat_count=2, gradient_accumulation_count=8, device_mapping=mapping)
        session.run(model2.initializer)
        assert model2.run(session).shape == (16,)
        assert session.update_count() == count + 2
        print("updates", updates)
    print("ended")
"""


@pytest.mark.parametrize(
    ("moment", "mapping"),  # over two devices, and as one program
    [
        ("first compilation", "01"),
        ("long run", "00"),
        ("short runs", "01"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [("first compilation", "00"), ("long run", "01"), ("short runs", "00")]
        ),
    ],
)
def test_ctrl_c(moment, mapping):
    repeat_count = "100000" if moment == "long run" else "2"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), repeat_count, mapping],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=os.path.dirname(os.path.dirname(__file__)),
    )
    try:
        wait_for = {"first compilation": "ready", "long run": "updated", "short runs": "ran"}[moment]
        for line in process.stdout:
            if line.strip() == wait_for:
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert output.splitlines()[-1] == "ended"
    updates = int(output.splitlines()[-2].split()[1])
    if moment != "first compilation":
        assert updates > 0


def test_deferred_lets_the_section_finish():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("section")
        done.append("after")
    assert done == ["section"]
    with interrupts.deferred():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
