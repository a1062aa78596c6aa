"""The parts of the estimators."""

from ipu_pipeline.graphcore.importing import explain_missing

explain_missing(__name__)
