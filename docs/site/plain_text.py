"""The pages as plain text, and llms.txt, which lists them for programs that read.

Every page is beside its HTML page as the Markdown that it was made of, or, of notebooks and the API
reference, whose text is not Markdown, as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

INTRODUCTION = """\
# ipu_pipeline

> Pipeline parallelism on JAX: stages are functions, micro-batches overlap over several devices, and the
> result equals training on one. It has the interfaces that Graphcore had for IPUs, in TensorFlow 1 and
> PyTorch (PopTorch), and an engine in plain JAX. On a laptop, virtual devices of the CPU stand in for IPUs.

Each page below is plain text.
"""


def _title(app: Any, name: str) -> str:
    return app.env.titles[name].astext()


def _is_part(name: str) -> bool:
    """Whether the page's text is a part of that of its module."""
    return name.startswith("build/api/")


def _write(app: Any, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    target = Path(app.outdir)
    for name in app.env.found_docs:
        if _is_part(name):
            continue
        source = Path(app.env.doc2path(name))
        if source.suffix == ".md" and not name.startswith("docs/api/"):
            (target / f"{name}.md").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        else:
            parts = [name, *filter(_is_part, app.env.toctree_includes.get(name, ()))]
            text = "\n\n".join(app.env.get_doctree(part).astext() for part in parts)
            (target / f"{name}.txt").write_text(text, encoding="utf-8")
    lines = [INTRODUCTION]
    root = app.config.root_doc
    for door in app.env.toctree_includes[root]:
        lines.append(f"\n## {_title(app, door)}\n")
        for name in app.env.toctree_includes[door]:
            ending = "md" if (target / f"{name}.md").exists() else "txt"
            lines.append(f"- [{_title(app, name)}]({name}.{ending})")
    (target / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True}
