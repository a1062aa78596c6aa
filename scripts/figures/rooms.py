"""The rooms of the package, in order, and what imports what, read from the sources."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["FLOORS", "MODULES", "Room", "read_all_imports", "read_imports", "room_of"]

PACKAGE = Path(__file__).resolve().parents[2] / "ipu_pipeline"


@dataclass(frozen=True)
class Room:
    """A folder, or single modules that stand beside each other.

    Attributes:
      name: what it is called.
      members: the folder, or the modules, by their dotted names within the package.
      purpose: in a line; of a folder the first line of its docstring.
    """

    name: str
    members: tuple[str, ...]
    purpose: str


def _folder(name: str) -> Room:
    text = (PACKAGE / name / "__init__.py").read_text()
    first = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
    return Room(f"{name}/", (name.replace("/", "."),), first.rstrip("."))


def _beside(name: str, members: str, purpose: str) -> Room:
    return Room(name, tuple(members.split()), purpose)


# From the ground up. A room imports only those before it.
FLOORS = (
    _folder("ground"),
    _folder("graphcore"),
    _beside(
        "engine: ground",
        "engine.option_types engine.mesh_isolation engine.state engine.progress engine.watching "
        "engine.peers engine.emulation",
        "State, progress, who watches, other processes",
    ),
    _folder("engine/jaxprs"),
    _folder("engine/schedules"),
    _folder("engine/tracing"),
    _folder("engine/programs"),
    _folder("engine/updates"),
    _folder("engine/devices"),
    _folder("engine/planning"),
    _folder("engine/plan"),
    _folder("engine/execution"),
    _folder("engine/inspect"),
    _beside(
        "engine: roof",
        "engine.pipeline_options engine.building engine.pipeline_states engine.step_micro_batches "
        "engine.measured_choices engine.pipeline engine.loop_markers engine.loop engine.segments "
        "engine.automatic_splits engine.resplitting engine.inspect.pipelines engine.measuring "
        "engine.reference engine.exporting engine.processes engine.fronts engine",
        "Pipeline, Loop, the plain loop that all is compared with, and what others may import",
    ),
    _folder("engine/generation"),
    _folder("processes"),
    _folder("reports"),
    _folder("data"),
    _folder("queues"),
    _folder("checkpointing"),
    _beside("saved states", "saved_states", "engine.save, engine.restore and states in memory"),
    _beside(
        "tf1: ground",
        "tf1.config tf1.distributed tf1.utils tf1.gradient_accumulation tf1.scopes tf1.ipu_run_config",
        "What is configured, and where operations go",
    ),
    _beside("tf1: graph", "tf1.graph", "Symbols, placeholders and operations of a graph"),
    _folder("tf1/optimizers"),
    _beside("tf1: hooks", "tf1.ipu_session_run_hooks", "What is called around an estimator's runs"),
    _folder("tf1/program"),
    _folder("tf1/session"),
    _folder("tf1/layers"),
    _folder("tf1/ops"),
    _beside(
        "tf1: loops and queues",
        "tf1.loops tf1.ipu_compiler tf1.ipu_infeed_queue tf1.ipu_outfeed_queue tf1.popdist tf1.metrics",
        "Graphcore's names",
    ),
    _folder("tf1/estimator"),
    _beside(
        "tf1: estimators",
        "tf1.ipu_pipeline_estimator tf1.ipu_estimator tf1.serving tf1.tutorial_support tf1",
        "The estimators",
    ),
    _beside("package", "__init__", "import ipu_pipeline as ipu"),
    _beside(
        "poptorch: ground",
        "poptorch.errors poptorch.enums poptorch.logs poptorch.dtypes poptorch.markers poptorch.structures "
        "poptorch.annotations poptorch.operations poptorch.profiling poptorch.ops poptorch.autocasting "
        "poptorch.replica_groups poptorch.thread_views poptorch._args_parser poptorch._impl "
        "poptorch._utils",
        "PopTorch's names; torch's dtypes; markers of blocks",
    ),
    _folder("poptorch/lowering"),
    _folder("poptorch/graphs"),
    _folder("poptorch/options"),
    _folder("poptorch/optim"),
    _folder("poptorch/data"),
    _folder("poptorch/files"),
    _folder("poptorch/execution"),
    _beside(
        "poptorch: roof", "poptorch._poplar_executor poptorch", "import ipu_pipeline.poptorch as poptorch"
    ),
    _folder("launching"),
    _beside("ray", "ray", "ray.train: jobs on a Ray cluster"),
    _folder("command_line"),
    _beside("program", "__main__", "python -m ipu_pipeline"),
)
# What a package's door names of later rooms. It is imported when somebody asks for it, and not before.
NAMED_LATER = {
    "__init__": {"ray"},
    "engine.__init__": {
        "saved_states",
        "engine.generation.generator",
        "engine.generation.requests",
        "engine.generation.sampling",
    },
    "engine.inspect.__init__": {"engine.inspect.pipelines"},
    "engine.planning.__init__": {"engine.inspect.pipelines"},
}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def room_of(module: str) -> int:
    """The number of a module's room in `FLOORS`.

    Raises:
      ValueError: it is in none.
    """
    parts = module.removesuffix(".__init__").split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for number, room in enumerate(FLOORS):
            # A roof is the package itself only.
            is_inner = name in ("engine", "poptorch", "tf1") and length < len(parts)
            if name in room.members and not is_inner:
                return number
    raise ValueError(f"{module} is in no room")


def read_imports(module: str, source: str) -> set[str]:
    """The modules of the package that a module imports, in functions and for annotations too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{module}: relative import")
            names = [(node.module or "", alias.name) for alias in node.names]
        for base, name in names:
            first, _, inner = base.partition(".")
            if first == "ipu_pipeline":
                both = ".".join(part for part in (inner, name) if part)
                known = [path.lstrip(".") for part in (both, inner) for path in (part, f"{part}.__init__")]
                found.add(next(candidate for candidate in known if candidate in MODULES))
    return found


@cache
def read_all_imports() -> dict[str, frozenset[str]]:
    """What each module imports, without `NAMED_LATER`."""
    return {
        module: frozenset(read_imports(module, path.read_text()) - NAMED_LATER.get(module, set()))
        for module, path in MODULES.items()
    }
