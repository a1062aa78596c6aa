"""Runs the examples of public names, in processes of their own: some change what is for all."""

import doctest
import importlib
import inspect
import sys

import jax

from ipu_pipeline import config
from tests.support.programs import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
import reference  # it belongs to the site's configuration

HOMES = reference.find_homes()


def objects_of(module):
    """The public objects that a module documents, and what is public in its classes."""
    for (of, name), home in HOMES.items():
        value = getattr(importlib.import_module(of), name)
        if of != home or home != module or not callable(value):
            continue
        yield name, value
        if inspect.isclass(value):
            for inner, member in vars(value).items():
                if not inner.startswith("_"):
                    yield f"{name}.{inner}", getattr(member, "__func__", member)


def run_all(modules):
    """Runs the examples of some modules; prints the lines that do not do what they say."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    preamble = "".join(f">>> {line}\n" for line in reference.PREAMBLE.splitlines() if line)
    for module in modules:
        for name, value in objects_of(module):
            if example := reference.example_in(value.__doc__):
                assert example.startswith(">>> "), f"the example of {module}.{name}"
                test = doctest.DocTestParser().get_doctest(
                    preamble + example, {}, f"{module}.{name}", None, 0
                )
                config.reset_ipu_configuration()
                runner.run(test)
    assert runner.tries > 0


def main(*modules):
    jax.config.update("jax_num_cpu_devices", 4)
    run_all(modules)
