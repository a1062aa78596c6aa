"""Files of models that are not what they should be: each is refused by name, and nothing in one is run."""

import collections
import functools
import io
import json
import operator
import os
import pickle
import struct
import zipfile

import pytest
import safetensors.torch
import torch
from torch import nn

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch.files import model_files
from tests.support.poptorch_front import make_options, seeded

x = torch.ones(2, 3)
KEY = "ipu_pipeline.poptorch"


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(collections.OrderedDict(fc=nn.Linear(3, 2)))
        self.shift = torch.ones(2)

    def forward(self, x):
        return poptorch.identity_loss(self.inner(x) + self.shift, "sum")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The bytes of a file."""
    file = tmp_path_factory.mktemp("exported") / "model"
    poptorch.trainingModel(seeded(Small), make_options()).compileAndExport(file, x)
    return file.read_bytes()


def split(content):
    """The header of a file, and what is behind it."""
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def join(header, data):
    """A file with a header, which may say anything."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def with_manifest(content, change):
    """A file with another manifest, and its check sum; `change` changes it in place."""
    header, data = split(content)
    manifest = json.loads(header["__metadata__"][KEY])
    change(manifest)
    text = json.dumps(manifest)
    tensors = safetensors.torch.load(content)
    in_order = {name: tensors[name] for name in sorted(tensors, key=int)}
    header["__metadata__"] = {KEY: text, "crc32": model_files._check_sum(text, in_order)}
    return join(header, data)


def refuse(tmp_path, content, match):
    """Loads a file that must be refused; nothing of it may run."""
    file = tmp_path / "file"
    file.write_bytes(content)
    for load in (poptorch.load, poptorch.trainingModel(Small(), make_options()).loadExecutable):
        with pytest.raises(poptorch.Error, match=match) as raised:
            load(file)
        assert not isinstance(raised.value.__cause__, AssertionError), raised.value.__cause__
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_the_file_itself_loads(tmp_path, exported):
    (tmp_path / "file").write_bytes(with_manifest(exported, lambda _data: None))
    assert poptorch.load(tmp_path / "file")(x).shape == ()


def test_any_program_for_safetensors_reads_it(exported):
    tensors = safetensors.torch.load(exported)
    assert sorted(tensors) == ["0", "1", "2"]
    manifest = json.loads(split(exported)[0]["__metadata__"][KEY])
    assert [one["op"] for one in manifest["program"]["nodes"]][-1] == "output"
    assert manifest["version"] == 2


# Nothing is run, imported or unpickled, and torch makes no Python code of a graph.


@pytest.fixture
def watched(monkeypatch):
    """Fails when something of a file is run or unpickled."""

    def forbid(owner, name):
        monkeypatch.setattr(owner, name, lambda *_args, **_kwargs: pytest.fail(f"{name} was called"))

    for name in ("load", "loads", "Unpickler"):
        forbid(pickle, name)
    forbid(torch, "load")
    forbid(torch.export, "load")
    forbid(torch.fx.graph_module, "_exec_with_source")
    forbid(torch.fx.Graph, "python_code")
    forbid(torch.ops, "load_library")
    forbid(torch.ops, "import_module")


@pytest.mark.usefixtures("watched")
def test_a_file_is_loaded_without_running_code_of_it(tmp_path, exported):
    (tmp_path / "file").write_bytes(exported)
    loaded = poptorch.load(tmp_path / "file")
    assert loaded.model(x).shape == (1,)[:0]


INJECTED = "x=__import__('pathlib').Path('EXPLODED').touch()"


def nodes(data):
    return data["program"]["nodes"]


def find(data, op):
    """The first node of a kind."""
    return next(one for one in nodes(data) if one["op"] == op)


def set_in(kind, **changes):
    return lambda data: find(data, kind).update(changes)


def set_argument(value):
    """Gives the first operation another first argument."""

    def change(data):
        find(data, "call_function")["args"][0] = value

    return change


def rename(old, new):
    def change(data):
        data.update(json.loads(json.dumps(data).replace(old, new)))

    return change


def call(name):
    return set_in("call_function", target=name)


