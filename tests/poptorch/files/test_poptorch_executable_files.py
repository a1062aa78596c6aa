"""Files of models that are not what they should be: each is refused by name, and nothing in one is run."""

import contextlib
import io
import json
import os
import pathlib
import pickle
import zipfile

import pytest
import torch
from torch import nn

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch.files import programs
from tests.support.poptorch_front import make_options, seeded

x = torch.ones(2, 3)
MODEL = "archive/models/model.json"
WEIGHTS = "archive/data/weights/model_weights_config.json"
CONSTANTS = "archive/data/constants/model_constants_config.json"


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.shift = torch.ones(2)

    def forward(self, x):
        return self.fc(x) + self.shift


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The bytes of a file."""
    file = tmp_path_factory.mktemp("exported") / "model"
    model = seeded(Small)
    executor = poptorch.trainingModel(WithLoss(model), make_options())
    executor.compileAndExport(file, x)
    return file.read_bytes()


class WithLoss(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return poptorch.identity_loss(self.inner(x), "sum")


def unzip(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(parts, compression=zipfile.ZIP_STORED):
    """A ZIP archive of pairs of names and contents."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as archive:
        for name, content in parts.items() if isinstance(parts, dict) else parts:
            archive.writestr(name, content)
    return made.getvalue()


def with_part(content, name, change):
    """A file with one part changed."""
    parts = unzip(content)
    return pack({**parts, name: change(parts[name])})


def with_json(content, name, change):
    """The same, for a part that is JSON; `change` changes it in place."""

    def changed(text):
        data = json.loads(text)
        change(data)
        return json.dumps(data).encode()

    return with_part(content, name, changed)


class Bomb:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.path),)


def refuse(tmp_path, content, match):
    """Loads a file that must be refused; nothing of it may run."""
    file = tmp_path / "file"
    file.write_bytes(content)
    for load in (poptorch.load, poptorch.trainingModel(WithLoss(Small()), make_options()).loadExecutable):
        with pytest.raises(poptorch.Error, match=match) as raised:
            load(file)
        assert not isinstance(raised.value.__cause__, AssertionError), raised.value.__cause__
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_the_file_itself_loads(tmp_path, exported):
    (tmp_path / "file").write_bytes(pack(unzip(exported)))
    loaded = poptorch.load(tmp_path / "file")
    assert loaded(x).shape == (1,)


# Payloads, in each place where torch's archive can hold one.


def add(name):
    return lambda parts, bomb: parts.update({name: bomb})


def in_config(config, entry, prefix=""):
    """An entry that is to be unpickled, and the part that it names."""

    def change(parts, bomb):
        folder = config.rpartition("/")[0]
        parts[f"{folder}/{prefix}0"] = bomb
        data = json.loads(parts[config])
        first = next(iter(data["config"].values()))
        data["config"] = {"evil": {**first, "path_name": f"{prefix}0", **entry}}
        parts[config] = json.dumps(data).encode()

    return change


PAYLOADS = {
    "sample inputs": add("archive/data/sample_inputs/model.pt"),
    "weights in the old way": add("archive/data/weights/model.pt"),
    "constants in the old way": add("archive/data/constants/model.pt"),
    "a pickled weight": in_config(WEIGHTS, {"use_pickle": True}, "weight_"),
    "a pickled weight, by a number": in_config(WEIGHTS, {"use_pickle": 1}, "weight_"),
    "a pickled constant": in_config(CONSTANTS, {"use_pickle": True}, "tensor_"),
    "a script object": in_config(CONSTANTS, {"use_pickle": True, "tensor_meta": None}, "custom_obj_"),
    "a script object, unsaid": in_config(CONSTANTS, {"use_pickle": False}, "custom_obj_"),
    "an opaque object": in_config(CONSTANTS, {"use_pickle": True, "tensor_meta": None}, "opaque_obj_"),
    "an opaque object, unsaid": in_config(CONSTANTS, {"use_pickle": False}, "opaque_obj_"),
    "another model": add("archive/data/sample_inputs/other.pt"),
    "a shared library": add("archive/data/aotinductor/model/code.so"),
    "the format of torch 2.7": add("serialized_state_dict.pt"),
    "a directory beside": add("archive2/data/sample_inputs/model.pt"),
    "extra files": add("archive/extra/file"),
    "a path out of the archive": add("archive/data/weights/../../../../evil"),
}


