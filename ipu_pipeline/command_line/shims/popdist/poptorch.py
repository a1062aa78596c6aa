"""`popdist.poptorch` under `ipu-pipeline run`."""

import warnings

import ipu_pipeline.poptorch


class Options(ipu_pipeline.poptorch.Options):
    """PopTorch's options, which know by themselves which process this is and how many there are."""

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        """Makes the options."""
        super().__init__()
        if ipus_per_replica is not None:
            warnings.warn(
                "popdist.poptorch.Options(ipus_per_replica=) has no effect: a model's blocks say how many "
                "IPUs a replica has.",
                stacklevel=2,
            )
