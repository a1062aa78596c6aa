"""What goes wrong in a branch or a body of control flow, told shortly; torch tells it at length."""

from __future__ import annotations

import re

from ipu_pipeline.poptorch.lowering.unsupported import find_users_frames

__all__ = ["describe_control_flow_error"]

_CONSTANT = re.compile(r"ConstantVariable\(\w+: (.+)\)")  # as torch has the arguments of an exception
_OBSERVED = re.compile(r"Observed(?P<name>\w*(?:Error|Exception|Iteration))(?:Error)?")


def describe_control_flow_error(error: BaseException) -> str:
    """The error of the user's branch or body and its line, in one line."""
    return f"{_find_place(str(error))}: {_find_reason(error)}"


def _find_place(text: str) -> str:
    """The innermost line that is neither torch's nor ours, of a text with frames."""
    users = find_users_frames(text)
    if not users:
        return "A branch or a body"
    return f"{users[-1]['file']}:{users[-1]['line']} ({(users[-1]['text'] or '').strip()})"


def _find_reason(error: BaseException) -> str:
    """What the first error says, of those that led to one."""
    from torch._dynamo.exc import TorchDynamoException

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    first = causes[-1]
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
