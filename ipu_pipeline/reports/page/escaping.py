"""Escapes text from users, such as names of stages, for HTML and scripts."""

from __future__ import annotations

import html
import json
from typing import Any

__all__ = ["as_html", "as_script"]

# In a script element `</script>` ends it and `<!--` changes how it ends; the last two end lines in older
# JavaScript.
_IN_SCRIPTS = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def as_html(value: object) -> str:
    """A value as text of an element or of a quoted attribute."""
    return html.escape(str(value), quote=True)


def as_script(value: Any) -> str:
    """A value as JSON that can be put in a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.translate(_IN_SCRIPTS)
