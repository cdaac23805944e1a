"""A small Hub on loopback: what `huggingface_hub` asks of the real one to publish and to load a model.

Import it before `huggingface_hub`, which reads its address once: no test reaches the real Hub, or the user's caches.
Repositories are kept in memory as lists of commits. Each request is logged, and `Fault`s break some of them.
"""

import base64
import hashlib
import json
import mimetypes
import os
import re
import secrets
import tempfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".bin")


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]
    oid: str = field(default_factory=lambda: secrets.token_hex(20))


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=dict)

    def commit(self, branch: str, message: str, files: dict[str, bytes]) -> Commit:
        self.branches.setdefault(branch, []).append(Commit(message, dict(files)))
        return self.branches[branch][-1]

    def find(self, revision: str) -> Commit | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((commit for each in self.branches.values() for commit in each if commit.oid == revision), None)


@dataclass
class Fault:
    """Breaks the next `times` requests that match.

    Args:
        method: of the request.
        path: a regular expression searched in its path.
        times: how many requests.
        answer: status, body and headers of the answer; None cuts the connection within the request's body.
        stall: wait for this event before cutting it.
        lose_answer: do what was asked, and cut the connection in place of an answer.
    """

    method: str
    path: str
    times: int = 1
    answer: tuple[int, bytes, dict] | None = None
    stall: threading.Event | None = None
    lose_answer: bool = False


class Refusal(Exception):
    """An answer other than success, with the headers by which the Hub explains it."""

    def __init__(self, status: int, message: str, code: str = "", body: dict | None = None):
        super().__init__(message)
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer = status, json.dumps(body or {"error": message}).encode(), headers


class HubServer:
    """A Hub with a user, repositories and faults.

    Attributes:
        repositories: `owner/name`, `datasets/owner/name`, `spaces/owner/name` -> Repository.
        objects: SHA-256 -> content, of files stored by LFS.
        requests: (method, path, status) of each request, in the order of their ends.
        bodies: bytes of request bodies, in the same order, to search for what must not be sent.
        faults: consulted for each request.
        on_commit: called with the repository before a commit to it is looked at.
        reached: set once a fault was met.
    """

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.bodies: list[bytes] = []
        self.faults: list[Fault] = []
        self.on_commit, self.reached, self.lock = None, threading.Event(), threading.RLock()
        http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{http.server_address[1]}"

    def reset(self) -> None:
        with self.lock:
            for records in (self.repositories, self.objects, self.requests, self.bodies, self.faults):
                records.clear()
            self.reached.clear()
            self.on_commit = None

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        return dict(self.repositories[name].find(revision).files)

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    self.reached.set()
                    return fault
        return None


