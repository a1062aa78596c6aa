"""Passes values that hooks log in stages on to the last stage, which enqueues them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ipu_pipeline.tf1.ipu_session_run_hooks import SessionRunHook, collecting_logs

__all__ = ["apply_to", "with_logs"]


def with_logs(
    stages: Sequence[Any], optimizer_function: Any, hooks: Sequence[SessionRunHook]
) -> dict[str, Any]:
    """Returns arguments of a pipeline whose stages also pass on what hooks log.

    The last stage returns a dict of `outputs`, its own results; `logs`, by the `id` of the hook; and in
    training the `loss`. Passing values on costs nothing.
    """
    last = len(stages) - 1

    def wrap(index: int, stage: Any) -> Any:
        if isinstance(stage, (list, tuple)):
            raise NotImplementedError(
                "IPULoggingTensorHook does not support parallel stages; "
                f"computational_stages[{index}] is a list "
                "of them. Leave the hook out."
            )

        def wrapped(*arguments: Any, **named: Any) -> Any:
            logs: dict[Any, Any] = {}
            if index > 0:
                (outputs, logs), named = (named["outputs"], named["logs"]), {}
                arguments = tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)
                if isinstance(outputs, dict):
                    arguments, named = (), outputs
            with collecting_logs(hooks) as found:
                outputs = stage(*arguments, **named)
            passed_on = {"outputs": outputs, "logs": {**logs, **found}}
            if index == last and optimizer_function is not None:
                passed_on["loss"] = jnp.asarray(apply_to(optimizer_function, outputs).loss)
            return passed_on

        wrapped.__name__ = getattr(stage, "__name__", f"stage{index}")
        return wrapped

    options: dict[str, Any] = {
        "computational_stages": [wrap(index, stage) for index, stage in enumerate(stages)]
    }
    if optimizer_function is not None:

        def without_logs(outputs: Any, logs: Any, loss: Any) -> Any:
            del logs, loss
            return apply_to(optimizer_function, outputs)

        options["optimizer_function"] = without_logs
        options["outfeed_mask"] = {"outputs": True, "logs": False, "loss": False}
    return options


def apply_to(function: Any, outputs: Any) -> Any:
    """Calls a function with what a stage returned, as the next stage would be called."""
    if isinstance(outputs, dict):
        return function(**outputs)
    return function(*outputs) if isinstance(outputs, (list, tuple)) else function(outputs)
