"""`report.html`: one file with everything in it, which opens without a network."""

from ipu_pipeline.reports.page.simulated import write_simulation
from ipu_pipeline.reports.page.writing import write_page

__all__ = ["write_page", "write_simulation"]
