"""Modules of Flax as layers: their parameters become variables, their random keys the stage's.

Flax is the extra `flax`; it is imported when the first of these layers is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, InitVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import assign, get_variable, get_variable_scope, next_rng_key
from ipu_pipeline.engine.fronts import absolute_scope, current_frame, find_frame, split_results
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.checks import hash_name, join
from ipu_pipeline.tf1.layers import base
from ipu_pipeline.tf1.layers.base import VariableLayer, argument, common, with_arguments

# The names of the argument that tells linen modules whether they train, and its value in training.
_TRAINING_ARGUMENTS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


def _check_module(_layer: str, _argument: str, value: Any) -> Any:
    try:
        from flax import linen, nnx
    except ImportError as error:
        raise ImportError(
            "ipu.layers.Flax needs Flax, which is not installed. It is the extra `flax` of this "
            'package: pip install "ipu_pipeline[flax]".'
        ) from error
    if not isinstance(value, (linen.Module, nnx.Module)):
        raise TypeError(
            "ipu.layers.Flax: module must be a module of flax.linen or flax.nnx, not a class or a "
            f"function; got {value!r}."
        )
    return value


def _check_init_inputs(_layer: str, _argument: str, value: Any) -> Any:
    if value is not None and not isinstance(value, tuple):
        raise TypeError(
            "ipu.layers.Flax: init_inputs must be a tuple of inputs, such as "
            f"(jax.ShapeDtypeStruct((1, 64, 16), jax.numpy.float32),), or None; got {value!r}."
        )
    return value


@with_arguments
class Flax(VariableLayer):
    """A module of flax.linen or flax.nnx as a layer in a stage.

    Variables are named after their paths in the module, in the scope `flax` (`flax_1`, ... for further
    modules in the same scope) or `name`: `flax/Dense_0/kernel`. Parameters are trained. Other state of a
    module, such as batch statistics, becomes variables that are not trained; changes by a call are assigned
    once per micro-batch. Random keys, such as dropout's, come from `next_rng_key()`, so masks do not depend
    on the split into stages. A second call uses the same variables again.

    linen: `Flax(module)(*inputs, **options)` calls the module with them. Variables outside the collection
    `params` have its name in front: `flax/batch_stats/BatchNorm_0/mean`. A variable's initial value is what
    the module's own `init` makes with the variable's key and zeros as inputs; it depends only on the
    session's seed and the variable's name. The random stream `dropout` has the key of `next_rng_key()`;
    other streams have keys derived from it.

    nnx: a module already has values, which become the variables' initial values, whatever the session's
    seed. So make the module outside of the stage, with its own seeds. `Param`s are trained, `RngState` is
    replaced in each call by keys derived from `next_rng_key()` and the path, and every other `Variable` is
    assigned when a call changes it. A `Variable` in several places of one or more modules (tied embeddings)
    is one variable of the program, named after the place that is traced first. The module that you pass is
    never changed.

    A module has its own dtypes. The arguments here, or `mixed_precision`, apply in addition: with
    `param_dtype`, the variables of floating-point parameters have this dtype in place of the module's; with
    `dtype`, these parameters and floating-point inputs are cast to it, so that the module computes in it
    unless it sets another dtype. Its outputs and its other state (batch statistics) keep the module's
    dtypes.

    Example:
      >>> import flax.linen
      >>> import flax.nnx
      >>> class Encoder(flax.linen.Module):
      ...     @flax.linen.compact
      ...     def __call__(self, x, train):
      ...         x = flax.linen.BatchNorm(use_running_average=not train)(flax.linen.Dense(16)(x))
      ...         return flax.linen.Dropout(0.1, deterministic=not train)(x)
      >>> decoder = flax.nnx.Linear(16, 10, rngs=flax.nnx.Rngs(0))
      >>> def stage(images):
      ...     x = layers.Flax(Encoder())(images)  # train=True in a program that trains
      ...     return layers.Flax(decoder, name="decoder")(x)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1)
      >>> pipeline.trace(np.ones([8, 784], np.float32))
      >>> sorted(pipeline.variables)
      ['decoder/bias', 'decoder/kernel', 'flax/BatchNorm_0/bias', 'flax/BatchNorm_0/scale',
       'flax/Dense_0/bias', 'flax/Dense_0/kernel', 'flax/batch_stats/BatchNorm_0/mean',
       'flax/batch_stats/BatchNorm_0/var']
    """

    kind = "flax"

    module: Any = argument(
        "an unbound flax.linen module, or a flax.nnx module; an ImportError says how to install Flax.",
        _check_module,
    )
    _: KW_ONLY
    dtype: InitVar[Any] = common(
        "of parameters and inputs when the module is applied; None: see `mixed_precision`, by default as "
        "they are."
    )
    param_dtype: InitVar[Any] = common(
        "of the parameters' variables; None: likewise, by default the module's own."
    )
    trainable: bool = common("whether an optimizer trains its parameters.", default=True)
    init_inputs: Any = argument(
        "of a linen module, a tuple of the inputs that its `init` gets, arrays or shapes "
        "(`jax.ShapeDtypeStruct`), where what it keeps depends on them: a cache of keys and values is as "
        "long as these are. None: like the inputs of the first call.",
        _check_init_inputs,
        default=None,
    )

    def _complete(self, values: dict[str, Any]) -> None:
        from flax import linen

        self._is_linen = isinstance(values["module"], linen.Module)
        if values["init_inputs"] is not None and not self._is_linen:
            raise ValueError(
                "ipu.layers.Flax: init_inputs are for modules of flax.linen; one of flax.nnx has values "
                "from the start: call its init_cache."
            )

    def __call__(self, *inputs: Any, training: bool | None = None, **options: Any) -> Any:
        """Applies the module, in a stage.

        Args:
          *inputs: the module's arguments.
          training: whether it is applied as in training; None: True in a program that trains. A linen
            module gets it as the argument `train`, `training` or `is_training`, or its opposite as
            `deterministic` or `use_running_average`, if its call has such an argument and the module has no
            attribute for it. An nnx module is switched with `train()` or `eval()`.
          **options: the module's keyword arguments; these override the argument for `training`.

        Returns:
          The module's result.

        Raises:
          ValueError: `training` is given, but the linen module has none of these arguments; or an nnx
            module was made inside the stage, or changes one of its parameters.
        """
        with self._own_scope(), jax.numpy_dtype_promotion("standard"):  # Flax mixes dtypes freely
            return self._apply(inputs, training, options)

    def _apply(self, inputs: Any, training: bool | None = None, options: Any = None) -> Any:
        inputs, options = self._cast_floating((inputs, options))
        if self._is_linen:
            return self._apply_linen(inputs, {**self._find_training(training, options), **options})
        return self._apply_nnx(inputs, options, self._is_training(training))

    def _key(self) -> jax.Array | None:
        """The random key of this call; None outside of stages, where there is none."""
        frame = find_frame()
        return next_rng_key() if frame is not None and frame.is_stage else None

    def _find_training(self, training: bool | None, options: dict[str, Any]) -> dict[str, bool]:
        """The argument that tells a linen module whether it trains."""
        method = options.get("method") or "__call__"
        call = getattr(self.module, method) if isinstance(method, str) else method
        parameters = inspect.signature(call).parameters
        if any(name in options for name in _TRAINING_ARGUMENTS):
            return {}
        for name, value in _TRAINING_ARGUMENTS.items():
            if name in parameters and getattr(self.module, name, None) is None:
                return {name: value == self._is_training(training)}
        if training is not None:
            raise ValueError(
                f"{self._full_name()}: training={training} was given, but {type(self.module).__name__} "
                f"takes none of {', '.join(_TRAINING_ARGUMENTS)} that it does not have as an attribute."
            )
        return {}

    def _apply_linen(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        init_inputs = inputs if self.init_inputs is None else self.init_inputs
        init, avals, tree = _trace_init(self.module, init_inputs, options)
        paths = [path for path, _leaf in jax.tree_util.tree_flatten_with_path(avals)[0]]
        makers = split_results(init)
        values = []
        for position, (path, aval) in enumerate(zip(paths, jax.tree.leaves(avals), strict=True)):
            is_parameter = path[0].key == "params"
            name = _name(path[1:] if is_parameter else path)
            initialize = _initializer(makers[position])
            dtype = self._variable_dtype(aval.dtype, is_parameter)
            value = get_variable(name, aval.shape, dtype, initialize, trainable=is_parameter)
            values.append(self._cast_floating(value) if is_parameter else value)
        key = self._key()
        streams = {} if key is None else {"dropout": key, "params": jax.random.fold_in(key, 1)}
        variables = jax.tree.unflatten(tree, values)
        outputs, changed = self.module.apply(
            variables,
            *inputs,
            rngs=streams,
            mutable=[collection for collection in variables if collection != "params"],
            **options,
        )
        for path, value in jax.tree_util.tree_flatten_with_path(changed)[0]:
            old_value = values[paths.index(path)] if path in paths else value  # what is new is dropped
            if value is not old_value:
                assign(_name(path), self._cast_back(value, old_value))
        return outputs

    def _apply_nnx(self, inputs: tuple[Any, ...], options: dict[str, Any], training: bool) -> Any:
        from flax import nnx

        # Variables: a copy of the module with traced values; the user's module stays as it is.
        graphdef, state = nnx.split(self.module)
        program_names = current_frame("Flax").names
        holders = dict(nnx.iter_graph(self.module))  # by path; what stands at several, at the same as above
        key = self._key()
        parts: dict[Any, Any] = {}
        values: dict[str, Any] = {}
        names: dict[Any, str] = {}  # path of a Variable -> full name of what stands there
        for path, variable in nnx.to_flat_state(state):
            if isinstance(variable, nnx.RngState):
                parts[path] = variable if key is None else _replace_rng(variable, path, key)
                continue
            if not isinstance(variable, nnx.Variable):
                self._check_concrete(variable, path)
                parts[path] = variable
                continue
            own_name = join(get_variable_scope().name, _name(path))
            names[path] = program_names.name_of_holder(holders[path], own_name)
            is_parameter = isinstance(variable, nnx.Param)
            inner_values = []
            leaves, tree = jax.tree_util.tree_flatten_with_path(variable.get_value())
            for inner, leaf in leaves:
                self._check_concrete(leaf, path)
                name = "/".join([names[path], *_words(inner)])
                shape, dtype = jnp.shape(leaf), self._variable_dtype(jnp.result_type(leaf), is_parameter)
                with absolute_scope("", reuse=names[path] != own_name):
                    value = get_variable(name, shape, dtype, _copy_of(leaf), trainable=is_parameter)
                values[name] = self._cast_floating(value) if is_parameter else value
                inner_values.append(values[name])
            parts[path] = variable.replace(jax.tree.unflatten(tree, inner_values))
        # The call.
        module = nnx.merge(graphdef, nnx.from_flat_state(parts))
        part: Any
        for _path, part in nnx.iter_modules(module):
            if getattr(part, "dtype", self) is None:
                # A BatchNorm would go on in the dtype of its statistics. (Modules of linen are made within
                # their calls, and look at inputs and parameters only.)
                part.dtype = self._policy.dtype
        if training:
            module.train()
        else:
            module.eval()
        outputs = module(*inputs, **options)
        # Assignment of what the call changed.
        for path, variable in nnx.to_flat_state(nnx.state(module)):
            if not isinstance(variable, nnx.Variable) or isinstance(variable, nnx.RngState):
                continue
            for inner, leaf in jax.tree_util.tree_flatten_with_path(variable.get_value())[0]:
                name = "/".join([names.get(path, ""), *_words(inner)])
                if name not in values or leaf is values[name]:  # what is new is dropped
                    continue
                if isinstance(variable, nnx.Param):
                    raise ValueError(
                        f"{self._full_name()}: the module changes its parameter {_name(path)} when it is "
                        "called, but parameters are the optimizer's. Make it another kind of nnx.Variable."
                    )
                assign(name, self._cast_back(leaf, values[name]))
        return outputs

    def _cast_floating(self, tree: Any) -> Any:
        """Casts what the module is given to the dtype that was set; without one, returns it as it is."""
        return base.cast_floating(tree, self._policy.dtype)

    def _variable_dtype(self, dtype: Any, is_parameter: bool) -> Any:
        """The dtype of a variable: `param_dtype` for parameters if it is set, or the module's."""
        param_dtype = self._policy.param_dtype
        is_set = is_parameter and param_dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        return param_dtype if is_set else dtype

    def _cast_back(self, value: Any, old_value: Any) -> Any:
        """Casts a variable's new value back from the dtype that was set for the computation."""
        is_cast = self._policy.dtype is not None
        return base.cast_floating(value, old_value.dtype) if is_cast else value

    def _check_concrete(self, leaf: Any, path: tuple[Any, ...]) -> None:
        if jax_compat.is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{self._full_name()}: the nnx module has no value at {_name(path)}, since it was made "
                "within the stage or abstractly. Its values are where the variables start: make it outside."
            )


