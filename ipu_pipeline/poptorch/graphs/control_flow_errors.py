"""Short descriptions of errors in branches and bodies of control flow. torch's are long."""

from __future__ import annotations

import re

from ipu_pipeline.poptorch.lowering.unsupported import find_users_frames

__all__ = ["describe_control_flow_error"]

_CONSTANT = re.compile(r"ConstantVariable\(\w+: (.+)\)")  # torch's form of an exception's arguments
_IPU = re.compile(r"for ipu devices|on device ipu")
_OBSERVED = re.compile(r"Observed(?P<name>\w*(?:Error|Exception|Iteration))(?:Error)?")


def describe_control_flow_error(error: BaseException) -> str:
    """Describes the error of the user's branch or body, and its line, in one line."""
    return f"{_find_place(str(error))}: {_find_reason(error)}"


def _find_place(text: str) -> str:
    """Finds the innermost line that is neither torch's nor ours in a text with frames."""
    users = find_users_frames(text)
    if not users:
        return "A branch or a body"
    return f"{users[-1]['file']}:{users[-1]['line']} ({(users[-1]['text'] or '').strip()})"


def _find_reason(error: BaseException) -> str:
    """Returns the message of the first error in the chain that led to one."""
    from torch._dynamo.exc import TorchDynamoException

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    first = causes[-1]
    if _IPU.search(str(first)):
        return (
            'The device "ipu" cannot be named within a branch or a body, where torch would look for it. '
            "Leave `device=` and `.to(device)` out there, or use the device of an operand (device=x.device)"
        )
    if not isinstance(first, TorchDynamoException):
        return f"{type(first).__name__}: {_first_line(str(first))}"
    text = _first_line(str(first).rpartition("Got graph break/error:")[2])
    if text.startswith("raised exception "):
        return text.removeprefix("raised exception ")
    explanation = re.search(r"^\s*Explanation: (.+)$", str(first), re.MULTILINE)
    if explanation is not None:
        return f"{text}. {explanation[1]}"
    text = _CONSTANT.sub(r"\1", text)
    observed = _OBSERVED.fullmatch(type(first).__name__)
    return text if observed is None else f"{observed['name']}: {text}"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "no text"
