"""MNIST in the forms in which it is read, and the embedded digits."""
