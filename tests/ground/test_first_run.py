"""What waits for the first pipeline of a process: what the environment asks for."""

import jax.numpy as jnp
import numpy as np

from ipu_pipeline import engine
from ipu_pipeline.ground import lazy_initialization
from ipu_pipeline.processes import executable_cache
from ipu_pipeline.reports import trace_capture


def test_pipelines_of_the_engine_begin_what_waits_once(monkeypatch):
    """Only sessions and PyTorch models did: a program of the engine's left no report."""
    begun = []
    monkeypatch.setattr(lazy_initialization, "_waiting", [])
    lazy_initialization.before_first_run(lambda: begun.append("here"))
    for _pipeline in range(2):
        pipeline = engine.Pipeline([lambda x: jnp.sin(x)], num_micro_batches=1)
        pipeline.trace(np.ones(2, np.float32))
        pipeline.prepare()
    assert begun == ["here"]


def test_the_package_has_what_the_environment_asks_for_wait(monkeypatch):
    """The cache of executables, too, which programs of the engine did not have."""
    import ipu_pipeline as ipu

    called = []
    cache = lambda: called.append("cache")  # noqa: E731  # beside the report
    monkeypatch.setattr(executable_cache, "enable_executable_cache_of_environment", cache)
    monkeypatch.setattr(trace_capture, "start_automatic_report", lambda: called.append("report"))
    monkeypatch.setattr(lazy_initialization, "_waiting", [ipu._follow_environment])
    lazy_initialization.begin_first_run()
    assert called == ["cache", "report"]
    assert not lazy_initialization._waiting
