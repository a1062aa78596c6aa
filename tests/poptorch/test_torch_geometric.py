"""Models of PyTorch Geometric equal plain torch, on graphs in packs of fixed numbers of nodes and edges."""

import copy
import tempfile

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch._poplar_executor import _OverwriteContextManager
from ipu_pipeline.poptorch._utils import combine_batch_tensors_gen
from tests.support.poptorch_front import assert_close, assert_same_state, ipus_of, make_options, make_sgd

pytestmark = pytest.mark.thorough

NUM_NODES, NUM_EDGES, NUM_GRAPHS = 24, 72, 4  # of a pack
FEATURES, HIDDEN, CLASSES = 4, 8, 3


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Not where tests are collected, which each process does: to import it takes seconds."""
    global pyg
    pyg = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
    import torch_geometric.nn  # noqa: F401  # makes pyg.nn


@pytest.fixture(autouse=True)
def _own_files(monkeypatch, tmp_path):
    """A class of layers writes a file when it is used first."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


# Packs.


def make_graphs(number):
    """Graphs of three to seven nodes, with loops at all nodes, and classes of nodes and graphs."""
    generator = torch.Generator().manual_seed(5)
    graphs = []
    for nodes in (3 + i * 3 % 5 for i in range(number)):
        graph = pyg.data.Data(
            x=torch.randn(nodes, FEATURES, generator=generator),
            edge_index=torch.randint(nodes, (2, 2 * nodes), generator=generator),
            labels=torch.randint(CLASSES, (nodes,), generator=generator),
            y=torch.randint(CLASSES, (1,), generator=generator),
        )
        graphs.append(pyg.transforms.AddSelfLoops()(graph))
    return graphs


def make_filler(nodes, edges):
    """A graph with features of zero and loops at its first node."""
    return pyg.data.Data(
        x=torch.zeros(nodes, FEATURES),
        edge_index=torch.zeros(2, edges, dtype=torch.long),
        labels=torch.zeros(nodes, dtype=torch.long),
        y=torch.zeros(1, dtype=torch.long),
    )


def make_pack(graphs):
    """The graphs and fillers as one graph, with masks of what is not filler."""
    nodes, edges = sum(g.num_nodes for g in graphs), sum(g.num_edges for g in graphs)
    others = NUM_GRAPHS - len(graphs) - 1
    fillers = [make_filler(NUM_NODES - nodes - others, NUM_EDGES - edges)] + [make_filler(1, 0)] * others
    pack = pyg.data.Batch.from_data_list([*graphs, *fillers])
    pack.graphs_mask = torch.arange(NUM_GRAPHS) < len(graphs)
    pack.nodes_mask = torch.arange(NUM_NODES) < nodes
    return pack


def choose_packs(graphs):
    """Numbers of graphs that fit into a pack together, with a node of each filler."""
    chosen = []
    for number, graph in enumerate(graphs):
        nodes = graph.num_nodes + sum(graphs[i].num_nodes for i in chosen)
        if len(chosen) == NUM_GRAPHS - 1 or nodes > NUM_NODES - (NUM_GRAPHS - len(chosen) - 1):
            yield chosen
            chosen = []
        chosen.append(number)
    yield chosen


class Packs(poptorch.DataLoader):
    """Packs of as many graphs as fit, or of a fixed number."""

    def __init__(self, options, graphs, size=None):
        self.size = size
        if size is None:
            sampler = list(choose_packs(graphs))
            assert len({len(pack) for pack in sampler}) > 1
            super().__init__(options, graphs, batch_sampler=sampler, collate_fn=make_pack)
        else:
            super().__init__(options, graphs, batch_size=size, collate_fn=self.make_all)

    def make_all(self, graphs):
        """The packs of a call, joined."""
        packs = [make_pack(graphs[i : i + self.size]) for i in range(0, len(graphs), self.size)]
        tensors = combine_batch_tensors_gen([list(PARSER.yieldTensors(pack)) for pack in packs])
        return PARSER.reconstruct(packs[0], tensors)


class GraphParser(poptorch.ICustomArgParser):
    """Takes graphs and packs apart."""

    def yieldTensors(self, struct):
        yield from (struct[name] for name in self.names_of(struct))

    def reconstruct(self, original_structure, tensor_iterator):
        made = copy.copy(original_structure)
        for name in self.names_of(original_structure):
            made[name] = next(tensor_iterator)
        return made

    @staticmethod
    def names_of(graph):
        return sorted(name for name in graph.keys() if isinstance(graph[name], torch.Tensor))  # noqa: SIM118


PARSER = GraphParser()


@pytest.fixture
def parsed():
    """Packs are arguments of models."""
    kinds = [pyg.data.Data, type(pyg.data.Batch(_base_cls=pyg.data.Data))]
    for kind in kinds:
        poptorch.registerCustomArgParser(kind, PARSER)
    yield
    for kind in kinds:
        poptorch.registerCustomArgParser(kind, None)


class FixedSizes:
    """Puts `to_dense_batch` with sizes of packs in the place of the one whose sizes depend on values."""

    def replace(self):
        self.before, pyg.utils.to_dense_batch = pyg.utils.to_dense_batch, to_dense_batch

    def restore(self):
        pyg.utils.to_dense_batch = self.before