@pytest.mark.parametrize("place", PAYLOADS)
def test_a_payload_is_refused_before_torch_sees_it(tmp_path, exported, monkeypatch, place):
    bomb = io.BytesIO()
    torch.save(Bomb(tmp_path / "exploded"), bomb)
    plain = pickle.dumps(Bomb(tmp_path / "exploded"))

    def planted(program):
        parts = unzip(program)
        PAYLOADS[place](parts, plain if "opaque" in place else bomb.getvalue())
        return pack(parts)

    monkeypatch.setattr(torch.export, "load", lambda _file: pytest.fail("torch saw it"))
    monkeypatch.setattr(pickle, "loads", lambda *_args, **_kwargs: pytest.fail("it was unpickled"))
    refuse(tmp_path, with_part(exported, "program.pt2", planted), "program in the file|program has a part")


def test_the_payloads_are_real(tmp_path, exported):
    """torch itself runs what is planted, where nobody refuses it."""
    bomb = io.BytesIO()
    torch.save(Bomb(tmp_path / "exploded"), bomb)
    for place in ("sample inputs", "a pickled weight", "a pickled constant"):
        parts = unzip(unzip(exported)["program.pt2"])
        PAYLOADS[place](parts, bomb.getvalue())
        with contextlib.suppress(Exception):  # what it unpickled is no tensor
            torch.export.load(io.BytesIO(pack(parts)))
        assert (tmp_path / "exploded").exists(), place
        (tmp_path / "exploded").unlink()


def find_dict(data, key):
    """The first dict within that has a key."""
    if isinstance(data, dict):
        if key in data:
            return data
        data = list(data.values())
    if isinstance(data, list):
        for part in data:
            if (found := find_dict(part, key)) is not None:
                return found
    return None


def set_first(key, value):
    def change(data):
        find_dict(data, key)[key] = value

    return change


def set_in_node(**changes):
    return lambda data: find_dict(data, "target").update(changes)


INJECTED = "x=__import__('pathlib').Path('EXPLODED').touch()"


def test_names_that_are_code_are_real(tmp_path, exported):
    """torch runs what it makes of the names in a graph."""
    code = INJECTED.replace("EXPLODED", str(tmp_path / "exploded"))
    program = unzip(exported)["program.pt2"]
    parts = unzip(program)
    parts[MODEL] = parts[MODEL].replace(b"tensors_0", code.encode())
    with contextlib.suppress(Exception):
        torch.export.load(io.BytesIO(pack(parts)))
    assert (tmp_path / "exploded").exists()


def set_spec(spec):
    return set_first("in_spec", json.dumps([1, spec]))


LEAF = {"type": None, "context": None, "children_spec": []}
EVIL_ENUM = json.dumps([{"__enum__": True, "fqn": "antigravity:Evil", "name": "x"}])
CODE = {
    "a function of torch": (set_first("target", "torch.hub.load"), "a call of torch.hub.load"),
    "a function of a module": (set_first("target", "torch.os.system"), "a call of torch.os.system"),
    "a function of math": (set_first("target", "math.sin"), "a call of math.sin"),
    "an operator": (set_first("target", "_operator.call"), "a call of _operator.call"),
    "a method": (set_first("target", "torch.ops.load_library"), "a call of torch.ops.load_library"),
    "a dunder": (
        set_first("target", "torch.ops.aten.__init__.__globals__"),
        "a call of|does not exist here",
    ),
    "an extension": (set_first("target", "#evil:op"), "a call of #evil:op"),
    "an unknown operation": (set_first("target", "torch.ops.evil.op.default"), "does not exist here"),
    "an operation without a lowering": (
        set_first("target", "torch.ops.aten.set_.source_Tensor"),
        "has no lowering here",
    ),
    "an operator on graphs": (
        set_first("target", "torch.ops.higher_order.triton_kernel_wrapper_mutation"),
        "a call of torch.ops.higher_order.triton",
    ),
    "a name of an input": (
        lambda data: data.update(json.loads(json.dumps(data).replace("tensors_0", INJECTED))),
        "a name .x=__import__",
    ),
    "a name of a node": (set_in_node(name="a = 1; b"), "a name 'a = 1; b'"),
    "a name of an argument": (
        lambda data: find_dict(data, "target")["inputs"][0].update(name="a=1, b"),
        "a name 'a=1, b'",
    ),
    "names of arguments": (set_first("forward_arg_names", ["a=1"]), "a forward_arg_names 'a=1'"),
    "a shape to evaluate": (
        set_first("as_int", {"as_expr": {"expr_str": "__import__('os')", "hint": None}}),
        "as_expr, expr_str|as_expr",
    ),
    "guards": (lambda data: data.update(guards_code=["__import__('os')"]), "guards_code"),
    "ranges": (
        lambda data: data.update(range_constraints={"s0": {"min_val": 0, "max_val": 1}}),
        "range_constraints",
    ),
    "a module to import": (
        set_spec({"type": "builtins.dict", "context": EVIL_ENUM, "children_spec": [LEAF]}),
        "in_spec with builtins.dict",
    ),
    "a default factory": (
        set_spec({"type": "collections.defaultdict", "context": "{}", "children_spec": []}),
        "in_spec with collections.defaultdict",
    ),
    "a class": (
        set_spec({"type": "evil.Class", "context": None, "children_spec": []}),
        "in_spec with evil.Class",
    ),
}


