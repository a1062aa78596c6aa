"""Transfers between processes: what arrives is what was meant, whatever comes first and whoever donates."""

import socket
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline.engine.devices import links
from ipu_pipeline.engine.devices.device_groups import make_groups
from ipu_pipeline.engine.devices.links import Tag
from ipu_pipeline.engine.devices.placement import copy_to, put
from tests.support import joined

SIZE = 1024


def make(group, value):
    """An array of a group; elsewhere without content."""
    (array,) = put([np.full(SIZE, value, np.float32)], group)
    return array


def read(array):
    return np.asarray(array)[0].item() if array.is_fully_addressable else None


def transfer():
    """What each of two processes has of what the first one sends."""
    first, second = make_groups(jax.devices(), [0, 1])
    process, made = jax.process_index(), {}
    links.links().warm(first.processes)

    # The receiver takes the second one first.
    values = [make(first, value) for value in (1, 2)]
    order = (0, 1) if process == 0 else (1, 0)
    copies = {number: copy_to([values[number]], second, Tag("edge", 0, number))[0] for number in order}
    made["order"] = [read(copies[number]) for number in (0, 1)]

    # The sender's program takes the memory of what it has sent long before the receiver asks for it.
    overwrite = first.program(jax.jit(lambda x: x * 0 - 1, donate_argnums=0))
    array = make(first, 3)
    if process == 1:
        links.links().read("overwritten")
    (copy,) = put([array], second, tag=Tag("edge", 1))
    for _number in range(3):
        array = overwrite(array)
    if process == 0:
        array.block_until_ready()
        links.links().share("overwritten", "yes")
    made["donated"] = read(copy), read(array)

    # It forgets what it has sent.
    array = make(first, 4)
    if process == 1:
        links.links().read("forgotten")
    (copy,) = copy_to([array], second, Tag("edge", 2))
    del array
    churn = jax.block_until_ready([jnp.full(SIZE, value) for value in range(50)])
    if process == 0:
        links.links().share("forgotten", "yes")
    made["forgotten"] = read(copy), len(churn)

    # Several at once, of several shapes and dtypes; random keys among them.
    key = jax.random.key(5)
    many = put([np.arange(3), np.float32(7), jax.random.split(key, 2), np.zeros((0, 4), np.int8)], first)
    found = copy_to(many, second, Tag("edge", 3))
    if process == 1:
        made["many"] = [np.asarray(found[0]).tolist(), float(found[1]), found[3].shape, found[3].dtype.name]
        expected = jax.random.uniform(jax.random.split(key, 2)[1])
        made["key"] = float(jax.random.uniform(found[2][1])) == float(expected)

    # What another process has is not handed on without a tag, as nobody knows who waits for it.
    with pytest.raises(ValueError, match="needed in another process"):
        put([many[0]], second)
    made["listening"] = listening()
    return made


def listening():
    """The addresses on which this process listens."""
    own = {link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A" or f"socket:[{fields[9]}]" not in own:
                continue
            packed = bytes.fromhex(fields[1].split(":")[0])
            words = [packed[n : n + 4][::-1] for n in range(0, len(packed), 4)]
            found.append(socket.inet_ntop(family, b"".join(words)))
    return found


@pytest.mark.thorough
def test_what_arrives_is_what_was_meant():
    first, second = joined.run(transfer, 2, 1)
    assert second["order"] == [1, 2]
    assert second["donated"] == (3, None)
    assert first["donated"] == (None, -1)
    assert second["forgotten"] == (4, 50)
    assert second["many"] == [[0, 1, 2], 7.0, (0, 4), "int8"]
    assert second["key"]
    for one in (first, second):
        assert one["listening"]
        assert set(one["listening"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_tags_are_told_apart():
    devices = [type("Device", (), {"id": number}) for number in (0, 1, 11)]
    tags = [Tag("a", 1, 2), Tag("a", 12, 2), Tag("a", 1, 22), Tag("a|1", 2, 2), Tag("b", 1, 2)]
    numbers = {
        links._number(tag, source, target) for tag in tags for source in devices for target in devices
    }
    assert len(numbers) == len(tags) * len(devices) ** 2
    assert all(0 <= number < 2**64 for number in numbers)
    assert links._number(tags[0], *devices[:2]) == links._number(Tag("a", 1, 2), *devices[:2])


def test_a_process_alone_has_no_links():
    (group, other) = make_groups(jax.devices(), [0, 1])
    assert not group.has_peers
    assert group.processes == (0,)
    (array,) = put([np.ones(3)], group)
    np.testing.assert_array_equal(copy_to([array], other)[0], np.ones(3))
    links.check_peers()
    assert not links.links.cache_info().currsize
    with pytest.raises(RuntimeError, match=r"ipu_pipeline\.distributed\.initialize"):
        links.links()
