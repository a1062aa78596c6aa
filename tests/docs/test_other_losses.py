"""docs/how_to/train_with_other_losses.md: its pipelines compute what one device does without them."""

import pytest

from tests.support.pages import PROGRAM
from tests.support.programs import ROOT, run_each

PAGE = (ROOT / "docs/how_to/train_with_other_losses.md").read_text()

PLAIN = """
def plain(weights, x):
    return head(weights[1], *body(weights[0], x))[0]


def check(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def descend(weights, gradients):
    return jax.tree.map(lambda w, gradient: w - 0.1 * gradient, weights, gradients)
"""
CHECKS = [  # after each section
    PLAIN,
    """
def mean_loss(weights):
    return sum(square(plain(weights, x), targets) for x, targets in data) / 4


check(gradients, jax.grad(mean_loss)(weights))
check(pipeline.parameters(state), weights)
""",
    """
def mean_loss(weights):
    teacher = [p["teacher"] for p in both]
    return sum(square(plain(weights, x), plain(teacher, x)) for x in inputs) / 4


check(student, descend(weights, jax.grad(mean_loss)(weights)))
check([p["teacher"] for p in pipeline.parameters(state)], [p["teacher"] for p in both])
""",
    """
expected = list(models)
for _round in range(3):
    for number, loss in ((1, lambda fake, real: fake - real), (0, lambda fake, real: -fake)):

        def mean_loss(part):
            own = [part if number == index else model for index, model in enumerate(expected)]
            return sum(loss(*judge(own[1], *generate(own[0], *one))) for one in data) / 4

        expected[number] = descend(expected[number], jax.grad(mean_loss)(expected[number]))
check(artist.parameters(art), expected)
""",
    """
gradients = jax.grad(lambda weights: contrast(plain(weights, np.concatenate(pairs))))(weights)
check(pipeline.parameters(state), descend(weights, gradients))
print("checked")
""",
]


@pytest.mark.thorough
def test_each_pipeline_equals_one_device(tmp_path):
    blocks = [code for _comment, code, _text in PROGRAM.findall(PAGE)]
    program = "".join(code + check for code, check in zip(blocks, CHECKS, strict=True))
    assert run_each({"page": program}, tmp_path, as_tests=True) == {"page": "checked\n"}
