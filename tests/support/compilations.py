"""What XLA compiles while something runs."""

import contextlib

import jax


@contextlib.contextmanager
def compilations():
    """The names of the programs that are compiled in the block, as JAX has them, in a list."""
    found = []

    def listen(event, _seconds, fun_name="", **_others):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def compiled_in(function, caplog):
    """What is compiled while a function runs, as JAX logs it."""
    caplog.clear()
    with jax.log_compiles():
        function()
    return [record.message for record in caplog.records if record.message.startswith("Compiling")]
