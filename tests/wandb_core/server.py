"""A stand-in for the W&B server on the loopback, with failures on request; the standard library only.

It answers what wandb-core asks in the tests beside it, always and optimistically, and keeps what it was sent.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import socket
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OPERATION = re.compile(r"\b(query|mutation)\s+(\w+)")
STREAM = re.compile(r"/files/[^/]+/[^/]+/([^/]+)/file_stream")
KEY = "0123456789abcdef0123456789abcdef01234567"
ENTITY = "tester"


def identity(text):
    return base64.b64encode(text.encode()).decode()


class Handler(BaseHTTPRequestHandler):
    """Hands requests to the server's ``owner``."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def body(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            data = b"".join(parts)
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def setup(self):
        super().setup()
        self.server.owner.connections.append(self.connection)

    def answer(self):
        status, payload = self.server.owner.answer(self.command, self.path, self.body())
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_HEAD = answer


class Listener(ThreadingHTTPServer):
    """Threads that end with the test; resets by the client's pool are normal."""

    daemon_threads = True

    def handle_error(self, request, client_address):
        pass


class LoopbackServer:
    """Receives runs.

    Attributes:
        down: A status that every request is answered with, such as 503; ``None`` while it is up.
        hanging: Whether requests are taken and left without an answer.
        slow: Seconds before each answer.
        refused: How many requests were answered with ``down`` or not at all.
        alerts: What alerts were asked for.
        runs: What is known of each run.
        uploads: Files by path.
        artifacts: Artifacts by identity.
        views: Workspaces that were saved.
        projects: Names of the projects that may have workspaces.
        trials: How many trials the agent of each sweep was given.
        unknown: What could not be answered.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self.down, self.hanging, self.slow = None, False, 0.0
        self.refused = 0
        self.connections = []
        self.stopped = threading.Event()
        self.alerts, self.unknown, self.runs, self.uploads, self.artifacts = [], [], {}, {}, {}
        self.views, self.projects, self.trials = [], {"test"}, {}
        self.streams = defaultdict(lambda: defaultdict(dict))
        self.http = Listener(("127.0.0.1", 0), Handler)
        self.http.owner = self
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.stop()

    def stop(self):
        """Go away: connections are refused from now on, and those that are open end; calling it again does nothing."""
        if self.stopped.is_set():
            return
        self.stopped.set()
        self.http.shutdown()
        self.http.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def settings(self):
        """Return settings of a run that is sent here."""
        return {"base_url": self.url, "api_key": KEY, "mode": "online"}

    def history(self, run):
        with self.lock:
            rows = self.streams[run]["wandb-history.jsonl"]
            return [json.loads(rows[number]) for number in sorted(rows)]

    def answer(self, method, path, body):
        """Return status and payload."""
        if self.hanging:
            with self.lock:
                self.refused += 1
            self.stopped.wait()
            raise ConnectionAbortedError
        if self.slow:
            self.stopped.wait(self.slow)
        with self.lock:
            if self.down:
                self.refused += 1
                return self.down, {"errors": [{"message": f"injected {self.down}"}]}
            if path == "/graphql":
                return 200, self.graphql(json.loads(body or b"{}"))
            if (stream := STREAM.match(path)) and method == "POST":
                for name, chunk in (json.loads(body).get("files") or {}).items():
                    lines = enumerate(chunk.get("content", []), chunk.get("offset", 0))
                    self.streams[stream.group(1)][name].update(lines)
                return 200, {"exitcode": None, "limits": {}}
            if path.startswith("/upload/"):
                self.uploads[path.removeprefix("/upload/")] = body
                return 200, {}
            self.unknown.append(f"{method} {path}")
            return 404, {"error": "not found"}

    def graphql(self, request):
        found = OPERATION.search(request.get("query", ""))
        name = request.get("operationName") or (found.group(2) if found else "")
        variables = request.get("variables") or {}
        variables = {**variables, **variables["input"]} if isinstance(variables.get("input"), dict) else variables
        try:
            return {"data": getattr(self, f"do_{name}")(variables)}
        except Exception as error:  # an error here must not make wandb-core retry for minutes
            self.unknown.append(f"{name}: {error!r}")
            return {"data": None, "errors": [{"message": f"not known here: {name}"}]}

    def do_Viewer(self, v):
        teams = {"edges": [{"node": {"name": ENTITY}}]}
        return {"viewer": {
            "id": identity("User:1"), "entity": ENTITY, "username": ENTITY, "name": ENTITY, "email": "t@example.com",
            "admin": False, "flags": "{}", "teams": teams,
        }}  # fmt: skip

    do_GetViewer = do_Viewer  # what wandb 0.28 calls it

    def do_ServerFeaturesQuery(self, v):
        return {"serverInfo": {"features": []}}

    def do_ServerInfo(self, v):
        return {"serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None}}

    def do_OrgFeatureFlags(self, v):
        return {"organization": {"featureFlags": []}}

    def do_FetchOrgEntityFromEntity(self, v):
        return {"entity": {"organization": None}}

    def do_RunResumeStatus(self, v):
        run, bucket = self.runs.get(v.get("name")), None
        if run:
            history = self.history(v["name"])
            bucket = {
                "id": run["id"], "name": run["name"], "displayName": run["displayName"],
                "summaryMetrics": json.dumps(self.summary(v["name"])), "logLineCount": 0,
                "historyLineCount": len(history), "eventsLineCount": 0,
                "historyTail": json.dumps([json.dumps(row) for row in history[-1:]]), "eventsTail": "[]",
                "config": run.get("config") or "{}", "tags": [], "notes": None, "wandbConfig": json.dumps({"t": 1}),
            }  # fmt: skip
        entity = {"id": identity("Entity:1"), "name": ENTITY}
        return {"model": {"id": identity("Project:1"), "name": v.get("project"), "entity": entity, "bucket": bucket}}

    def summary(self, run):
        with self.lock:
            kept = self.streams[run]["wandb-summary.json"]
            return json.loads(kept[max(kept)]) if kept else {}

    def do_UpsertBucket(self, v):
        name = v.get("name") or next((n for n, run in self.runs.items() if run["id"] == v.get("id")), None)
        inserted = name not in self.runs
        new = {"id": identity(f"Run:v1:{name}"), "name": name, "displayName": "a-run", "project": v.get("project")}
        run = self.runs.setdefault(name, new)
        run.update({key: value for key, value in v.items() if value is not None and key != "id"})
        entity = {"id": identity("Entity:1"), "name": v.get("entity") or ENTITY}
        return {"upsertBucket": {"inserted": inserted, "bucket": {
            "id": run["id"], "name": name, "displayName": run["displayName"], "description": None,
            "config": run.get("config"), "sweepName": None, "historyLineCount": 0,
            "project": {"id": identity("Project:1"), "name": run["project"] or "test", "entity": entity},
        }}}  # fmt: skip

    def do_RewindRun(self, v):
        name, kept = v["runName"], int(v["metricValue"]) + 1
        rows = self.streams[name]["wandb-history.jsonl"]
        for number in [number for number, row in rows.items() if json.loads(row)["_step"] >= kept]:
            del rows[number]
        made = self.do_UpsertBucket({"name": name})["upsertBucket"]["bucket"]
        return {"rewindRun": {"rewoundRun": {**made, "historyLineCount": len(rows)}}}

    def do_CreateAgent(self, v):
        return {"createAgent": {"agent": {"id": identity(f"Agent:{v['sweep']}")}}}

    def do_Heartbeat(self, v):
        sweep = base64.b64decode(v["id"]).decode().partition(":")[2]
        trial = self.trials[sweep] = self.trials.get(sweep, 0) + 1
        command = {"type": "run", "run_id": f"{sweep}-{trial}", "args": {"lr": {"value": trial}}}
        commands = [command] if trial < 3 else []
        return {"agentHeartbeat": {"agent": {"id": v["id"]}, "commands": json.dumps(commands)}}

    def do_RunStoppedStatus(self, v):
        return {"project": {"run": {"stopped": False}}}

    def do_NotifyScriptableRunAlert(self, v):
        self.alerts.append(v)
        return {"notifyScriptableRunAlert": {"success": True}}

    def do_CreateRunFiles(self, v):
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{v['run']}/{name}"} for name in v["files"]]
        return {"createRunFiles": {"runID": self.runs[v["run"]]["id"], "uploadHeaders": [], "files": files}}

    def do_MarkRunFilesUploaded(self, v):
        return {"markRunFilesUploaded": {"success": True}}

    def do_CreateArtifact(self, v):
        name = identity(f"Artifact:{len(self.artifacts) + 1}")
        self.artifacts[name] = {"name": v.get("artifactCollectionName"), "digest": v.get("digest"), "committed": False}
        made = {"id": name, "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": made}}

    def manifest(self, artifact):
        name = identity(f"ArtifactManifest:{artifact}")
        file = {"id": name, "uploadUrl": f"{self.url}/upload/manifest/{artifact}", "uploadHeaders": []}
        return {"artifactManifest": {"id": name, "file": file}}

    def do_CreateArtifactManifest(self, v):
        return {"createArtifactManifest": self.manifest(v["artifactID"])}

    def do_UpdateArtifactManifest(self, v):
        artifact = base64.b64decode(v["artifactManifestID"]).decode().partition(":")[2]
        return {"updateArtifactManifest": self.manifest(artifact)}

    def do_CreateArtifactFiles(self, v):
        edges = [
            {"node": {
                "id": identity(file["name"]), "name": file["name"], "displayName": file["name"],
                "storagePath": f"wandb_artifacts/{file['name']}", "uploadHeaders": [], "uploadMultipartUrls": None,
                "uploadUrl": f"{self.url}/upload/artifact/{file['artifactID']}/{file['name']}",
                "artifact": {"id": file["artifactID"]},
            }}
            for file in v["artifactFiles"]
        ]  # fmt: skip
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def do_CommitArtifact(self, v):
        artifact = self.artifacts[v["artifactID"]]
        artifact["committed"] = True
        return {"commitArtifact": {"artifact": {"id": v["artifactID"], "digest": artifact["digest"]}}}

    def do_UpdateArtifact(self, v):
        return {"updateArtifact": {"artifact": {"id": v["artifactID"]}}}

    def do_ClientIDMapping(self, v):
        return {"clientIDMapping": {"serverID": next(iter(self.artifacts), None)}}

    def do_ArtifactType(self, v):
        return {"project": {"artifact": None}}

    def do_UpsertView2(self, v):
        if v["projectName"] not in self.projects:
            raise PermissionError(v["projectName"])
        self.views.append(v)
        return {
            "upsertView": {"view": {"id": identity(f"View:{len(self.views)}"), "name": v["name"]}, "inserted": True}
        }

    def do_ProjectInternalId(self, v):
        return {"project": {"id": identity("Project:1"), "internalId": identity("ProjectInternalId:1")}}

    def do_GetProjects(self, v):
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        nodes = [
            {"__typename": "Project", "id": identity(f"Project:{name}"), "name": name, "entityName": v["entity"],
             "createdAt": "2025-01-01T00:00:00", "isBenchmark": False, "user": None}
            for name in self.projects
        ]  # fmt: skip
        return {"models": {"pageInfo": page, "edges": [{"node": node} for node in nodes]}}

    def do_upsertView(self, v):
        self.views.append(v)
        project = {"id": identity("Project:1"), "name": v["projectName"], "entityName": v["entityName"]}
        view = {"id": identity(f"View:{len(self.views)}"), "type": v["type"], "name": v["name"], "project": project,
                "displayName": v["displayName"], "description": v["description"] or "", "spec": v["spec"],
                "updatedAt": "2025-01-01T00:00:00"}  # fmt: skip
        return {"upsertView": {"view": view, "inserted": True}}

    def do_QueryRunInfo(self, v):
        return {"project": {"run": {"displayName": "a-run", "summaryMetrics": json.dumps(self.summary(v["run"]))}}}
