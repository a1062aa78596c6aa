"""Names of JAX for several processes that are not public, looked up and listed as in `jax_compat`.

The names of the first part have no public substitute that tells transfers apart by what they are. If one is
missing, pipelines over several processes are refused. Without the names of the second part, JAX serves the
coordination in process 0, clusters are not recognised, and collectives listen where the host's name leads.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ipu_pipeline.ground.jax_compat import find

# What a pipeline over several processes needs.

_distributed_state = find("jax._src.distributed:global_state")
_start_transfer_server = find("jax.experimental.transfer:start_transfer_server")


def key_value_store() -> Any:
    """The store that processes joined by `jax.distributed` share; None without it."""
    return None if _distributed_state is None else _distributed_state.client


def start_transfers(client: Any, host: str) -> Any:
    """Starts a server at free ports of an address, from which others pull a client's arrays; else None."""
    if _start_transfer_server is None:
        return None
    return _start_transfer_server(client, f"{host}:0", [f"{host}:0"])


# What joining processes needs.

coordination_service = "jaxlib._jax:get_distributed_runtime_service"  # called in a process without JAX
_backends_are_initialized = find("jax._src.xla_bridge:backends_are_initialized")
_detect_cluster = find("jax._src.clusters:ClusterEnv.auto_detect_unset_distributed_params")
_get_service = find(coordination_service)
_make_cpu_client = find("jax._src.xla_bridge:make_cpu_client")
_make_gloo = find("jaxlib._jax:make_gloo_tcp_collectives")
_register_backend_factory = find("jax._src.xla_bridge:register_backend_factory")


def backends_run() -> bool:
    """Whether JAX has looked at its devices, and can join no others any more; False if not known."""
    return _backends_are_initialized is not None and bool(_backends_are_initialized())


def detect_cluster(seconds: int) -> tuple[str | None, int | None, int | None, list[int] | None]:
    """A cluster's coordinator address, its number of processes, this one's number, and its devices."""
    if _detect_cluster is None:
        return None, None, None, None
    address, count, index, devices = _detect_cluster(None, None, None, None, None, seconds)
    return address, count, index, None if devices is None else list(devices)


@contextlib.contextmanager
def coordinated_elsewhere(start: Callable[[], Any]) -> Iterator[None]:
    """While processes are joined, makes `start`'s service coordinate them, in place of process 0."""
    if _get_service is None:
        yield
        return
    module, _, name = coordination_service.partition(":")
    owner = importlib.import_module(module)

    def get_service(*_arguments: Any, **_named: Any) -> Any:
        return start()

    setattr(owner, name, get_service)
    try:
        yield
    finally:
        setattr(owner, name, _get_service)


def listen_for_collectives(address: str) -> bool:
    """Makes collectives of CPU devices listen only at an address of this machine; False if they cannot.

    It is called after processes have been joined, and before the CPU backend runs.
    """
    if None in (_make_cpu_client, _make_gloo, _register_backend_factory):
        return False

    def make_client() -> Any:
        collectives = None
        if jax.config.jax_cpu_collectives_implementation == "gloo":  # type: ignore[attr-defined]  # at run time
            collectives = _make_gloo(distributed_client=key_value_store(), hostname=address)
        return _make_cpu_client(collectives)

    _register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)
    return True
