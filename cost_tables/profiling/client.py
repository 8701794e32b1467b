"""JSON over HTTP to one server; every failure is a ProfileError of one line."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from cost_tables.profiling.errors import ProfileError


class Client:
    """url: of the server, as in http://127.0.0.1:30000."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ProfileError(f"--url is {url!r}; must start with http:// or https://")

    def get(self, path: str, timeout_s: float = 60.0) -> Any:
        return self._answer(urllib.request.Request(self.url + path), timeout_s)

    def post(self, path: str, payload: Any, timeout_s: float = 60.0) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(payload).encode(),
            headers={"Content-Type": "application/json"},
        )
        return self._answer(request, timeout_s)

    def _answer(self, request: urllib.request.Request, timeout_s: float) -> Any:
        """Decoded JSON; text if it is none."""
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                body = response.read().decode()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace").strip().replace("\n", " ")[:200]
            raise ProfileError(f"{request.full_url} answered {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ProfileError(f"{request.full_url}: not reachable ({reason})") from error
        try:
            return json.loads(body)
        except ValueError:
            return body
