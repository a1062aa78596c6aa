"""MNIST, in the forms that can be read, and the embedded digits."""

from ipu_pipeline.graphcore.sdk_names import explain_missing

explain_missing(__name__)
