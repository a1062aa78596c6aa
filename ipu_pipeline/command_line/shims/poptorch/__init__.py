"""`import poptorch` under `ipu-pipeline run`: it gives `ipu_pipeline.poptorch`."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import ipu_pipeline.poptorch

METADATA = "Metadata-Version: 2.1\nName: poptorch\nVersion: 3.3.0\n"  # the SDK whose names are here
_ANY = importlib.metadata.DistributionFinder.Context()


class Aliases(importlib.metadata.DistributionFinder):
    """Gives the modules of `ipu_pipeline.poptorch` as those of `poptorch`, so that each exists once."""

    def find_spec(  # noqa: D102  # as its base says
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.startswith("poptorch."):
            with contextlib.suppress(ModuleNotFoundError):  # which may say what name is near
                if (spec := importlib.util.find_spec(f"ipu_pipeline.{fullname}")) is not None:
                    return importlib.machinery.ModuleSpec(fullname, Alias(spec.name), origin=spec.origin)
        return None

    def find_distributions(  # noqa: D102  # as its base says
        self, context: importlib.metadata.DistributionFinder.Context = _ANY
    ) -> Iterable[importlib.metadata.Distribution]:
        return [Installed()] if context.name in (None, "poptorch") else []


class Installed(importlib.metadata.Distribution):
    """PopTorch as a package that pip installed, for programs that ask for its version."""

    def read_text(self, filename: str) -> str | None:  # noqa: D102  # as its base says
        return METADATA if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:  # noqa: D102  # as its base says
        return Path(__file__).parents[1] / path


class Alias(importlib.abc.Loader):
    """Gives a module by another name."""

    def __init__(self, real_name: str) -> None:
        self._real_name = real_name

    def exec_module(self, module: ModuleType) -> None:  # noqa: D102  # as its base says
        sys.modules[module.__name__] = self.load_module()

    def load_module(self, fullname: str | None = None) -> ModuleType:  # noqa: D102  # programs call it
        del fullname
        return importlib.import_module(self._real_name)


sys.meta_path.insert(0, Aliases())
sys.modules["poptorch"] = ipu_pipeline.poptorch
