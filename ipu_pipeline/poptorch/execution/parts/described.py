"""What a wrapped model is, for people: `print(wrapped)` and `wrapped.summary()`."""

from __future__ import annotations

import abc

from ipu_pipeline.poptorch.annotations import module_repr
from ipu_pipeline.poptorch.execution.building import Wrapped, batching_of
from ipu_pipeline.poptorch.execution.compiled import CompiledModel
from ipu_pipeline.poptorch.execution.weights import on_host
from ipu_pipeline.poptorch.graphs.model_summary import ModelSummary, summarize_module, summarize_stages

__all__ = ["Described"]


class Described(abc.ABC):
    """The part of a wrapped model that says what it is made of."""

    _wrapped: Wrapped
    _compiled: CompiledModel | None

    def summary(self, lines: bool = False) -> ModelSummary:
        """What the model is made of: its stages with their modules, parameters, bytes and operations.

        Before it is compiled, its modules and how it is to run. Of several shapes, it is about those that
        were called or compiled last.

        Args:
          lines: whether to tell, too, what each line of the user's becomes: its operations of torch, how
            many primitives of JAX these are, and in which stage. All operations are traced for it.

        Returns:
          What is known; `str` and `print` make tables of it, 100 columns wide.

        Raises:
          TypeError: `lines` is no boolean.
        """
        if not isinstance(lines, bool):
            raise TypeError(f"lines must be True or False; got {lines!r}.")
        compiled, wrapped = self._compiled, self._wrapped  # another thread may destroy the model
        facts = self._describe_options()
        if compiled is None:
            name = type(wrapped.model).__name__
            use = "training" if wrapped.trains else "inference"
            text = (
                f"{name}, wrapped for {use}: stages are known once it is compiled, by a call or compile()"
            )
            with on_host():
                return summarize_module(wrapped.model, [text, *facts])
        program = compiled.program
        if len(compiled.programs) > 1:
            facts.append(f"for {program.describe()}, one of {len(compiled.programs)} shapes")
        name = type(wrapped.model).__name__
        return summarize_stages(program.stages, program.pipeline.summary(), name, facts, lines)

    def _describe_options(self) -> list[str]:
        wrapped = self._wrapped
        options, batching = wrapped.options, batching_of(wrapped.options)
        text = f"a call has {batching.num_micro_batches} micro-batches"
        if wrapped.trains:
            updates, each = batching.device_iterations, batching.gradient_accumulation
            text += f": {updates} weight {'update' if updates == 1 else 'updates'} of {each}"
        if options.replication_factor > 1:
            text += f", on {options.replication_factor} replicas"
        return [text]

    def __repr__(self) -> str:
        """The model with its blocks, as PopTorch shows it; once it is compiled, its stages too."""
        with on_host():
            text = f"{type(self).__name__}({module_repr(self._wrapped.model)})"
        return text if self._compiled is None else f"{text}\n{self.summary()}"