NO_OPERATION = "which is no operation that a graph may have"
NO_VALUE = "which stands for no value"
CODE = {
    "a function of torch": (call("torch.hub.load"), NO_OPERATION),
    "an operator by torch's name": (call("_operator.getitem"), NO_OPERATION),
    "a library to load, as an operation": (call("load_library::__call__.__call__"), NO_OPERATION),
    "a dunder": (call("aten::__init__.__globals__"), "which is no operation|does not exist here"),
    "an extension": (call("#evil:op"), NO_OPERATION),
    "no name": (call(["aten", "add"]), "TypeError"),
    "an unknown operation": (call("evil::op.default"), "evil::op.default, which does not exist here"),
    "an unknown overload": (call("aten::add.evil"), "aten::add.evil, which does not exist here"),
    "an operation that writes": (call("aten::set_.source_Tensor"), NO_OPERATION),
    "an operation without a lowering": (call("aten::nonzero.default"), "has no lowering here"),
    "an operator on graphs": (call("triton_kernel_wrapper_mutation"), NO_OPERATION),
    "a call of a module": (set_in("call_function", op="call_module"), "of kind 'call_module'"),
    "a name of a node": (set_in("call_function", name="a = 1; b"), "has the name 'a = 1; b'"),
    "a name of an argument": (set_in("call_function", kwargs={INJECTED: 1}), "arguments that it does not"),
    "a number to evaluate": (set_argument({"as_expr": "__import__('os')"}), NO_VALUE),
    "an object": (set_argument({"object": ["subprocess:Popen", ["true"]]}), NO_VALUE),
    "a member of torch": (set_argument({"torch": "load"}), NO_VALUE),
}


@pytest.mark.usefixtures("watched")
def test_code_in_the_graph_is_refused(tmp_path, exported):
    for change, match in CODE.values():
        refuse(tmp_path, with_manifest(exported, change), match)


@pytest.mark.usefixtures("watched")
def test_code_where_a_node_says_where_it_is_from_is_text(tmp_path, exported):
    code = f"""{INJECTED.replace("EXPLODED", str(tmp_path / "exploded"))}\n\"\"\"\n"""
    change = set_in("call_function", trace=code, modules=[[code, code]])
    (tmp_path / "file").write_bytes(with_manifest(exported, change))
    assert poptorch.load(tmp_path / "file")(x).shape == ()
    assert os.listdir(tmp_path) == ["file"]


# Graphs that are none.


def drop(op):
    return lambda data: nodes(data).remove(find(data, op))


def spec(key, number, *values):
    def change(data):
        data["program"][key][number] = list(values)

    return change


def with_value(op, value):
    return set_in(op, value=value)


def constant_spec(data):
    return next(one for one in data["program"]["inputs"] if one[0] == "CONSTANT_TENSOR")


GRAPHS = {
    "a node that is not there": (set_argument({"node": "evil"}), "'evil'}, which stands for no value"),
    "a cycle": (
        lambda data: find(data, "call_function").update(
            args=[{"node": find(data, "call_function")["name"]}]
        ),
        "or for a node that comes later",
    ),
    "a later node": (lambda data: nodes(data).insert(-1, nodes(data).pop(0)), "a node that comes later"),
    "a name twice": (lambda data: nodes(data).insert(0, nodes(data)[0]), "which is another's"),
    "no output": (drop("output"), "'output' is not in list"),
    "nodes behind the output": (lambda data: nodes(data).append(nodes(data)[0]), "nodes behind the output"),
    "fewer arguments": (set_in("call_function", args=[]), "with arguments that it does not have"),
    "more arguments": (set_in("call_function", args=[1] * 20), "with arguments that it does not have"),
    "a huge shape": (with_value("placeholder", {"tensor": ["float32", [2**62, 2]]}), "RuntimeError"),
    "a negative shape": (with_value("placeholder", {"tensor": ["float32", [-1]]}), "RuntimeError"),
    "a shape of fractions": (with_value("placeholder", {"tensor": ["float32", [1.5]]}), "TypeError"),
    "an unknown dtype": (with_value("placeholder", {"tensor": ["evil", [1]]}), NO_VALUE),
    "an input that is no tensor": (with_value("placeholder", 3), "is no tensor"),
    "a tensor as an argument": (set_argument({"tensor": ["float32", [2]]}), NO_VALUE),
    "a node as a value": (with_value("call_function", {"node": "tensors_0"}), NO_VALUE),
    "two values in one": (set_argument({"node": "tensors_0", "tuple": []}), "ValueError"),
    "a number beyond 64 bits": (set_argument(2**63), "which has more than 64 bits"),
    "a negative number beyond 64 bits": (set_argument([-(2**63) - 1]), "which has more than 64 bits"),
    "a number that is long": (lambda data: data.update({"rng state": 10**4000}), "TypeError"),
    "no result": (lambda data: nodes(data)[-1].update(args=[]), "IndexError"),
    "a result that is a number": (lambda data: nodes(data)[-1].update(args=[[3]]), "AttributeError"),
    "fewer results": (
        lambda data: (nodes(data)[-1].update(args=[[]]), data["program"]["outputs"].clear()),
        "another number of inputs or outputs",
    ),
    "fewer kinds of inputs": (lambda data: data["program"]["inputs"].pop(), "zip"),
    "an unknown kind of input": (spec("inputs", 0, "CUSTOM_OBJ", "evil"), "KeyError: 'CUSTOM_OBJ'"),
    "an unknown kind of output": (spec("outputs", 0, "TOKEN", None), "KeyError: 'TOKEN'"),
    "another input of the user": (spec("inputs", 0, "USER_INPUT", None), "another number of inputs"),
    "no buffer": (spec("outputs", 0, "BUFFER_MUTATION", "model.inner.fc.weight"), "which is no buffer"),
    "an unknown constant": (lambda data: constant_spec(data).__setitem__(1, "evil"), "KeyError: 'evil'"),
    "another constant": (
        lambda data: data["constants"].update(
            dict.fromkeys(data["constants"], data["model"]["tensors"][0]["number"])
        ),
        r"its constant .* is torch.float32 of shape \(2, 3\)",
    ),
    "nodes without a place": (lambda data: find(data, "call_function").pop("trace"), "KeyError: 'trace'"),
}


