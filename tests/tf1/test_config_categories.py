"""Graphcore's settings and functions that have nothing to do here: known, and each warns once."""

import copy
import pickle

import jax
import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.config import IPUConfig, StochasticRoundingBehaviour
from ipu_pipeline.tf1 import config
from ipu_pipeline.tf1.session.store import Store
from tests.support import front

pytestmark = pytest.mark.usefixtures("nothing_warned")


def other_value(setting):
    match setting.default:
        case bool():
            return not setting.default
        case int() | float():
            return setting.default + 1
        case str():
            return setting.default + "x"
        case dict():
            return {"partialsType": "half"}
        case _:
            return next(member for member in type(setting.default) if member is not setting.default)


def find(config, name):
    *path, last = name.split(".")
    for part in path:
        config = getattr(config, part)
    return config, last


def test_a_setting_is_known_and_warns_once():
    for name in config.SETTINGS:
        check_setting(name)


def check_setting(name):
    setting = config.SETTINGS[name]
    owner, last = find(IPUConfig(), name)
    assert getattr(owner, last) == setting.default
    setattr(owner, last, setting.default)  # silently
    value = other_value(setting)
    if not setting.reason:  # it has an effect
        setattr(owner, last, value)
        assert getattr(owner, last) == value
        return
    with pytest.warns(UserWarning, match=f"IPUConfig.{name} has no effect: ") as caught:
        setattr(owner, last, value)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert getattr(owner, last) == value
    setattr(*find(IPUConfig(), name), value)  # silently
    with pytest.raises(TypeError, match=f"IPUConfig.{name} must be of type .*; got None"):
        setattr(owner, last, None)
    if not isinstance(setting.default, (bool, dict)) and type(setting.default) is not float:
        with pytest.raises(TypeError, match="must be of type"):
            setattr(owner, last, 1.5)


def test_items_of_poplars_options():
    config = IPUConfig()
    with pytest.warns(UserWarning, match="IPUConfig.matmuls.poplar_options has no effect"):
        config.matmuls.poplar_options["partialsType"] = "half"
    config.matmuls.poplar_options["partialsType"] = "float"
    assert config.matmuls.poplar_options == {"partialsType": "float"}
    assert IPUConfig().matmuls.poplar_options == {}
    with pytest.warns(UserWarning, match="IPUConfig.compilation_poplar_options has no effect"):
        config.compilation_poplar_options.update({"opt.x": "y"})


def test_rounding_as_a_boolean():
    config = IPUConfig()
    config.floating_point_behaviour.esr = False
    with pytest.warns(UserWarning, match="esr has no effect: JAX devices round to nearest"):
        config.floating_point_behaviour.esr = True
    assert config.floating_point_behaviour.esr is StochasticRoundingBehaviour.ON
    assert StochasticRoundingBehaviour.from_bool(False) is StochasticRoundingBehaviour.OFF


def test_unknown_names():
    config = IPUConfig()
    unknown = [
        (lambda: config.wibble, "IPUConfig has no attribute 'wibble'.$"),
        (lambda: config.optimisations, "no attribute 'optimisations'. Did you mean 'optimizations'"),
        (lambda: config.optimizations.xyz, "IPUConfig.optimizations has no attribute 'xyz'.$"),
        (
            lambda: setattr(config.floating_point_behaviour, "es", True),
            "IPUConfig.floating_point_behaviour has no attribute 'es'. "
            "Did you mean 'floating_point_behaviour.esr'",
        ),
        (lambda: setattr(config, "wibble", 1), "IPUConfig has no attribute 'wibble'.$"),
    ]
    for use, message in unknown:
        with pytest.raises(AttributeError, match=message):
            use()


def test_ipu_model_is_a_boolean_and_a_category():
    config = IPUConfig()
    assert not config.ipu_model
    assert config.ipu_model == False  # noqa: E712  # as scripts may compare it
    assert not copy.deepcopy(config).ipu_model  # without a warning
    assert "optimizations." in repr(config.optimizations)
    with pytest.warns(UserWarning, match="ipu_model.tiles_per_ipu has no effect"):
        config.ipu_model.tiles_per_ipu = 4
    assert not config.ipu_model
    config.ipu_model = True
    assert config.ipu_model
    assert config.ipu_model == True  # noqa: E712
    assert config.ipu_model.tiles_per_ipu == 4
    copied = copy.deepcopy(config)
    copied.ipu_model = False
    assert config.ipu_model
    assert "ipu_model.tiles_per_ipu = 4" in repr(config.ipu_model)
    config.auto_select_ipus = 1
    config.configure_ipu_system(device="/cpu:0")
    assert ipu.utils.running_on_ipu_model()
    with pytest.raises(ValueError, match="device is the host's, a CPU"):
        config.configure_ipu_system(device="/device:IPU:0")


