"""The front with the interface of Graphcore's TensorFlow 1, in the layout of `tensorflow.python.ipu`."""
