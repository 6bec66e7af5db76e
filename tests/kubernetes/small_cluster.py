"""As much of a Kubernetes API server as kubectl needs to apply, get, delete and read logs. It runs no pods."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml

KINDS = {
    ("", "v1"): {"configmaps": "ConfigMap", "pods": "Pod"},
    ("jobset.x-k8s.io", "v1alpha2"): {"jobsets": "JobSet"},
    ("networking.k8s.io", "v1"): {"networkpolicies": "NetworkPolicy"},
    ("ray.io", "v1"): {"rayjobs": "RayJob"},
}
OBJECT = re.compile(r"(?:/api/v1|/apis/[^/]+/[^/]+)/namespaces/[^/]+/(?P<kind>\w+)(?:/(?P<name>[^/]+))?")


def base_of(group: str, version: str) -> str:
    return f"/apis/{group}/{version}" if group else f"/api/{version}"


class SmallCluster:
    """Objects by path. A test puts pods and logs here, and reads what kubectl has sent."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.dry_runs: list[str] = []

    def without(self, group: str) -> None:
        """Forget a kind of objects, as a cluster without its controller."""
        self.missing = group

    missing = "-"

    def answer(self, method: str, url: str, body: bytes) -> tuple[int, Any]:
        address = urlparse(url)
        query = parse_qs(address.query)
        if (found := self._discovery(address.path)) is not None:
            return 200, found
        path = address.path
        if path.endswith("/log"):
            return 200, _log(self.logs[path.split("/")[-2]], "timestamps" in query, query.get("sinceTime", [""])[0])
        match = OBJECT.fullmatch(path)
        if match is None:
            return 404, _fault(404, "NotFound", f"no such path: {path}")
        if method == "PATCH":
            return 200, self._applied(path, yaml.safe_load(body), dry="dryRun" in query)
        if match["name"] is None:
            wanted = dict(pair.split("=", 1) for pair in query.get("labelSelector", [""])[0].split(",") if pair)
            items = [each for key, each in self.objects.items() if key.startswith(f"{path}/") and _fits(each, wanted)]
            return 200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}
        if path not in self.objects:
            return 404, _fault(404, "NotFound", f'{match["kind"]} "{match["name"]}" not found')
        return 200, self.objects.pop(path) if method == "DELETE" else self.objects[path]

    def _applied(self, path: str, table: dict[str, Any], dry: bool) -> dict[str, Any]:
        if dry:
            self.dry_runs.append(path)
        elif "kind" in table:
            self.objects[path] = {**table, "metadata": {**table["metadata"], "uid": f"uid of {path}"}}
        else:
            # A merge patch, of the metadata alone.
            self.objects[path] = {
                **self.objects[path],
                "metadata": {**self.objects[path]["metadata"], **table["metadata"]},
            }
        return table if dry else self.objects[path]

    def _discovery(self, path: str) -> Any:
        known = {key: kinds for key, kinds in KINDS.items() if key[0] != self.missing}
        if path == "/version":
            return {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            versions = [(group, {"groupVersion": f"{group}/{name}", "version": name}) for group, name in known if group]
            listed = [{"name": group, "versions": [each], "preferredVersion": each} for group, each in versions]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        if path == "/openapi/v3":
            bases = [base_of(*key).removeprefix("/") for key in known]
            return {"paths": {base: {"serverRelativeURL": f"/openapi/v3/{base}"} for base in bases}}
        for (group, version), kinds in known.items():
            base = base_of(group, version)
            if path == base:
                resources = [
                    {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": ["get"]}
                    for name, kind in kinds.items()
                ]
                full = f"{group}/{version}".removeprefix("/")
                return {"kind": "APIResourceList", "groupVersion": full, "resources": resources}
            if path == f"/openapi/v3{base}":
                return _openapi(group, version, kinds)
        return None


def _log(text: str, has_times: bool, since: str) -> str:
    """Each line is a second later than the one before."""
    lines = [(f"2026-01-01T00:00:{index:02}Z", line) for index, line in enumerate(text.splitlines(keepends=True))]
    return "".join(f"{at} {line}" if has_times else line for at, line in lines if at >= since)


def _openapi(group: str, version: str, kinds: dict[str, str]) -> dict[str, Any]:
    """Only that a change is checked by the server, so that kubectl does not do so."""
    paths = {
        f"{base_of(group, version)}/namespaces/{{namespace}}/{name}/{{name}}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query"}],
                "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
            }
        }
        for name, kind in kinds.items()
    }
    return {"openapi": "3.0.0", "info": {"title": "small", "version": "1"}, "paths": paths}


def _fits(table: dict[str, Any], labels: dict[str, str]) -> bool:
    return labels.items() <= table.get("metadata", {}).get("labels", {}).items()


def _fault(code: int, reason: str, message: str) -> dict[str, Any]:
    told = {"status": "Failure", "message": message, "reason": reason, "code": code}
    return {"kind": "Status", "apiVersion": "v1", **told}


@contextmanager
def served(cluster: SmallCluster, config: Path) -> Iterator[None]:
    """Serve a cluster on the loopback address, and write kubectl's config for it: context `lab`."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, found = cluster.answer(self.command, self.path, body)
            data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(found, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    tables = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "small", "cluster": {"server": address}}],
        "contexts": [{"name": "lab", "context": {"cluster": "small", "user": "me"}}],
        "users": [{"name": "me", "user": {}}],
    }
    config.write_text(yaml.safe_dump(tables))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
