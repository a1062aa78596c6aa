"""`report.html`: one file with everything in it, which opens without a network."""

from ipu_pipeline.reports.page.report_page import write_page, write_simulation

__all__ = ["write_page", "write_simulation"]
