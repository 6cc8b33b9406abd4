"""The one door to httpx, without the terminal libraries that its command line would bring into the agent's memory."""

from __future__ import annotations

import sys

# Where click cannot be imported, httpx leaves its command line away: 8 MB and a tenth of a second less.
_click = sys.modules.get("click")
sys.modules["click"] = None  # type: ignore[assignment]
try:
    import httpx
finally:
    if _click is None:
        del sys.modules["click"]
    else:
        sys.modules["click"] = _click

__all__ = ["httpx"]