def to_dense_batch(x, graph_of):
    counts = torch.zeros(NUM_GRAPHS, dtype=torch.long).index_add(0, graph_of, torch.ones_like(graph_of))
    place = torch.arange(NUM_NODES) - (counts.cumsum(0) - counts)[graph_of]
    index = graph_of * NUM_NODES + place
    dense = x.new_zeros(NUM_GRAPHS * NUM_NODES, x.shape[1]).index_copy(0, index, x)
    return dense.view(NUM_GRAPHS, NUM_NODES, -1), torch.arange(NUM_NODES) < counts[:, None]


@pytest.fixture
def replaced(monkeypatch):
    monkeypatch.setattr(_OverwriteContextManager, "_classes", [])
    _OverwriteContextManager.registerSubsitutionManager(FixedSizes)


# Models.


def find_loss(scores, targets, mask):
    losses = torch.nn.functional.cross_entropy(scores, targets, reduction="none")
    return poptorch.identity_loss((losses * mask).sum() / mask.sum(), reduction="none")


class GCN(torch.nn.Module):
    """Classes of nodes."""

    def __init__(self):
        super().__init__()
        self.first = pyg.nn.GCNConv(FEATURES, HIDDEN, add_self_loops=False)
        self.second = pyg.nn.GCNConv(HIDDEN, CLASSES, add_self_loops=False)

    def forward(self, pack):
        with poptorch.Block("first", ipu_id=0):
            x = self.first(pack.x, pack.edge_index).relu()
        with poptorch.Block("second", ipu_id=1):
            x = self.second(x, pack.edge_index)
            return (x, find_loss(x, pack.labels, pack.nodes_mask)) if self.training else x


class GAT(torch.nn.Module):
    """Classes of graphs, from the nodes of each graph as a dense array."""

    def __init__(self):
        super().__init__()
        self.first = pyg.nn.GATConv(FEATURES, HIDDEN // 2, heads=2, add_self_loops=False)
        self.second = pyg.nn.GATv2Conv(HIDDEN, HIDDEN, add_self_loops=False)
        self.last = torch.nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, pack):
        with poptorch.Block("first", ipu_id=0):
            x = self.first(pack.x, pack.edge_index).relu()
        with poptorch.Block("second", ipu_id=1):
            x = self.second(x, pack.edge_index).sigmoid()
            dense, mask = pyg.utils.to_dense_batch(x, pack.batch)
            mean = dense.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
            x = self.last(torch.cat([mean, dense.amax(1)], 1))
            return (x, find_loss(x, pack.y, pack.graphs_mask)) if self.training else x


class GIN(torch.nn.Module):
    """Classes of graphs, from all layers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            pyg.nn.GINConv(pyg.nn.MLP([size, HIDDEN, HIDDEN], norm="layer_norm"), train_eps=True)
            for size in (FEATURES, HIDDEN)
        )
        self.readouts = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, CLASSES) for _layer in self.layers)
        poptorch.BeginBlock(self.layers[1], ipu_id=1)

    def forward(self, pack):
        x, hidden = pack.x, []
        for layer in self.layers:
            x = layer(x, pack.edge_index)
            hidden.append(pyg.nn.global_add_pool(x, pack.batch, size=pack.num_graphs))
        x = sum(readout(one) for readout, one in zip(self.readouts, hidden, strict=True))
        return (x, find_loss(x, pack.y, pack.graphs_mask)) if self.training else x


# What a call does is what plain torch does, one pack after the other.


def make_seeded(make):
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize(("make", "size"), [("GCN", None), ("GAT", 3), ("GIN", None)])
def test_trains_and_infers_like_plain_torch(make, size, parsed, replaced):
    model = make_seeded(globals()[make])
    plain = copy.deepcopy(model)
    graphs, original = make_graphs(26), pyg.utils.to_dense_batch
    packs = list(Packs(make_options(), graphs, size))
    assert len(packs) >= 8

    options = make_options(device_iterations=2, accumulation=2)
    trained = poptorch.trainingModel(model, options, make_sgd(model.parameters()))
    optimizer, remaining = make_sgd(plain.parameters()), iter(packs)
    for pack in Packs(options, graphs, size):
        actual, expected = trained(pack), []
        for _update in range(2):
            optimizer.zero_grad()
            for _micro_batch in range(2):
                expected.append(plain(next(remaining)))
                (expected[-1][1] / 2).backward()
            optimizer.step()
        scores, losses = zip(*expected, strict=True)
        assert_close(actual, [torch.cat(scores), torch.stack(losses)])
    assert ipus_of(trained) == [0, 1]
    assert_same_state(model, plain)

    options = make_options(device_iterations=3)
    inferred = poptorch.inferenceModel(model.eval(), options)
    plain.eval()
    expected = torch.cat([plain(pack) for pack in packs])
    actual = torch.cat([inferred(pack) for pack in Packs(options, graphs, size)])
    assert_close([actual], [expected[: len(actual)]])
    assert len(actual) >= 6 * len(expected) // len(packs)
    assert pyg.utils.to_dense_batch is original


def test_what_nothing_replaces_names_its_place(parsed):
    (pack, *_others) = Packs(make_options(), make_graphs(3), 3)
    inferred = poptorch.inferenceModel(make_seeded(GAT).eval(), make_options())
    with pytest.raises(poptorch.Error, match=r"_to_dense_batch\.py.* asks for a value of a tensor"):
        inferred(pack)
