"""A small Hub on loopback: what `huggingface_hub` asks of the real one to publish and to load a model.

Repositories are kept in memory as lists of commits. Each request is logged, and `Fault`s break some of them.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LICENSES = {"mit", "apache-2.0", "cc-by-4.0"}
LFS_SUFFIXES = (".safetensors", ".bin")
# What the Hub writes into a new Space.
SPACE_TEXT = "Check out the configuration reference at https://huggingface.co/docs/hub/spaces-config-reference"


@dataclass
class Commit:
    oid: str
    message: str
    files: dict[str, bytes]


@dataclass
class Repository:
    name: str
    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=dict)

    def commit(self, branch: str, message: str, files: dict[str, bytes]) -> Commit:
        history = self.branches.setdefault(branch, [])
        parent = history[-1].oid if history else ""
        listing = "".join(f"{path}\n{hashlib.sha256(data).hexdigest()}\n" for path, data in sorted(files.items()))
        oid = hashlib.sha1(f"{self.name}\n{branch}\n{parent}\n{len(history)}\n{listing}".encode()).hexdigest()
        history.append(Commit(oid, message, dict(files)))
        return history[-1]

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
        status: answer with this status; or, when 0, cut the connection after `after_bytes` of the body.
        after_bytes: read of the body before the connection is cut.
        stall: wait for this event before cutting it.
        lose_answer: do what was asked, and cut the connection in place of an answer.
        message: said with the status.
    """

    method: str
    path: str
    times: int = 1
    status: int = 0
    after_bytes: int = 0
    stall: threading.Event | None = None
    lose_answer: bool = False
    message: str | None = None


class Refusal(Exception):
    """An answer other than success, with the headers by which the Hub explains it."""

    def __init__(self, status: int, message: str, code: str | None = None, body: dict | None = None):
        super().__init__(message)
        self.status, self.code, self.body = status, code, body or {"error": message}


class HubServer:
    """A Hub with users, repositories and faults; a context manager that serves while it is open.

    Attributes:
        tokens: token -> user name.
        readers: tokens that may not write.
        repositories: `owner/name`, of a Space `spaces/owner/name`, of a dataset `datasets/owner/name` -> Repository.
        objects: SHA-256 -> content, of files stored by LFS.
        requests: (method, path, status) of each request, in the order of their ends.
        bodies: bytes of request bodies, in the same order, to search for what must not be sent.
        faults: consulted for each request.
        on_commit: called with the repository before a commit to it is looked at.
    """

    def __init__(self):
        self.tokens = {"hf_writer": "tester", "hf_reader": "tester"}
        self.readers = {"hf_reader"}
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.bodies: list[bytes] = []
        self.faults: list[Fault] = []
        self.on_commit = None
        self.reached = threading.Event()  # a fault was met
        self.lock = threading.RLock()
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def reset(self) -> None:
        """As new, at the same address."""
        with self.lock:
            for kept in (self.repositories, self.objects, self.requests, self.bodies, self.faults):
                kept.clear()
            self.reached.clear()
            self.on_commit = None

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Content of each file of a repository."""
        return dict(self.repositories[name].find(revision).files)

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    self.reached.set()
                    return fault
        return None


def _owner(name: str) -> str:
    return name.removeprefix("spaces/").partition("/")[0]


def git_blob(data: bytes) -> str:
    """The object id that git gives to content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_lfs(path: str) -> bool:
    return path.endswith(LFS_SUFFIXES)


