"""What a launcher gives its processes, as far as the library knows."""

from tests.support.launched import directory, restart

__all__ = ["directory", "restart"]
