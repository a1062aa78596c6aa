"""Programs as they are after porting: what users of Graphcore's TensorFlow 1 had, in structure."""
