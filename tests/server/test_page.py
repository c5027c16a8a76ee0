"""The page at / in headless Chromium, driven over its debugging pipe."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    def __init__(self):
        self.profile = tempfile.mkdtemp()
        to_read, self.to = os.pipe()
        self.back, to_write = os.pipe()

        def place_pipes():  # Chromium reads commands from 3 and writes to 4
            os.dup2(to_read, 103)
            os.dup2(to_write, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
             "--user-data-dir=" + self.profile, "about:blank"],
            preexec_fn=place_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.rest = b""
        self.number = 0
        self.session = None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                part = os.read(self.back, 1 << 20)
                assert part, "the browser has ended"
                self.rest += part
            one, self.rest = self.rest.split(b"\0", 1)
            got = json.loads(one)
            if got.get("id") == self.number:
                assert "error" not in got, got
                return got["result"]
            self.events.append(got)

    def js(self, expression):
        r = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in r, r
        return r["result"].get("value")

    def wait(self, expression, seconds=60):
        end = time.time() + seconds
        while time.time() < end:
            if self.js(f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()"):  # the page may not be there yet
                return
            time.sleep(0.1)
        raise AssertionError(f"never true: {expression}\n{self.js('document.body.innerText')}")

    def key(self, key, text=None, modifiers=0):
        common = {"key": key, "code": key, "modifiers": modifiers,
                  "windowsVirtualKeyCode": {"Enter": 13, "Tab": 9, "Escape": 27}.get(key, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, name):
        path = os.path.join(os.environ["NFP_TEST_OUT"], name)
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        shutil.rmtree(self.profile, ignore_errors=True)


@pytest.fixture
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    b = Browser()
    yield b
    b.close()


def test_chat_by_keyboard_and_timeline(browser, launch):
    server = launch("--step-us", 20000, "--precision-policy", "alternate:40", "--root-path", "/llm")
    browser.call("Emulation.setDeviceMetricsOverride", width=1200, height=800, deviceScaleFactor=1, mobile=False)
    browser.call("Page.navigate", url=server.url + "/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    browser.wait("document.getElementById('model').textContent.startsWith('fake')")
    assert browser.js("document.activeElement.id") == "input"

    browser.call("Input.insertText", text="first line")
    browser.key("Enter", "\r", modifiers=8)  # Shift: a new line, not an end
    browser.call("Input.insertText", text="SAY:<b>bold</b> & 'quoted' 😀")
    assert browser.js("document.querySelectorAll('.msg').length") == 0
    browser.key("Enter", "\r")
    browser.wait("document.querySelector('.msg.assistant .meta').textContent.includes('tokens in')")
    assert browser.js("document.querySelector('.msg.assistant .body').textContent") == "<b>bold</b> & 'quoted' 😀"
    assert browser.js("document.querySelectorAll('.msg b').length") == 0
    assert browser.js("document.activeElement.id") == "input"

    # A long answer, stopped by Escape: the server stops too.
    browser.js("document.getElementById('clear').click()")
    assert browser.js("document.querySelectorAll('.msg').length") == 0
    browser.call("Input.insertText", text="go on for ever")
    browser.key("Enter", "\r")
    browser.wait("document.getElementById('running').textContent === '1'")
    time.sleep(3)
    browser.screenshot("page-light.png")
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    time.sleep(1)
    browser.screenshot("page-dark.png")
    assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
    browser.key("Escape")
    browser.wait("document.getElementById('running').textContent === '0'")
    server.wait_idle(5)
    browser.wait("[...document.querySelectorAll('.msg.assistant .meta')].pop().textContent === 'stopped'")
    assert browser.js("document.getElementById('ttft_p50').textContent") != "–"
    assert int(browser.js("document.getElementById('switches').textContent")) > 0

    # Everything can be reached with Tab, also what unfolds.
    browser.js("document.querySelector('#more summary').focus()")
    browser.key("Enter", "\r")
    browser.wait("document.getElementById('more').open")
    reached = set()
    for _ in range(20):
        browser.key("Tab")
        reached.add(browser.js("document.activeElement.id"))
    assert {"send", "clear", "precision", "temperature", "system", "key", "input"} <= reached

    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
    time.sleep(1)
    browser.screenshot("page-phone.png")
    assert browser.js("document.documentElement.scrollWidth") <= 390
    # Nothing from elsewhere, and no complaint in the console.
    for event in browser.events:
        if event["method"] == "Network.requestWillBeSent":
            assert event["params"]["request"]["url"].startswith((server.url, "data:", "about:")), event
        assert event["method"] != "Runtime.exceptionThrown", event
        if event["method"] == "Log.entryAdded":
            assert event["params"]["entry"]["level"] != "error" or "favicon" in json.dumps(event), event


def test_errors_are_shown(browser, launch):
    server = launch("--api-key", "secret")
    browser.call("Page.navigate", url=server.url + "/")
    browser.wait("document.getElementById('model').textContent.includes('API key')")
    browser.call("Input.insertText", text="hello")
    browser.key("Enter", "\r")
    browser.wait("document.querySelector('.msg.error .body') !== null")
    assert "API key" in browser.js("document.querySelector('.msg.error .body').textContent")
    browser.js("document.getElementById('key').value = 'secret'; document.getElementById('key').dispatchEvent(new Event('change'))")
    browser.call("Input.insertText", text="SAY:welcome")
    browser.key("Enter", "\r")
    browser.wait("[...document.querySelectorAll('.msg .body')].pop().textContent === 'welcome'")