def test_functions_without_effect():
    for name in ipu.utils.WITHOUT_EFFECT:
        function, given = getattr(ipu.utils, name), object()
        with pytest.warns(UserWarning, match=f"ipu.utils.{name} has no effect. It ") as caught:
            result = function(given)
        assert caught[0].filename == __file__
        assert result == ({"set": given, "ext": []}.get(name[:3]))
        assert function(given) == result  # silently


def test_configurations_as_scripts_before_sdk_2_1_made_them():
    utils = ipu.utils
    config = utils.create_ipu_config(selection_order=utils.SelectionOrder.SNAKE)
    config = utils.auto_select_ipus(config, 2)
    config = utils.set_recomputation_options(config, allow_recompute=True)
    utils.configure_ipu_system(config)
    assert utils.get_num_of_ipus_in_device("/device:IPU:0") == 2
    assert utils.get_num_of_ipus_in_device("/device:IPU:1") == 0
    with pytest.raises(RuntimeError, match="reset_configuration is False"):
        utils.configure_ipu_system(config, reset_configuration=False)
    utils.reset_ipu_configuration()
    assert not utils.running_on_ipu_model()
    assert utils.select_ipus(IPUConfig(), [1, 0]).select_ipus == [1, 0]
    with pytest.warns(UserWarning, match="create_ipu_config: profiling has no effect"):
        utils.create_ipu_config(profiling=True)
    with pytest.warns(UserWarning, match="allow_stateful_recompute has no effect"):
        utils.set_recomputation_options(config, allow_stateful_recompute=True)
    with pytest.raises(ValueError, match='must be like "/device:IPU:0"'):
        utils.get_num_of_ipus_in_device("/device:CPU:0")
    with pytest.raises(TypeError, match="config must be an IPUConfig"):
        utils.configure_ipu_system({})
    with pytest.raises(AttributeError, match="no attribute 'wibble'"):
        _ = utils.wibble


@pytest.fixture
def seed_afterwards():
    yield
    ipu.utils.reset_ipu_seed(0)


@pytest.mark.usefixtures("seed_afterwards")
def test_the_seed():
    def draw():
        return ipu.get_variable("w", (3,), initializer=jax.nn.initializers.normal())

    compiled = front.compile_program(draw)

    def value(session):
        return session.run(compiled)

    with ipu.Session() as first, ipu.Session(seed=7) as other:
        expected = value(other)
        ipu.utils.reset_ipu_seed(7)
        assert first.seed == 7
        np.testing.assert_array_equal(value(first), expected)
        with ipu.Session() as later:
            np.testing.assert_array_equal(value(later), expected)
        ipu.utils.reset_ipu_seed(8)
        np.testing.assert_array_equal(value(first), expected)  # variables that exist stay
        with ipu.Session() as later:
            assert not np.array_equal(value(later), expected)
    for wrong in (1.5, True, "1"):
        with pytest.raises(TypeError, match="reset_ipu_seed: seed must be an integer"):
            ipu.utils.reset_ipu_seed(wrong)
    with pytest.raises(ValueError, match="must fit 64 bits"):
        ipu.utils.reset_ipu_seed(2**63)


@pytest.mark.usefixtures("seed_afterwards")
def test_a_load_that_fails_keeps_a_seed_that_was_set_meanwhile(monkeypatch):
    compiled = front.compile_program(lambda: ipu.get_variable("w", (3,)))
    check = Store.check_loaded

    def check_later(store, programs):
        ipu.utils.reset_ipu_seed(7)
        check(store, programs)

    with ipu.Session() as session:
        session.run(compiled)
        monkeypatch.setattr(Store, "check_loaded", check_later)
        with pytest.raises(ValueError, match="no compiled program has a variable 'wibble'"):
            session.load({"wibble": np.zeros(3)})
        assert session.seed == 7
        assert list(session.variables) == ["w"]


def test_kinds_of_values():
    config, other = IPUConfig(), IPUConfig()
    with pytest.warns(UserWarning, match="num_io_tiles has no effect"):
        config.io_tiles.num_io_tiles = np.int64(32)
    assert config.io_tiles.num_io_tiles == 32
    with pytest.raises(TypeError, match="IPUConfig.optimizations is a category: set what it has"):
        config.optimizations = 3
    other.ipu_model = True
    config.ipu_model = other.ipu_model
    assert config.ipu_model
    with pytest.warns(UserWarning, match="compilation_poplar_options has no effect"):
        config.compilation_poplar_options = {"a": "b"}
    assert pickle.loads(pickle.dumps(config)).compilation_poplar_options == {"a": "b"}
