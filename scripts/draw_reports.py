"""Takes the pictures of reports that pages of the tutorial and of docs show. Needs chromium.

    python scripts/draw_reports.py [NAME ...]

They are measured anew, so that they differ each time: look at them before they are committed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMULATED = ["--emulate", "2"]
STEPS = {
    "step1": ["tutorial/step1_single_ipu.py", *EMULATED],
    "step2": ["answers/step2_sharding.py", *EMULATED],
    "step3": ["answers/step3_pipelining.py", *EMULATED],
    "step4": [
        "answers/step4_configurable_stages.py",
        "--splits",
        "dense128",
        "dense64",
        "dense32",
        *EMULATED,
    ],
}
PAGES = {"first_minutes": ("docs/first_minutes.md", "first_run")}  # and where its program puts its report
SCHEDULES = ("grouped", "sequential")
NUM_STAGES, NUM_MICRO_BATCHES, FORWARD_MS, BACKWARD_MS = 4, 8, 10.0, 20.0
WIDTH, HEIGHT = 1280, 890  # of the top of a page, down to the end of its trace


def emulate(schedule: str, directory: str) -> None:
    """Traces a step of four emulated stages."""
    import jax

    jax.config.update("jax_num_cpu_devices", NUM_STAGES)

    import ipu_pipeline as ipu
    from benchmarks.emulation import stages
    from ipu_pipeline import engine

    sys.argv = ["scripts/draw_reports.py", schedule]
    pipeline, state, micro_batches = stages.make_pipeline(
        [FORWARD_MS] * NUM_STAGES,
        [BACKWARD_MS] * NUM_STAGES,
        NUM_MICRO_BATCHES,
        schedule=schedule,
        dispatch_plan=engine.Chunking(),
    )
    state, _outputs = pipeline.step(state, micro_batches)
    with ipu.reports.capture(directory):
        state, _outputs = pipeline.step(state, micro_batches)
        jax.block_until_ready(state.variables)


def photograph(page: Path, picture: Path) -> None:
    """Writes the top of a page as a picture."""
    browser = shutil.which("chromium") or shutil.which("chrome") or "chromium"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    time = "--virtual-time-budget=10000"
    size = f"--window-size={WIDTH},{HEIGHT}"
    command = [browser, *options, time, size, f"--screenshot={picture}", page.absolute().as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    print(picture.relative_to(ROOT))


def main() -> None:
    if sys.argv[1:2] == ["--emulate"]:
        emulate(*sys.argv[2:])
        return
    names = sys.argv[1:] or [*PAGES, *STEPS, *SCHEDULES]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("IPU_PIPELINE_DATA_DIR", None)  # the digits, which everybody has
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            place = f"{directory}/report"
            if name in PAGES:
                path, found = PAGES[name]
                blocks = re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
                program = Path(directory) / f"{name}.py"
                program.write_text("\n".join(blocks))
                command, place = [program.name], f"{directory}/{found}"
            elif name in STEPS:
                command = ["-m", "ipu_pipeline", "profile", "--directory", place, *STEPS[name]]
            else:
                command = [__file__, "--emulate", name, place]
            done = [sys.executable, *command]
            folder = directory if name in PAGES else ROOT
            subprocess.run(done, check=True, cwd=folder, env=environment, capture_output=True)
            photograph(Path(place) / "report.html", ROOT / "docs" / "pictures" / f"report_{name}.png")


if __name__ == "__main__":
    main()
