"""How many threads XLA's CPU backend has in several processes."""

import warnings
from types import SimpleNamespace

import jax
import pytest

from ipu_pipeline.engine.devices import xla_settings


def test_a_thread_more_than_devices(monkeypatch):
    for given, num_devices, wanted in [("1", 1, "2"), ("1", 4, "5"), ("2", 1, "2"), ("8", 4, "8")]:
        monkeypatch.setenv("PJRT_NPROC", given)
        monkeypatch.setattr(xla_settings, "num_cpu_devices_set", lambda n=num_devices: n)
        xla_settings.keep_one_free()
        assert xla_settings.os.environ["PJRT_NPROC"] == wanted


def _row(*processes, platform="cpu"):
    devices = [SimpleNamespace(process_index=process, platform=platform) for process in processes]
    return SimpleNamespace(devices=devices, is_joined=len(set(processes)) > 1)


def test_warns_where_no_thread_may_be_free(monkeypatch):
    num_devices = len(jax.local_devices(backend="cpu"))
    monkeypatch.setenv("PJRT_NPROC", f"{num_devices}")
    with pytest.warns(RuntimeWarning, match=f"PJRT_NPROC to {num_devices + 1} or more"):
        xla_settings.warn_unless_one_is_free([_row(0, 0), _row(0, 1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xla_settings.warn_unless_one_is_free([_row(0, 0), _row(1, 1)])
        xla_settings.warn_unless_one_is_free([_row(0, 1, platform="cuda")])
        monkeypatch.setenv("PJRT_NPROC", f"{num_devices + 1}")
        xla_settings.warn_unless_one_is_free([_row(0, 1)])
