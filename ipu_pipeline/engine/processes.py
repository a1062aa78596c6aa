"""The processes of a run: what they tell each other, and which devices each has."""

from __future__ import annotations

from ipu_pipeline.engine.devices.action_log import current as current_log
from ipu_pipeline.engine.devices.device_groups import group_sharding, is_here
from ipu_pipeline.engine.devices.links import naming_peers
from ipu_pipeline.engine.devices.process_exchange import (
    connect_all,
    fetch_bytes,
    offer_bytes,
    only_if_written_here,
    parts_written_here,
    read_gathered,
    rows_written_here,
    share_stacks,
    spread_rows,
)
from ipu_pipeline.engine.devices.xla_settings import keep_one_free, num_cpu_devices_set
from ipu_pipeline.engine.peers import (
    Peers,
    Store,
    check_joined,
    current,
    digest,
    digest_array,
    may_come_from,
    occupied,
    one_thread,
    set_current,
    waiting,
)

__all__ = [
    "Peers",
    "Store",
    "check_joined",
    "connect_all",
    "current",
    "current_log",
    "digest",
    "digest_array",
    "fetch_bytes",
    "group_sharding",
    "is_here",
    "keep_one_free",
    "may_come_from",
    "naming_peers",
    "num_cpu_devices_set",
    "occupied",
    "offer_bytes",
    "one_thread",
    "only_if_written_here",
    "parts_written_here",
    "read_gathered",
    "rows_written_here",
    "set_current",
    "share_stacks",
    "spread_rows",
    "waiting",
]
