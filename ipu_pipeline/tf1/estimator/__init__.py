"""What IPUPipelineEstimator is made of."""

from ipu_pipeline.graphcore.importing import explain_missing

explain_missing(__name__)
