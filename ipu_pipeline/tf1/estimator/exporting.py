"""Exports the prediction of an estimator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ipu_pipeline.checkpointing.together import do_first
from ipu_pipeline.tf1.estimator.programs import EstimatorProgram, ModeKeys
from ipu_pipeline.tf1.session.session import Session
from ipu_pipeline.tf1.session.signatures import make_example

__all__ = ["check_export", "export_prediction"]


def check_export(
    export_dir_base: Any,
    serving_input_receiver_fn: Any,
    assets_extra: Any,
    as_text: bool,
    experimental_mode: ModeKeys | str,
) -> Callable[[], Any]:
    """Checks the arguments of `export_saved_model`; returns a maker of an example micro-batch."""
    if not callable(serving_input_receiver_fn):
        raise TypeError(
            "export_saved_model: serving_input_receiver_fn must be a function that returns what a "
            f"micro-batch is like; got {serving_input_receiver_fn!r}."
        )
    os.fspath(export_dir_base)
    for name, value, only, reason in (
        ("assets_extra", assets_extra, None, "copy such files into the folder that is returned"),
        ("as_text", as_text, False, "there is no SavedModel, and what is not an array is JSON already"),
        ("experimental_mode", experimental_mode, ModeKeys.PREDICT, "only inference pipelines are exported"),
    ):
        if value != only:
            raise NotImplementedError(
                f"export_saved_model: {name} must be {only!r}; got {value!r}. Leave it out: {reason}."
            )

    def receive() -> Any:
        received = serving_input_receiver_fn()
        described = getattr(received, "features", received)
        return make_example(described, "export_saved_model: what serving_input_receiver_fn returns")

    return receive


def export_prediction(
    session: Session, made: EstimatorProgram, global_step: int, base: str | os.PathLike[str]
) -> str:
    """Exports a program to a folder that is named by the time.

    Returns:
      The folder.
    """

    def choose() -> str:
        number = int(time.time())
        while (Path(base) / str(number)).exists():
            number += 1
        return str((Path(base) / str(number)).absolute())

    path = do_first(choose)
    session.export(path, made.program, made.feed_steps(global_step))
    return path
