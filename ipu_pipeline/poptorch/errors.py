"""The errors of PopTorch's front."""

from __future__ import annotations


class Error(Exception):
    """An error in a model, or in how it is used.

    Attributes:
      message: what happened, and what to do.
      type: the kind of error; of a failed program the status code or CUDA's name, in lower case.
      location: where in the front it was noticed; empty where that is of no use.
    """

    def __init__(self, message: str, type: str = "poptorch_error", location: str = "") -> None:
        """Takes the attributes."""
        super().__init__(message)
        self.message = message
        self.type = type
        self.location = location


class RecoverableError(Error):
    """An error that running again may fix.

    Attributes:
      recovery_action: "IPU_RESET": call the model again; "PARTITION_RESET": `destroy` all wrapped models
        and wrap them again; "FULL_RESET": start a new process from saved weights.
    """

    def __init__(
        self,
        message: str,
        type: str = "poptorch_error",
        location: str = "",
        recovery_action: str = "IPU_RESET",
    ) -> None:
        """Takes the attributes."""
        super().__init__(message, type, location)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """An error that running again does not fix."""
