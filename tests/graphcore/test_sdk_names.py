"""Graphcore's public names, by every way of importing them: the same objects, or what to use instead."""

import copy
import doctest
import fnmatch
import importlib
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys

import pytest

import ipu_pipeline as ipu
from ipu_pipeline.graphcore import sdk_names
from tests.docs.test_porting import ROWS, find

BY_NAME = {row.name: row for row in ROWS}
MODULES = sdk_names.read_sdk_names()
NAMES = [(module, name) for module, names in MODULES.items() for name in names]
IDS = [f"{module}.{name}".strip(".") for module, name in NAMES]


def row_of(module, name):
    return sdk_names.find_row(module, name) or BY_NAME.get(f"{sdk_names.shorten(module)}.{name}")


def paths_of(module):
    """In full and short; also through `ops` for what is short."""
    return list(dict.fromkeys([module, sdk_names.shorten(module)]))


def full_name(*parts):
    return ".".join(part for part in ("ipu_pipeline", *parts) if part)


def attribute(path):
    found = ipu
    for part in path.split(".") if path else []:
        found = getattr(found, part)
    return found


def import_from(module, name):
    namespace = {}
    exec(f"from {module} import {name} as found", namespace)  # noqa: S102
    return namespace["found"]


def text_of(kind, function, *arguments):
    """What the error of a call says; None if there is none."""
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    return None


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_a_module_has_a_row_that_is_true(module):
    for name in MODULES[module]:
        check_name(module, name)
    if module:
        check_module(module)


def check_name(module, name):
    row = row_of(module, name)
    assert row is not None, f"{module}.{name} needs a row in ipu_pipeline/graphcore/names.json"
    for path in paths_of(module):
        if row.is_here:
            assert import_from(full_name(path), name) is not None
            if row.status == "same":
                expected = find(row.here)
                assert getattr(attribute(path), name) is expected
                assert getattr(importlib.import_module(full_name(path)), name) is expected
                assert import_from(full_name(path), name) is expected
            continue
        imported = text_of(ImportError, import_from, full_name(path), name)
        used = text_of(AttributeError, lambda path=path: getattr(attribute(path), name))
        for text in (imported, used):
            assert text, f"{row.name} is there now: change its row in ipu_pipeline/graphcore/names.json"
            assert row.why in text
            assert not row.here or f"ipu.{row.here}" in text


def check_module(module):
    """It is imported, or says what to use."""
    rows = [row_of(module, name) for name in MODULES[module]]
    is_here = any(row.is_here for row in rows) or not rows or module in ipu.__all__
    for path in paths_of(module):
        parent, _dot, name = path.rpartition(".")
        ways = {
            importlib.import_module: [full_name(path)],
            import_from: [full_name(parent), name],
            exec: [f"import {full_name(path)}", {}],
        }
        if is_here:
            for way, arguments in ways.items():
                assert way(*arguments) in (attribute(path), None)
            continue
        texts = [text_of(ModuleNotFoundError, way, *arguments) for way, arguments in ways.items()]
        for text in (*texts, text_of(AttributeError, attribute, path)):
            assert text, f"{module} is there now: change its rows in ipu_pipeline/graphcore/names.json"
            assert ", of Graphcore's TensorFlow, is not in ipu_pipeline. " in text
            assert all(row.why in text for row in rows)
        assert "." in path or not hasattr(ipu, path)


def is_about(row, path):
    return fnmatch.fnmatchcase(path, row.name) or row.name == path or row.name.startswith(f"{path}.")


def test_every_row_is_about_a_name_of_the_sdk():
    known = [f"{sdk_names.shorten(module)}.{name}".strip(".") for module, name in NAMES]
    known += IDS
    known += [f"optimizers.{name}" for module, name in NAMES if module.startswith("optimizers.")]
    known += [f"{sdk_names.shorten(module)}." for module in MODULES if not MODULES[module]]
    ours = [row for row in ROWS if not row.name.startswith("tf.") and " " not in row.name]
    assert [row.name for row in ours if not any(is_about(row, path) for path in known)] == []


def test_paths_that_are_not_those_of_files():
    for path, own in sdk_names.PATHS.items():
        module = importlib.import_module(f"ipu_pipeline.{own}")
        parent, _dot, child = f"ipu_pipeline.{path}".rpartition(".")
        for way in (f"import {parent}.{child} as m", f"from {parent} import {child} as m"):
            namespace = {}
            exec(way, namespace)  # noqa: S102
            assert namespace["m"] is module
        for inner in pkgutil.iter_modules(getattr(module, "__path__", [])):
            found = importlib.import_module(f"ipu_pipeline.{path}.{inner.name}")
            assert found is importlib.import_module(f"ipu_pipeline.{own}.{inner.name}")
        files = [vars(one).get("__file__") for one in set(sys.modules.values())]
        assert files.count(module.__file__) == 1


