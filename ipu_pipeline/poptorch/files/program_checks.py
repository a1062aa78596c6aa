"""What may be in a torch program's archive. `torch.export.load` is given nothing else.

torch unpickles parts of such an archive where the archive says so, loads shared libraries that are in it,
evaluates expressions of its shapes, imports modules that structures name, calls what a node names, and runs
Python code that it makes of the names of nodes and arguments.
Programs of ours have none of this: the names of the archive's parts, the configurations of its tensors and
the graph are compared with what they have. What else there may be is refused, not found out about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.graphs.blocks import is_check_operation
from ipu_pipeline.poptorch.lowering.control_flow import CONTROL_FLOW
from ipu_pipeline.poptorch.lowering.registry import find_lowering

__all__ = ["check_records"]

_MODEL = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_CONFIGS = {
    "data/weights/model_weights_config.json": "data/weights/weight_",
    "data/constants/model_constants_config.json": "data/constants/tensor_",
}
_FIXED = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", _SAMPLES: b""}
_FREE = {".data/version", ".data/serialization_id", ".format_version", ".storage_alignment"}
_RAW = re.compile(r"data/(weights/weight|constants/tensor)_\d{1,9}", re.ASCII)
# Keys of torch's JSON with what torch would evaluate or unpickle.
_REFUSED_KEYS = {
    "as_expr",
    "expr_str",
    "as_custom_obj",
    "as_operator",
    "as_string_to_argument",
    "custom_obj",
}
# Names that stand in the code that torch makes of a graph.
_NAME_KEYS = {"name", "as_name", "forward_arg_names"}
_PLAIN_TYPES = {"builtins.tuple", "builtins.list", "builtins.dict", None}


def check_records(records: Mapping[str, bytes]) -> None:
    """Checks an archive of `torch.export.save`, before torch sees it.

    Args:
      records: the contents of its parts, by their names without the archive's own.

    Raises:
      Error: there is something in it that no program of ours has; or an operation that has no lowering.
      Others: it is no such archive.
    """
    for name, content in records.items():
        is_known = name in _FREE or name == _MODEL or name in _CONFIGS or _RAW.fullmatch(name)
        if not is_known and name not in _FIXED:
            raise _refusal(f"a part {name}")
        if content != _FIXED.get(name, content):
            raise _refusal(f"{name} with {content[:40]!r}")
    if missing := {_MODEL, *_CONFIGS, *_FIXED} - records.keys():
        raise ValueError(f"the program has no {', '.join(sorted(missing))}")
    for name, prefix in _CONFIGS.items():
        _check_config(name, json.loads(records[name]), prefix, records)
    _check_program(json.loads(records[_MODEL]))


def _refusal(what: str) -> Error:
    return Error(
        f"The program in the file has {what}, which no program of compileAndExport has. It could run code "
        "as it is loaded, and is not given to torch."
    )


def _check_config(where: str, config: Any, prefix: str, records: Mapping[str, bytes]) -> None:
    if set(config) != {"config"}:
        raise _refusal(f"{where} with {sorted(config)}")
    for name, entry in config["config"].items():
        if entry["use_pickle"] is not False:
            raise _refusal(f"an entry {name} in {where} that is to be unpickled")
        path = f"{where.rpartition('/')[0]}/{entry['path_name']}"
        if not path.startswith(prefix) or path not in records:
            raise _refusal(f"an entry {name} in {where} that is in {entry['path_name']!r}")
        _check_keys(where, entry)


def _check_keys(where: str, value: Any) -> None:
    for holder in _dicts(value):
        if found := _REFUSED_KEYS & holder.keys():
            raise _refusal(f"{', '.join(sorted(found))} in {where}")


def _check_program(program: Any) -> None:
    _check_keys(_MODEL, program)
    for key in ("guards_code", "range_constraints"):
        if program.get(key):
            raise _refusal(f"{key} {program[key]!r}")
    for holder in _dicts(program):
        for key in ("in_spec", "out_spec"):
            if key in holder:
                protocol, spec = json.loads(holder[key])
                if protocol != 1:
                    raise _refusal(f"{key} of kind {protocol!r}")
                _check_structure(key, spec)
        for key in _NAME_KEYS & holder.keys():
            _check_names(key, holder[key])
        if "target" in holder:
            _check_target(holder["target"])


def _check_structure(key: str, spec: Any) -> None:
    kind, context = spec["type"], spec["context"]
    if kind not in _PLAIN_TYPES or context not in (None, "null", "[]"):
        raise _refusal(f"{key} with {kind} and {context}")
    for child in spec["children_spec"]:
        _check_structure(key, child)


def _check_names(key: str, value: Any) -> None:
    for name in value if isinstance(value, list) else [value]:
        if name not in (None, "") and not (isinstance(name, str) and name.isidentifier()):
            raise _refusal(f"a {key} {name!r}")


def _check_target(name: Any) -> None:
    """Checks what a node of the graph calls: an operation with a lowering, and never something else."""
    if name == "_operator.getitem":
        return
    parts = name.split(".")
    if parts[:2] != ["torch", "ops"] or len(parts) not in (4, 5):
        raise _refusal(f"a call of {name}")
    found: Any = torch.ops
    for part in parts[2:]:
        found = getattr(found, part, None) if part.isidentifier() else None
    if found is None:
        raise Error(
            f"The program in the file calls {name}, which does not exist here. Define it with "
            "torch.library, and register its lowering, before loading the file."
        )
    if isinstance(found, HigherOrderOperator) and found in CONTROL_FLOW:
        return
    if not isinstance(found, OpOverload):
        raise _refusal(f"a call of {name}")
    is_ours = found.namespace == markers.NAMESPACE or is_check_operation(found)
    if not is_ours and find_lowering(found) is None:
        raise Error(
            f"The program in the file calls {name}, which has no lowering here. Say how JAX computes it "
            "with poptorch.register_lowering, before loading the file."
        )


def _dicts(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _dicts(part)
