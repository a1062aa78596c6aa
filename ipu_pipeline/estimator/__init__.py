"""What IPUPipelineEstimator is made of."""