IN_A_NEW_PROCESS = """
import importlib.util, sys
from concurrent.futures import ThreadPoolExecutor
import ipu_pipeline
from ipu_pipeline.graphcore import sdk_names
caches = [sdk_names.read_rows, sdk_names.read_sdk_names]
assert "jax" not in sys.modules and not any(cache.cache_info().currsize for cache in caches)

from ipu_pipeline.session.store import *
import ipu_pipeline.tf1.session.store as own
import ipu_pipeline.session.store as other
assert own is other is sys.modules["ipu_pipeline.session"].store
import pickle
from ipu_pipeline import errors
assert pickle.loads(b"cipu_pipeline.errors\\nOutOfRangeError\\n.") is errors.OutOfRangeError
assert len({id(m) for name, m in sys.modules.items() if name.endswith(".session.store")}) == 1

def use(_number):
    from ipu_pipeline.serving import export_single_step
    from ipu_pipeline.session.resumption import __doc__
    return export_single_step

spec = importlib.util.find_spec("ipu_pipeline.serving")
assert spec.origin.endswith("tf1/serving.py") and spec.loader.get_source("x").startswith('"')
assert importlib.util.find_spec("ipu_pipeline.ops.experimental") is None
finder = next(each for each in sys.meta_path if type(each).__name__ == "_Finder")
assert finder.find_spec("ipu_pipeline.ops.experimental", None) is None  # nothing calls the script
with ThreadPoolExecutor(8) as pool:
    assert len(set(pool.map(use, range(8)))) == 1
import ipu_pipeline.serving as serving
assert serving.__spec__.name == "ipu_pipeline.tf1.serving"
assert importlib.reload(serving) is serving

import runpy
for name in [name for name in sys.modules if name.endswith("pipeline.errors")]:
    del sys.modules[name]
runpy.run_module("ipu_pipeline.errors", run_name="__main__", alter_sys=True)

importlib.reload(ipu_pipeline)
assert sum(type(finder).__module__.startswith("ipu_pipeline") for finder in sys.meta_path) == 2
"""