def card_errors(content: str) -> list[str]:
    """What is wrong with a card's front matter, by some of the Hub's rules."""
    match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
    if not match:
        return []
    try:
        data = yaml.safe_load(match.group(1))
    except yaml.YAMLError as error:
        return [f"invalid YAML: {error}"]
    errors = []
    if "license" in data and data["license"] not in LICENSES:
        errors.append(f'"license" must be one of {sorted(LICENSES)}')
    languages = data.get("language", [])
    for language in languages if isinstance(languages, list) else [languages]:
        if not re.fullmatch(r"[a-z]{2,3}", str(language)):
            errors.append(f'"language" {language} must be a code of ISO 639')
    if "sdk" in data:  # of a Space
        colours = {data.get("colorFrom", "red"), data.get("colorTo", "red")}
        if colours - {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}:
            errors.append('"colorFrom" and "colorTo" must be of the known colours')
        if data["sdk"] not in ("gradio", "docker", "static") or len(data.get("short_description", "")) > 60:
            errors.append('"sdk" must be a known one, and "short_description" have 60 characters at most')
    for index in data.get("model-index", []):
        for result in index["results"]:
            if not result.get("task", {}).get("type") or not result.get("dataset", {}).get("name"):
                errors.append('"model-index" needs a task type and a dataset name')
            if not all("type" in metric and "value" in metric for metric in result.get("metrics", [{}])):
                errors.append('"model-index" needs a type and a value for each metric')
    return errors


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms
    server_hub: HubServer

    def log_message(self, *_):
        pass

    def _serve(self) -> None:
        hub = self.server_hub
        parts = urlsplit(self.path)
        self.route, self.query = unquote(parts.path), parse_qs(parts.query)
        fault = hub.take_fault(self.command, self.route)
        length = int(self.headers.get("Content-Length") or 0)
        self.lose_answer = fault is not None and fault.lose_answer
        if fault is not None and not fault.status and not fault.lose_answer:
            self.rfile.read(min(fault.after_bytes, length))
            if fault.stall is not None:
                fault.stall.wait(30)
            self._note(0, b"")
            self.close_connection = True
            self.connection.close()
            return
        self.body = self.rfile.read(length)
        if len(self.body) < length:  # the client went away in the middle of it
            self._note(0, b"")
            self.close_connection = True
            return
        try:
            if fault is not None and fault.status == 200:  # what any web server may say
                return self._answer(200, b"<html>Hello.</html>", {"Content-Type": "text/html"})
            if fault is not None and fault.status:
                raise Refusal(fault.status, fault.message or f"made to fail with {fault.status}")
            with hub.lock:
                self._answer(*self._dispatch())
        except Refusal as refusal:
            headers = {"X-Error-Message": str(refusal)} | ({"X-Error-Code": refusal.code} if refusal.code else {})
            self._answer(refusal.status, json.dumps(refusal.body).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _note(self, status: int, body: bytes) -> None:
        with self.server_hub.lock:
            self.server_hub.requests.append((self.command, self.route, status))
            self.server_hub.bodies.append(body)

    def _answer(self, status: int, body: bytes = b"", headers: dict | None = None) -> None:
        self._note(status, self.body)
        if self.lose_answer:
            self.close_connection = True
            self.connection.close()
            return
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))} | (headers or {})
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value, status: int = 200):
        return status, json.dumps(value).encode(), {}

    # Who asks, and for what

    def _user(self) -> str | None:
        """Name of the user whose token this is; None without one."""
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if not token:
            return None
        if scheme != "Bearer" or token not in self.server_hub.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        self.token = token
        return self.server_hub.tokens[token]

    def _may_write(self, name: str) -> None:
        user = self._user()
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        if self.token in self.server_hub.readers or _owner(name) != user:
            raise Refusal(403, "You don't have the rights to write to this repository")

    def _repository(self, name: str) -> Repository:
        repository, user = self.server_hub.repositories.get(name), self._user()
        if repository is None or (repository.private and user != _owner(name)):
            raise Refusal(404, "Repository not found", "RepoNotFound")
        return repository

    def _commit(self, name: str, revision: str) -> Commit:
        commit = self._repository(name).find(revision)
        if commit is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def _dispatch(self):
        method = "GET" if self.command == "HEAD" else self.command
        for verb, pattern, action in _ROUTES:
            match = re.fullmatch(pattern, self.route)
            if verb == method and match:
                return action(self, *match.groups())
        raise Refusal(404, "Not found", "EntryNotFound")

    # Actions

    def whoami(self):
        user = self._user()
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        return self._json({"type": "user", "name": user, "orgs": [], "auth": {"type": "access_token"}})

    def validate_yaml(self):
        errors = card_errors(json.loads(self.body)["content"])
        if errors:
            body = {"errors": [{"message": message} for message in errors], "warnings": []}
            raise Refusal(400, "Invalid metadata", body=body)
        return self._json({"errors": [], "warnings": []})

    def create(self):
        asked = json.loads(self.body)
        is_space = asked.get("type") == "space"
        name = f"{'spaces/' if is_space else ''}{asked.get('organization') or self._user()}/{asked['name']}"
        self._may_write(name)
        if name in self.server_hub.repositories:
            url = f"{self.server_hub.endpoint}/{name}"
            message = "You already created this model repo"
            raise Refusal(409, message, body={"error": message, "url": url})
        repository = Repository(name, asked.get("visibility") == "private")
        files = {".gitattributes": b"*.safetensors filter=lfs\n"}
        if is_space:
            files["README.md"] = f"---\ntitle: A Space\nsdk: {asked['sdk']}\n---\n\n{SPACE_TEXT}\n".encode()
        repository.commit("main", "initial commit", files)
        self.server_hub.repositories[name] = repository
        return self._json({"url": f"{self.server_hub.endpoint}/{name}", "name": name, "id": name})

    def branch(self, name, branch):
        self._may_write(name)
        repository = self._repository(name)
        if branch in repository.branches:
            raise Refusal(409, f"Reference already exists: {branch}")
        repository.branches[branch] = [repository.find(json.loads(self.body).get("startingPoint") or "main")]
        return self._json({})

    def info(self, name, revision="main"):
        commit = self._commit(name, revision)
        siblings = []
        for path, data in sorted(commit.files.items()):
            sibling = {"rfilename": path, "size": len(data), "blobId": git_blob(data)}
            if is_lfs(path):
                sibling["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
            siblings.append(sibling if "blobs" in self.query else {"rfilename": path})
        private = self.server_hub.repositories[name].private
        name = name.removeprefix("spaces/").removeprefix("datasets/")
        return self._json({"id": name, "sha": commit.oid, "private": private, "siblings": siblings, "tags": []})

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
        for file in json.loads(self.body)["files"]:
            data = present.get(file["path"])
            answer = {"path": file["path"], "uploadMode": "lfs" if is_lfs(file["path"]) else "regular"}
            answer["shouldIgnore"] = file["path"] in present.get(".gitignore", b"").decode().split()
            if data is not None:
                answer["oid"] = hashlib.sha256(data).hexdigest() if is_lfs(file["path"]) else git_blob(data)
            answers.append(answer)
        return self._json({"files": answers})

    def lfs_batch(self, name):
        self._may_write(name)
        objects = []
        for each in json.loads(self.body)["objects"]:
            if each["oid"] not in self.server_hub.objects:
                href = f"{self.server_hub.endpoint}/lfs/{each['oid']}"
                verify = {"href": f"{self.server_hub.endpoint}/lfs-verify"}
                each = each | {"actions": {"upload": {"href": href}, "verify": verify}}
            objects.append(each)
        return self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "content does not match its SHA-256")
        self.server_hub.objects[oid] = self.body
        return self._json({})

    def lfs_verify(self):
        asked = json.loads(self.body)
        if len(self.server_hub.objects.get(asked["oid"], b"")) != asked["size"]:
            raise Refusal(404, "no such object")
        return self._json({})

    def commit(self, name, branch):
        self._may_write(name)
        if self.server_hub.on_commit:
            self.server_hub.on_commit(self._repository(name))
        parent = self._commit(name, branch)
        lines = [json.loads(line) for line in self.body.decode().splitlines()]
        header, files = lines[0]["value"], dict(parent.files)
        if header.get("parentCommit") not in (None, parent.oid):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server_hub.objects:
                    raise Refusal(400, f"LFS object {value['oid']} does not exist")
                files[value["path"]] = self.server_hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        if errors := card_errors(files.get("README.md", b"").decode()):
            raise Refusal(400, "; ".join(errors))
        commit = self.server_hub.repositories[name].commit(branch, header["summary"], files)
        url = f"{self.server_hub.endpoint}/{name}/commit/{commit.oid}"
        return self._json({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    def resolve(self, name, revision, path):
        commit = self._commit(name, revision)
        if path not in commit.files:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        data, headers = commit.files[path], {"X-Repo-Commit": commit.oid, "Content-Type": "application/octet-stream"}
        headers["ETag"] = f'"{git_blob(data)}"'
        if is_lfs(path):
            headers["X-Linked-Etag"] = f'"{hashlib.sha256(data).hexdigest()}"'
            headers["X-Linked-Size"] = str(len(data))
        if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            return 206, data[int(part[1]) : int(part[2]) + 1], headers
        return 200, data, headers


_NAME = r"((?:spaces/|datasets/)?[^/]+/[^/]+)"  # of a model, a Space or a dataset
_API = rf"/api/(?:models/)?{_NAME}"
_ROUTES = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/validate-yaml", _Handler.validate_yaml),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", rf"{_API}/branch/(.+)", _Handler.branch),
    ("GET", rf"{_API}", _Handler.info),
    ("GET", rf"{_API}/revision/(.+)", _Handler.info),
    ("GET", rf"{_API}/tree/([^/]+)", _Handler.tree),
    ("GET", rf"{_API}/tree/([^/]+)/(.+)", _Handler.tree),
    ("POST", rf"{_API}/preupload/(.+)", _Handler.preupload),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", _Handler.lfs_put),
    ("POST", r"/lfs-verify", _Handler.lfs_verify),
    ("POST", rf"{_API}/commit/(.+)", _Handler.commit),
    ("GET", rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
]