@pytest.mark.usefixtures("watched")
def test_graphs_that_are_none(tmp_path, exported):
    for change, match in GRAPHS.values():
        refuse(tmp_path, with_manifest(exported, change), match)


def test_a_manifest_that_is_deep(tmp_path, exported):
    header, data = split(exported)
    header["__metadata__"][KEY] = text = "[" * 10**5
    tensors = {name: safetensors.torch.load(exported)[name] for name in "012"}
    header["__metadata__"]["crc32"] = model_files._check_sum(text, tensors)
    refuse(tmp_path, join(header, data), "RecursionError")


# Files that are something else.


def test_other_files(tmp_path):
    for content, match in [
        (b"", "is empty"),
        (b"hello, this is text", "is not in the format of safetensors"),
        (bytes(20), "is not in the format of safetensors"),
        (struct.pack("<Q", 2), "is not in the format of safetensors"),
        (struct.pack("<Q", 2) + b"{", "damaged or cut off"),
        (struct.pack("<Q", 2) + b"{}", "its metadata has no ipu_pipeline.poptorch"),
        (struct.pack("<Q", 2**63) + b"{}", "header too large"),
        (struct.pack("<Q", 2**30) + b"{}", "damaged or cut off"),
        (safetensors.torch.save({"0": x}, {"format": "pt"}), r"no ipu_pipeline.poptorch, but \['format'\]"),
        (safetensors.torch.save({"0": x}, {KEY: "{}"}), "its check sum does not match"),
    ]:
        refuse(tmp_path, content, match)


