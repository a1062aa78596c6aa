"""Programs of `torch.export` as bytes, without the values of their tensors, and back."""

from __future__ import annotations

import io
import logging
import operator
import threading
import warnings
import zipfile
from collections.abc import Mapping

import torch

from ipu_pipeline.poptorch.files.program_checks import check_records

__all__ = ["read_program", "write_program"]

_ROOT = "archive"
_lock = threading.RLock()  # torch has global variables for a program that it reads
# What a node says of how torch came to it; nobody reads it, and it is most of the bytes.
_NOTES = ("from_node", "torch_fn", "source_fn_stack", "custom")


def write_program(program: torch.export.ExportedProgram) -> bytes:
    """An archive of `torch.export.save`, in which each tensor has a single element in memory.

    Args:
      program: static shapes, and tensors as constants.
    """
    for module in program.graph_module.modules():
        assert isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes:
            for note in _NOTES:
                node.meta.pop(note, None)
    bare = torch.export.ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=program.graph_signature,
        state_dict={name: _stand_in(tensor) for name, tensor in program.state_dict.items()},
        range_constraints={},
        module_call_graph=program.module_call_graph,
        example_inputs=None,
        constants={name: _stand_in(tensor) for name, tensor in program.constants.items()},
        verifiers=program.verifiers,
    )
    written = io.BytesIO()
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No complete tensor found")
        torch.export.save(bare, written)
    content = written.getvalue()
    check_records(_records(content))  # what is written can be read
    return content


def read_program(content: bytes) -> torch.export.ExportedProgram:
    """The program of what `write_program` gave; its tensors have shapes, dtypes and no values.

    Raises:
      Error: torch would do more with it than make a graph, see `program_checks`.
      Others: it is something else.
    """
    records = _records(content)
    check_records(records)
    # torch reads archives in its own way: it is given one that has what was looked at, and nothing else.
    checked = io.BytesIO()
    with zipfile.ZipFile(checked, "w", zipfile.ZIP_STORED) as archive:
        for name, record in records.items():
            archive.writestr(zipfile.ZipInfo(f"{_ROOT}/{name}"), record)
    checked.seek(0)
    logger, noticed = logging.getLogger("torch.export"), _Noticed()
    with _lock:
        logger.addFilter(noticed)
        try:
            program = torch.export.load(checked)
        except RuntimeError as error:
            raise noticed.error or error from None
        finally:
            logger.removeFilter(noticed)
    _drop_unused(program)
    return program


def _drop_unused(program: torch.export.ExportedProgram) -> None:
    """Takes away what torch adds as it reads: a node for each of several results, also if nobody has it."""
    for module in program.graph_module.modules():
        assert isinstance(module, torch.fx.GraphModule)
        for node in reversed(module.graph.nodes):
            if node.target is operator.getitem and not node.users and "_unused_" in node.name:
                module.graph.erase_node(node)
        module.recompile()


class _Noticed(logging.Filter):
    """Takes the error that torch logs, in the place of which it raises one that says nothing."""

    error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info is None:
            return True
        self.error = record.exc_info[1]
        return False


def _records(content: bytes) -> Mapping[str, bytes]:
    records: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            root, _slash, name = info.filename.partition("/")
            if root != _ROOT or name in records or info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"the program has a part {info.filename!r}")
            records[name] = archive.read(info)
    return records


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.zeros((1,) * tensor.dim(), dtype=tensor.dtype).expand(tensor.shape)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made
