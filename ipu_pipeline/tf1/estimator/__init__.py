"""The parts of the estimators."""

from ipu_pipeline.graphcore.sdk_names import explain_missing

explain_missing(__name__)