def test_a_file_of_the_version_before(tmp_path):
    """It was a ZIP archive, as files of torch are."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("manifest.json", '{"version": 1}')
    refuse(tmp_path, made.getvalue(), "is a ZIP archive.* 0.1.0 .*in version 1 of the format.*: export the")
    torch.save({"a": 1}, made)
    refuse(tmp_path, made.getvalue(), "is a ZIP archive. If compileAndExport or save wrote it")


def set_header(name, **changes):
    return lambda header: header[name].update(changes)


def add_tensor(name, **changes):
    def change(header):
        end = max(one["data_offsets"][1] for one in header.values() if "data_offsets" in one)
        header[name] = {"dtype": "U8", "shape": [0], "data_offsets": [end, end], **changes}

    return change


HEADERS = {
    "a size beyond the file": set_header("0", shape=[2**40], data_offsets=[0, 2**42]),
    "a negative size": set_header("0", shape=[-2, -3]),
    "as many elements": lambda header: header["0"].update(shape=header["0"]["shape"][::-1] + [1]),
    "another dtype": set_header("0", dtype="I32"),
    "an unknown dtype": set_header("0", dtype="EVIL"),
    "the bytes of another": lambda header: header["0"].update(data_offsets=header["1"]["data_offsets"]),
    "a tensor too many": add_tensor("evil"),
    "a tensor too many, by number": add_tensor("3"),
    "a tensor too few": lambda header: header.pop("0"),
    "another name": lambda header: header.update({"../0": header.pop("0")}),
    "another manifest": set_header("__metadata__", **{KEY: "{}"}),
    "metadata that is no text": set_header("__metadata__", crc32=0),
}


def test_headers_that_say_something_else(tmp_path, exported):
    for change in HEADERS.values():
        header, data = split(exported)
        change(header)
        refuse(tmp_path, join(header, data), r"damaged or cut off.*(SafetensorError|ValueError)")


def test_tensors_that_are_there_twice_or_behind_the_others(tmp_path, exported):
    header, data = split(exported)
    text = json.dumps(header).encode()
    twice = text[:-1] + b', "0": ' + json.dumps(header["1"]).encode() + b"}"
    refuse(tmp_path, join(twice, data), "damaged or cut off")
    refuse(tmp_path, exported + b"more", "damaged or cut off")


def test_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name, match in [
        (tmp_path / "missing", "There is no file"),
        (tmp_path / "link", "There is no file"),
        (tmp_path, "is a directory"),
        (tmp_path / "pipe", "is no regular file"),
        ("\0", "cannot be read"),
    ]:
        with pytest.raises(poptorch.Error, match=match):
            poptorch.load(name)
    for wrong in (7, None, b"file"):
        with pytest.raises(TypeError, match="filename must be a path"):
            poptorch.load(wrong)


def update(changes, *keys):
    """Changes the dict that some keys lead to."""
    return lambda data: functools.reduce(operator.getitem, keys, data).update(changes)


def returns(kind, name):
    return update({"is": kind, "class": name, "of": []}, "outputs")


MANIFESTS = {
    "version": (update({"version": 99}), "is of version 99 of its format, made by ipu_pipeline"),
    "class": (returns("object", "antigravity:Evil"), "objects of class Evil. Import it from antigravity"),
    "no structure": (returns("object", "subprocess:Popen"), "neither a named tuple nor a data class"),
    "plain dict": (
        returns("dict of fields", "builtins:dict"),
        "builtins:dict is no dict that is a data class",
    ),
    "a data class that is no dict": (
        returns("dict of fields", "ipu_pipeline.poptorch.structures:Structure"),
        "structures:Structure is no dict that is a data class",
    ),
    "nothing": (dict.clear, "KeyError: 'version'"),
    "optimizer": (
        update({"class": "subprocess.Popen"}, "model", "optimizer"),
        "KeyError: 'subprocess.Popen'",
    ),
    "options": (
        update({"of": [["device_iterations", -1]]}, "model", "options", "", "values"),
        "KeyError|must be",
    ),
    "name": (rename("inner.fc.weight", ".."), r"a tensor of the name '\.\.'"),
    "name of a method": (rename("inner.fc.weight", "forward"), "a tensor of the name 'forward'"),
    "unknown name": (update({"name": "other"}, "model", "tensors", 0), "KeyError: 'inner.fc.weight'"),
    "other names": (
        lambda data: data["model"]["tensors"].pop(),
        "KeyError|parameter inner.fc.bias, which this one does not have",
    ),
    "number": (update({"number": 10**9}, "model", "tensors", 0), "KeyError"),
    "number of another": (
        lambda data: data["model"]["tensors"][0].update(number=next(iter(data["constants"].values()))),
        r"whose inner.fc.weight is torch.float32 of shape \(2, 3\); this model's",
    ),
    "random numbers": (update({"rng state": ["x"]}), "'x' is no int"),
    "negative random numbers": (update({"rng state": [1, 1, -1]}), "is no state of random numbers"),
    "other random numbers": (update({"rng state": [1, 1]}), "another kind of random"),
}


def test_manifests_that_say_something_else(tmp_path, exported):
    for change, match in MANIFESTS.values():
        (tmp_path / "file").write_bytes(with_manifest(exported, change))
        with pytest.raises(poptorch.Error, match=match):
            poptorch.load(tmp_path / "file")


def test_a_program_of_another_torch(tmp_path, exported):
    def change(data):
        find(data, "call_function")["kwargs"] = {"new": 1}
        data["made by"]["torch"] = "9.9.9"

    content = with_manifest(exported, change)
    refuse(tmp_path, content, "made with torch 9.9.9, and torch .* has other operations")


def test_files_that_were_cut_off(tmp_path, exported):
    file = tmp_path / "file"
    for size in range(0, len(exported), 499):
        file.write_bytes(exported[:size])
        with pytest.raises(poptorch.Error, match="is empty|not in the format|damaged or cut off"):
            poptorch.load(file)


def test_files_with_a_wrong_byte(tmp_path, exported):
    file = tmp_path / "file"
    for place in range(0, len(exported), 499):
        file.write_bytes(exported[:place] + bytes([exported[place] ^ 0x55]) + exported[place + 1 :])
        with pytest.raises(poptorch.Error):
            poptorch.load(file)
