"""Where an error in a branch or a body is said to be."""

from pathlib import Path

import torch

from ipu_pipeline.poptorch.graphs.control_flow_errors import describe_control_flow_error


def test_the_line_is_the_users_whatever_their_folders_are_called():
    """Scripts lie in clones of this repository, too: a folder's name does not make a file ours."""
    frames = [
        ("/home/somebody/ipu_pipeline/mine/torch/model.py", "return x @ y"),
        (str(Path(torch.__file__).parent / "_ops.py"), "return call()"),
    ]
    text = "".join(f'  File "{file}", line 3, in body\n    {code}\n' for file, code in frames)
    described = describe_control_flow_error(RuntimeError(text))
    assert described.startswith(f"{frames[0][0]}:3 (return x @ y): RuntimeError: ")