def test_a_new_process():
    """No table is read at first; a module is imported once, by whatever path, in threads and for tools."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", IN_A_NEW_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_modules_are_those_that_there_are():
    assert importlib.import_module("ipu_pipeline.ops.pipelining_ops") is ipu.pipelining_ops
    assert ipu.ops.rand_ops is ipu.rand_ops
    assert ipu.rand_ops.__spec__.name == ipu.rand_ops.__name__ == "ipu_pipeline.tf1.ops.rand_ops"
    made = importlib.import_module("ipu_pipeline.optimizers.cross_replica_optimizer")
    assert made.CrossReplicaOptimizer is ipu.optimizers.CrossReplicaOptimizer
    assert ipu.cross_replica_optimizer.CrossReplicaOptimizer is ipu.optimizers.CrossReplicaOptimizer
    namespace = {}
    exec("from ipu_pipeline.optimizers.gradient_accumulation_optimizer import *", namespace)  # noqa: S102
    method = ipu.gradient_accumulation.GradientAccumulationReductionMethod
    assert namespace["GradientAccumulationReductionMethod"] is method


def test_inspect_pickle_copy_and_doctest_know_them():
    made = importlib.import_module("ipu_pipeline.optimizers.ipu_optimizer")
    optimizer = made.CrossReplicaOptimizer
    assert dir(made) == made.__all__ == ["CrossReplicaOptimizer"]
    assert inspect.getmembers(made, inspect.isclass) == [("CrossReplicaOptimizer", optimizer)]
    assert inspect.getsource(optimizer).startswith("class CrossReplicaOptimizer")
    assert pickle.loads(pickle.dumps(optimizer)) is copy.deepcopy(optimizer) is optimizer
    assert pickle.loads(pickle.dumps(ipu.ops.rand_ops.dropout)) is ipu.rand_ops.dropout
    for module in (ipu, ipu.ops, ipu.scopes, made):
        doctest.DocTestFinder().find(module)
        inspect.getmembers(module)
        assert inspect.getmodule(module) is module


@pytest.mark.parametrize(
    ("statement", "error", "text"),
    [
        (
            "ipu.pipelining_op",
            AttributeError,
            "no attribute 'pipelining_op'. Did you mean 'pipelining_ops'?",
        ),
        ("from ipu_pipeline import pipelining_op", ImportError, "Did you mean 'pipelining_ops'?"),
        ("ipu.IPUEstimator", AttributeError, "It is ipu.ipu_estimator.IPUEstimator."),
        ("from ipu_pipeline import PopnnLSTM", ImportError, "It is ipu.rnn_ops.PopnnLSTM."),
        ("ipu.scopes.ipu_scop", AttributeError, "Did you mean 'ipu_scope'?"),
        ("from ipu_pipeline.scopes import ipu_scop", ImportError, "Did you mean 'ipu_scope'?"),
        ("ipu.utils.set_gcl_option", AttributeError, "Did you mean 'set_gcl_options'?"),
        ("ipu.nothing", AttributeError, "module 'ipu_pipeline' has no attribute 'nothing'"),
        ("import ipu_pipeline.nothing", ImportError, "No module named 'ipu_pipeline.nothing'"),
        ("from ipu_pipeline.scopes import nothing", ImportError, "cannot import name 'nothing'"),
        ("import ipu_pipeline.session.none", ImportError, "No module named 'ipu_pipeline.session.none'"),
        (
            "ipu.layers.Conv3D",
            AttributeError,
            "tf.layers.Conv3D, of TensorFlow, is not in",
        ),
        ("ipu.optimizers.AdamOptimizer", AttributeError, "is ipu.optimizers.tf1.AdamOptimizer in ipu"),
        ("ipu.optimizers.tf1.LARSOptimizer", AttributeError, "tf.contrib.opt.LARSOptimizer, of TensorFlow"),
        ("ipu.optimizers.tf1.linear_cosine_decay", AttributeError, "tf.train.linear_cosine_decay, of Tens"),
        ("ipu.ipu_session_run_hooks.StopAtStepHook", AttributeError, "It ended training. Use `train("),
        ("ipu.ipu_session_run_hooks.FeedFnHook", AttributeError, "tf.train.FeedFnHook, of TensorFlow, is"),
        ("ipu.metrics.recall_at_k", AttributeError, "tf.metrics.recall_at_k, of TensorFlow, is not in"),
        ("ipu.scopes.__wrapped__", AttributeError, "has no attribute '__wrapped__'"),
    ],
)
def test_names_that_are_nobody_s(statement, error, text):
    with pytest.raises(error, match=re.escape(text)):
        exec(statement, {"ipu": ipu})  # noqa: S102


def test_python_adds_no_suggestion_to_those_of_the_table():
    """Its own would be the nearest name, for `rnn_ops` `rand_ops`."""
    with pytest.raises(AttributeError) as error:
        _ = ipu.horovod
    assert error.value.name is None


def test_names_of_tensorflow_that_are_looked_for_here():
    """By their last name, as `ipu.TrainSpec`."""
    taken = {name for names in MODULES.values() for name in names} | set(MODULES)
    for row in ROWS:
        name = row.name.rpartition(".")[2]
        if not row.name.startswith("tf.") or "*" in name:
            continue
        if name not in taken and not hasattr(ipu, name):
            for kind, way, arguments in (
                (ImportError, import_from, ("ipu_pipeline", name)),
                (AttributeError, attribute, (name,)),
            ):
                text = text_of(kind, way, *arguments)
                assert text.startswith(f"{row.name}, of TensorFlow, is ")
                assert text.endswith(row.why)
                assert (
                    f"ipu.{row.here} in ipu_pipeline" in text if row.here else "not in ipu_pipeline" in text
                )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("train", "  tf.train.Saver: ipu.Saver."),
        ("contrib", "  tf.contrib.opt.AdamWOptimizer: ipu.optimizers.tf1.AdamWOptimizer."),
        ("nn", "  tf.nn.sigmoid_cross_entropy_with_logits: It was a loss."),
    ],
)
def test_modules_of_tensorflow_that_are_looked_for_here(name, line):
    for text in (
        text_of(AttributeError, attribute, name),
        text_of(ImportError, import_from, "ipu_pipeline", name),
        text_of(ImportError, importlib.import_module, f"ipu_pipeline.{name}"),
    ):
        assert text.startswith(
            f"ipu.{name}, as tf.{name} of TensorFlow, is not in ipu_pipeline. By name:\n"
        )
        assert f"\n{line}" in text


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("config", "argument 'config', which is TensorFlow's. It configured .* `config.IPUConfig` does"),
        ("graph", "argument 'graph', which is TensorFlow's. .* `ipu_compiler.compile` traces"),
        ("seeds", r"got an unexpected keyword argument 'seeds'$"),
    ],
)
def test_arguments_of_tensorflow_s_session(argument, text):
    with pytest.raises(TypeError, match=text):
        ipu.Session(**{argument: None})
