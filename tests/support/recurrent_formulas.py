"""LSTM and GRU step by step, with `xp` NumPy or jax.numpy: what the scans are compared with."""

import numpy as np


def sigmoid(xp, x):
    return 1 / (1 + xp.exp(-x))


def plain_lstm(xp, x, c, h, kernel, biases, lengths=None):
    kernels, outputs = xp.split(kernel, 4, axis=1), []
    for step in range(len(x)):
        both = xp.concatenate([x[step], h], axis=1)
        i, f, candidate, o = (both @ w + b for w, b in zip(kernels, biases, strict=True))
        new_c = sigmoid(xp, f) * c + sigmoid(xp, i) * xp.tanh(candidate)
        new_h = sigmoid(xp, o) * xp.tanh(new_c)
        goes_on = np.full((len(h), 1), True) if lengths is None else (step < lengths)[:, None]
        c, h = xp.where(goes_on, new_c, c), xp.where(goes_on, new_h, h)
        outputs.append(xp.where(goes_on, h, xp.zeros_like(h)))
    return xp.stack(outputs), c, h


def plain_gru(xp, x, h, kernel, biases, lengths=None, scores=None):
    features = x.shape[-1]
    of_inputs, of_state = xp.split(kernel[:features], 3, axis=1), xp.split(kernel[features:], 3, axis=1)
    resets_after, outputs = biases.ndim == 3, []
    for step in range(len(x)):
        x_z, x_r, x_c = (x[step] @ w for w in of_inputs)
        if resets_after:
            x_z, x_r, x_c = x_z + biases[0, 0], x_r + biases[1, 0], x_c + biases[2, 0]
            z = sigmoid(xp, x_z + (h @ of_state[0] + biases[0, 1]))
            r = sigmoid(xp, x_r + (h @ of_state[1] + biases[1, 1]))
            candidate = xp.tanh(x_c + r * (h @ of_state[2] + biases[2, 1]))
        else:
            z = sigmoid(xp, x_z + h @ of_state[0] + biases[0])
            r = sigmoid(xp, x_r + h @ of_state[1] + biases[1])
            candidate = xp.tanh(x_c + (r * h) @ of_state[2] + biases[2])
        if scores is not None:
            z = (1 - scores[step][:, None]) * z
        new = z * h + (1 - z) * candidate
        goes_on = np.full((len(h), 1), True) if lengths is None else (step < lengths)[:, None]
        h = xp.where(goes_on, new, h)
        outputs.append(xp.where(goes_on, h, xp.zeros_like(h)))
    return xp.stack(outputs), h
