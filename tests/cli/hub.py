"""A hub on this machine: what test_pull.py downloads from, with the faults that a network has.

Two servers, as there are two hosts: the hub, and the store that large files are redirected to.
"""

import hashlib
import http.server
import json
import threading
import urllib.parse

COMMIT = "1234567890abcdef1234567890abcdef12345678"


def git_sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """`files`: path -> bytes, of one repository. The other members turn faults on."""

    def __init__(self, repository, files, context=None):
        self.repository = repository
        self.files = dict(files)
        self.large = {path for path, data in files.items() if path.endswith((".safetensors", ".gguf"))}
        self.revisions = {"main": COMMIT, "v1": COMMIT, COMMIT: COMMIT, "refs/pr/1": COMMIT}
        self.token = None  # what the hub asks for
        self.gated = False
        self.ranges = True
        self.cut = {}  # path -> bytes after which the connection ends, once each
        self.list_passing = []  # statuses that the next requests for the list of files get
        self.passing = []  # the same of files
        self.wrong = {}  # path -> what is sent instead
        self.stall = {}  # path -> (bytes after which it stands still, event that ends that)
        self.listed = None  # instead of the list of files
        self.store_redirect = None
        self.store_status = None  # that the store answers with
        self.requests = []  # (server, method, path, headers)
        self.lock = threading.Lock()
        self.hub = self.start(HubHandler, context)
        self.store = self.start(StoreHandler, context)
        scheme = "https" if context else "http"
        # Two names of this machine, so that a token for one is not for the other.
        self.endpoint = f"{scheme}://localhost:{self.hub.server_address[1]}"
        self.store_url = f"{scheme}://127.0.0.1:{self.store.server_address[1]}"

    def start(self, handler, context):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        server.hub = self
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    def close(self):
        for server in (self.hub, self.store):
            server.shutdown()
            server.server_close()

    def etag(self, path):
        data = self.files[path]
        return hashlib.sha256(data).hexdigest() if path in self.large else git_sha1(data)

    def siblings(self):
        for path, data in self.files.items():
            entry = {"rfilename": path, "size": len(data), "blobId": git_sha1(data)}
            if path in self.large:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            yield entry


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def note(self):
        hub = self.server.hub
        with hub.lock:
            hub.requests.append((self.kind, self.command, self.path, dict(self.headers.items())))
        return hub

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, hub, path):
        data = hub.wrong.get(path, hub.files[path])
        begin, asked = 0, self.headers.get("Range")
        if asked and hub.ranges:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
            if begin >= len(data):
                return self.answer(416, Content_Range=f"bytes */{len(data)}")
        body = data[begin:]
        self.send_response(206 if asked and hub.ranges else 200)
        if asked and hub.ranges:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with hub.lock:
            cut = hub.cut.pop(path, None)
        if path in hub.stall:
            count, event = hub.stall[path]
            self.wfile.write(body[:count])
            self.wfile.flush()
            event.wait(60)
            body = body[count:]
        if cut is None:
            self.wfile.write(body)
        else:
            self.wfile.write(body[:cut])
            self.close_connection = True


class HubHandler(Handler):
    kind = "hub"

    def do_GET(self):
        hub = self.note()
        url = urllib.parse.urlsplit(self.path)
        known = hub.token is not None and self.headers.get("Authorization") == f"Bearer {hub.token}"
        api = f"/api/models/{hub.repository}/revision/"
        files = f"/{hub.repository}/resolve/"
        if hub.token is not None and not hub.gated and not known:
            return self.answer(401, b"Invalid username or password.", X_Error_Code="RepoNotFound")
        if url.path.startswith(api) and url.query == "blobs=true":
            if hub.list_passing:
                return self.answer(hub.list_passing.pop(0), b"busy", Retry_After="0")
            commit = hub.revisions.get(urllib.parse.unquote(url.path[len(api):]))
            if commit is None:
                return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            body = hub.listed or {"id": hub.repository, "sha": commit, "siblings": list(hub.siblings())}
            return self.answer(200, json.dumps(body).encode(), Content_Type="application/json")
        if url.path.startswith(files):
            if hub.gated and not known:
                return self.answer(401 if "Authorization" not in self.headers else 403, X_Error_Code="GatedRepo")
            with hub.lock:
                status = hub.passing.pop(0) if hub.passing else None
            if status:
                return self.answer(status, b"busy", Retry_After="0")
            commit, path = urllib.parse.unquote(url.path[len(files):]).split("/", 1)
            if commit != COMMIT or path not in hub.files:
                return self.answer(404, X_Error_Code="EntryNotFound")
            if path in hub.large:
                target = hub.store_redirect or f"{hub.store_url}/{urllib.parse.quote(path)}?signature=secret"
                return self.answer(302, b"moved", Location=target, X_Linked_Etag=f'"{hub.etag(path)}"')
            return self.send_file(hub, path)
        return self.answer(401 if "Authorization" not in self.headers else 404, X_Error_Code="RepoNotFound")


class StoreHandler(Handler):
    kind = "store"

    def do_GET(self):
        hub = self.note()
        if "Authorization" in self.headers:  # as real stores do: one authorisation is enough
            return self.answer(400, b"Only one auth mechanism allowed")
        if hub.store_status:
            return self.answer(hub.store_status)
        self.send_file(hub, urllib.parse.unquote(urllib.parse.urlsplit(self.path).path[1:]))