@pytest.mark.parametrize("place", CODE)
def test_code_in_the_graph_is_refused_before_torch_sees_it(tmp_path, exported, monkeypatch, place):
    change, match = CODE[place]
    changed = with_part(exported, "program.pt2", lambda program: with_json(program, MODEL, change))
    monkeypatch.setattr(torch.export, "load", lambda _file: pytest.fail("torch saw it"))
    refuse(tmp_path, changed, match)


def test_programs_that_torch_would_read_otherwise(exported):
    """What torch gets is made anew of what was looked at."""
    program = unzip(exported)["program.pt2"]
    parts = list(unzip(program).items())
    with pytest.warns(UserWarning, match="Duplicate name"):
        twice = pack([*parts, (MODEL, b"{}")])
    with pytest.raises(ValueError, match="the program has a part"):
        programs.read_program(twice)
    with pytest.raises(ValueError, match="the program has a part"):
        programs.read_program(pack(parts, zipfile.ZIP_DEFLATED))


# Files that are something else.


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"hello, this is text", "it is no archive"),
        (b"PK", "it is no archive"),
        (b"PK\x03\x04", "damaged or cut off"),
        (b"PK\x05\x06" + bytes(18), "it has no manifest.json"),
    ],
)
def test_no_archives(tmp_path, content, match):
    refuse(tmp_path, content, match)


def test_a_file_of_torch(tmp_path):
    saved = io.BytesIO()
    torch.save({"a": 1}, saved)
    refuse(tmp_path, saved.getvalue(), "it has no manifest.json, but '.*data.pkl'")


@pytest.mark.parametrize(
    "name", ["../evil", "/evil", "tensors/../../evil", "evil", "tensors/0x", "tensors\\0"]
)
def test_parts_that_lead_elsewhere(tmp_path, exported, name):
    refuse(tmp_path, pack({**unzip(exported), name: b"evil"}), "which is none of such a file")


def test_parts_that_are_there_twice_or_packed(tmp_path, exported):
    parts = unzip(exported)
    with pytest.warns(UserWarning, match="Duplicate name"):
        twice = pack([*parts.items(), ("tensors/0", b"")])
    refuse(tmp_path, twice, "which is none of such a file")
    refuse(tmp_path, pack(parts, zipfile.ZIP_DEFLATED), "is packed, or longer than the file")
    del parts["tensors/1"]
    refuse(tmp_path, pack(parts), "no item named 'tensors/1'")


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


def manifest(change):
    return lambda content: with_json(content, "manifest.json", change)


def first_tensor(**changes):
    return lambda data: data["tensors"][0].update(changes)


def rename(name):
    def change(data):
        data.update(json.loads(json.dumps(data).replace("inner.fc.weight", name)))

    return change


