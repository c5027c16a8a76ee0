"""The page at / in headless Chromium, driven over its debugging pipe, at the sizes of a desk and of a phone, light and dark.

Screenshots lie in the folder that tests write to (tests/server of the build)."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time

import httpx
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
        self.call("Page.addScriptToEvaluateOnNewDocument", source="window.yes = true; window.confirm = text => { window.asked = text; return yes; }")

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
                  "windowsVirtualKeyCode": {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37}.get(key, 0)}
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


CONTRAST = """(() => {
  const numbers = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = el => {
    for (; el; el = el.parentElement) {
      const colour = numbers(getComputedStyle(el).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const el of document.querySelectorAll("body *")) {
    const style = getComputedStyle(el);
    const own = [...el.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || el.matches("input, textarea, select");
    if (!own || el.disabled || !el.getClientRects().length || style.visibility === "hidden" || el.closest("script, style")) continue;
    const [a, b] = [light(numbers(style.color)), light(behind(el))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) bad.push(`${el.tagName}.${el.className}#${el.id} ${ratio.toFixed(2)} ${el.textContent.trim().slice(0, 30)}`);
  }
  return bad;
})()"""

# Names that a screen reader would say, of everything that can be operated.
NAMELESS = """[...document.querySelectorAll("button, input, select, textarea, canvas, [tabindex]")].filter(el => el.getClientRects().length &&
  !(el.getAttribute("aria-label") || el.getAttribute("aria-labelledby") || el.labels?.length || el.textContent.trim())).map(el => el.outerHTML.slice(0, 80))"""


def open_page(browser, server, width=1280, height=800, model="fake"):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1 if width > 500 else 2, mobile=width < 500)
    browser.call("Page.navigate", url=server.url + "/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    browser.wait("document.getElementById('model').textContent.startsWith(" + repr(model) + ")")


def say(browser, text):
    before = browser.js("document.querySelectorAll('.msg').length")
    browser.js("document.getElementById('input').focus()")
    browser.call("Input.insertText", text=text)
    browser.key("Enter", "\r")
    browser.wait(f"document.querySelectorAll('.msg').length === {before + 2} && document.getElementById('stop').disabled")


def last(browser, what=".body"):
    return browser.js(f"[...document.querySelectorAll('.msg')].pop().querySelector('{what}').innerText.trim()")


def theme(browser, name):
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])
    time.sleep(0.3)


def complaints(browser, server):
    """Nothing from elsewhere was asked for, and the console has no complaint."""
    for event in browser.events:
        if event["method"] == "Network.requestWillBeSent":
            assert event["params"]["request"]["url"].startswith((server.url, "data:", "about:")), event
        assert event["method"] != "Runtime.exceptionThrown", event
        if event["method"] == "Log.entryAdded":
            assert event["params"]["entry"]["level"] != "error", event


def test_chat_by_keyboard(browser, launch):
    server = launch("--step-us", 5000, "--root-path", "/llm")
    open_page(browser, server)
    assert browser.js("document.activeElement.id") == "input"
    browser.call("Input.insertText", text="first line")
    browser.key("Enter", "\r", modifiers=8)  # Shift: a new line, not an end
    browser.call("Input.insertText", text="SAY:<b>bold</b> & 'quoted' 😀")
    assert browser.js("document.querySelectorAll('.msg').length") == 0
    browser.key("Enter", "\r")
    browser.wait("document.querySelector('.msg.assistant .meta').textContent.includes('tokens in')")
    assert last(browser) == "<b>bold</b> & 'quoted' 😀"
    assert browser.js("document.querySelectorAll('.msg b').length") == 0
    assert browser.js("document.activeElement.id") == "input"
    # In which precision prompt and answer were computed.
    shown = browser.js("[...document.querySelectorAll('.msg.assistant .share')].map(e => e.getAttribute('aria-label'))")
    assert len(shown) == 2 and shown[0].startswith("prompt: ") and shown[1].startswith("answer: ") and "tokens in FP16" in shown[1]
    # A long answer, stopped by Escape: the server stops too.
    browser.js("document.getElementById('new').click()")
    browser.call("Input.insertText", text="go on for ever")
    browser.key("Enter", "\r")
    browser.wait("document.getElementById('running').textContent === '1'")
    browser.key("Escape")
    browser.wait("[...document.querySelectorAll('.msg.assistant .meta')].pop().textContent === 'stopped'")
    server.wait_idle(5)
    # Everything can be reached with Tab, also what unfolds.
    browser.js("document.querySelector('#more summary').focus()")
    browser.key("Enter", "\r")
    browser.wait("document.getElementById('more').open")
    reached = set()
    for _ in range(40):
        browser.key("Tab")
        reached.add(browser.js("document.activeElement.id || document.activeElement.textContent"))
    assert {"send", "new", "forget", "precision", "temperature", "system", "key", "input", "log", "Edit", "Regenerate", "Copy"} <= reached
    assert browser.js(NAMELESS) == []
    complaints(browser, server)


def test_the_keyboard_keeps_its_place(browser, launch):
    server = launch()
    open_page(browser, server)
    for word in ("one", "two"):
        say(browser, "SAY:" + word)
        browser.js("document.getElementById('new').click()")
    browser.js("document.querySelector('#conversations .open').click()")
    here = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    for leave in ("Escape", "Cancel"):
        browser.js("[...document.querySelectorAll('.msg.user button')].find(b => b.textContent === 'Edit').focus()")
        browser.key("Enter", "\r")
        assert browser.js(here) == "Edited message"
        if leave == "Cancel":
            browser.key("Tab")
            browser.key("Tab")
            assert browser.js(here) == leave
            browser.key("Enter", "\r")
        else:
            browser.key(leave)
        assert browser.js(here) == "Edit"
    browser.js("document.querySelector('#conversations .drop').focus()")
    for after in ('Delete "SAY:one"', "New conversation"):
        browser.key("Enter", "\r")
        assert browser.js(here) == after
    complaints(browser, server)


def test_copying_without_https(browser, launch):
    """There the browser gives the page no clipboard to write to; the old way may work, and the keyboard's place stays."""
    server = launch()
    open_page(browser, server)
    say(browser, "SAY:some words")
    browser.js("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    copy = "[...document.querySelectorAll('.msg.assistant button')].find(b => /opied|Copy/.test(b.textContent))"
    for allowed, says in (("true", "Copied"), ("false", "Not copied")):
        browser.js(f"document.execCommand = () => {{ window.copied = document.activeElement.value; return {allowed}; }}")
        browser.js(copy + ".focus()")
        browser.key("Enter", "\r")
        browser.wait(f"{copy}.textContent === '{says}'")
        assert browser.js("copied") == "some words" and browser.js(f"document.activeElement === {copy}")
        browser.wait(copy + ".textContent === 'Copy'")
    complaints(browser, server)


MARKDOWN = ("SAY:# Title **bold** `code` [link](https://example.com/) [bad](javascript:alert(1)) ![i](https://example.com/i.png) "
            "<img src=x onerror=alert(1)>")


def test_markdown_is_rendered_and_harmless(browser, launch):
    server = launch()
    open_page(browser, server)
    if not browser.js("markdown !== null"):
        pytest.skip("built without markdown-it, DOMPurify and highlight.js (scripts/install-deps)")
    say(browser, MARKDOWN)
    here = "[...document.querySelectorAll('.msg')].pop()"
    assert browser.js(here + ".querySelector('h1').textContent").startswith("Title bold code link")
    assert browser.js(here + ".querySelectorAll('strong').length") == 1
    assert browser.js(f"[...{here}.querySelectorAll('a')].map(a => a.getAttribute('href'))") == ["https://example.com/", "https://example.com/i.png"]
    assert browser.js(here + ".querySelectorAll('img, [onerror]').length") == 0
    assert "onerror=alert(1)" in last(browser)
    # The fake model ends at a line break, so what has several lines is rendered here.
    text = "Some code:\\n\\n```python\\ndef f(x):\\n    return 'a' + x  # <b>\\n```\\n\\n| a | b |\\n| --- | --- |\\n| 1 | 2 |\\n\\n1. one\\n2. two\\n\\n<script>window.evil = 1</script>"
    browser.js(f"current.messages.push({{role: 'assistant', content: \"{text}\"}}); showConversation()")
    assert browser.js(here + ".querySelector('.code .bar span').textContent") == "python"
    assert browser.js(here + ".querySelectorAll('.code .hljs-keyword').length") >= 2
    assert browser.js(here + ".querySelector('.code code').textContent") == "def f(x):\n    return 'a' + x  # <b>\n"
    assert browser.js(here + ".querySelectorAll('td').length") == 2 and browser.js(here + ".querySelectorAll('li').length") == 2
    assert browser.js(here + ".querySelectorAll('script').length") == 0 and browser.js("window.evil") is None
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.js(here + ".querySelector('.code button').click()")
    browser.wait(here + ".querySelector('.code button').textContent === 'Copied'")
    assert browser.js("navigator.clipboard.readText()") == "def f(x):\n    return 'a' + x  # <b>\n"
    # Were something to get through, the page's policy would not run it.
    browser.js("(() => { const s = document.createElement('script'); s.textContent = 'window.evil = 1'; document.body.append(s); })()")
    assert browser.js("window.evil") is None
    for name in ("light", "dark"):
        theme(browser, name)
        assert browser.js(CONTRAST) == []
        browser.screenshot(f"page-markdown-{name}.png")


# Each takes the renderer minutes.
ENDLESS = {"emphasis": "'**a'.repeat(200000)", "brackets": "'[a]('.repeat(60000)", "links": "'http://a.com/(('.repeat(20000)",
           "definitions": "'[a]: b\\n'.repeat(30000)", "table": "'|a'.repeat(5000) + '\\n' + '|-'.repeat(5000) + '\\n' + '|\\n'.repeat(5000)"}


@pytest.mark.parametrize("what", ENDLESS)
def test_no_markdown_stops_the_page(browser, launch, what):
    """What would take too long to render is shown as it is, and what comes after it is rendered."""
    server = launch()
    open_page(browser, server)
    if not browser.js("markdown !== null"):
        pytest.skip("built without markdown-it, DOMPurify and highlight.js (scripts/install-deps)")
    browser.js(f"window.text = {ENDLESS[what]}; current.messages.push({{role: 'assistant', content: text}}); showConversation()")
    here = "[...document.querySelectorAll('.msg .text')].pop()"
    if what != "links":  # these are text anyhow, in one paragraph
        assert browser.js(here + ".classList.contains('plain')")
    assert browser.js(f"{here}.textContent.trim() === text.trim()")
    browser.js("current.messages.push({role: 'assistant', content: '**bold** http://a.com\\n\\n'.repeat(1000)}); showConversation()")
    assert [browser.js(f"{here}.querySelectorAll('{tag}').length") for tag in ("strong", "a")] == [1000, 1000]


def test_no_code_stops_the_page(browser, launch):
    """Words that follow each other in C++ take the library minutes: they are not coloured. What is begins and ends where it should."""
    server = launch()
    open_page(browser, server)
    if not browser.js("markdown !== null"):
        pytest.skip("built without markdown-it, DOMPurify and highlight.js (scripts/install-deps)")
    here = "[...document.querySelectorAll('.code')].pop()"
    for code in ("'a '.repeat(20000)", "'a a a a\\n'.repeat(5000)", "'/*' + ' a comment\\n'.repeat(300) + '*/ int x;\\n'"):
        browser.js(f"window.text = {code}; current.messages.push({{role: 'assistant', content: '```cpp\\n' + text + '\\n```'}}); showConversation()")
        assert browser.js(f"{here}.querySelector('code').textContent.trim() === text.trim()"), code
    assert browser.js(f"[...{here}.querySelectorAll('.hljs-comment')].map(e => e.textContent).join('') === text.slice(0, text.indexOf(' int'))")
    assert browser.js(f"[...{here}.querySelectorAll('.hljs-keyword')].map(e => e.textContent)") == ["int"]


def test_conversations_are_kept(browser, launch):
    server = launch()
    open_page(browser, server)
    say(browser, "SAY:one")
    say(browser, "SAY:two")
    browser.js("document.getElementById('new').click()")
    assert browser.js("document.querySelectorAll('.msg').length") == 0
    say(browser, "SAY:three")
    titles = "[...document.querySelectorAll('#conversations .open')].map(e => e.textContent)"
    assert browser.js(titles) == ["SAY:three", "SAY:one"]
    browser.call("Page.reload")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    assert browser.js(titles) == ["SAY:three", "SAY:one"]
    browser.js("[...document.querySelectorAll('#conversations .open')][1].click()")
    assert browser.js("[...document.querySelectorAll('.msg .body')].map(e => e.innerText.trim())")[::2] == ["SAY:one", "SAY:two"]
    # Edited and sent again: what followed is said anew.
    browser.js("[...document.querySelectorAll('.msg.user button')].find(b => b.textContent === 'Edit').click()")
    browser.js("document.querySelector('.msg textarea').value = 'SAY:changed'")
    browser.js("[...document.querySelectorAll('.msg button')].find(b => b.textContent === 'Send edited').click()")
    browser.wait("document.getElementById('stop').disabled && [...document.querySelectorAll('.msg')].length === 2")
    browser.wait("[...document.querySelectorAll('.msg')].pop().innerText.includes('changed')")
    browser.js("[...document.querySelectorAll('.msg.assistant button')].find(b => b.textContent === 'Regenerate').click()")
    browser.wait("document.getElementById('stop').disabled && document.querySelectorAll('.msg').length === 2")
    assert last(browser) == "changed"
    browser.js("yes = false; document.querySelector('#conversations .drop').click()")
    assert browser.js("asked") == 'Delete "SAY:changed"?' and browser.js(titles) == ["SAY:changed", "SAY:three"]
    browser.js("yes = true; document.querySelector('#conversations .drop').click()")
    assert browser.js(titles) == ["SAY:three"]
    browser.js("document.getElementById('forget').click()")
    assert browser.js(titles) == [] and browser.js("localStorage.length") <= 1
    complaints(browser, server)


def press(browser, role, label):
    """The last message of this role has such a button."""
    browser.js(f"[...[...document.querySelectorAll('.msg.{role}')].pop().querySelectorAll('button')]"
               f".find(b => [b.textContent, b.getAttribute('aria-label')].includes('{label}')).click()")


def test_what_was_before_an_edit_is_kept(browser, launch):
    """An edit and an answer made anew leave what was there, and all that followed, as a version to go back to."""
    server = launch("--step-us", 5000)
    open_page(browser, server)
    texts = "[...document.querySelectorAll('.msg .body')].map(e => e.innerText.trim())"
    places = "[...document.querySelectorAll('.tools span')].map(e => e.textContent)"
    say(browser, "SAY:one")
    say(browser, "SAY:two")
    assert browser.js(places) == []
    press(browser, "assistant", "Regenerate")
    browser.wait("document.getElementById('stop').disabled && document.querySelectorAll('.version').length === 2")
    assert browser.js(places) == ["2 / 2"] and browser.js(texts) == ["SAY:one", "one", "SAY:two", "two"]
    browser.js("[...document.querySelectorAll('.msg.user button')].find(b => b.textContent === 'Edit').click()")
    browser.js("document.querySelector('.msg textarea').value = 'SAY:changed'")
    browser.js("[...document.querySelectorAll('.msg button')].find(b => b.textContent === 'Send edited').click()")
    browser.wait("document.getElementById('stop').disabled && document.querySelectorAll('.msg').length === 2")
    assert browser.js(texts) == ["SAY:changed", "changed"] and browser.js(places) == ["2 / 2"]
    # Back at the first, with all that followed and its versions; also when the page was loaded again.
    here = "document.activeElement.getAttribute('aria-label') + document.getElementById('told').textContent"
    press(browser, "user", "Previous version")
    assert browser.js(here) == "Next versionversion 1 of 2"
    browser.call("Page.reload")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    browser.js("document.querySelector('#conversations .open').click()")
    assert browser.js(texts) == ["SAY:one", "one", "SAY:two", "two"] and browser.js(places) == ["1 / 2", "2 / 2"]
    # What a version says the model is told, and nothing of the others.
    browser.js("window.asked = []; const was = fetch; window.fetch = (path, options) => { if (options?.body) asked.push(JSON.parse(options.body)); return was(path, options); }")
    press(browser, "assistant", "Previous version")
    say(browser, "SAY:three")
    assert browser.js("asked.pop().messages.map(m => m.content)") == ["SAY:one", "one", "SAY:two", "two", "SAY:three"]
    assert browser.js("JSON.stringify(asked)").find("versions") < 0
    browser.js("[...document.querySelectorAll('.version')].find(b => b.getAttribute('aria-label') === 'Next version').click()")
    assert browser.js(texts) == ["SAY:changed", "changed"]
    # An answer that is coming is stopped, and kept in its version.
    browser.js("send('SAY:abc' + ' and more'.repeat(100))")
    browser.wait("[...document.querySelectorAll('.msg.assistant .body')].pop().textContent.startsWith('abc')")
    browser.js("document.querySelector('.version').click()")
    browser.wait("document.getElementById('stop').disabled")
    server.wait_idle(5)
    assert browser.js(texts) == ["SAY:one", "one", "SAY:two", "two", "SAY:three", "three"]
    browser.js("[...document.querySelectorAll('.version')].find(b => b.getAttribute('aria-label') === 'Next version').click()")
    assert last(browser).startswith("abc") and last(browser, ".meta") == "stopped"
    assert browser.js(NAMELESS) == [] and browser.js(CONTRAST) == []
    complaints(browser, server)


def test_what_came_of_an_answer_is_kept_when_the_page_is_loaded_again(browser, launch):
    server = launch("--step-us", 20000)
    open_page(browser, server)
    browser.js("send('go on for ever')")
    browser.wait("document.querySelector('.msg.assistant .body').textContent.startsWith('abcdef')")
    browser.call("Page.reload")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    server.wait_idle(5)
    browser.js("document.querySelector('#conversations .open').click()")
    assert last(browser).startswith("abcdef") and last(browser, ".meta") == "stopped"
    complaints(browser, server)


def test_the_end_of_an_answer_is_in_view(browser, launch):
    """Also where much comes at once, and as its line and buttons come below it; who looks elsewhere stays there."""
    server = launch()
    open_page(browser, server)
    browser.js("current.messages.push({role: 'assistant', content: 'a line\\n\\n'.repeat(200)}); showConversation()")
    below = "log.scrollHeight - log.clientHeight - log.scrollTop"
    assert browser.js(below) < 2 and browser.js("log.scrollTop") > 1000
    say(browser, "SAY:" + "many words " * 60)
    browser.js("new Promise(requestAnimationFrame)")
    assert browser.js(below) < 2
    browser.js("[...document.querySelectorAll('.msg.assistant button')].pop().click()")  # Regenerate
    browser.js("log.scrollTop = 500")
    browser.wait("document.getElementById('stop').disabled")
    browser.js("new Promise(requestAnimationFrame)")
    assert browser.js("log.scrollTop") == 500


def test_thoughts_stay_as_they_were_folded(browser, launch):
    server = launch("--step-us", 20000, "--reasoning-parser", "think")
    open_page(browser, server)
    browser.js("send('SAY:<think>' + 'a thought '.repeat(8) + '</think>and an answer')")
    browser.wait("document.querySelector('.msg.assistant details').open && document.querySelector('.thoughts').textContent.length > 5")
    browser.js("document.querySelector('.msg.assistant summary').focus()")
    browser.key("Enter", "\r")
    before = browser.js("document.querySelector('.thoughts').textContent.length")
    browser.wait(f"document.querySelector('.thoughts').textContent.length > {before + 5}")
    assert not browser.js("document.querySelector('.msg.assistant details').open") and browser.js("document.activeElement.tagName") == "SUMMARY"
    browser.wait("document.getElementById('stop').disabled")
    assert last(browser, ".text") == "and an answer" and not browser.js("document.querySelector('.msg.assistant details').open")
    assert browser.js("document.activeElement.tagName") == "SUMMARY"
    complaints(browser, server)


def test_a_screen_reader_is_told_once(browser, launch):
    """The start and the end of an answer, not each piece of it with all before; and not twice a second that the server is ready."""
    server = launch("--step-us", 20000)
    open_page(browser, server)
    browser.js("""(() => {
      window.told = [];
      for (const el of document.querySelectorAll("[role=status], [role=log], [aria-live]")) {
        if (el.getAttribute("aria-live") === "off") continue;
        new MutationObserver(() => told.push(el.id + ": " + el.textContent)).observe(el, {childList: true, subtree: true, characterData: true});
      }
    })()""")
    say(browser, "SAY:" + "many words " * 5)
    time.sleep(1.5)
    assert browser.js("told") == ["told: the model answers", "told: answer: " + ("many words " * 5).strip()]
    complaints(browser, server)


def test_settings_are_there_when_the_page_is_loaded_again(browser, launch):
    server = launch()
    open_page(browser, server)
    values = "['precision', 'max_tokens', 'temperature', 'top_k', 'system', 'key'].map(id => document.getElementById(id).value)"
    before = browser.js(values)
    for name, value in (("precision", "fast"), ("max_tokens", "1000"), ("temperature", "0.1"), ("system", "Say little."), ("key", "secret")):
        browser.js(f"{{const one = document.getElementById('{name}'); one.value = '{value}'; one.dispatchEvent(new Event('input'))}}")
    browser.call("Page.reload")
    browser.wait("document.getElementById('state').textContent === 'ready' && document.getElementById('model').textContent.startsWith('fake')")
    assert browser.js(values) == ["fast", "1000", "0.1", before[3], "Say little.", ""]
    assert "secret" not in browser.js("JSON.stringify([{...sessionStorage}, {...localStorage}])")
    complaints(browser, server)


def test_what_is_written_from_the_right(browser, launch):
    server = launch()
    open_page(browser, server)
    say(browser, "SAY:שלום `f(x)`, Hello")
    assert last(browser) == "שלום f(x), Hello" or not browser.js("markdown !== null")
    direction = "getComputedStyle([...document.querySelectorAll('.msg')].pop().querySelector('{}')).direction"
    assert browser.js(direction.format(".text")) == "rtl"
    if browser.js("markdown !== null"):
        assert browser.js(direction.format("code")) == "ltr"
    say(browser, "SAY:Hello, שלום")
    assert browser.js(direction.format(".text")) == "ltr"
    browser.js("document.getElementById('precision').value = 'compare'")
    say(browser, "SAY:שלום, Hello")
    assert browser.js(direction.format(".plain")) == "rtl"
    assert browser.js("getComputedStyle([...document.querySelectorAll('.msg.user .body')].pop()).direction") == "ltr"  # begins with SAY
    browser.call("Input.insertText", text="שלום")
    assert browser.js("getComputedStyle(document.getElementById('input')).direction") == "rtl"
    complaints(browser, server)


def test_an_answer_goes_on_beside_other_conversations(browser, launch):
    server = launch("--step-us", 20000)
    open_page(browser, server)
    say(browser, "SAY:one")
    browser.js("document.getElementById('new').click()")
    browser.js("send('go on for ever')")
    shown = "document.querySelector('.msg.assistant .body').textContent.length"
    browser.wait(shown + " > 3")
    # Another is deleted, and the list leads back to the one that is shown.
    browser.js("[...document.querySelectorAll('#conversations .drop')].pop().click()")
    browser.js("document.querySelector('#conversations .open').click()")
    before = browser.js(shown)
    browser.wait(f"{shown} > {before + 10}")
    assert not browser.js("document.getElementById('stop').disabled") and browser.js("document.querySelectorAll('#conversations li').length") == 1
    # What is being composed (Japanese, Chinese) is left by Escape too, which is not for the answer.
    browser.js("document.getElementById('input').dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', isComposing: true, bubbles: true}))")
    time.sleep(0.5)
    assert not browser.js("document.getElementById('stop').disabled")
    browser.js("document.getElementById('stop').click()")
    browser.wait("document.querySelector('.msg.assistant .meta').textContent === 'stopped'")
    complaints(browser, server)


def test_two_tabs_keep_what_each_says(browser, launch):
    server = launch()
    open_page(browser, server)
    first = browser.session
    browser.session = None
    target = browser.call("Target.createTarget", url=server.url + "/")["targetId"]
    second = browser.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    browser.wait("document.getElementById('state').textContent === 'ready'")
    for session, text in ((second, "SAY:one"), (first, "SAY:two"), (second, "SAY:three"), (first, "SAY:four")):
        browser.session = session
        browser.js(f"send('{text}')")
        browser.wait("document.getElementById('stop').disabled")
    for session in (first, second):
        browser.session = session
        browser.wait("JSON.stringify([...document.querySelectorAll('#conversations .open')].map(e => e.textContent).sort()) === '[\"SAY:one\",\"SAY:two\"]'")
        assert browser.js("document.querySelectorAll('.msg').length") == 4
    # Also where one saved before it had seen the last of the other's.
    for stale in (False, True):
        browser.session = first
        if stale:
            browser.js("(() => { const kept = JSON.parse(localStorage.getItem(storeKey)); kept.find(c => c.id !== current.id).messages.pop();"
                       "localStorage.setItem(storeKey, JSON.stringify(kept)); })()")
        for session in (first, second):
            browser.session = session
            browser.wait("JSON.stringify(JSON.parse(localStorage.getItem(storeKey)).map(c => c.messages.map(m => m.content)).sort()) === "
                         "'[[\"SAY:one\",\"one\",\"SAY:three\",\"three\"],[\"SAY:two\",\"two\",\"SAY:four\",\"four\"]]'")


def test_an_answer_that_a_limit_cut_says_so(browser, launch):
    server = launch("--max-model-len", 100)
    open_page(browser, server)
    browser.js("document.getElementById('max_tokens').value = 5")
    say(browser, "go on for ever")
    assert last(browser) == "abcde" and ", cut off: Max tokens" in last(browser, ".meta")
    say(browser, "SAY:all")
    assert last(browser) == "all" and "tokens in" in last(browser, ".meta") and "cut off" not in last(browser, ".meta")
    browser.js("document.getElementById('new').click(); document.getElementById('max_tokens').value = ''")
    say(browser, "go on for ever")
    assert ", cut off: the context is full" in last(browser, ".meta")
    complaints(browser, server)


def test_a_conversation_in_two_tabs(browser, launch):
    """What one says the other shows, so that it goes on from there; said in both at once, these are two conversations."""
    server = launch("--step-us", 10000)
    open_page(browser, server)
    say(browser, "SAY:one")
    first = browser.session
    browser.session = None
    target = browser.call("Target.createTarget", url=server.url + "/")["targetId"]
    second = browser.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    browser.wait("document.getElementById('state').textContent === 'ready'")
    browser.js("document.querySelector('#conversations .open').click()")
    texts = "JSON.stringify([...document.querySelectorAll('.msg .body')].map(e => e.innerText.trim()).filter(Boolean))"
    said = ["SAY:one", "one"]
    for session, word in ((second, "two"), (first, "three")):
        browser.session = session
        browser.js(f"send('SAY:{word}')")
        said += ["SAY:" + word, word]
        for browser.session in (first, second):
            browser.wait(f"document.getElementById('stop').disabled && {texts} === {json.dumps(json.dumps(said, separators=(',', ':')))}")
    # Both at once.
    browser.session = first
    browser.js("send('SAY:' + 'left '.repeat(100))")
    browser.wait("document.querySelectorAll('.msg .body').length === 8")
    browser.session = second
    browser.wait("document.querySelectorAll('.msg .body').length === 7")
    browser.js("send('SAY:' + 'right '.repeat(20))")
    kept = "JSON.stringify(JSON.parse(localStorage.getItem(storeKey)).map(c => c.messages.at(-1).content.slice(0, 5)).sort())"
    for browser.session in (first, second):
        browser.wait(f"document.getElementById('stop').disabled && {kept} === '[\"left \",\"right\"]'")
    time.sleep(1)
    for browser.session, word in ((first, "left "), (second, "right")):
        assert browser.js(kept) == '["left ","right"]' and last(browser).startswith(word)
        assert browser.js("document.querySelectorAll('#conversations li').length") == 2


def test_a_server_that_goes_away_in_an_answer(browser, launch):
    server = launch("--step-us", 20000)
    open_page(browser, server)
    browser.js("send('go on for ever')")
    browser.wait("document.querySelector('.msg.assistant .body').textContent.startsWith('abc')")
    server.process.kill()
    server.process.wait()
    server.process.returncode = 0  # as was asked for
    browser.wait("document.getElementById('stop').disabled")
    gone = "the server went away before the answer was done"
    assert last(browser).startswith("abc") and last(browser, ".fault") == gone
    # Where a proxy ends the stream, it looks like a good end.
    event = json.dumps({"choices": [{"index": 0, "delta": {"content": "half an"}}]})
    browser.js(f"window.fetch = async () => new Response('data: ' + {event!r} + '\\n\\n')")
    say(browser, "SAY:more")
    assert last(browser).startswith("half an") and last(browser, ".fault") == gone


def test_a_server_that_starts_again(browser, launch):
    server = launch()
    open_page(browser, server)
    time.sleep(2)
    say(browser, "SAY:one")
    browser.wait("slices.size > 0")
    server.process.send_signal(signal.SIGSTOP)  # as where the network is lost: nobody says no
    browser.wait("document.getElementById('state').textContent === 'the server does not answer'")
    server.process.send_signal(signal.SIGCONT)
    browser.wait("document.getElementById('state').textContent === 'ready'")
    before = browser.js("now")
    server.stop()
    browser.wait("document.getElementById('state').textContent === 'the server does not answer'")
    # Also where it is seen so late that its numbers are beyond those of the one before.
    browser.js("window.fetched = fetch; window.fetch = async () => { throw new TypeError('away'); }")
    again = launch("--port", server.port)
    httpx.post(again.url + "/v1/completions", json={"prompt": "SAY:early", "max_tokens": 5})
    early = httpx.get(again.url + "/nestedfp/timeline").json()["slices"][-1]["i"]
    end = time.time() + 60
    while httpx.get(again.url + "/nestedfp/timeline").json()["now"] <= max(before, early + 2) and time.time() < end:
        time.sleep(0.2)
    browser.js("window.fetch = fetched")
    say(browser, "SAY:two")
    browser.wait(f"slices.has({early}) && slices.size === 1 + [...slices.keys()].filter(i => i > {early}).length")
    assert last(browser) == "two" and again.url == server.url


def test_compare(browser, launch):
    server = launch("--fp8-says", "X", "--step-us", 2000)
    open_page(browser, server)
    browser.js("document.getElementById('precision').value = 'compare'")
    say(browser, "SAY:the same until here")
    browser.wait("document.querySelectorAll('.pair h3').length === 2")
    assert browser.js("[...document.querySelectorAll('.pair h3')].map(e => e.textContent)") == ["FP16", "FP8"]
    assert browser.js("[...document.querySelectorAll('.pair .plain')].map(e => e.textContent)") == ["the same until here", "the same Xntil here"]
    assert browser.js("[...document.querySelectorAll('.pair mark')].map(e => e.textContent)") == ["u", "X"]
    assert "differ first at token 10" in browser.js("[...document.querySelectorAll('.msg.compare > .meta')].pop().textContent")
    # Prompt and answer of each side, all of it in the side's precision: neither took what the other had computed.
    labels = browser.js("[...document.querySelectorAll('.pair .share')].map(e => e.getAttribute('aria-label'))")
    counts = [tuple(map(int, re.search(r"(\d+) tokens in FP16, (\d+) in FP8", label).groups())) for label in labels]
    assert [label.split(":")[0] for label in labels] == ["prompt", "answer"] * 2
    prompt, text = counts[0][0], counts[1][0]
    assert prompt > 32 and text > 10 and counts == [(prompt, 0), (text, 0), (0, prompt), (0, text)]
    for name in ("light", "dark"):
        theme(browser, name)
        assert browser.js(CONTRAST) == []
        browser.screenshot(f"page-compare-{name}.png")
    complaints(browser, server)


def test_compare_with_thoughts(browser, launch):
    server = launch("--fp8-says", "X", "--reasoning-parser", "think")
    open_page(browser, server)
    browser.js("document.getElementById('precision').value = 'compare'")
    say(browser, "SAY:<think>some thoughts</think>the answer")

    def texts(what):
        return browser.js(f"[...[...document.querySelectorAll('.msg')].pop().querySelectorAll('.pair {what}')].map(e => e.textContent)")
    assert texts(".thoughts") == ["some thoughts", "soXe thoughts"] and texts(".thoughts mark") == ["m", "X"]
    assert texts(".plain") == ["the answer", "the answer"] and len(texts("details[open]")) == 2
    # Where the answers part behind the same thoughts these stay folded.
    browser.js("""current.messages.push({role: "assistant", content: "", pair: ["yes", "no"].map((word, i) => (
        {precision: i ? "fast" : "exact", tokens: ["<think>", "hm, yes", "</think>", "\\n\\n", word, " sir"], thoughts: "hm, yes", content: word + " sir", meta: "stopped"}))});
        showConversation()""")
    assert texts(".thoughts") == ["hm, yes"] * 2 and texts(".plain") == ["yes sir", "no sir"]
    assert texts("mark") == texts(".plain mark") == ["yes", "no"] and texts("details[open]") == []
    complaints(browser, server)


def test_a_new_users_first_questions(browser, launch_real, tmp_path):
    """As scripts/quickstart leaves the demo model: how it is sampled lies beside it."""
    demo = os.path.abspath(os.environ.get("NFP_DEMO_MODEL", ""))
    os.symlink(demo, tmp_path / "demo.gguf")
    shutil.copy(os.path.join(os.path.dirname(__file__), "../../scripts/demo/generation_config.json"), tmp_path / "demo.generation_config.json")
    server = launch_real("--max-model-len", 1024, "--kv-cache-memory", "256MB", model=str(tmp_path / "demo.gguf"))
    open_page(browser, server, model="demo")
    browser.js("document.getElementById('max_tokens').value = 60")
    for question, answer in (("What is the capital of France?", "Paris"), ("Why is the sky blue?", "Rayleigh scattering"),
                             ("What is 2 + 2?", "4")):
        say(browser, question)
        assert answer in last(browser), (question, last(browser))
    complaints(browser, server)


def busy(server):
    """Load that makes a threshold policy change its mind: (pool, stop)."""
    import concurrent.futures
    import httpx
    pool = concurrent.futures.ThreadPoolExecutor(11)
    pool.submit(httpx.post, server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 250}, timeout=60)
    time.sleep(1)
    for i in range(10):
        pool.submit(httpx.post, server.url + "/v1/completions", json={"prompt": "x" * 300, "max_tokens": 60 + 10 * i}, timeout=60)
    return pool


@pytest.mark.parametrize("policy", ["threshold:8", "alternate:5"])
def test_load_and_reasons(browser, launch, policy):
    server = launch("--step-us", 20000, "--precision-policy", policy)
    open_page(browser, server)
    with busy(server):
        browser.wait("document.querySelectorAll('#why time').length >= 2")
        browser.wait("document.getElementById('ttft_p50').textContent !== '–'")
        time.sleep(1.5)
        for name in ("light", "dark"):
            theme(browser, name)
            assert browser.js(CONTRAST) == []
            browser.screenshot(f"page-load-{policy[:4]}-{name}.png")
    assert int(browser.js("document.getElementById('switches').textContent.replace(',', '')")) > 0
    reason = browser.js("[...document.querySelectorAll('#why li')].map(e => e.textContent).join('|')")
    told = browser.js("document.getElementById('policy').textContent")
    if policy.startswith("threshold"):
        assert told == "FP8 in steps of more than 8 tokens, else FP16."
        assert "to FP8: " in reason and "in the step, step of" in reason and "over 8" in reason
        assert browser.js("!document.getElementById('line_legend').hidden && document.getElementById('line_text').textContent") == "threshold, 8 tokens"
    else:
        assert "every 5 steps" in reason
    # Prompts and answers are apart, and p99 is not told of ten requests.
    assert browser.js("[...slices.values()].some(s => s.prefill_fp16 + s.prefill_fp8 >= 300 && s.decode_fp16 + s.decode_fp8 < 300)")
    assert browser.js("document.getElementById('ttft_count').textContent") == "11"
    assert browser.js("document.getElementById('ttft_p90').textContent") != "–"
    assert browser.js("document.getElementById('ttft_p99').textContent") == "–"
    complaints(browser, server)


def test_the_slider_of_load(browser, launch):
    """With --demo-load the page has a slider that makes the server load itself; without, it has none."""
    open_page(browser, launch())
    browser.js("document.getElementById('tab_load').click()")
    assert not browser.js("document.getElementById('demo_load').checkVisibility()")
    server = launch("--demo-load", "--step-us", 500)
    open_page(browser, server)
    browser.js("document.getElementById('tab_load').click()")
    browser.wait("document.getElementById('demo_load').checkVisibility()")

    def slide(value):
        browser.js(f"{{const s = document.getElementById('demo_load'); s.value = {value}; s.dispatchEvent(new Event('input'))}}")
    slide(100)
    browser.wait("document.getElementById('demo_load').parentNode.textContent.includes('100 requests/s')")
    browser.wait("Number(document.getElementById('fp16_now').textContent.replace(/[^0-9]/g, '')) > 0")
    assert httpx.get(server.url + "/nestedfp/timeline").json()["demo_load"] == 100
    slide(0)
    browser.wait("document.getElementById('demo_load').parentNode.textContent.includes('0.0 requests/s')")
    end = time.time() + 20
    while httpx.get(server.url + "/nestedfp/timeline").json()["demo_load"] > 0 and time.time() < end:
        time.sleep(0.1)
    server.wait_idle()
    assert httpx.get(server.url + "/nestedfp/timeline").json()["demo_load"] == 0


def test_on_a_phone(browser, launch):
    server = launch("--step-us", 5000, "--precision-policy", "threshold:8")
    open_page(browser, server, width=400, height=844)
    seen = "['chat', 'saved', 'settings', 'load'].filter(id => document.getElementById(id).getClientRects().length > 0)"
    assert browser.js(seen) == ["chat"]
    say(browser, "SAY:a word and `code`")
    with busy(server):
        for tab in ("saved", "load", "settings", "chat"):
            browser.js(f"document.getElementById('tab_{tab}').click()")
            time.sleep(1.2)
            assert browser.js(seen) == [tab]
            assert browser.js("document.documentElement.scrollWidth") <= 400
            for name in ("light", "dark"):
                theme(browser, name)
                assert browser.js(CONTRAST) == [], tab
                browser.screenshot(f"page-phone-{tab}-{name}.png")
    browser.js("document.getElementById('tab_chat').focus()")
    browser.key("ArrowRight")
    assert browser.js("document.activeElement.id") == "tab_saved" and browser.js(seen) == ["saved"]
    assert browser.js("document.getElementById('tab_saved').getAttribute('aria-selected')") == "true"
    assert browser.js(NAMELESS) == []
    complaints(browser, server)


def test_errors_are_shown(browser, launch):
    server = launch("--api-key", "secret")
    browser.call("Page.navigate", url=server.url + "/")
    browser.wait("document.getElementById('model').textContent.includes('API key')")
    browser.call("Input.insertText", text="hello")
    browser.key("Enter", "\r")
    browser.wait("document.querySelector('.msg.error .fault') !== null")
    assert "API key" in browser.js("document.querySelector('.msg.error .fault').textContent")
    browser.js("document.getElementById('key').value = 'secret'; document.getElementById('key').dispatchEvent(new Event('change'))")
    say(browser, "SAY:welcome")
    assert last(browser) == "welcome"
    # Where a proxy answers for a server that is away, in HTML.
    browser.js("window.fetch = async () => new Response('<html>', {status: 502, statusText: 'Bad Gateway'})")
    say(browser, "SAY:away")
    assert last(browser, ".fault") == "the server answers 502 Bad Gateway"
    browser.wait("document.getElementById('state').textContent === 'the server answers 502 Bad Gateway'")
