"""A feature example: a regression whose product has a gradient of its own, beside one without.

python -m tests.programs.ported.custom_gradient
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import ipu_pipeline as ipu
from ipu_pipeline.optimizers import tf1


@jax.custom_vjp
def custom_product(a, b):
    """Different: jax.custom_vjp for `ipu.custom_ops.precompiled_user_op` and its library of C++."""
    return a @ b


def forward(a, b):
    return a @ b, (a, b)


def backward(kept, gradient):
    a, b = kept
    return gradient @ b.T, a.T @ gradient


custom_product.defvjp(forward, backward)


def model(use_custom_op, inputs, targets):
    def loss_of(inputs, weights):
        preds = custom_product(inputs, weights) if use_custom_op else jnp.matmul(inputs, weights)
        sigmoid = 0.5 * (jnp.tanh(preds) + 1)
        probs = sigmoid * targets + (1 - sigmoid) * (1 - targets)
        return jnp.sum(-jnp.log(probs))

    with ipu.variable_scope(f"model_vars_{use_custom_op}", reuse=ipu.AUTO_REUSE):
        weights = ipu.get_variable("weights", shape=[3, 1], initializer="zeros")
    loss = loss_of(inputs, weights)
    # Different: the optimizer minimizes by one of ipu.optimizers, such as tf1's; and jax.grad for
    # tf.gradients, of a function.
    train_op = tf1.GradientDescentOptimizer(learning_rate=0.05).minimize(loss)
    return loss, weights, jax.grad(loss_of)(inputs, weights), train_op


INPUTS = np.array([[0.52, 1.12, 0.77], [0.88, -1.08, 0.15], [0.52, 0.06, -1.30], [0.74, -2.49, 1.39]])
TARGETS = np.array([[1, 1, 0, 1]]).transpose()


def train(steps):
    """The losses, gradients and last weights, of the built-in product and of the other one."""
    inputs = ipu.placeholder(np.float32, [4, 3])
    targets = ipu.placeholder(np.float32, [4, 1])
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        fetches = ipu.ipu_compiler.compile(partial(model, False), [inputs, targets])
        fetches_custom = ipu.ipu_compiler.compile(partial(model, True), [inputs, targets])
    cfg = ipu.utils.create_ipu_config()
    cfg = ipu.utils.auto_select_ipus(cfg, 1)
    cfg = ipu.utils.set_optimization_options(cfg, max_cross_replica_sum_buffer_size=10)
    ipu.utils.configure_ipu_system(cfg)
    ipu.utils.move_variable_initialization_to_cpu()
    found = []
    with ipu.Session() as sess:
        sess.run(ipu.global_variables_initializer())
        for chosen in (fetches, fetches_custom):
            losses, grads = [], []
            for _step in range(steps):
                loss, current_weights, gradient = sess.run(
                    chosen, feed_dict={inputs: INPUTS, targets: TARGETS}
                )
                losses.append(loss)
                grads.append(gradient)
            found.append((losses, grads, current_weights))
    return found


if __name__ == "__main__":
    plain, custom = train(100)
    for one, other in zip(plain, custom, strict=True):
        if not np.allclose(one, other):
            raise RuntimeError("They do not match.")
    print("Losses, grads and weights match.")
