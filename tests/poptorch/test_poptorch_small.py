"""Log levels, spans of profiling, the enumerations, errors, and operations that need no compiling."""

import logging

import pytest

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch import enums, logs
from ipu_pipeline.poptorch.execution.instrumentation import CompileProgress


@pytest.fixture
def level():
    before = logs.logger.level
    yield lambda: logging.getLevelName(logs.logger.level)
    logs.logger.setLevel(before)


def test_log_levels(level):
    expected = {"TRACE": "TRACE", 0: "TRACE", "DEBUG": "DEBUG", 2: "INFO", "WARN": "WARNING", 4: "ERROR"}
    for given, name in expected.items():
        poptorch.setLogLevel(given)
        assert level() == name
    poptorch.setLogLevel("OFF")
    assert not logs.logger.isEnabledFor(logging.CRITICAL)
    with pytest.raises(ValueError, match="Invalid log level integer"):
        poptorch.setLogLevel(5)
    message = "Unknown log level: wibble. Valid values are DEBUG, ERR, INFO, OFF, TRACE and WARN"
    with pytest.raises(ValueError, match=message):
        poptorch.setLogLevel("wibble")


def test_a_warning_is_given_once(caplog, monkeypatch, tmp_path):
    """And shown once, by the program's handlers if it has any."""
    monkeypatch.setattr(logs, "_said", set())
    for _time in range(2):
        logs.warn_once("twice")
    assert [record.message for record in caplog.records] == ["twice"]
    (handler,) = logs.logger.handlers
    assert not handler.filter(caplog.records[0])
    errors = logging.StreamHandler()
    errors.setLevel(logging.ERROR)
    for silent in ([], [errors, logging.NullHandler(), logging.FileHandler(tmp_path / "log", delay=True)]):
        monkeypatch.setattr(logging.getLogger(), "handlers", silent)
        assert handler.filter(caplog.records[0])


def test_spans_are_logged(caplog, level):
    poptorch.setLogLevel("INFO")
    channel = poptorch.profiling.Channel("Mine")

    class Trainer:
        def train(self, x, *, y):
            return x + y

        def fail(self):
            raise KeyError("mine")

    trainer = channel.instrument(Trainer(), "train", "fail")
    with channel.tracepoint("epoch"):
        assert trainer.train(1, y=2) == 3
    with pytest.raises(KeyError):
        trainer.fail()
    found = [record.message.split(": ")[0] for record in caplog.records]
    assert found == ["[Mine] train", "[Mine] epoch", "[Mine] fail"]
    assert all(record.message.endswith(" ms") for record in caplog.records)
    with pytest.raises(AttributeError, match="nothing"):
        channel.instrument(trainer, "nothing")


def test_errors():
    error = poptorch.RecoverableError("text", "kind", "place", "FULL_RESET")
    assert (str(error), error.message, error.type, error.location) == ("text", "text", "kind", "place")
    assert error.recovery_action == "FULL_RESET"
    assert issubclass(poptorch.RecoverableError, poptorch.Error)
    assert issubclass(poptorch.UnrecoverableError, poptorch.Error)


def test_enumerations():
    assert [mode.name for mode in poptorch.OutputMode] == ["Final", "EveryN", "All", "Sum", "Default"]
    assert poptorch.VariableRetrievalMode.AllReplicas == 2
    assert poptorch.MatMulSerializationMode("none") is poptorch.MatMulSerializationMode.Disabled
    for name in enums.__all__:
        assert getattr(poptorch, name) is getattr(enums, name)


def test_there_is_no_ipu(monkeypatch):
    assert not poptorch.ipuHardwareIsAvailable()
    assert poptorch.ipuHardwareVersion() == 0
    monkeypatch.setenv("IPU_PIPELINE_HARDWARE_VERSION", "21")
    assert poptorch.ipuHardwareVersion() == 21
    monkeypatch.setenv("IPU_PIPELINE_HARDWARE_VERSION", "Mk2")
    with pytest.raises(ValueError, match="HARDWARE_VERSION must be a whole number; it is 'Mk2'"):
        poptorch.ipuHardwareVersion()
    with pytest.raises(ValueError, match="num_ipus must be an integer from 1; got 0"):
        poptorch.ipuHardwareIsAvailable(0)


def test_the_progress_bar(capsys):
    for shows in (True, False):
        with CompileProgress(shows) as progress:
            for part in ("capture", "trace"):
                progress.done(part)
            assert progress.time is None
            progress.end()
        assert progress.time is not None
    assert capsys.readouterr().err.count("100%") == 1
