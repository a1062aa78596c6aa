"""MNIST in the forms in which it is read, and the embedded digits."""

from ipu_pipeline.graphcore.importing import explain_missing

explain_missing(__name__)