MANIFESTS = {
    "version": (
        lambda data: data.update(version=99),
        "is of version 99 of its format, made by ipu_pipeline",
    ),
    "format": (lambda data: data.update(format="other"), "its format is 'other'"),
    "byte order": (
        lambda data: data.update({"byte order": "big"}),
        "big-endian, and this machine is little",
    ),
    "shape": (first_tensor(shape=[1000]), "has 8 bytes, and not torch.float32 of"),
    "negative": (first_tensor(shape=[-2, -3]), "bytes, and not torch.float32"),
    "dtype": (first_tensor(dtype="complex64"), "KeyError"),
    "class": (
        lambda data: data["outputs"].update({"is": "object", "class": "antigravity:Evil", "of": []}),
        "objects of class Evil. Import it from antigravity",
    ),
    "a class that is no structure": (
        lambda data: data["outputs"].update({"is": "object", "class": "subprocess:Popen", "of": []}),
        "neither a named tuple nor a data class",
    ),
    "a dict that is no data class": (
        lambda data: data["outputs"].update({"is": "dict of fields", "class": "builtins:dict", "of": []}),
        "builtins:dict is no dict that is a data class",
    ),
    "a data class that is no dict": (
        lambda data: data["outputs"].update(
            {"is": "dict of fields", "class": "ipu_pipeline.poptorch.structures:Structure", "of": []}
        ),
        "is no dict that is a data class",
    ),
    "nothing": (lambda data: data.clear(), "KeyError: 'format'"),
    "optimizer": (
        lambda data: data["model"]["optimizer"].update({"class": "subprocess.Popen"}),
        "KeyError: 'subprocess.Popen'",
    ),
    "options": (
        lambda data: data["model"]["options"][""]["values"].update(of=[["device_iterations", -1]]),
        "KeyError|must be",
    ),
    "name": (rename(".."), r"a tensor of the name '\.\.'"),
    "name of a method": (rename("forward"), "a tensor of the name 'forward'"),
    "unknown name": (
        lambda data: data["model"]["tensors"][0].update(name="other"),
        "KeyError: 'inner.fc.weight'",
    ),
    "other names": (
        lambda data: data["model"]["tensors"].pop(),
        "KeyError|parameter inner.fc.bias, which this one does not have",
    ),
    "number": (lambda data: data["model"]["tensors"][0].update(number=10**9), "IndexError"),
    "random numbers": (lambda data: data.update({"rng state": ["x"]}), "'x' is no int"),
    "negative random numbers": (
        lambda data: data.update({"rng state": [1, 1, -1]}),
        "is no state of random numbers",
    ),
    "other random numbers": (lambda data: data.update({"rng state": [1, 1]}), "another kind of random"),
}


@pytest.mark.parametrize("place", MANIFESTS)
def test_manifests_that_say_something_else(tmp_path, exported, place):
    change, match = MANIFESTS[place]
    (tmp_path / "file").write_bytes(manifest(change)(exported))
    with pytest.raises(poptorch.Error, match=match):
        poptorch.load(tmp_path / "file")


def test_a_program_of_another_torch(tmp_path, exported):
    def change(data):
        data["schema_version"]["major"] = 99

    newer = with_part(exported, "program.pt2", lambda program: with_json(program, MODEL, change))
    refuse(tmp_path, newer, "Serialized schema version .* does not match")
    newer = with_json(newer, "manifest.json", lambda data: data["made by"].update(torch="9.9.9"))
    refuse(tmp_path, newer, "made with torch 9.9.9, and torch .* cannot read its program")


@pytest.mark.parametrize("step", [pytest.param(211, marks=pytest.mark.thorough), 2111])
def test_files_that_were_cut_off(tmp_path, exported, step):
    file = tmp_path / "file"
    for size in range(0, len(exported), step):
        file.write_bytes(exported[:size])
        with pytest.raises(poptorch.Error, match="is empty|no archive|damaged or cut off"):
            poptorch.load(file)


@pytest.mark.parametrize("step", [pytest.param(97, marks=pytest.mark.thorough), 1499])
def test_files_with_a_wrong_byte(tmp_path, exported, step):
    """Either it is noticed, or the byte means nothing, and the model is the same."""
    file = tmp_path / "file"
    file.write_bytes(exported)
    expected = dict(poptorch.load(file).model.state_dict())
    num_noticed = 0
    places = range(0, len(exported), step)
    for place in places:
        file.write_bytes(exported[:place] + bytes([exported[place] ^ 0x55]) + exported[place + 1 :])
        try:
            loaded = poptorch.load(file)
        except poptorch.Error:
            num_noticed += 1
        else:
            for name, tensor in loaded.model.state_dict().items():
                assert torch.equal(tensor, expected[name])
    assert num_noticed > 0.9 * len(places)
