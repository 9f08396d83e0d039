"""A real browser (Debian's ``chromium``), driven over a pipe with the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support.threads import PATIENCE

FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests run as root in throw-away machines
    "--disable-gpu",
    "--disable-dev-shm-usage",  # which is small in containers
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.send("Page.enable")
        self.send("Runtime.enable")
        self.send("Log.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        return self._browser.send(method, self._session, **parameters)

    def open(self, url: str) -> None:
        """Go somewhere."""
        self.send("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What a piece of JavaScript gives, as plain data."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, within: float = PATIENCE) -> float:
        """Wait until a piece of JavaScript is true; the moment when it was."""
        deadline = time.monotonic() + within
        while not self.value(f"Boolean({expression})"):
            now = time.monotonic()
            assert now < deadline, f"not within {within:g} s: {expression}\n{self.text()[:3000]}"
            time.sleep(0.02)
        return time.monotonic()

    def text(self) -> str:
        """What a person reads on the page."""
        return str(self.value("document.body?.innerText ?? ''"))

    def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Be a screen of this size."""
        scheme = "dark" if dark else "light"
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def press(self, key: str) -> None:
        """Press a key, such as Tab."""
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13}.get(key, 0)
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def picture(self, *, whole: bool = False) -> bytes:
        """A screenshot, as PNG; of the whole page if wanted."""
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    @property
    def complaints(self) -> list[str]:
        """What the browser's console says was wrong: exceptions, violations, missing files."""
        return [text for session, text in self._browser.complaints if session == self._session]


class Browser:
    """One browser process."""

    def __init__(self, folder: Path, on: Callable[[Sequence[str]], list[str]] = list) -> None:
        found = shutil.which("chromium")
        assert found is not None, "these tests need Debian's package chromium"
        # The browser reads commands at descriptor 3 and answers at 4.
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        line = f"exec {found} {' '.join(FLAGS)} --user-data-dir={folder} about:blank"
        shell = f"{line} 3<&{theirs_in} 4>&{theirs_out}"
        self._process = subprocess.Popen(
            on(["bash", "-c", shell]),
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number = 0
        self._unread = b""
        self.complaints: list[tuple[str, str]] = []

    def send(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """A command, and its result; what happens meanwhile is noted."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            message = self._read(deadline)
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        parameters, session = event.get("params", {}), event.get("sessionId", "")
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append((session, json.dumps(parameters["exceptionDetails"])))
        if event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append((session, json.dumps(parameters["entry"])))

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            remaining = max(0.0, deadline - time.monotonic())
            assert select.select([self._in], [], [], remaining)[0], "the browser does not answer"
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._unread += data
        first, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def page(self) -> Page:
        """A new tab."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(AssertionError, OSError):
            self.send("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)


@contextlib.contextmanager
def browser(on: Callable[[Sequence[str]], list[str]] = list) -> Iterator[Browser]:
    """A browser with a profile of its own, gone at the end; ``on`` starts it on another host."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        started = Browser(Path(folder), on)
        try:
            yield started
        finally:
            started.close()
