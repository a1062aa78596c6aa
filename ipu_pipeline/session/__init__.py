"""Running programs: the session, what it resumes from, and what it exports."""

from ipu_pipeline.session.session import Session

__all__ = ["Session"]
