"""A headless chromium, spoken to by pipes: pages are opened, keys pressed and values read."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --remote-debugging-pipe"
)


class Browser:
    """One tab. `errors`: what its console and scripts complained of."""

    def __init__(self, profile: Path) -> None:
        chromium = shutil.which("chromium")
        if chromium is None:
            pytest.skip("install chromium to see the page rendered: apt-get install chromium")
        theirs, self.to = os.pipe()
        self.back, ours = os.pipe()

        def take() -> None:  # chromium reads commands from 3 and answers on 4
            copies = os.dup(theirs), os.dup(ours)
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        self.process = subprocess.Popen(
            [chromium, *FLAGS.split(), f"--user-data-dir={profile}"],
            preexec_fn=take,
            pass_fds=(3, 4),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(ours)
        self.count, self.rest, self.session = 0, b"", ""
        self.errors: list[str] = []
        self.events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.back)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        command = {"id": self.count, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.to, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self.count:
                assert "error" not in message, message
                return dict(message["result"])

    def open(self, path: Path, width: int = 1280, dark: bool = False, scripts: bool = True) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.events.clear()
        self.errors.clear()
        self.call("Page.navigate", url=f"file://{path}")
        while "Page.loadEventFired" not in self.events:
            self._next()

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression, in the page; of a promise, when it is kept."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code[key])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            part = os.read(self.back, 1 << 16)
            assert part, "chromium has ended"
            self.rest += part
        whole, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(whole)
        method = message.get("method", "")
        self.events.append(method)
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.errors.append(json.dumps(message["params"]))
        return message
