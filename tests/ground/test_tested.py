"""Versions of other packages that the tests did not run with."""

import pytest

from ipu_pipeline.ground import user_warnings
from tests.support.programs import ROOT


@pytest.mark.parametrize("version", ["0.99.1", "0.11.0.1", "0.8.2"])
def test_another_version_warns_once(version, nothing_warned):
    for one in ("0.9.0", "0.10.2", "0.10.7", "0.10.0.dev20260101"):
        user_warnings.warn_of_untested("jax", one)
    with pytest.warns(UserWarning, match=f"tested with jax 0.9.0 to 0.10.2, and this is {version}") as told:
        user_warnings.warn_of_untested("jax", version)
    assert len(told) == 1
    user_warnings.warn_of_untested("jax", version)  # a second warning would be an error


def test_the_page_has_the_versions():
    page = (ROOT / "docs" / "versions.md").read_text()
    for versions in user_warnings.TESTED.values():
        assert all(version in page for version in versions)


def test_versions_of_torch_have_names():
    assert user_warnings.is_tested("torch", "2.13.0+cpu")
    assert not user_warnings.is_tested("torch", "2.16.0a0+git1234")