def git_blob(data: bytes) -> str:
    """The object id that git gives to content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def card_errors(content: str) -> list[str]:
    """What is wrong with a card's front matter, by some of the Hub's rules."""
    match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    data, errors = yaml.safe_load(match[1]) if match else {}, []
    if data.get("license", "mit") not in ("mit", "apache-2.0", "cc-by-4.0"):
        errors.append('"license" must be one of mit, apache-2.0, cc-by-4.0')
    languages = data.get("language", [])
    for language in languages if isinstance(languages, list) else [languages]:
        if not re.fullmatch(r"[a-z]{2,3}", str(language)):
            errors.append(f'"language" {language} must be a code of ISO 639')
    return errors


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms
    hub: HubServer

    def log_message(self, *_):
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.route, self.query = unquote(parts.path), parse_qs(parts.query)
        fault = self.hub.take_fault(self.command, self.route)
        length = int(self.headers.get("Content-Length") or 0)
        if fault is not None and fault.answer is None and not fault.lose_answer:
            self.rfile.read(min(1000, length))
            if fault.stall is not None:
                fault.stall.wait(30)
            return self._cut(0, b"")
        self.body = self.rfile.read(length)
        if len(self.body) < length:  # the client went away in the middle of it
            return self._cut(0, b"")
        if fault is not None and fault.answer:
            return self._answer(*fault.answer)
        try:
            with self.hub.lock:
                answer = self._dispatch()
        except Refusal as refusal:
            answer = refusal.answer
        if fault is not None and fault.lose_answer:
            return self._cut(answer[0], self.body)
        self._answer(*answer)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _note(self, status: int, body: bytes) -> None:
        with self.hub.lock:
            self.hub.requests.append((self.command, self.route, status))
            self.hub.bodies.append(body)

    def _cut(self, status: int, body: bytes) -> None:
        self._note(status, body)
        self.close_connection = True
        self.connection.close()

    def _answer(self, status: int, body: bytes, headers: dict) -> None:
        self._note(status, self.body)
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value):
        return 200, json.dumps(value).encode(), {}

    def _dispatch(self):
        method = "GET" if self.command == "HEAD" else self.command
        for verb, pattern, action in _ROUTES:
            if verb == method and (match := re.fullmatch(pattern, self.route)):
                return action(self, *filter(None, match.groups()))
        raise Refusal(404, "Not found", "EntryNotFound")

    # Who asks, and for what

    def _user(self) -> str | None:
        """Name of the user whose token this is; None without one."""
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.token not in ("", "hf_writer", "hf_reader"):
            raise Refusal(401, "Invalid credentials in Authorization header")
        return "tester" if self.token else None

    def _may_write(self, name: str) -> None:
        user = self._user()
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        if self.token == "hf_reader" or name.split("/")[-2] != user:
            raise Refusal(403, "You don't have the rights to write to this repository")

    def _repository(self, name: str) -> Repository:
        repository, user = self.hub.repositories.get(name), self._user()
        if repository is None or (repository.private and user != name.split("/")[-2]):
            raise Refusal(404, "Repository not found", "RepoNotFound")
        return repository

    def _commit(self, name: str, revision: str) -> Commit:
        commit = self._repository(name).find(revision)
        if commit is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Actions

    def whoami(self):
        if self._user() is None:
            raise Refusal(401, "Invalid username or password.")
        return self._json({"type": "user", "name": "tester", "orgs": [], "auth": {"type": "access_token"}})

    def validate_yaml(self):
        if errors := card_errors(json.loads(self.body)["content"]):
            body = {"errors": [{"message": message} for message in errors], "warnings": []}
            raise Refusal(400, "Invalid metadata", body=body)
        return self._json({"errors": [], "warnings": []})

    def create(self):
        asked = json.loads(self.body)
        folder = "spaces/" if asked.get("type") == "space" and asked["sdk"] == "static" else ""
        name = f"{folder}{asked.get('organization') or self._user()}/{asked['name']}"
        self._may_write(name)
        url = f"{self.hub.endpoint}/{name}"
        if name in self.hub.repositories:
            message = "You already created this model repo"
            raise Refusal(409, message, body={"error": message, "url": url})
        repository = self.hub.repositories[name] = Repository(asked.get("visibility") == "private")
        repository.commit("main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return self._json({"url": url, "name": name, "id": name})

    def branch(self, name, branch):
        self._may_write(name)
        repository = self._repository(name)
        if branch in repository.branches:
            raise Refusal(409, f"Reference already exists: {branch}")
        repository.branches[branch] = [repository.find(json.loads(self.body).get("startingPoint") or "main")]
        return self._json({})

    def info(self, name, revision="main"):
        commit = self._commit(name, revision)
        siblings = [
            {"rfilename": path} | ({"size": len(data), "blobId": git_blob(data)} if "blobs" in self.query else {})
            for path, data in sorted(commit.files.items())
        ]
        private = self.hub.repositories[name].private
        name = name.removeprefix("datasets/").removeprefix("spaces/")
        config = json.loads(commit.files.get("config.json", "null"))
        facts = {} if config is None else {"config": {"model_type": config.get("model_type")}}
        facts |= {"id": name, "sha": commit.oid, "private": private, "siblings": siblings, "tags": []}
        return self._json(facts)

    def tree(self, name, revision, folder=""):
        commit = self._commit(name, revision)
        if folder and not any(path.startswith(folder + "/") for path in commit.files):
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        within, is_deep, entries = f"{folder}/" if folder else "", self.query.get("recursive") == ["true"], {}
        for path, data in sorted(commit.files.items()):
            inner, slash, _ = path.removeprefix(within).partition("/")
            if path.startswith(within) and slash:
                entries[within + inner] = {"type": "directory", "path": within + inner, "oid": git_blob(b"")}
            if path.startswith(within) and (is_deep or not slash):
                entries[path] = {"type": "file", "path": path, "size": len(data), "oid": git_blob(data)}
        return self._json(list(entries.values()))

    def preupload(self, name, revision):
        self._may_write(name)
        present, answers = self._commit(name, revision).files, []
        for path in (file["path"] for file in json.loads(self.body)["files"]):
            is_lfs = path.endswith(LFS_SUFFIXES)
            answer = {"path": path, "uploadMode": "lfs" if is_lfs else "regular"}
            answer["shouldIgnore"] = path in present.get(".gitignore", b"").decode().split()
            if path in present:
                answer["oid"] = hashlib.sha256(present[path]).hexdigest() if is_lfs else git_blob(present[path])
            answers.append(answer)
        return self._json({"files": answers})

    def lfs_batch(self, name):
        self._may_write(name)
        objects = json.loads(self.body)["objects"]
        for each in objects:
            if each["oid"] not in self.hub.objects:
                each["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{each['oid']}"}}
        return self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "content does not match its SHA-256")
        self.hub.objects[oid] = self.body
        return self._json({})

    def commit(self, name, branch):
        self._may_write(name)
        if self.hub.on_commit:
            self.hub.on_commit(self._repository(name))
        parent = self._commit(name, branch)
        header, *lines = (json.loads(line) for line in self.body.decode().splitlines())
        files = dict(parent.files)
        if header["value"].get("parentCommit") not in (None, parent.oid):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        if errors := card_errors(files.get("README.md", b"").decode()):
            raise Refusal(400, "; ".join(errors))
        commit = self.hub.repositories[name].commit(branch, header["value"]["summary"], files)
        url = f"{self.hub.endpoint}/{name}/commit/{commit.oid}"
        return self._json({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    def resolve(self, name, revision, path):
        commit = self._commit(name, revision)
        if path not in commit.files:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        data = commit.files[path]
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        headers["Content-Type"] = mimetypes.guess_type(path)[0] or "application/octet-stream"
        if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            return 206, data[int(part[1]) : int(part[2]) + 1], headers
        return 200, data, headers


_NAME = r"((?:datasets/|spaces/)?[^/]+/[^/]+)"  # of a model, a dataset or a Space
_API = rf"/api/(?:models/)?{_NAME}"
_ROUTES = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/validate-yaml", _Handler.validate_yaml),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", rf"{_API}/branch/(.+)", _Handler.branch),
    ("GET", rf"{_API}(?:/revision/(.+))?", _Handler.info),
    ("GET", rf"{_API}/tree/([^/]+)(?:/(.+))?", _Handler.tree),
    ("POST", rf"{_API}/preupload/(.+)", _Handler.preupload),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", _Handler.lfs_put),
    ("POST", rf"{_API}/commit/(.+)", _Handler.commit),
    ("GET", rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
]

HUB, _HOME = HubServer(), tempfile.TemporaryDirectory()
for _name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HUGGING_FACE_HUB_TOKEN"):
    os.environ.pop(_name, None)
os.environ |= {"HF_ENDPOINT": HUB.endpoint, "HF_HOME": _HOME.name, "HF_TOKEN": "hf_writer"}
os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # plain LFS, which this server speaks
