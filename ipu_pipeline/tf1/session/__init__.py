"""Running programs: the session, what it resumes from, and what it exports."""

from ipu_pipeline.tf1.session.session import Session

__all__ = ["Session"]