def _trace_init(module: Any, inputs: Any, options: Any) -> tuple[Any, Any, Any]:
    """A linen module's `init` as a jaxpr from a key to its variables, their shapes, and their structure."""
    from flax import linen

    # Only shapes of arrays go in: initial values do not depend on what the module is given.
    leaves, tree = jax.tree.flatten((inputs, options))
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf
        for leaf in leaves
    ]

    def init(key: jax.Array) -> Any:
        zeros = [jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x for x in shapes]
        args, kwargs = jax.tree.unflatten(tree, zeros)
        return linen.meta.unbox(module.init(key, *args, **kwargs))

    closed_jaxpr, avals = jax.make_jaxpr(init, return_shape=True)(jax.eval_shape(jax.random.key, 0))
    return closed_jaxpr, avals, jax.tree.structure(avals)


def _initializer(make: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """An initializer that gives one of the results of `init`."""

    def initialize(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        del shape  # that of the result
        return make(key).astype(dtype)

    return initialize


def _copy_of(leaf: Any) -> Callable[..., jax.Array]:
    def initialize(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        del key, shape
        return jnp.array(leaf, dtype)

    return initialize


def _replace_rng(variable: Any, path: tuple[Any, ...], key: jax.Array) -> Any:
    """Returns a random stream's state at its start, from this key."""
    from flax import nnx

    value = variable.get_value()
    if not isinstance(variable, nnx.RngKey):
        return variable.replace(jnp.zeros(value.shape, value.dtype))
    new_key = jax.random.fold_in(key, np.uint32(hash_name(_name(path))))
    return variable.replace(new_key if value.shape == () else jax.random.split(new_key, value.shape))


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(_words(path)) or "value"


def _words(path: tuple[Any, ...]) -> Iterator[str]:
    for part in path:
        is_key = hasattr(part, "key") or hasattr(part, "idx") or hasattr(part, "name")
        yield jax.tree_util.keystr((part,), simple=True) if is_key else str(part)
